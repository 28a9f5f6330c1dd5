"""What the end of a run says about ``--autotune`` if the run did not use it."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.commands.config import RunConfig
from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Fact
from hvdtrain.config.fields import facts_of
from hvdtrain.config.wording import flag_of

_SHORT_MS = 5.0
"""For shorter steps, calling TensorFlow takes as long as computing."""
_LONG_RUN_S = 600.0
"""Trials take about half a minute: 5 % of this."""


def suggestion(config: RunConfig, summary: Mapping[str, Any], conditions: Mapping[Fact, str]) -> str | None:
    """A line for a run that spent much time on calls of single short steps; it promises no gain, for none is measured.

    Args:
        summary: the run's; see ``summary.json``.
        conditions: of the job, which may exclude it.
    """
    facts = {**facts_of(config), **conditions, exclusions.AUTOTUNE: ""}
    is_open = config.training.steps_per_execution == 1 and "steps_per_execution" not in config.explicitly_set
    if config.autotune or not is_open or exclusions.first_broken(facts) is not None:
        return None
    step_ms = summary["step_ms"]["p50"]
    if step_ms >= _SHORT_MS or summary["wall_seconds"] < _LONG_RUN_S:
        return None
    return f"steps took {step_ms:.2g} ms each: {flag_of('autotune')} tries whether other settings make them shorter"
