"""A step of an elastic job that is interrupted in one of its reductions and repeated changes nothing."""

import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trainers import train_config

import hvdtrain
from hvdtrain.config import exclusions
from hvdtrain.data import Arrays
from hvdtrain.distributed.gradient_reduction import single_rank_reducer
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.shutdown import is_secondary
from hvdtrain.optim.distributed_optimizer import compression_memories
from hvdtrain.training.step_runner import StepRunner
from hvdtrain.training.strategies.strategy import Place

hvdtrain.init()

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 6)).astype(np.float32), RNG.integers(4, size=64)
STEPS, INTERRUPTED = 6, 4


class Interruptible(SingleProcessCollectives):
    """The collectives of one rank of an elastic job, one of which fails when its turn has come."""

    may_change = True
    conditions = (exclusions.ELASTIC,)
    reduces = True

    def __init__(self):
        super().__init__()
        self.num_made = 0
        self.fails_at = None

    def _note(self):
        self.num_made += 1
        if self.num_made == self.fails_at:
            time.sleep(0.05)  # Meanwhile, everything happens that does not wait for this.
            raise RuntimeError("Horovod has lost a rank")
        return True

    def _sent(self, tensors):
        """The tensors, each by a message of its own: some arrive before one of them fails.

        First the last one, the number of samples, and then the gradient of the first variable, for which the other
        updates wait.
        """
        arrived = []
        for tensor in [*tensors[-1:], *tensors[:-1]]:
            with tf.control_dependencies([tensor, *arrived[-1:]]):
                passed = tf.numpy_function(self._note, [], tf.bool)
            with tf.control_dependencies([passed]):
                arrived.append(tf.identity(tensor))
        return [*arrived[1:], *arrived[:1]]

    def gradient_reducer(self, config):
        reduce = single_rank_reducer(config)

        def reduce_or_fail(gradients):
            reduced = reduce(gradients)
            return dataclasses.replace(reduced, buckets=self._sent(reduced.buckets))

        return reduce_or_fail

    def step_sum(self, num_buckets=None):
        return self._sent

    def all_true(self, value):
        return self._sent([value])[0]

    def gather_rows(self, row, name):
        @tf.custom_gradient
        def gather(own):
            return self._sent([own])[0][tf.newaxis], lambda upstream: self._sent([upstream])[0][0]

        return gather(row)


class TwoOptimizers(keras.Sequential):
    """Trains the first layers by one optimizer and then, with other gradients, the last one by another."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.second = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        x, y = data
        for optimizer, variables in (
            (self.optimizer, self.trainable_variables[:-2]),
            (self.second, self.trainable_variables[-2:]),
        ):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, variables), variables)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


def runner(make_optimizer, model_class=keras.Sequential, x=X, starts=True, compression=None, **options) -> StepRunner:
    keras.utils.set_random_seed(3)
    dense = layers.Dense(8, activation="tanh")
    model = model_class([layers.Input((6,)), dense, layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    collectives, optimizer = Interruptible(), make_optimizer()
    if compression is not None:
        optimizer = hvdtrain.DistributedOptimizer(optimizer, compression=compression, collectives=collectives)
    model.compile(optimizer, loss, metrics=["accuracy"])
    if compression is not None and model_class is TwoOptimizers:
        hvdtrain.DistributedOptimizer(model.second, compression=compression, collectives=collectives)
    made = StepRunner(
        model,
        Arrays(x, Y),
        train_config(batch_size=8, steps=STEPS, **options),
        collectives=collectives,
        job_watch=JobWatch(collectives),
    )
    if starts:
        made.start()
        made.parts.train_step.keep_snapshot()
    return made


def train(made: StepRunner, until: int) -> None:
    while made.parts.train_step.steps_made < until:
        made.parts.strategy.run(1)


def state(made: StepRunner) -> list[np.ndarray]:
    memories = [each for memory in compression_memories(made.model) for each in memory.variables().values()]
    return [each.numpy() for each in [*made.model.variables, *optimizer_variables(made.model), *memories]]


class LastKernel(hvdtrain.FP16):
    """The gradients of the first layers are sent whole, and could be used earlier."""

    def num_bytes(self, gradient):
        return super().num_bytes(gradient) if gradient.shape == (8, 4) else None


ADAM = keras.optimizers.Adam
CASES = {
    "weight decay": (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1), {}),
    "nadam": (lambda: keras.optimizers.Nadam(0.01), {}),
    "ema": (lambda: ADAM(0.01, use_ema=True, ema_momentum=0.9), {}),
    "accumulation": (
        lambda: ADAM(0.01, gradient_accumulation_steps=3, use_ema=True),
        {"gradient_accumulation_steps": 3},
    ),
    "loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(ADAM(0.01), initial_scale=8.0, dynamic_growth_steps=2),
        {},
    ),
    "loss scale and accumulation": (
        lambda: keras.optimizers.LossScaleOptimizer(
            ADAM(0.01, gradient_accumulation_steps=2), initial_scale=8.0, dynamic_growth_steps=3
        ),
        {"gradient_accumulation_steps": 2},
    ),
    "skipped steps": (lambda: ADAM(0.01), {"on_nan": "skip"}),
    "without a check": (lambda: ADAM(0.01), {"on_nan": "ignore"}),
    "bad samples": (lambda: ADAM(0.01), {"bad_samples": 1}),
    "synchronized batch normalization": (lambda: ADAM(0.01), {"sync_batchnorm": True}),
    "jit_compile": (lambda: ADAM(0.01), {"jit_compile": True}),
    "half precision": (lambda: ADAM(0.01), {"compression": "fp16"}),
    "PowerSGD": (
        lambda: ADAM(0.01, gradient_accumulation_steps=2),
        {"compression": hvdtrain.PowerSGD(rank=1, start_after=2), "gradient_accumulation_steps": 2},
    ),
    "half precision of the last kernel, without a check": (
        lambda: ADAM(0.01),
        {"compression": LastKernel(), "on_nan": "ignore"},
    ),
    "half precision and several optimizers": (
        lambda: ADAM(0.01),
        {"compression": "fp16", "model_class": TwoOptimizers},
    ),
    "several optimizers": (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1), {"model_class": TwoOptimizers}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case if number % 2 == 0 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(CASES)],
)
def test_an_interrupted_step_is_repeated_as_if_it_had_not_been(case):
    make_optimizer, options = CASES[case]
    uninterrupted = runner(make_optimizer, **options)
    train(uninterrupted, INTERRUPTED)
    before = uninterrupted.collectives.num_made
    train(uninterrupted, INTERRUPTED + 1)
    num_collectives = uninterrupted.collectives.num_made - before
    assert num_collectives >= 1
    train(uninterrupted, STEPS)
    made = runner(make_optimizer, **options)
    train(made, INTERRUPTED)
    for number in range(1, num_collectives + 1):
        # The same step again and again, each time in the next of its reductions.
        start = state(made)
        made.collectives.fails_at = made.collectives.num_made + number
        with pytest.raises(tf.errors.OpError) as caught:
            made.parts.strategy.run(1)
        assert is_secondary(caught.value)
        assert made.parts.train_step.steps_made == INTERRUPTED
        made.parts.train_step.undo_interrupted()
        assert all(np.array_equal(a, b) for a, b in zip(state(made), start, strict=True))
        made.parts.strategy.take_over([Place(True, INTERRUPTED, True, True, 0, 0)], 0, 0)
        made.parts.restart_with(made.plan)
    train(made, STEPS)
    assert all(np.array_equal(a, b) for a, b in zip(state(made), state(uninterrupted), strict=True))


def test_a_step_that_is_not_finite_decays_no_weights():
    made = runner(CASES["weight decay"][0], x=np.full_like(X, np.nan))
    start = [weight.numpy() for weight in made.model.trainable_variables]
    with pytest.raises(NonFiniteError):
        made.parts.strategy.run(1)
    assert all(np.array_equal(a, b) for a, b in zip(made.model.trainable_variables, start, strict=True))


@pytest.mark.parametrize(
    ("op", "options", "refused"),
    [
        ("average", {"mode": "local", "wait_free": True, "record": "file"}, "record"),
        ("average", {"mode": "local", "sync_steps_first": 3}, "sync_steps_first"),
        ("sum", {}, "op='sum' with a loss that is a mean over samples"),
        ("average", {"mode": "local"}, None),
        ("average", {"mode": "local", "overlap": True}, None),
        ("average", {"mode": "local", "wait_free": True, "sync_every": 4, "fragments": 2}, None),
        ("average", {}, None),
    ],
)
def test_what_elastic_jobs_cannot_do_is_refused(op, options, refused):
    def make():
        optimizer = hvdtrain.DistributedOptimizer(ADAM(0.01), op=op, collectives=Interruptible())
        return runner(lambda: optimizer, starts=False, **options)

    if refused is None:
        make()
        return
    with pytest.raises(UsageError, match=f"an elastic job excludes {refused}"):
        make()


GLOO = "[/tmp/horovod-0.28.1/third_party/compatible17_gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tf.errors.UnknownError(None, None, f"{GLOO}\n\t [[{{{{node adam/hvdtrain_gradients_1_0}}}}]]"), True),
        (tf.errors.UnknownError(None, None, "Horovod has been shut down."), True),
        (tf.errors.InvalidArgumentError(None, None, 'File "/home/me/gloo/train.py", line 3'), False),
        (UsageError("Horovod must be installed."), False),
    ],
)
def test_errors_that_a_lost_rank_causes_are_known(error, expected):
    assert is_secondary(error) == expected
