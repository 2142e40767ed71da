"""Cores that settle several steps at a time, so that these are delivered together."""


def together(core, size):
    """The core, settling this many steps in each of its own."""
    step = core.step

    def several():
        news = [step() for _ in range(size) if core.has_work()]
        return [item for started, _ in news for item in started], [item for _, tokens in news for item in tokens]

    core.step = several
    return core
