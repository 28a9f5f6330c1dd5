"""Properties of the loss over ranks: for any loss, mask, weights and batch it is that of Keras on the whole batch.

The ranks run one after the other in this process: first each records what it adds to a sum over ranks, then each
receives the sums. No gradient depends on them, so that this is what ranks at the same time would compute.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, losses
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed.gradient_reduction import unreduced
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.optim.global_loss import LossScope, losses_over_ranks
from hvdtrain.optim.keras_calls import run_train_step
from hvdtrain.training.config import StepConfig
from hvdtrain.training.step_runner import StepRunner

hvdtrain.init()
LENGTH, OUTPUTS = 3, 4
TOLERANCE = 1e-6

PROPERTY = settings(derandomize=True, deadline=None, database=None)


@pytest.fixture(autouse=True, scope="module")
def float64():
    """So that rounding does not hide what is tested."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def numbers(rng, shape):
    return rng.normal(size=(*shape, OUTPUTS))


def bits(rng, shape):
    return rng.integers(0, 2, (*shape, OUTPUTS)).astype(float)


def classes(rng, shape):
    return rng.integers(0, OUTPUTS, shape)


def classes_or_none(rng, shape):
    return rng.integers(-1, OUTPUTS, shape)


def one_hot(rng, shape):
    return np.eye(OUTPUTS)[classes(rng, shape)]


LOSSES = {
    "mse": (losses.MeanSquaredError, {}, numbers),
    "mae": (losses.MeanAbsoluteError, {}, numbers),
    "huber": (losses.Huber, {"delta": 0.7}, numbers),
    "log_cosh": (losses.LogCosh, {}, numbers),
    "cosine": (losses.CosineSimilarity, {}, numbers),
    "hinge": (losses.Hinge, {}, bits),
    "binary": (losses.BinaryCrossentropy, {"from_logits": True}, bits),
    "focal": (losses.BinaryFocalCrossentropy, {"from_logits": True}, bits),
    "categorical": (losses.CategoricalCrossentropy, {"from_logits": True, "label_smoothing": 0.1}, one_hot),
    "sparse": (losses.SparseCategoricalCrossentropy, {"from_logits": True}, classes),
    "ignore_class": (losses.SparseCategoricalCrossentropy, {"from_logits": True, "ignore_class": -1}, classes_or_none),
}
REDUCTIONS = ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch, and how ranks share it."""

    loss: str
    reduction: str
    is_series: bool
    is_masked: bool
    weights: str | None
    """``positions``: one for each position of a series; ``samples``: one for each sample."""
    ranks: int
    batch_size: int
    num_samples: int
    seed: int

    @property
    def op(self) -> str:
        return "sum" if self.reduction == "sum" else "average"

    def arrays(self, num_samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        rng = np.random.default_rng(self.seed)
        shape = (num_samples, LENGTH) if self.is_series else (num_samples,)
        x = rng.normal(size=(*shape, OUTPUTS))
        # Whole samples too, so that a rank may have no position that counts.
        is_left_out = (rng.random(shape) < 0.3) | (rng.random((num_samples,) + (1,) * (len(shape) - 1)) < 0.3)
        x[is_left_out] = 0
        weights = None
        if self.weights is not None:
            shape_of_weights = shape if self.weights == "positions" else (num_samples,) + (1,) * (len(shape) - 1)
            weights = rng.integers(0, 3, shape_of_weights) * rng.random(shape_of_weights)
        return x, LOSSES[self.loss][2](rng, shape), weights

    def model(self, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        keras.utils.set_random_seed(self.seed)
        make, options, _ = LOSSES[self.loss]
        masking = [layers.Masking()] if self.is_masked else []
        shape = (LENGTH, OUTPUTS) if self.is_series else (OUTPUTS,)
        model = keras.Sequential([layers.Input(shape), *masking, layers.Dense(OUTPUTS)])
        model.compile(optimizer=optimizer, loss=make(reduction=self.reduction, **options), run_eagerly=True)
        return model


class RanksInTurn(SingleProcessCollectives):
    """The collectives of ranks that run one after the other."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.gradients: list[list[np.ndarray]] = []
        self._recorded: list[list[list[tf.Tensor]]] = []
        self._totals: list[list[tf.Tensor]] | None = None
        self._gathered_by_first: list[Any] = []
        self._num_gathered = 0

    def run(self, run_rank: Callable[[int], Any]) -> None:
        """Runs all ranks, after which ``gradients`` are those that each passed to the reduction."""
        for _ in range(2):
            self.gradients, self._recorded, self._gathered_by_first = [], [], []
            for rank in range(self.size):
                self.rank, self._num_gathered = rank, 0
                self._recorded.append([])
                run_rank(rank)
                assert len(self.gradients) == rank + 1
            # Otherwise a rank would wait for the others forever.
            assert len({len(each) for each in self._recorded}) == 1
            self._totals = [
                [sum(values) for values in zip(*parts, strict=True)] for parts in zip(*self._recorded, strict=True)
            ]
            if not self._totals:
                break

    def sum_tensors(self, tensors, name):
        position = len(self._recorded[self.rank])
        self._recorded[self.rank].append(list(tensors))
        return list(tensors) if self._totals is None else self._totals[position]

    def sum(self, arrays):
        return [self.size * np.asarray(each) for each in arrays]

    def allgather(self, value):
        if self.rank == 0:
            self._gathered_by_first.append(value)
        first = self._gathered_by_first[self._num_gathered]
        self._num_gathered += 1
        return [first, *[value] * (self.size - 1)]

    def gradient_reducer(self, config):
        def reduce(gradients):
            self.gradients.append([each.numpy() for each in gradients])
            return unreduced([tf.zeros_like(each) for each in gradients])

        return reduce


@st.composite
def batches(draw, *, is_even):
    is_series = draw(st.booleans())
    ranks, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    whole = ranks * batch_size
    return Batch(
        loss=draw(st.sampled_from(sorted(LOSSES))),
        reduction=draw(st.sampled_from(REDUCTIONS)),
        is_series=is_series,
        is_masked=draw(st.booleans()),
        weights=draw(st.sampled_from([None, "samples", "positions"] if is_series else [None, "samples"])),
        ranks=ranks,
        batch_size=batch_size,
        num_samples=whole if is_even else draw(st.integers(1, whole)),
        seed=draw(st.integers(0, 1 << 16)),
    )


def gradients_of_keras(batch, x, y, weights):
    model = batch.model(keras.optimizers.SGD())
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, tf.constant(y), model(x), None if weights is None else tf.constant(weights))
    return [each.numpy() for each in tape.gradient(loss, model.trainable_variables)]


def require_equal(batch, gradients, expected):
    for parts, whole in zip(zip(*gradients, strict=True), expected, strict=True):
        total = sum(parts) / (1 if batch.op == "sum" else batch.ranks)
        assert np.max(np.abs(total - whole)) <= TOLERANCE * max(np.max(np.abs(each)) for each in (whole, *parts))


@pytest.mark.slow
@given(batch=batches(is_even=True))
@settings(PROPERTY, max_examples=40)
def test_model_fit(batch):
    """Ranks with batches of the same size, in the ``train_step`` that ``model.fit`` runs."""
    x, y, weights = batch.arrays(batch.num_samples)
    ranks = RanksInTurn(batch.ranks)
    model = batch.model(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), op=batch.op, collectives=ranks))

    def run_rank(rank):
        own = slice(rank * batch.batch_size, (rank + 1) * batch.batch_size)
        data = tuple(tf.constant(each[own]) for each in (x, y, weights) if each is not None)
        run_train_step(model, model.train_step, data)

    ranks.run(run_rank)
    require_equal(batch, ranks.gradients, gradients_of_keras(batch, x, y, weights))


class InOrder(Arrays):
    keeps_order = True


@pytest.mark.slow
@given(batch=batches(is_even=False))
@settings(PROPERTY, max_examples=18)
def test_trainer(batch):
    """The last step of an epoch: ranks have batches of different sizes, or none."""
    first = batch.ranks * batch.batch_size
    arrays = batch.arrays(first + batch.num_samples)
    ranks = RanksInTurn(batch.ranks)
    source, config = InOrder(*arrays), StepConfig(batch_size=batch.batch_size)
    runners = []

    def run_rank(rank):
        if len(runners) == rank:
            optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), op=batch.op, collectives=ranks)
            model = batch.model(optimizer)
            runners.append(StepRunner(model, source, config, collectives=ranks, job_watch=JobWatch(ranks)))
            runners[rank].start()
        runners[rank].parts.feed.start(1)
        runners[rank].parts.strategy.run(1)

    ranks.run(run_rank)
    last = [None if each is None else each[first:] for each in arrays]
    require_equal(batch, ranks.gradients, gradients_of_keras(batch, *last))


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_that_is_not_reduced_is_refused(reduction):
    """TensorFlow adds up the gradients of its values, so that the mean over ranks would be too small."""
    batch = Batch("mse", reduction, False, False, None, ranks=2, batch_size=2, num_samples=4, seed=0)
    x, y, _ = batch.arrays(4)
    model = batch.model(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), collectives=RanksInTurn(2)))
    with pytest.raises(UsageError, match=r"must be one number. Received: a tensor of shape \(4,\)"):
        run_train_step(model, model.train_step, (tf.constant(x), tf.constant(y)))
    with pytest.raises(UsageError, match=r"must be one number. Received: a tensor of shape \(2,\)"):
        make_trainer(batch.model(keras.optimizers.SGD()), Arrays(x, y), batch_size=2, epochs=1).fit()


class OneNumber(losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))


@pytest.mark.parametrize("differs", [False, True])
def test_a_loss_that_is_no_mean_on_another_rank_is_refused_on_this_one(differs):
    """Otherwise this rank would wait for the others in the reduction of gradients."""

    class TwoRanks(SingleProcessCollectives):
        size = 2

        def sum_tensors(self, tensors, name):
            return [each + differs for each in tensors]

    rng = np.random.default_rng(0)
    with losses_over_ranks(LossScope(TwoRanks())):
        refused = pytest.raises(tf.errors.InvalidArgumentError, match="must be the mean of the losses of its samples")
        with refused if differs else contextlib.nullcontext():
            OneNumber()(numbers(rng, (6,)), numbers(rng, (6,)))
