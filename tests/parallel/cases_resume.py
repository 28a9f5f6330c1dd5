"""On all ranks: a run that is stopped anywhere and resumed ends bit-identical to an uninterrupted run."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, relative_difference, values
from stopped_runs import StopAt, StopInEvaluation, TwoOptimizers, assert_same_results, make_run, results_of, stopped
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    assert_equal_replicas,
    dtype_policy,
    tanh_model,
)

from hvdtrain import CheckpointConfig, Checkpointer, TrainConfig, Trainer
from hvdtrain.checkpoint import storage
from hvdtrain.data import Arrays, Stream
from hvdtrain.distributed import runtime
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import JobError, StoppedEarly
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.loggers.reporter import Reporter
from hvdtrain.optim.loss_scaling import overflowed_steps

STEPS_PER_EPOCH = 8


class Warmed(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01 * keras.ops.minimum(1.0, (keras.ops.cast(step, "float32") + 1) / 15)


OPTIONS = {
    "warm-up, clipping, EMA": (
        lambda: keras.optimizers.AdamW(Warmed(), global_clipnorm=0.5, use_ema=True, ema_momentum=0.9),
        {},
    ),
    "accumulation, EMA, several steps per execution": (
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9),
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3},
    ),
    "skipping, synchronized": (
        lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        {"on_nan": "skip", "sync_batchnorm": True, "remainder": "drop"},
    ),
}


RARELY = "warm-up, clipping, EMA"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == RARELY else name for name in OPTIONS]
)
def test_stopped_and_resumed_equals_uninterrupted(name, folder, watch):
    optimizer, options = OPTIONS[name]
    uninterrupted = make_run(optimizer, **options)
    end = results_of(uninterrupted, uninterrupted.fit())
    calls = 5 // options.get("steps_per_execution", 1)
    trainer = make_run(optimizer, folder, callbacks=[StopAt(watch, calls)], job_watch=watch, **options)
    step = stopped(trainer)
    assert 0 < step < STEPS - 1
    assert step % trainer.plan.steps_per_epoch, "the stop should be in the middle of an epoch"
    if not options:  # and a second time
        with JobWatch(COLLECTIVES) as again:
            trainer = make_run(optimizer, folder, weights=200 + RANK, callbacks=[StopAt(again, 1)], job_watch=again)
            assert step < stopped(trainer) < STEPS
    trainer = make_run(optimizer, folder, weights=300 + RANK, **options)
    summary = trainer.fit()
    assert summary["resumed_from"] >= step
    assert_same_results(results_of(trainer, summary), end)
    assert_equal_replicas(trainer.model)


def test_a_completed_run_is_extended(folder):
    """The shorter run evaluates and compares replicas at a step at which the longer one does not."""
    optimizer = lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    uninterrupted = make_run(optimizer)
    end = results_of(uninterrupted, uninterrupted.fit())
    assert make_run(optimizer, folder, steps=STEPS // 2 + 1).fit()["steps"] == STEPS // 2 + 1
    trainer = make_run(optimizer, folder, weights=300 + RANK, check_every=3)
    assert_same_results(results_of(trainer, trainer.fit()), end)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"mode": "local", "sync_every": 3}, marks=pytest.mark.long),
        pytest.param({"mode": "local", "overlap": True}, marks=pytest.mark.long),
    ],
)
def test_all_optimizers_of_a_model_resume(options, folder, watch):
    options = {"make_model": TwoOptimizers, **options}
    adam = lambda: keras.optimizers.Adam(0.01)
    uninterrupted = make_run(adam, **options)
    end = results_of(uninterrupted, uninterrupted.fit())
    stopped(make_run(adam, folder, callbacks=[StopAt(watch, 10)], job_watch=watch, **options))
    trainer = make_run(adam, folder, weights=300 + RANK, **options)
    summary = trainer.fit()
    assert summary["resumed_from"] == 10
    assert_same_results(results_of(trainer, summary), end)
    # iterations, learning rate, and two slots for each of two variables
    assert len(trainer.model.first_optimizer.variables) == len(trainer.model.optimizer.variables) == 6
    assert int(trainer.model.first_optimizer.iterations) == STEPS


def test_mixed_precision_resumes_with_its_loss_scale(folder, watch):
    with dtype_policy("mixed_float16"):
        optimizer = lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**24, dynamic_growth_steps=4
        )
        uninterrupted = make_run(optimizer)
        end = results_of(uninterrupted, uninterrupted.fit())
        stopped(make_run(optimizer, folder, callbacks=[StopAt(watch, 9)], job_watch=watch))
        trainer = make_run(optimizer, folder, weights=300 + RANK)
        assert_same_results(results_of(trainer, trainer.fit()), end)
        skipped = overflowed_steps(uninterrupted.model.optimizer, STEPS)
        assert 0 < skipped < STEPS


def test_a_dataset_resumes_at_its_position(folder, watch):
    adam = lambda: keras.optimizers.Adam(0.01)
    source = lambda: Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    uninterrupted = make_run(adam, source=source())
    end = results_of(uninterrupted, uninterrupted.fit())
    stopped(make_run(adam, folder, source=source(), callbacks=[StopAt(watch, 11)], job_watch=watch))
    trainer = make_run(adam, folder, weights=300 + RANK, source=source())
    assert_same_results(results_of(trainer, trainer.fit()), end)


class Recorder(Reporter):
    """Records log lines, evaluations, and with callback() the ends of epochs, in the order in which they happen."""

    def __init__(self):
        self.events: list[tuple] = []

    def progressed(self, step, values):
        self.events.append(("logged", step))

    def evaluated(self, step, results):
        self.events.append(("evaluated", step, dict(results)))

    def callback(self) -> keras.callbacks.Callback:
        return keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: self.events.append(("epoch", epoch, dict(logs)))
        )


@pytest.mark.parametrize(
    ("options", "stop_step"),
    [
        pytest.param({"log_every": 2}, 2 * STEPS_PER_EPOCH, marks=pytest.mark.long),
        ({"eval_every": 3, "steps_per_execution": 2, "checkpoint_every": 3, "log_every": 2}, 6),
    ],
)
def test_an_interrupted_evaluation_runs_after_resuming(options, stop_step, folder, watch):
    """Before the next step; then follows what else is due at the step: the end of the epoch, a checkpoint."""
    adam = lambda: keras.optimizers.Adam(0.01)

    def run(place, **more):
        recorder = Recorder()
        callbacks = [*more.pop("callbacks", []), recorder.callback()]
        return make_run(adam, place, callbacks=callbacks, reporter=recorder, **options, **more), recorder

    uninterrupted, expected = run(None)
    end = results_of(uninterrupted, uninterrupted.fit())
    trainer, first = run(folder, callbacks=[StopInEvaluation(watch, 2)], job_watch=watch)
    assert stopped(trainer) == stop_step
    resumed, then = run(folder, weights=300 + RANK)
    assert_same_results(results_of(resumed, resumed.fit()), end)
    interrupted = [event[:2] for event in expected.events].index(("evaluated", stop_step))
    assert first.events == expected.events[:interrupted]
    assert then.events == expected.events[interrupted:]


def test_interval_checkpoints_change_nothing_and_each_can_be_resumed_from(folder):
    adam = lambda: keras.optimizers.Adam(0.01)
    uninterrupted = make_run(adam)
    end = results_of(uninterrupted, uninterrupted.fit())
    trainer = make_run(adam, folder, checkpoint_every=5, keep=10)
    assert_same_results(results_of(trainer, trainer.fit()), end)
    steps = [storage.step_of(each) for each in storage.checkpoints_in(folder)] if RANK == 0 else None
    steps = COLLECTIVES.allgather(steps)[0]
    assert steps == [5, 10, 15, 20, STEPS]
    for step in (15, 5):
        path = folder / storage.folder_name(step)
        trainer = make_run(adam, folder, weights=300 + RANK + step, resume=str(path), keep=10)
        summary = trainer.fit()
        assert summary["resumed_from"] == step
        assert_same_results(results_of(trainer, summary), end)
        if RANK == 0:
            kept = [storage.step_of(each) for each in storage.checkpoints_in(folder)]
            assert kept == [*(each for each in steps if each <= step), STEPS]
            assert (folder / f"{storage.folder_name(STEPS)}.aside{1 if step == 15 else 2}").is_dir()


class Counts(keras.callbacks.Callback):
    """A user's callback with its own state."""

    def __init__(self):
        super().__init__()
        self.losses, self.patience = [], 3

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


def test_callbacks_resume_with_their_state(folder, watch):
    # The high learning rate makes the evaluation loss rise, so that the callbacks act.
    optimizer = lambda: keras.optimizers.SGD(3.0, momentum=0.9)

    def callbacks(place):
        if RANK == 0:
            (folder / place).mkdir(exist_ok=True)
        COLLECTIVES.barrier()
        return [
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.0),
            keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(folder / place / "best.keras", save_best_only=True, monitor="val_loss"),
            keras.callbacks.CSVLogger(folder / place / "log.csv"),
            Counts(),
        ]

    def state_of(trainer, summary, callbacks):
        plateau, early, best, _, counts = callbacks
        return (
            *(plateau.best, plateau.wait, early.best, early.wait, early.best_epoch, counts.losses, summary["steps"]),
            *(best.best if RANK == 0 else None, float(trainer.model.optimizer.learning_rate)),
        )

    uninterrupted_callbacks = callbacks("uninterrupted")
    uninterrupted = make_run(optimizer, steps=100, callbacks=uninterrupted_callbacks)
    summary = uninterrupted.fit()
    expected, end = state_of(uninterrupted, summary, uninterrupted_callbacks), results_of(uninterrupted, summary)
    assert summary["steps"] < 100, "EarlyStopping should have stopped"
    early = callbacks("halves")
    stopped(make_run(optimizer, folder / "c", steps=100, callbacks=[*early, StopAt(watch, 28)], job_watch=watch))
    late = callbacks("halves")
    late[-1].patience = 7  # the user's new setting is kept
    trainer = make_run(optimizer, folder / "c", weights=300 + RANK, steps=100, callbacks=[*late, StopAt(watch, 999)])
    summary = trainer.fit()
    assert state_of(trainer, summary, late) == expected
    assert late[-1].patience == 7
    assert_same_results(results_of(trainer, summary), end)
    if RANK == 0:
        logs = [(folder / place / "log.csv").read_text() for place in ("uninterrupted", "halves")]
        assert logs[0] == logs[1]
    # A run that a callback has ended is complete.
    trainer = make_run(optimizer, folder / "c", steps=100, callbacks=[*callbacks("halves"), StopAt(watch, 999)])
    assert trainer.fit()["steps"] == summary["steps"]


def test_resumes_at_the_same_sample_on_another_number_of_ranks(folder, watch):
    """One rank resumes the run of all ranks, and all ranks resume the run of one."""

    def smooth(optimizer, place, **options):
        return make_run(optimizer, place, make_model=tanh_model, source=Arrays(X, Y), **options)

    adam = lambda: keras.optimizers.Adam(0.01)
    uninterrupted = smooth(adam, None)
    summary = uninterrupted.fit()
    many = folder / "many"
    stopped(smooth(adam, many, callbacks=[StopAt(watch, 11)], job_watch=watch))
    one = folder / "one"
    if RANK == 0:
        with pytest.MonkeyPatch.context() as patch:
            single = runtime.Runtime(runtime.current().topology, SingleProcessCollectives())
            patch.setattr(runtime, "_runtime", single)
            shutil.copytree(many, folder / "copy")
            trainer = smooth(adam, folder / "copy", weights=300, batch=GLOBAL_BATCH)
            ended = trainer.fit()
            assert 11 <= ended["resumed_from"] < STEPS
            assert ended["samples"] == summary["samples"]
            assert relative_difference(values(trainer.model.weights), values(uninterrupted.model.weights)) < 1e-5
            assert ended["metrics"]["accuracy"] == pytest.approx(summary["metrics"]["accuracy"], abs=1e-6)
            # With the same number of samples per step, in two gradient accumulation steps.
            twice = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
            shutil.copytree(many, folder / "accumulated")
            options = {"weights": 300, "batch": GLOBAL_BATCH, "gradient_accumulation_steps": 2}
            trainer = smooth(twice, folder / "accumulated", **options)
            trainer.fit()
            assert relative_difference(values(trainer.model.weights), values(uninterrupted.model.weights)) < 1e-5
            with JobWatch(SingleProcessCollectives()) as own:
                halfway = smooth(adam, one, batch=GLOBAL_BATCH, callbacks=[StopAt(own, 13, rank=0)], job_watch=own)
                with pytest.raises(StoppedEarly):
                    halfway.fit()
    COLLECTIVES.barrier()
    keras.utils.clear_session()  # rank 0 has created more models, and Keras numbers them
    trainer = smooth(adam, one, weights=300 + RANK)
    ended = trainer.fit()
    assert 13 <= ended["resumed_from"] < STEPS
    assert relative_difference(values(trainer.model.weights), values(uninterrupted.model.weights)) < 1e-5
    assert ended["eval"]["loss"] == pytest.approx(summary["eval"]["loss"], rel=1e-5)


def wider_model() -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(17, activation="tanh"), layers.Dense(NUM_CLASSES)])


def test_another_run_is_refused_with_the_difference(folder):
    adam = lambda: keras.optimizers.Adam(0.01)
    own = {"make_model": tanh_model, "identity": {"task": "one"}}
    make_run(adam, folder, steps=3, **own).fit()
    before = sorted(folder.rglob("*")) if RANK == 0 else None
    # The optimizer, the options that differ, and the expected message.
    changes = [
        (
            adam,
            {"make_model": wider_model},
            r"kernel \(6, 16\) float32 in the checkpoint, .*kernel \(6, 17\) float32 here",
        ),
        (lambda: keras.optimizers.SGD(0.01), {}, "of the same model and optimizer"),
        (adam, {"seed": 6}, "seed: 5 in the checkpoint, 6 here"),
        (adam, {"batch": GLOBAL_BATCH // SIZE // 2}, "samples in a step: 32 in the checkpoint, 16 here"),
        (adam, {"source": Arrays(X + 1, Y)}, "training data"),
        (adam, {"identity": {"task": "another"}}, "task: one in the checkpoint, another here"),
    ]
    for optimizer, options, message in changes:
        with pytest.raises(JobError, match=message) as caught:
            make_run(optimizer, folder, steps=5, **{**own, **options}).fit()
        assert caught.value.exit_code == 65
        assert before == (sorted(folder.rglob("*")) if RANK == 0 else None)


def test_states_of_recurrent_layers_are_resumed(folder, capfd):
    """Each rank has those of its own samples; no step of one process has them, so that steps cannot be compared."""
    size = 4 * SIZE
    series = np.cumsum(np.random.default_rng(0).normal(size=(size, 61)), 1) * 0.3
    x = np.concatenate([series[:, 5 * t : 5 * t + 5, None] for t in range(12)])
    y = np.concatenate([series[:, 5 * t + 5, None] for t in range(12)])

    def train(name, steps):
        keras.utils.set_random_seed(1)
        inputs = layers.Input(batch_shape=(4, 5, 1))
        model = keras.Sequential([inputs, layers.LSTM(8, stateful=True), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        config = TrainConfig(batch_size=4, steps=steps, checkpoint=CheckpointConfig(checkpoint_every=100))
        data = tf.data.Dataset.from_tensor_slices((x, y))
        Trainer(model, data, config, checkpointer=Checkpointer(folder / name, model)).fit()
        return values(model.weights)

    in_one_go = train("a", 12)
    train("b", 6)
    for ours, theirs in zip(train("b", 12), in_one_go, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    said = "its layers keep states of the samples of each rank's last batch"
    assert (said in capfd.readouterr().out) == (RANK == 0 and SIZE > 1)
