"""The training loop: the order of things; how they are done stands elsewhere."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras

from hvdtrain import process, replicas, runtime
from hvdtrain.activations import Activations
from hvdtrain.averaging import LocalTraining
from hvdtrain.batchnorm import synchronize_batch_normalization
from hvdtrain.callbacks import RankCallbacks
from hvdtrain.checkpoint import Checkpointer, Restored
from hvdtrain.data import Source
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feed import EvaluationFeed, TrainingFeed
from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.evaluation import Evaluator
from hvdtrain.failure import JobWatch, on_every_rank
from hvdtrain.gradient_watch import GradientWatch
from hvdtrain.intervals import Intervals
from hvdtrain.losses import sums_over_batch
from hvdtrain.metrics import require_sums
from hvdtrain.modes import Training, TrainingCalls, make_mode
from hvdtrain.optimizer import distribute_where_needed, distribution_of
from hvdtrain.progress import Progress
from hvdtrain.report import Reporter
from hvdtrain.run_state import RunState
from hvdtrain.sampling import SamplePlan
from hvdtrain.steps import CompiledSteps
from hvdtrain.timing.clock import Clock
from hvdtrain.timing.profiler import Profiler
from hvdtrain.timing.step_times import StepTimes, TimeShares
from hvdtrain.training_report import TrainingReport
from hvdtrain.weight_average import averaged_weights, keeps_average
from hvdtrain.xla import require_compilable


class Trainer:
    """Trains a compiled Keras model on all ranks as one process would train it on the whole batch.

    With ``local`` ranks train by themselves instead, and their parameters are averaged now and then.

    Args:
        model: built and compiled; its optimizer is made distributed if it is not yet. One made with
            ``use_ema=True`` has its averaged weights evaluated, and left in the model at the end.
        training: the samples to train on, all of them on every rank; each rank reads its share.
        evaluation: the samples to evaluate on, likewise; None: no evaluation.
        batch_size: samples per rank and micro-batch.
        steps: updates to make; or ``epochs``.
        epochs: passes over the samples; or ``steps``.
        callbacks: Keras callbacks, the same on every rank; see :class:`~hvdtrain.callbacks.RankCallbacks`.
        seed: of the order of samples and of what augments them.
        accumulate: micro-batches per step, one allreduce for all. More than 1 needs an optimizer
            with ``gradient_accumulation_steps`` of the same value.
        remainder: ``pad`` or ``drop``, see :class:`~hvdtrain.sampling.SamplePlan`.
        steps_per_call: steps in one compiled call. Callbacks hear of a call's last batch only.
        log_every, eval_every, check_every, histograms_every: in steps; ``eval_every=0``: at the end
            of each epoch; ``check_every=0``: variables are compared over ranks only at the end;
            ``histograms_every=0``: none.
        on_nan: what follows a loss or gradient that is not finite: ``stop`` with an error, ``skip`` the
            step, or ``ignore``. A TerminateOnNaN callback takes the place of ``stop``.
        bad_samples: how many samples may be unreadable, over all ranks.
        sync_batchnorm: BatchNormalization over all ranks in every layer, not only in those made with
            ``synchronized=True``.
        jit_compile: have XLA compile the forward and backward pass; a ``train_step`` of the model's own has to apply
            gradients once.
        reporter: told what happens (default: nobody).
        profiler: of a range of steps (default: none).
        checkpointer: of this model; saves after the last step, before averaged weights replace the model's
            own, and where the job is asked to stop (default: nothing is saved).
        checkpoint_every: in steps; 0: only then.
        resume: what to go on from, see :meth:`~hvdtrain.checkpoint.Checkpointer.restore`.
        identity: what a run must have in common with the one it goes on from, beside data, order and model.
        watch: tells where the job is to stop, and is told that it goes on (default: nobody).
        local: how ranks meet that train by themselves (default: gradients are averaged at each step). Everybody but
            the rank itself sees the averaged model.

    Raises:
        UsageError: an argument breaks its rule.
    """

    def __init__(
        self,
        model: keras.Model,
        training: Source,
        evaluation: Source | None = None,
        *,
        batch_size: int,
        steps: int | None = None,
        epochs: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        seed: int = 0,
        accumulate: int = 1,
        remainder: str = "pad",
        steps_per_call: int = 1,
        log_every: int = 10,
        eval_every: int = 0,
        check_every: int = 500,
        histograms_every: int = 0,
        on_nan: str = "stop",
        bad_samples: int = 0,
        sync_batchnorm: bool = False,
        jit_compile: bool = False,
        reporter: Reporter | None = None,
        profiler: Profiler | None = None,
        checkpointer: Checkpointer | None = None,
        checkpoint_every: int = 0,
        resume: str = "auto",
        watch: JobWatch | None = None,
        identity: Mapping[str, Any] | None = None,
        local: LocalTraining | None = None,
    ):
        if not model.built or getattr(model, "optimizer", None) is None:
            raise UsageError(
                f"model {model.name!r} must be built and compiled with an optimizer: give its first layer an Input, or "
                "call it once on a batch, then compile it. A model with several optimizers of its own trains with "
                "model.fit, each of them wrapped in DistributedOptimizer."
            )
        self._collectives = runtime.current().collectives
        self._plan = SamplePlan(
            num_samples=training.num_samples,
            batch_size=batch_size,
            rank=self._collectives.rank,
            size=self._collectives.size,
            seed=seed,
            shuffle=not training.keeps_order,
            accumulate=accumulate,
            remainder=remainder,
        )
        if (steps is None) == (epochs is None):
            raise UsageError(f"give either steps or epochs. Received: steps={steps}, epochs={epochs}")
        self._total_steps = steps if steps is not None else (epochs or 0) * self._plan.steps_per_epoch
        self.model = model
        self._local = local
        distribute_where_needed(model.optimizer, accumulate, self._collectives)
        op = distribution_of(model.optimizer).op
        loss_sums = sums_over_batch(model, op, training.has_sample_weights, accumulate)
        self._training = training
        self._evaluation = evaluation
        self._callbacks = RankCallbacks(
            callbacks,
            model,
            self._collectives,
            epochs=-(-self._total_steps // self._plan.steps_per_epoch),
            steps_per_epoch=self._plan.steps_per_epoch,
        )
        self._on_nan = "ignore" if on_nan == "stop" and self._callbacks.terminate_on_nan else on_nan
        times = StepTimes(accumulate)
        self._gradients = GradientWatch(
            model.optimizer,
            times,
            on_nan=self._on_nan,
            copy_every=histograms_every,
            compression_error_every=log_every,
        )
        self._steps = CompiledSteps(
            model,
            times=times,
            steps_per_call=steps_per_call,
            accumulate=accumulate,
            watch=self._gradients,
            weighted=not self._plan.is_even or bad_samples > 0,
            has_fillers=self._plan.has_fillers or bad_samples > 0,
            loss_sums=loss_sums,
            skips_non_finite=on_nan == "skip" or isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer),
            jit_compile=jit_compile,
        )
        self._num_synchronized = synchronize_batch_normalization(
            model, all_layers=sync_batchnorm, collectives=self._collectives, part_weight=self._steps.part_weight
        )
        if jit_compile:
            require_compilable(self._num_synchronized)
        self._shows_average = keeps_average(model.optimizer) and not self._callbacks.swap_averaged_weights
        self._quota = BadSampleQuota(bad_samples, self._collectives)
        self._feed = TrainingFeed(training, self._plan, self._quota)
        self._reporter = reporter or Reporter()
        self._profiler = profiler or Profiler()
        self._job = watch or JobWatch(self._collectives)
        self._progress = Progress()
        self._shares = TimeShares(times, self._collectives, process.host_name())
        calls = TrainingCalls(model, self._steps, self._feed, self._gradients)
        self._mode = make_mode(
            Training(model, self._plan, self._progress, calls, self._collectives, self._shares, self._job),
            local,
            total_steps=self._total_steps,
            num_synchronized=self._num_synchronized,
        )
        self._state = RunState(
            self._progress,
            self._gradients,
            self._callbacks,
            self._quota,
            self._steps,
            self._mode,
            plan=self._plan,
            training=training,
            local=local,
            identity=identity or {},
        )
        self._report = TrainingReport(
            model,
            self._plan,
            self._progress,
            collectives=self._collectives,
            reporter=self._reporter,
            gradients=self._gradients,
            quota=self._quota,
            shares=None if local is not None and local.wait_free else self._shares,
            averager=self._mode.averager,
            activations=Activations(model, evaluation or training),
        )
        self._checkpointer = checkpointer
        self._resume = resume
        self._every = {
            "log": log_every,
            "eval": eval_every or self._plan.steps_per_epoch,
            "check": check_every,
            "histograms": histograms_every,
            "checkpoint": checkpoint_every if checkpointer is not None else 0,
        }
        self._intervals = Intervals(
            self._total_steps,
            marks=[*self._profiler.marks, *self._mode.marks],
            others=self._callbacks.save_intervals,
            epoch=self._plan.steps_per_epoch,
            **self._every,
        )
        self._evaluator: Evaluator | None = None
        if evaluation is not None:
            place = (self._collectives.rank, self._collectives.size)
            self._evaluator = Evaluator(
                model,
                self._steps,
                EvaluationFeed(evaluation, batch_size, *place, self._quota),
                self._collectives,
                uses_average=self._shows_average,
                shared=self._mode.shared,
                watch=self._job,
            )
        self._restored: Restored | None = None
        self._is_prepared = self._has_begun = False

    @property
    def plan(self) -> SamplePlan:
        """This rank's share of the samples."""
        return self._plan

    @property
    def step(self) -> int:
        """Steps made."""
        return self._progress.step

    @property
    def total_steps(self) -> int:
        """Steps that :meth:`fit` makes."""
        return self._total_steps

    @property
    def shares(self) -> TimeShares:
        """Where the time of the steps went."""
        return self._shares

    def fit(self) -> dict[str, Any]:
        """Trains.

        Returns:
            What a run's ``summary.json`` holds, but for what only the command line knows.

        Raises:
            DataError: more samples are unreadable than allowed, or a file changed while training.
            DisagreementError: ranks differ in arguments, data or model.
            DivergenceError: replicas that must be equal are not.
            NonFiniteError: a loss or a gradient is not finite, with ``on_nan='stop'``.
            StoppedEarly: the job was asked to stop; all ranks did at the same step, and it is saved.
            UsageError: it was called before.
        """
        if self._has_begun:
            raise UsageError(
                f"fit() may be called once. This trainer has made its {self.step} steps; make another one."
            )
        self._has_begun = True
        restored = self.prepare()
        clock, feed = Clock(), self._feed
        feed.start(self._steps.steps_made * self._plan.accumulate)
        self._reporter.model_built(self.model)
        if restored is not None:
            self._reporter.resumed(self.step, restored.path)
        self._callbacks.train_begins(None if restored is None else restored.state["callbacks"])
        while not self._is_done():
            if self._progress.is_between_calls:
                self._stop_if_asked()
                self._make_call(clock)
            self._after_call(clock)
            if self._is_due("checkpoint") and not self._is_done():
                self._save()
        return self._finish(clock)

    def prepare(self) -> Restored | None:
        """Compares the ranks, makes their replicas equal and restores what the run goes on from; :meth:`fit` calls it.

        Returns:
            What was restored; None: the run begins anew.

        Raises:
            JobError: on every rank: the checkpoint is damaged, or of another run.
            DisagreementError: ranks differ in arguments, data or model.
        """
        if not self._is_prepared:
            self._start()
            self._steps.build(self._feed.element_spec)
            self._restored = None if self._checkpointer is None else self._restore(self._checkpointer)
            self._mode.begin()
            self._is_prepared = True
        return self._restored

    def make_steps(self, steps: int, clock: Clock) -> None:
        """Makes this many steps and nothing else: no logs, evaluations, checkpoints, guards. For measurements.

        Raises:
            JobError: as :meth:`fit`.
        """
        self.prepare()
        if self._feed.iterator is None:
            self._feed.start(0)
        last = self.step + steps
        while self.step < last:
            self._make_call(clock)

    def _is_done(self) -> bool:
        progress = self._progress
        return progress.is_between_calls and (progress.is_stopped or progress.step == self._total_steps)

    def _is_due(self, thing: str, *, at_end: bool = True) -> bool:
        return self._intervals.is_due(thing, self._progress.previous_step, self.step, at_end=at_end)

    def _make_call(self, clock: Clock) -> None:
        progress = self._progress
        progress.previous_step = self.step
        if not progress.is_in_epoch:
            self._begin_epoch()
        self._profiler.before(self.step)
        if self._callbacks.hear_train_batches:
            self._callbacks.train_call_begins(self.step % self._plan.steps_per_epoch)
        clock.start_call()
        self._mode.make_call(self._intervals.steps_to_next(self.step))
        clock.end_call(max(1, self.step - progress.previous_step))
        self._profiler.after(self.step)
        if self._callbacks.hear_train_batches:
            self._progress.is_stopped = self._end_call()
        self._progress.is_between_calls = False

    def _after_call(self, clock: Clock) -> None:
        progress = self._progress
        if self._is_due("log") or progress.is_stopped:
            self._report.log(clock)
        if self._is_due("histograms", at_end=False):
            self._report.histograms()
        if self._is_due("check"):
            self._mode.compare_replicas()
        if self._evaluator is not None and (self._is_due("eval") or progress.is_stopped):
            results = self._evaluator.run(self._callbacks, self.step)
            self._stop_if_asked()
            assert results is not None
            progress.evaluation_done(results)
            self._reporter.evaluated(self.step, results)
        if self._is_due("epoch") or progress.is_stopped:
            progress.is_stopped = self._end_epoch() or progress.is_stopped
        progress.is_between_calls = True

    def _stop_if_asked(self) -> None:
        """Every rank comes here at the same places of the run, and they stop at the same one."""
        if not self._job.check():
            return
        saved = "Nothing was saved: the trainer has no checkpointer."
        if self._checkpointer is not None:
            self._save(wait=True)
            saved = "The state is saved; started again, the job goes on from there."
        raise StoppedEarly(f"stopped at step {self.step} of {self._total_steps} ({self._job.stop_reason}). {saved}")

    def _begin_epoch(self) -> None:
        if self._training.can_change:
            on_every_rank(self._training.check_unchanged, self._collectives)
        self.model.reset_metrics()
        require_sums(self.model)
        self._progress.validated = {}
        self._progress.epoch = self.step // self._plan.steps_per_epoch
        self._progress.is_in_epoch = True
        self._callbacks.epoch_begins(self._progress.epoch)

    def _save(self, wait: bool = False) -> None:
        assert self._checkpointer is not None
        self._job.beat("saving", self.step)
        self._state.save(self._checkpointer, wait=wait)

    def _restore(self, checkpointer: Checkpointer) -> Restored | None:
        # Metrics must have their variables before these are restored.
        self._steps.build(self._feed.element_spec, must=True)
        restored = self._state.restore(checkpointer, self._resume)
        if restored is not None:
            on_every_rank(self._training.check_unchanged, self._collectives)
        return restored

    def _end_call(self) -> bool:
        """Gives back whether a callback stops the training."""
        last_batch = (self.step - 1) % self._plan.steps_per_epoch
        values = self._report.epoch_so_far()
        # A ModelCheckpoint may save here; not all Keras versions do at multiples of its interval.
        may_save = bool(self._callbacks.save_intervals)
        with self._mode.shared() if may_save else nullcontext():
            return self._callbacks.train_call_ends(last_batch, values)

    def _end_epoch(self) -> bool:
        """Gives back whether a callback stops the training."""
        self._progress.is_in_epoch = False
        if not self._callbacks.names:
            return False  # Nobody asks: ranks need not meet.
        values = self._report.epoch_so_far()
        average = averaged_weights(self.model.optimizer) if self._shows_average else nullcontext()
        with self._mode.shared(), average:
            return self._callbacks.epoch_ends(self._progress.epoch, {**values, **self._progress.validated})

    def _start(self) -> None:
        arguments = {
            "batch_size": self._plan.batch_size,
            "steps": self._total_steps,
            "seed": self._plan.seed,
            "accumulate": self._plan.accumulate,
            "remainder": self._plan.remainder,
            **{f"{thing}_every": steps for thing, steps in self._every.items()},
            "steps_per_call": self._steps.steps_per_call,
            "jit_compile": self._steps.jit_compile,
            "on_nan": self._on_nan,
            "resume": str(self._resume),
            "callbacks": self._callbacks.names,
            "synchronised BatchNormalization layers": self._num_synchronized,
            "local": str(self._local),
        }
        replicas.require_agreement("arguments of Trainer", arguments, self._collectives)
        replicas.require_agreement("training data", self._training.facts(), self._collectives)
        evaluation = {} if self._evaluation is None else self._evaluation.facts()
        replicas.require_agreement("evaluation data", evaluation, self._collectives)
        for source in (self._training, self._evaluation):
            if source is not None:
                self._quota.note_known(source.bad_samples)
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._gradients.build(self.model.trainable_variables)
        replicas.require_agreement("model", replicas.structure(self.model), self._collectives)
        replicas.broadcast(self.model, collectives=self._collectives)

    def _finish(self, clock: Clock) -> dict[str, Any]:
        self._profiler.close()
        self._mode.compare_replicas()
        if self._checkpointer is not None:
            self._save(wait=True)
        self._mode.finish()
        replicas.share_statistics(self.model, self._collectives)
        if self._shows_average:
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
        self._callbacks.train_ends(self._progress.values)
        return self._report.summary(clock, None if self._restored is None else self._restored.step)
