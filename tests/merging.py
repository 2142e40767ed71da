"""Cores that settle several steps at a time, so that these are delivered together."""

from gapless.base.records import Turn


def together(core, size):
    """The core, settling this many steps in each of its own."""
    step = core.step

    def several():
        whole = Turn([], [], [])
        for _ in range(size):
            if core.has_work():
                for gathered, more in zip(whole, step(), strict=True):
                    gathered += more
        return whole

    core.step = several
    return core
