"""A task for elastic jobs: in double precision, smooth, and with processes that send themselves signals.

``HVDTRAIN_TEST_EVENTS`` names a JSON file, a list of ``[step, rank, signal, where]``: the rank sends itself the signal
``before`` that step, or ``within`` it, between its forward pass and the reduction, or ``from`` it on: within the first
step that the rank makes of those, for ranks that do not count each. Each event happens once, and is
noted in a file with the time and the number of ranks; while its rank has not joined yet, the steps before it are slow.
Those of ``from`` happen in their order, after processes have shared two more averages; until then, steps are slow.
With ``connect`` and ``settle`` instead, the first number is how often this process has connected to other ranks, or
settled with them; with ``build`` and ``end``, it is 1.
``HVDTRAIN_TEST_BATCHNORM``, if set, makes the statistics of batches part of the forward pass.
``HVDTRAIN_TEST_TIMES`` names a folder, in which each process notes when it has completed its steps.
``HVDTRAIN_TEST_SAMPLES`` names a folder, in which each process notes the samples of each step that it makes beside
others; such steps take at least ``HVDTRAIN_TEST_STEP_S`` seconds, or those in the file of this name while there is one.
In local mode, callbacks do not see each step.
``HVDTRAIN_TEST_AVERAGES`` names a folder, in which each process notes the digest of each average that it receives.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers
from shared_averages import compared_averages

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.local_sgd.fragment import Fragment
from hvdtrain.tasks import digits
from hvdtrain.training.joining import Joining

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


MODELS: list[keras.Model] = []
STEP = ("before", "within", "from")


def events() -> list[list]:
    path = os.environ.get("HVDTRAIN_TEST_EVENTS")
    return json.loads(Path(path).read_text()) if path else []


def has_happened(event: int) -> bool:
    return Path(f"{os.environ['HVDTRAIN_TEST_EVENTS']}.{event}").exists()


def may_happen(event: int) -> bool:
    """Whether one of ``from`` may: after those before it, when ranks have trained together since."""
    shared = compared_averages(Path(os.environ["HVDTRAIN_TEST_AVERAGES"])).shared
    return shared >= 2 * (event + 1) and all(map(has_happened, range(event)))


def wait_for_ranks(step: int) -> None:
    size = runtime.collectives().size
    for i, (at, rank, _, where) in enumerate(events()):
        # Ranks that do not wait for each other may be any number of steps apart.
        is_close = at - 60 <= step and (step < at or where == "from") if where in STEP else where == "settle"
        if is_close and not has_happened(i) and (size <= max(rank, 1) or where == "from"):
            # A process that starts again takes ten seconds and more on a busy machine.
            missing_s = 3 if 0 < at - step <= 10 else 0.5
            time.sleep(missing_s if size <= max(rank, 1) else 0.1)
            return


def events_at(step: int, where: str) -> None:
    path = os.environ.get("HVDTRAIN_TEST_EVENTS")
    for i, (at, rank, name, place) in enumerate(events()):
        is_from = place == "from" and where == "within" and step >= at and not has_happened(i) and may_happen(i)
        if (at, place) != (step, where) and not is_from:
            continue
        if runtime.collectives().size > 1 and runtime.collectives().rank == rank:
            try:
                os.close(os.open(f"{path}.{i}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            Path(f"{path}.{i}").write_text(f"{time.time()} {runtime.collectives().size}")
            os.kill(os.getpid(), getattr(signal, name))


def step_s() -> float:
    value = os.environ.get("HVDTRAIN_TEST_STEP_S", "0")
    if not value.startswith("/"):
        return float(value)
    try:
        return float(Path(value).read_text())
    except OSError:
        return 0.0


def note_samples(samples: int) -> None:
    folder = os.environ.get("HVDTRAIN_TEST_SAMPLES")
    # A newcomer compiles its step by making one alone.
    if folder and runtime.collectives().size > 1:
        time.sleep(step_s())
        with Path(folder, f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{samples}\n")


def _with_events(owner: type, method: str, where: str) -> None:
    plain = getattr(owner, method)
    calls = []

    def call(*args):
        calls.append(1)
        events_at(len(calls), where)
        return plain(*args)

    setattr(owner, method, call)


def _noting_averages(method: str) -> None:
    plain = getattr(Fragment, method)

    def call(self, *args, **options):
        result = plain(self, *args, **options)
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in self._anchor)).hexdigest()
        with Path(os.environ["HVDTRAIN_TEST_AVERAGES"], f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{self._name} {self.rounds} {digest}\n")
        return result

    setattr(Fragment, method, call)


if "HVDTRAIN_TEST_AVERAGES" in os.environ:
    for each in ("merge", "adopt", "join"):
        _noting_averages(each)

if events():
    _with_events(ElasticCollectives, "restart", "connect")
    _with_events(Joining, "settle", "settle")


@keras.saving.register_keras_serializable()
class Events(layers.Layer):
    """Between the forward pass and the reduction of a step."""

    def call(self, x, training=False):
        if not training:
            return x
        leaf = leaves_of(MODELS[0])[0]
        micro_batches = leaf._iterations.value

        def happen(micro_batches, samples):
            note_samples(int(samples))
            # The step is that which is being made; in its last micro-batch.
            step, left = divmod(int(micro_batches) + 1, leaf.gradient_accumulation_steps or 1)
            if left == 0:
                wait_for_ranks(step)
                events_at(step, "within")
            return micro_batches

        with tf.control_dependencies([tf.numpy_function(happen, [micro_batches, tf.shape(x)[0]], micro_batches.dtype)]):
            return tf.identity(x)


class Observer(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        events_at(int(self.model.optimizer.iterations) + 1, "before")

    def on_membership_changed(self, rank, size):
        path = os.environ.get("HVDTRAIN_TEST_EVENTS")
        if path:
            with Path(path).with_name("changes.txt").open("a") as file:
                file.write(f"{size}\n")

    def on_train_end(self, logs=None):
        events_at(1, "end")

    def on_train_batch_end(self, batch, logs=None):
        folder = os.environ.get("HVDTRAIN_TEST_TIMES")
        if folder:
            with Path(folder, f"{os.getpid()}.txt").open("a") as file:
                file.write(f"{int(self.model.optimizer.iterations)} {time.time()}\n")
        if "HVDTRAIN_TEST_SAMPLES" not in os.environ:
            time.sleep(step_s())


def model(data: hvdtrain.data.Data) -> keras.Model:
    events_at(1, "build")
    made = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.BatchNormalization(momentum=0.5, trainable="HVDTRAIN_TEST_BATCHNORM" in os.environ),
            Events(),
            layers.Dense(10),
        ]
    )
    MODELS[:] = [made]
    return made


TASK = hvdtrain.Task(
    model=model,
    data=digits.read_data,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    optimizer="adam",
    callbacks=lambda: [Observer()],
    defaults={"learning_rate": 2e-3, "log_every": 10, "batch_size": 16},
)
