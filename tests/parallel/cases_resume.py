"""On every rank: a run that stops anywhere and goes on ends as if nothing had happened, to the bit."""

import itertools
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from trainings import COLLECTIVES, GLOBAL_BATCH, RANK, SIZE, STEPS, X, Y, assert_equal_replicas, dtype_policy

import hvdtrain
from hvdtrain import runtime
from hvdtrain.checkpoint import folders
from hvdtrain.collectives import OneProcess
from hvdtrain.data import Arrays, Stream
from hvdtrain.errors import StoppedEarly
from hvdtrain.failure import JobError, JobWatch
from hvdtrain.loss_scale import overflowed_steps

STEPS_PER_EPOCH = 8


class StopAt(keras.callbacks.Callback):
    """Asks from the last rank alone, in the middle of a call, as a signal would."""

    def __init__(self, watch: JobWatch, step: int):
        super().__init__()
        # No plain value, which a resumed run would take over.
        self._watch, self._step, self._steps = watch, step, itertools.count(1)

    def on_train_batch_end(self, batch, logs=None):
        if next(self._steps) == self._step and RANK == SIZE - 1:
            self._watch.request_stop("a test")


class StopInEvaluation(keras.callbacks.Callback):
    def __init__(self, watch: JobWatch, evaluation: int):
        super().__init__()
        self._watch, self._evaluation, self._evaluations = watch, evaluation, itertools.count(1)

    def on_test_begin(self, logs=None):
        if next(self._evaluations) == self._evaluation and RANK == SIZE - 1:
            self._watch.request_stop("a test")


def noisy_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, activation="tanh"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1),
            layers.Dense(NUM_CLASSES),
        ]
    )


def augment(x, y, seed):
    return x + tf.random.stateless_normal(tf.shape(x), seed, stddev=0.1), y


class Warmed(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01 * keras.ops.minimum(1.0, (keras.ops.cast(step, "float32") + 1) / 15)


OPTIONS = {
    "warm-up, clipping, moving average": (
        lambda: keras.optimizers.AdamW(Warmed(), global_clipnorm=0.5, use_ema=True, ema_momentum=0.9),
        {},
    ),
    "accumulation, moving average, several steps a call": (
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9),
        {"accumulate": 2, "steps_per_call": 3},
    ),
    "skipping, synchronised": (
        lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        {"on_nan": "skip", "sync_batchnorm": True, "remainder": "drop"},
    ),
}


def make_trainer(
    optimizer, folder=None, *, seed=5, weights=100, source=None, batch=GLOBAL_BATCH // SIZE, keep=3, **options
):
    # Other initial weights at each start, and on each rank: all of them have to be replaced.
    keras.utils.set_random_seed(weights)
    model = noisy_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=["accuracy"])
    checkpointer = None if folder is None else hvdtrain.Checkpointer(folder, model, keep=keep)
    arguments = {"steps": STEPS, "seed": seed, "log_every": 5, **options}
    arguments["batch_size"] = batch // arguments.get("accumulate", 1)
    source = source or Arrays(X, Y, augment=augment)
    evaluation = Arrays(X[:99], Y[:99])
    return hvdtrain.Trainer(model, source, evaluation, checkpointer=checkpointer, **arguments)


def what_a_run_comes_to(trainer, summary) -> tuple:
    everything = [values(trainer.model.weights), values(trainer.model.optimizer.variables)]
    own = [v.numpy() for v in trainer.model.variables]  # random streams included
    return everything, own, {name: summary[name] for name in ("loss", "metrics", "eval", "samples", "weights_sha256")}


def assert_same_end(one, other) -> None:
    for these, those in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))
    assert one[2] == other[2]


def stopped(trainer) -> int:
    with pytest.raises(StoppedEarly, match="The state is saved") as caught:
        trainer.fit()
    assert caught.value.exit_code == 75
    assert len(set(COLLECTIVES.allgather(trainer.step))) == 1
    return trainer.step


@pytest.mark.parametrize("name", OPTIONS)
def test_stopped_and_gone_on_equals_straight(name, folder, watch):
    optimizer, options = OPTIONS[name]
    straight = make_trainer(optimizer, **options)
    end = what_a_run_comes_to(straight, straight.fit())
    calls = 5 // options.get("steps_per_call", 1)
    trainer = make_trainer(optimizer, folder, callbacks=[StopAt(watch, calls)], watch=watch, **options)
    step = stopped(trainer)
    assert 0 < step < STEPS - 1
    assert step % trainer.plan.steps_per_epoch, "the stop should be in the middle of an epoch"
    if not options:  # and a second time
        with JobWatch(COLLECTIVES) as again:
            trainer = make_trainer(optimizer, folder, weights=200 + RANK, callbacks=[StopAt(again, 1)], watch=again)
            assert step < stopped(trainer) < STEPS
    trainer = make_trainer(optimizer, folder, weights=300 + RANK, **options)
    summary = trainer.fit()
    assert summary["resumed_from"] >= step
    assert_same_end(what_a_run_comes_to(trainer, summary), end)
    assert_equal_replicas(trainer.model)


def test_a_run_that_was_to_be_shorter_goes_on(folder):
    """It was evaluated and compared where a longer run is not, which must leave no trace."""
    optimizer = lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    straight = make_trainer(optimizer)
    end = what_a_run_comes_to(straight, straight.fit())
    assert make_trainer(optimizer, folder, steps=STEPS // 2 + 1).fit()["steps"] == STEPS // 2 + 1
    trainer = make_trainer(optimizer, folder, weights=300 + RANK, check_every=3)
    assert_same_end(what_a_run_comes_to(trainer, trainer.fit()), end)


def test_mixed_precision_goes_on_with_its_loss_scale(folder, watch):
    with dtype_policy("mixed_float16"):
        optimizer = lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**24, dynamic_growth_steps=4
        )
        straight = make_trainer(optimizer)
        end = what_a_run_comes_to(straight, straight.fit())
        stopped(make_trainer(optimizer, folder, callbacks=[StopAt(watch, 9)], watch=watch))
        trainer = make_trainer(optimizer, folder, weights=300 + RANK)
        assert_same_end(what_a_run_comes_to(trainer, trainer.fit()), end)
        skipped = overflowed_steps(straight.model.optimizer, STEPS)
        assert 0 < skipped < STEPS


def test_a_data_set_goes_on_where_it_was(folder, watch):
    adam = lambda: keras.optimizers.Adam(0.01)
    source = lambda: Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    straight = make_trainer(adam, source=source())
    end = what_a_run_comes_to(straight, straight.fit())
    stopped(make_trainer(adam, folder, source=source(), callbacks=[StopAt(watch, 11)], watch=watch))
    trainer = make_trainer(adam, folder, weights=300 + RANK, source=source())
    assert_same_end(what_a_run_comes_to(trainer, trainer.fit()), end)


def test_an_evaluation_that_was_cut_short_is_made_after_going_on(folder, watch):
    adam = lambda: keras.optimizers.Adam(0.01)
    heard = []
    note = lambda: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: heard.append((epoch, logs)))
    straight = make_trainer(adam, callbacks=[note()])
    end = what_a_run_comes_to(straight, straight.fit())
    told = list(heard)
    heard.clear()
    callbacks = [StopInEvaluation(watch, 2), note()]
    assert stopped(make_trainer(adam, folder, callbacks=callbacks, watch=watch)) == 2 * STEPS_PER_EPOCH
    assert len(heard) == 1, "the epoch must not end before it is evaluated"
    trainer = make_trainer(adam, folder, weights=300 + RANK, callbacks=[note()])
    assert_same_end(what_a_run_comes_to(trainer, trainer.fit()), end)
    assert heard == told


def test_interval_checkpoints_change_nothing_and_each_can_be_gone_on_from(folder):
    adam = lambda: keras.optimizers.Adam(0.01)
    straight = make_trainer(adam)
    end = what_a_run_comes_to(straight, straight.fit())
    trainer = make_trainer(adam, folder, checkpoint_every=5, keep=10)
    assert_same_end(what_a_run_comes_to(trainer, trainer.fit()), end)
    steps = [folders.step_of(each) for each in folders.checkpoints_in(folder)] if RANK == 0 else None
    steps = COLLECTIVES.allgather(steps)[0]
    assert steps == [5, 10, 15, 20, STEPS]
    for step in (15, 5):
        path = folder / folders.folder_name(step)
        trainer = make_trainer(adam, folder, weights=300 + RANK + step, resume=str(path), keep=10)
        summary = trainer.fit()
        assert summary["resumed_from"] == step
        assert_same_end(what_a_run_comes_to(trainer, summary), end)
        if RANK == 0:
            kept = [folders.step_of(each) for each in folders.checkpoints_in(folder)]
            assert kept == [*(each for each in steps if each <= step), STEPS]
            assert (folder / f"{folders.folder_name(STEPS)}.aside{1 if step == 15 else 2}").is_dir()


class Counts(keras.callbacks.Callback):
    """A user's own, with state of its own."""

    def __init__(self):
        super().__init__()
        self.losses, self.patience = [], 3

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


def test_callbacks_go_on_with_what_they_have_come_to(folder, watch):
    # An evaluation that gets worse again: a large rate, which is then reduced.
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

    def came_to(trainer, summary, of):
        plateau, early, best, _, counts = of
        return (
            *(plateau.best, plateau.wait, early.best, early.wait, early.best_epoch, counts.losses, summary["steps"]),
            *(best.best if RANK == 0 else None, float(trainer.model.optimizer.learning_rate)),
        )

    straight_callbacks = callbacks("straight")
    straight = make_trainer(optimizer, steps=100, callbacks=straight_callbacks)
    summary = straight.fit()
    expected, end = came_to(straight, summary, straight_callbacks), what_a_run_comes_to(straight, summary)
    assert summary["steps"] < 100, "EarlyStopping should have stopped"
    early = callbacks("halves")
    stopped(make_trainer(optimizer, folder / "c", steps=100, callbacks=[*early, StopAt(watch, 28)], watch=watch))
    late = callbacks("halves")
    late[-1].patience = 7  # a user's new choice stays
    trainer = make_trainer(
        optimizer, folder / "c", weights=300 + RANK, steps=100, callbacks=[*late, StopAt(watch, 999)]
    )
    summary = trainer.fit()
    assert came_to(trainer, summary, late) == expected
    assert late[-1].patience == 7
    assert_same_end(what_a_run_comes_to(trainer, summary), end)
    if RANK == 0:
        logs = [(folder / place / "log.csv").read_text() for place in ("straight", "halves")]
        assert logs[0] == logs[1]
    # A run that a callback has ended stays ended.
    trainer = make_trainer(optimizer, folder / "c", steps=100, callbacks=[*callbacks("halves"), StopAt(watch, 999)])
    assert trainer.fit()["steps"] == summary["steps"]


def test_on_another_number_of_ranks_it_goes_on_at_the_same_sample(folder, watch, monkeypatch):
    """The other ranks are this process alone: it takes over from all, and hands over to all."""

    def smooth(optimizer, place, **options):
        return make_trainer(optimizer, place, source=Arrays(X, Y), **options)

    adam = lambda: keras.optimizers.Adam(0.01)
    monkeypatch.setitem(globals(), "noisy_model", plain_model)
    straight = smooth(adam, None)
    summary = straight.fit()
    many = folder / "many"
    stopped(smooth(adam, many, callbacks=[StopAt(watch, 11)], watch=watch))
    one = folder / "one"
    if RANK == 0:
        with pytest.MonkeyPatch.context() as patch:
            alone = runtime.Runtime(runtime.current().topology, OneProcess())
            patch.setattr(runtime, "_runtime", alone)
            shutil.copytree(many, folder / "copy")
            trainer = smooth(adam, folder / "copy", weights=300, batch=GLOBAL_BATCH)
            ended = trainer.fit()
            assert 11 <= ended["resumed_from"] < STEPS
            assert ended["samples"] == summary["samples"]
            assert relative_difference(values(trainer.model.weights), values(straight.model.weights)) < 1e-5
            assert ended["metrics"]["accuracy"] == pytest.approx(summary["metrics"]["accuracy"], abs=1e-6)
            # With as many samples in a step, cut into micro-batches.
            twice = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
            shutil.copytree(many, folder / "accumulated")
            trainer = smooth(twice, folder / "accumulated", weights=300, batch=GLOBAL_BATCH, accumulate=2)
            trainer.fit()
            assert relative_difference(values(trainer.model.weights), values(straight.model.weights)) < 1e-5
            with JobWatch(OneProcess()) as own:
                halfway = smooth(adam, one, batch=GLOBAL_BATCH, callbacks=[StopOnceAt(own, 13)], watch=own)
                with pytest.raises(StoppedEarly):
                    halfway.fit()
    COLLECTIVES.barrier()
    keras.utils.clear_session()  # rank 0 has made more models, and Keras numbers them
    trainer = smooth(adam, one, weights=300 + RANK)
    ended = trainer.fit()
    assert 13 <= ended["resumed_from"] < STEPS
    assert relative_difference(values(trainer.model.weights), values(straight.model.weights)) < 1e-5
    assert ended["eval"]["loss"] == pytest.approx(summary["eval"]["loss"], rel=1e-5)


class StopOnceAt(StopAt):
    def on_train_batch_end(self, batch, logs=None):
        if next(self._steps) == self._step:
            self._watch.request_stop("a test")


def plain_model() -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(NUM_CLASSES)])


def wider_model() -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(17, activation="tanh"), layers.Dense(NUM_CLASSES)])


def test_another_run_is_refused_with_the_difference(folder, monkeypatch):
    monkeypatch.setitem(globals(), "noisy_model", plain_model)
    adam = lambda: keras.optimizers.Adam(0.01)
    own = {"identity": {"task": "one"}}
    make_trainer(adam, folder, steps=3, **own).fit()
    before = sorted(folder.rglob("*")) if RANK == 0 else None
    # Each is one thing that differs: what it is, the optimizer, the trainer's arguments, what is told.
    changes = [
        ("model", adam, own, r"kernel \(6, 16\) float32 in the checkpoint, .*kernel \(6, 17\) float32 here"),
        ("", lambda: keras.optimizers.SGD(0.01), own, "of the same model and optimizer"),
        ("", adam, {**own, "seed": 6}, "seed: 5 there, 6 here"),
        ("", adam, {**own, "batch": GLOBAL_BATCH // SIZE // 2}, "samples in a step: 32 there, 16 here"),
        ("", adam, {**own, "source": Arrays(X + 1, Y)}, "training data"),
        ("", adam, {"identity": {"task": "another"}}, "task: one there, another here"),
    ]
    for what, optimizer, options, message in changes:
        monkeypatch.setitem(globals(), "noisy_model", wider_model if what else plain_model)
        with pytest.raises(JobError, match=message) as caught:
            make_trainer(optimizer, folder, steps=5, **options).fit()
        assert caught.value.exit_code == 65
        assert before == (sorted(folder.rglob("*")) if RANK == 0 else None)
