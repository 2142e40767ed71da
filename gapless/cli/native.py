"""`python -m gapless.cli.native` builds the C++ now, so that no start has to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gapless.base.progress import starting
from gapless.comm import shared
from gapless.device import build, cpu_native
from gapless.kernels import native
from gapless.loop import mask_threads


def build_all() -> list[build.Outcome]:
    """Build missing parts; the outcomes for the CPU's streams, its kernels, the threads of masks and the ranks."""
    with starting(), ThreadPoolExecutor() as pool:  # it may take half a minute
        list(pool.map(lambda load: load(), (cpu_native.load, native.load, mask_threads.load, shared.load)))
    names = cpu_native.STREAM_NAME, native.NAME, mask_threads.MASKS_EXTENSION, shared.COMM_NAME
    return [build.outcomes[name] for name in names]


def main() -> None:
    """Print one line. A machine that cannot build is no error: the engine works there, slower."""
    outcomes = build_all()
    seconds = max(outcome.seconds for outcome in outcomes)
    reason = next((outcome.reason for outcome in outcomes if outcome.reason), "")
    if reason:
        print(f"C++: not built, so work on the CPU is slower: {reason}")
    else:
        brought = all(outcome.brought for outcome in outcomes)
        print("C++: prebuilt" if brought else f"C++: built in {seconds:.0f} s" if seconds else "C++: built before")


if __name__ == "__main__":
    main()
