"""What is left of the check of a step with ``on_unequal="ignore"``: it costs no step."""

from typing import Any

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.training.equality.samples import gather_samples
from hvdtrain.training.equality.step_check import SAME_SAMPLES, Finding


class SampleGuard:
    """In place of a StepCheck: finds only whether all ranks train on the same samples."""

    is_within_update = False

    def __init__(self, collectives: Collectives):
        self._collectives = collectives

    def restart(self) -> None:
        """Begins again, with other ranks."""

    def run(self, batch: Any) -> Finding:
        """Compares the ranks' batches. All ranks must call it."""
        samples = gather_samples(batch, self._collectives)
        return Finding({}, unequal=SAME_SAMPLES if samples is not None and samples.are_the_same else None)
