"""`python -m gapless.kernels.native` builds the C++ for the CPU now, so that no start has to."""

from __future__ import annotations

from gapless.base.progress import starting
from gapless.device import build, cpu_native
from gapless.kernels import native


def main() -> None:
    """Print one line. A machine that cannot build is no error: the engine works there, slower."""
    with starting():
        cpu_native.load()
        native.load()
    outcomes = [build.outcomes[name] for name in (cpu_native.NAME, native.NAME)]
    seconds = sum(outcome.seconds for outcome in outcomes)
    reason = next((outcome.reason for outcome in outcomes if outcome.reason), "")
    if reason:
        print(f"C++ for the CPU: not built, so the CPU works slower: {reason}")
    else:
        print(f"C++ for the CPU: built in {seconds:.0f} s" if seconds else "C++ for the CPU: built before")


if __name__ == "__main__":
    main()
