"""The training loop: owns the order of operations and delegates the work."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import keras

from hvdtrain.checkpoint.checkpointer import Checkpointer, Restored
from hvdtrain.config.fields import as_dict
from hvdtrain.config.wording import option
from hvdtrain.data import Data, Source
from hvdtrain.data.feeds import EvaluationFeed
from hvdtrain.data.preprocessed import preprocessed_data
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.loggers.reporter import Reporter, RunShape
from hvdtrain.optim.ema import ema_weights, keep_ema_weights, keeps_ema
from hvdtrain.optim.only_checks import end_if_only_checking
from hvdtrain.optim.rank_policy import PASS_ALL_CALLBACKS
from hvdtrain.system import processes
from hvdtrain.training.activations import Activations
from hvdtrain.training.callback_state import RESTORABLE
from hvdtrain.training.callbacks import RankCallbacks
from hvdtrain.training.clock import Clock
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.equality.model_check import check_of_model
from hvdtrain.training.equality.scheduled_check import ScheduledCheck
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.evaluator import Evaluator
from hvdtrain.training.gradient_record import make_record
from hvdtrain.training.guards import Guards
from hvdtrain.training.members import make_members
from hvdtrain.training.metric_state import require_sums
from hvdtrain.training.metrics import single_numbers
from hvdtrain.training.parts import make_parts
from hvdtrain.training.plan import sample_plan, total_steps
from hvdtrain.training.prediction import predict
from hvdtrain.training.preparation import create_metrics, prepare_ranks
from hvdtrain.training.report import TrainingReport, console_of_rank
from hvdtrain.training.resolution import resolve
from hvdtrain.training.state import RunState
from hvdtrain.training.triggers import Interval, Triggers
from hvdtrain.training.uncalled_methods import uncalled


class Trainer:
    """Trains a compiled Keras model on all ranks as one process would train it on the whole batch.

    With ``mode="local"`` the ranks train independently instead, and their parameters are averaged periodically;
    evaluations, callbacks and checkpoints see the averaged model.

    Args:
        model: built and compiled; its optimizer is made distributed if it is not yet. If it was made with
            ``use_ema=True``, the EMA of the weights is evaluated, and left in the model at the end.
        data: the samples to train on, all of them on every rank: a source, or what Keras takes (``tf.data.Dataset``,
            PyDataset, arrays); or these and the samples to evaluate on, as ``hvdtrain.data.Data(training,
            evaluation)``. Each rank reads its share.
        config: how to train; exactly one of ``steps`` and ``epochs`` must be set.
        callbacks: Keras callbacks, the same on every rank. Writers such as ModelCheckpoint run on rank 0.
            TerminateOnNaN replaces ``on_nan="stop"``.
        reporter: receives training events. By default rank 0 prints: a progress bar on a terminal, else about a line a
            second, or every one if ``log_every`` is not its default. None: nothing is printed.
        checkpointer: of this model; saves every ``checkpoint_every`` steps, after the last step and when the job is
            asked to stop (default: nothing is saved).
        job_watch: source of stop requests; receives heartbeats (default: none).
        collectives: the ranks that train together (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an argument breaks its rule.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Source | Data,
        config: TrainConfig,
        *,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        reporter: Reporter | Literal["console"] | None = "console",
        checkpointer: Checkpointer | None = None,
        job_watch: JobWatch | None = None,
        collectives: Collectives | None = None,
    ):
        self.model = model
        data = data if isinstance(data, Data) else Data(data)
        self._collectives = collectives = collectives or runtime.current().collectives
        self._job_watch = job_watch = job_watch or JobWatch(collectives)
        self._checkpointer = checkpointer
        resolved = resolve(config, model, data.training, collectives, callbacks=callbacks)
        self._data = data = preprocessed_data(data, model)
        self.config = config = resolved.config
        """The complete configuration."""
        self._reports_all = reporter == "console"
        self._reporter = reporter = (
            console_of_rank(collectives.rank, config.logging) if reporter == "console" else reporter or Reporter()
        )
        plan = sample_plan(data.training, config, collectives)
        self.total_steps = total_steps(config, plan)
        self.parts = parts = make_parts(
            model,
            data.training,
            plan,
            resolved,
            collectives=collectives,
            job_watch=job_watch,
            record=make_record(model, config.logging),
            total_steps=self.total_steps,
        )
        """What makes the steps."""
        self._progress = parts.progress
        self._strategy = parts.strategy
        self._train_step = parts.train_step
        self._callbacks = RankCallbacks(callbacks, model, collectives, self.total_steps, plan.steps_per_epoch)
        self._shows_ema = keeps_ema(model) and not self._callbacks.swap_averaged_weights
        self._state = RunState(
            data.training,
            config,
            feed=parts.feed,
            progress=parts.progress,
            shared={"callbacks": self._callbacks, "balancing": parts.balancer},
            own={"bad_samples": parts.quota, "steps": parts.times, "skipped_steps": parts.record},
            strategy=parts.strategy,
            collectives=collectives,
        )
        self._check = self._make_check()
        self._members = make_members(
            model,
            parts,
            self._state,
            collectives,
            job_watch,
            on_undo=lambda: self._report.settle(),
            on_change=self._members_changed,
            on_leave=self._leave,
        )
        self._on_rank_changed: Callable[[int], None] = lambda ranks_before: None
        self._guards = Guards(
            model,
            skips_steps=config.guards.on_nan == "skip",
            progress=parts.progress,
            quota=parts.quota,
            record=parts.record,
            strategy=parts.strategy,
            collectives=collectives,
            reporter=reporter,
        )
        self._report = TrainingReport(
            model,
            config,
            feed=parts.feed,
            progress=parts.progress,
            quota=parts.quota,
            record=parts.record,
            returned=parts.train_step.returned,
            time_shares=parts.time_shares,
            balancer=parts.balancer,
            strategy=parts.strategy,
            activations=Activations(model, data.evaluation or data.training),
            collectives=collectives,
            reporter=reporter,
        )
        self._evaluator = None if data.evaluation is None else self._make_evaluator(data.evaluation)
        self._first_profiled, self._last_profiled = config.logging.profile_range or (1, 0)
        self._triggers = self._make_triggers()
        self._clock = Clock()
        self._has_begun = False

    @property
    def step(self) -> int:
        """Number of steps made."""
        return self._progress.step

    @property
    def plan(self) -> SamplePlan:
        """The assignment of samples to steps and ranks."""
        return self.parts.feed.plan

    @property
    def shape(self) -> RunShape:
        """The length of the run, and the step that this process begins or resumes at."""
        return self._report.shape(self.total_steps)

    def fit(
        self,
        *,
        on_start: Callable[[Restored | None], None] = lambda restored: None,
        on_rank_changed: Callable[[int], None] = lambda ranks_before: None,
    ) -> dict[str, Any]:
        """Trains.

        Args:
            on_start: called on every rank before the first step, after the ranks were compared and the run was
                restored, with the checkpoint that it resumes from.
            on_rank_changed: called on every rank of an elastic job when others train together from now on, and this
                process may be another rank; with the number of ranks before.

        Returns:
            A run's ``summary.json``, except for what only the command line knows.

        Raises:
            DataError: more samples are unreadable than allowed, or a file changed while training.
            DisagreementError: ranks differ in arguments, data or model.
            DivergenceError: replicas that must be equal are not.
            JobError: on every rank: the checkpoint is damaged, or of another run.
            NonFiniteError: a loss or a gradient is not finite, with ``on_nan='stop'``.
            StoppedEarly: the job was asked to stop; all ranks stopped at the same step, and it is saved.
            UnequalError: a step is not that of one process, with ``on_unequal='stop'``.
            UsageError: it was called before.
        """
        if self._has_begun:
            raise UsageError(
                f"fit() must be called once. Received: a second call, after {self.step} steps. Make another trainer."
            )
        self._has_begun = True
        self._on_rank_changed = on_rank_changed
        try:
            summary = self._fit(on_start)
        finally:
            self._strategy.close()
            if self._reports_all:
                self._reporter.close()
        return summary

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        """Loss and metrics of the model over all samples, equal on every rank. All ranks must call it.

        Args:
            data: as for :func:`hvdtrain.evaluate` (default: the trainer's evaluation samples).

        Raises:
            UsageError: the trainer has none.
        """
        samples = self._data.evaluation if data is None else data
        if samples is None:
            raise UsageError("evaluate needs samples: the trainer has none to evaluate on. Received: no data.")
        return evaluate(self.model, samples, batch_size=self.config.batch_size, collectives=self._collectives)

    def predict(self, data: Any, *, output: str | Path | None = None, on_all_ranks: bool = False) -> Any:
        """Predictions of the model for all samples, in their order. All ranks must call it.

        The arguments, and what it returns, are those of :func:`hvdtrain.predict`.
        """
        return predict(
            self.model,
            data,
            batch_size=self.config.batch_size,
            output=output,
            on_all_ranks=on_all_ranks,
            collectives=self._collectives,
        )

    def _fit(self, on_start: Callable[[Restored | None], None]) -> dict[str, Any]:
        on_start(restored := self._prepare())
        if self._reports_all:
            self._reporter.started(self._report.facts(), self.shape)
        self._tell_of_uncalled_methods()
        self._clock = Clock()
        self.parts.feed.start(self._train_step.steps_made * self.plan.gradient_accumulation_steps)
        self._reporter.model_built(self.model)
        if restored is not None:
            self._reporter.resumed(self.step, restored.path)
        self._callbacks.train_begins()
        self._members.prepare()
        self._train()
        summary = self._finish(restored)
        if self._reports_all:
            self._reporter.finished(summary)
        return summary

    def _tell_of_uncalled_methods(self) -> None:
        told = [uncalled(self.model, "fit", "Trainer calls train_step itself")]
        if self._evaluator is not None:
            told.append(uncalled(self.model, "evaluate", "Trainer calls test_step itself"))
        for text in filter(None, told):
            self._reporter.warned(self.step, text)

    def _prepare(self) -> Restored | None:
        """Compares the ranks, makes replicas equal, and restores the checkpoint to resume from."""
        arguments = {
            **as_dict(self.config),
            "steps": self.total_steps,
            "checkpointer": "none" if self._checkpointer is None else "given",
            "synchronized BatchNormalization layers": self.parts.num_synchronized,
        }
        # First, because some callbacks change arguments.
        require_agreement(
            "callbacks", {"callbacks": self._callbacks.names}, self._collectives, remedy=PASS_ALL_CALLBACKS
        )
        require_agreement("arguments of Trainer", arguments, self._collectives)
        evaluation = self._data.evaluation
        require_agreement("evaluation data", {} if evaluation is None else evaluation.facts(), self._collectives)
        parts = self.parts
        prepare_ranks(
            self.model,
            self._data.training,
            feed=parts.feed,
            quota=parts.quota,
            record=parts.record,
            requires_metrics=parts.requires_metrics,
            collectives=self._collectives,
        )
        if evaluation is not None:
            parts.quota.note_known(evaluation.bad_samples)
        restored = None
        if self._checkpointer is not None:
            # Metrics must have their variables before these are restored.
            create_metrics(self.model, parts.feed, required=True)
        if self._checkpointer is not None and not self._members.is_newcomer:
            restored = self._state.restore(self._checkpointer, self.config.checkpoint.resume)
            if restored is not None:
                self._plan_changed()
                on_every_rank(self._data.training.check_unchanged, self._collectives)
        self._strategy.start()
        return restored

    def _train(self) -> None:
        while True:
            try:
                self._train_with_these_ranks()
                return
            except Exception as error:
                if not self._members.is_over(error):
                    raise
            self._members.rejoin()

    def _members_changed(self, change: Mapping[str, float], ranks_before: int) -> None:
        self._callbacks.rank_changed()
        if self._check is not None:
            self._check.restart()
        if self._checkpointer is not None and self._collectives.rank == 0:
            self._checkpointer.take_over()
        self._plan_changed()
        self._reporter.reshaped(self.shape)
        self._on_rank_changed(ranks_before)
        self._callbacks.members_changed(self._collectives.rank, self._collectives.size)
        self._reporter.members_changed(self._progress.step, {**change, "ranks_before": ranks_before})

    def _leave(self) -> None:
        self._report.settle()
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self._reporter.close()

    def _train_with_these_ranks(self) -> None:
        progress, triggers = self._progress, self._triggers
        call_end = triggers.next_call_end(progress.step)
        # A run that was stopped in an evaluation resumes with what remains to be done after its last call.
        next_due = triggers.next_due(progress.step) if progress.is_between_calls else progress.step
        while not self._is_done():
            if progress.is_between_calls:
                self._stop_if_requested()
                self._run_steps(call_end - progress.step)
                if not self._strategy.waits_for_ranks:
                    self._report.log_pending()
            if progress.step >= next_due or progress.is_stopped:
                self._train_step.settle()
                self._after_steps()
                call_end, next_due = triggers.next_call_end(progress.step), triggers.next_due(progress.step)
            progress.is_between_calls = True

    def _is_done(self) -> bool:
        progress = self._progress
        return progress.is_between_calls and (progress.is_stopped or progress.step == self.total_steps)

    def _run_steps(self, max_steps: int) -> None:
        """Makes one compiled call of steps."""
        progress = self._progress
        before = progress.previous_step = progress.step
        if not progress.is_in_epoch:
            self._begin_epoch()
        if self._first_profiled <= before + 1 <= self._last_profiled:
            self._reporter.profile_begins()
        if self._callbacks.use_train_batches:
            self._callbacks.train_call_begins(self.plan.position(before).step)
        self._job_watch.heartbeat("training", before)
        # Already now: what follows a step is due even if other ranks alone complete it.
        progress.is_between_calls = progress.is_logged = False
        check = self._check
        if check is not None and not self._strategy.makes_common_steps:
            check = None
        if check is not None:
            check.before_call()
        start_s = time.perf_counter()
        self._strategy.run(max_steps)
        self._clock.calls.append((max(1, progress.step - before), time.perf_counter() - start_s))
        if check is not None:
            self._train_step.settle()
            check.after_call()
        if self._callbacks.use_train_batches:
            self._train_step.settle()
            progress.is_stopped = self._end_call()

    def _log_steps(self) -> None:
        """What is due at this step before the evaluation, in order."""
        progress = self._progress
        if progress.step == self._last_profiled:
            self._reporter.profile_ends()
        if self._is_due("exchange", at_end=False):
            # Before the assignment of samples changes.
            self.parts.time_shares.exchange()
            self._report.rank_times()
            self.parts.balancer.rebalance()
        if self._is_due("guard") or progress.is_stopped:
            self._guards.check()
        if self._is_due("log") or progress.is_stopped:
            self._report.log(self._clock)
        if self._is_due("histograms", at_end=False):
            self._report.histograms()
        if self._is_due("check"):
            self._strategy.compare_replicas()
        progress.is_logged = True

    def _after_steps(self) -> None:
        """What is due at this step, in order."""
        progress = self._progress
        if not progress.is_logged:
            self._log_steps()
        if self._evaluator is not None and (self._is_due("eval") or progress.is_stopped):
            self._report.log_pending(waits=True)
            results = self._evaluator.run(self._callbacks, self.step)
            self._stop_if_requested()
            assert results is not None
            progress.record_evaluation(results)
            self._reporter.evaluated(self.step, single_numbers(results))
        if self._is_due("epoch") or progress.is_stopped:
            progress.is_stopped = self._end_epoch() or progress.is_stopped
        progress.is_between_calls = True
        if self._is_due("checkpoint") and not self._is_done():
            self._save()

    def _is_due(self, name: str, *, at_end: bool = True) -> bool:
        return self._triggers.is_due(name, self._progress.previous_step, self.step, at_end=at_end)

    def _stop_if_requested(self) -> None:
        """Every rank checks at the same points of the run, and all stop at the same one."""
        if not self._job_watch.check():
            return
        self._train_step.settle()
        self._members.pause_if_due()
        saved = "Nothing was saved: the trainer has no checkpointer."
        if self._checkpointer is not None:
            self._save(wait=True)
            saved = f"The state is saved; this resumes it, under the same launcher: {processes.command_line()}"
        raise StoppedEarly(
            f"stopped at step {self.step} of {self.total_steps} ({self._job_watch.stop_reason}). {saved}"
        )

    def _begin_epoch(self) -> None:
        if self._data.training.can_change:
            on_every_rank(self._data.training.check_unchanged, self._collectives)
        self.model.reset_metrics()
        require_sums(self.model)
        self._progress.validated = {}
        self._progress.epoch = self.plan.position(self.step).epoch
        self._progress.is_in_epoch = True
        self._callbacks.epoch_begins(self._progress.epoch)

    def _end_call(self) -> bool:
        """Returns whether a callback stops the training."""
        last_batch = self.plan.position(self.step - 1).step
        values = self._report.epoch_so_far()
        # A ModelCheckpoint may save here; not all Keras versions do so at multiples of its interval.
        may_save = bool(self._callbacks.save_intervals)
        with self._strategy.synchronized() if may_save else nullcontext():
            return self._callbacks.train_call_ends(last_batch, values)

    def _end_epoch(self) -> bool:
        """Returns whether a callback stops the training."""
        self._progress.is_in_epoch = False
        if not self._callbacks.names:
            return False  # No callback needs the values: no reduction.
        self._report.log_pending(waits=True)
        values = self._report.epoch_so_far()
        ema = ema_weights(self.model) if self._shows_ema else nullcontext()
        with self._strategy.synchronized(), ema:
            return self._callbacks.epoch_ends(self._progress.epoch, {**values, **self._progress.validated})

    def _save(self, wait: bool = False) -> None:
        assert self._checkpointer is not None
        self._report.log_pending(waits=True)
        self._job_watch.heartbeat("saving", self.step)
        start_s = time.perf_counter()
        self._state.save(self._checkpointer, wait=wait)
        self._reporter.saved(self.step, {"blocked_seconds": time.perf_counter() - start_s})
        if lost := self._callbacks.newly_unrestorable():
            self._reporter.warned(self.step, f"a resumed run will not restore {', '.join(lost)}: {RESTORABLE}")

    def _finish(self, restored: Restored | None) -> dict[str, Any]:
        self._reporter.profile_ends()
        self._report.log_pending(waits=True)
        self._strategy.compare_replicas()
        if self._checkpointer is not None:
            self._save(wait=True)
        self._strategy.finish()
        replica_consistency.share_statistics(self.model, self._collectives)
        if self._shows_ema:
            keep_ema_weights(self.model)
        self._callbacks.train_ends(self._progress.values)
        resumed_from = None if restored is None else restored.step
        return {**self._report.summary(self._clock, resumed_from), **self._members.summary()}

    def _plan_changed(self) -> None:
        self.total_steps = total_steps(self.config, self.plan)
        self._triggers = self._make_triggers()

    def _make_evaluator(self, source: Source) -> Evaluator:
        feed = EvaluationFeed(source, self.config.batch_size, self._collectives, self.parts.quota)
        return Evaluator(
            self.model,
            feed,
            self._collectives,
            uses_ema=self._shows_ema,
            synchronized=self._strategy.synchronized,
            job_watch=self._job_watch,
        )

    def _make_check(self) -> ScheduledCheck | None:
        if not self._strategy.makes_common_steps:
            end_if_only_checking(f"{option('mode', 'local')} averages parameters, not gradients", self._collectives)
            return None
        return check_of_model(
            self.model,
            self._train_step.batches,
            self._collectives,
            on_unequal=self.config.guards.on_unequal,
            how_to_continue=f"set {option('on_unequal', 'warn')}",
            report=lambda text: self._reporter.warned(self.step, text),
            weighs_micro_batches=True,
        )

    def _make_triggers(self) -> Triggers:
        config = self.config
        each_epoch = Interval(self.plan.steps_per_epoch, phase=self.plan.first_step_of(0))
        profiled = [self._first_profiled - 1, self._last_profiled] if self._last_profiled else []
        return Triggers(
            self.total_steps,
            marks=[*self._strategy.marks, *profiled],
            intervals=self._callbacks.save_intervals,
            loose=["guard", "exchange"],
            epoch=each_epoch,
            log=config.logging.log_every,
            histograms=config.logging.histograms_every,
            eval=config.eval_every or each_epoch,
            check=config.guards.check_every,
            checkpoint=config.checkpoint.checkpoint_every if self._checkpointer is not None else 0,
            guard=config.guards.guard_every,
            exchange=self.parts.balancer.exchange_every if self._strategy.in_lockstep else 0,
        )
