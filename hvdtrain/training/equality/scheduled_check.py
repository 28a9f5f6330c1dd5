"""When steps are checked: after the first one, and again at growing distances, for differences that appear late."""

import time
from collections.abc import Callable

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.runtime import OnUnequal
from hvdtrain.errors import EndOfCheckedSteps, UnequalError
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.only_checks import UNCHECKED, print_comparison
from hvdtrain.system import environment
from hvdtrain.training.equality.compared_data import compare_data
from hvdtrain.training.equality.sample_guard import SampleGuard
from hvdtrain.training.equality.step_check import Finding, StepCheck

_MAX_SHARE_OF_TIME = 0.005
_NUM_ONLY_CHECKED = 3
"""Steps that ``hvdtrain check`` compares."""
# Earlier ones would find what the first has found.
_FIRST_REPETITION = 16


class ScheduledCheck:
    """Checks steps between calls of a compiled training step.

    Args:
        batches: keeps a batch of the step.
        on_unequal: what to do if the step is not that of one process.
        how_to_continue: what a user can do who wants to train nevertheless.
        report: receives, on rank 0, what users should know.
    """

    def __init__(
        self,
        check: StepCheck | SampleGuard,
        batches: KeptBatch,
        collectives: Collectives,
        *,
        on_unequal: OnUnequal,
        how_to_continue: str,
        report: Callable[[str], None],
    ):
        self._check = check
        self._batches = batches
        batches.enable()
        self._collectives = collectives
        self._on_unequal = on_unequal
        self._how_to_continue = how_to_continue
        self._report = report
        self._last_check_s = 0.0
        self._last_check_took_s = 0.0
        self._has_checked = False
        self.restart()

    def restart(self) -> None:
        """Begins again with the next call: other ranks train together, some of which have checked nothing.

        If rank 0 has checked a step with the ranks before, the first call is not checked: others would wait for it in
        each change of ranks.
        """
        self._check.restart()
        self._num_calls = 0
        self._is_due = False
        self._is_over = False
        self._num_checks = 0
        self._has_noted = self._has_noted_data = False

    def before_call(self) -> None:
        """Before a call; all ranks must make it."""
        if self._collectives.size == 1:
            return
        self._num_calls += 1
        self._is_due = not self._is_over and (self._is_due or self._may_check())
        if self._is_due:
            self._batches.want()

    def _may_check(self) -> bool:
        if environment.only_checks():
            return True
        if self._num_calls == 1:
            return not self._collectives.allgather(self._has_checked)[0]
        is_power_of_two = self._num_calls & (self._num_calls - 1) == 0
        if self._num_calls < _FIRST_REPETITION or not is_power_of_two:
            return False
        trained_s = time.monotonic() - self._last_check_s
        return bool(self._collectives.allgather(self._last_check_took_s <= _MAX_SHARE_OF_TIME * trained_s)[0])

    def after_call(self) -> None:
        """After a call; all ranks must make it.

        Raises:
            UnequalError: on every rank: the step is not that of one process, with ``on_unequal="stop"``.
        """
        if not self._is_due or self._check.is_within_update:
            return
        begin_s = time.monotonic()
        batch = self._batches.take()
        if any(self._collectives.allgather(batch is None)):
            return  # The call has made its step without a batch of this rank.
        self._is_due = False
        of_data = compare_data(self._collectives)
        finding = self._check.run(batch) if of_data.unequal is None else of_data
        self._num_checks += 1
        self._has_checked = True
        self._last_check_s = time.monotonic()
        self._last_check_took_s = self._last_check_s - begin_s
        if of_data.noted is not None and not self._has_noted_data:
            self._has_noted_data = True
            self._tell(of_data.noted)
        self._act(finding)

    def _act(self, finding: Finding) -> None:
        if finding.unchecked is not None:
            self._is_over = True
            self._tell(UNCHECKED.format(finding.unchecked))
        if finding.noted is not None and not self._has_noted:
            self._has_noted = True
            self._tell(finding.noted)
        if environment.only_checks():
            self._end_after_checks(finding)
        if self._on_unequal == "ignore":
            self._is_over = True
            if finding.unequal is not None:
                self._tell(f"{finding.unequal}.")
            return
        if finding.unequal is None:
            return
        text = f"{finding.unequal}. To continue nevertheless, {self._how_to_continue}."
        if self._on_unequal == "stop":
            raise UnequalError(text)
        self._is_over = True
        self._tell(text)

    def _end_after_checks(self, finding: Finding) -> None:
        if finding.unequal is None and finding.unchecked is None:
            text = f"step {self._num_calls} is that of one process. Compared: {finding.summary}"
            print_comparison(f"{text}.", self._collectives)
        if finding.unchecked is not None or (finding.unequal is None and self._num_checks == _NUM_ONLY_CHECKED):
            raise EndOfCheckedSteps(0 if finding.unchecked is None else UnequalError.exit_code)

    def _tell(self, text: str) -> None:
        if self._collectives.rank == 0:
            self._report(text)
