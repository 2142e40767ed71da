"""A metric: the tokens of a step."""

from gapless.engine.series import GAUGE, SERIES, Series

SERIES.append(
    Series(
        "toy:step_tokens", GAUGE, "Tokens of a step, a mean since the start.",
        lambda stats: stats.sizes.tokens / max(1, stats.steps.steps), title="tokens a step", column="step_tokens",
    )
)  # fmt: skip
