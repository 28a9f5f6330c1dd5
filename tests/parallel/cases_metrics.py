"""On all ranks: metrics and the measured shares of a step cover all ranks."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, dense_model, loss, samples
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime
from hvdtrain.errors import UsageError
from hvdtrain.training.metrics import reduced_results

# Not deterministic: step times are then read from tf.timestamp.
TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
X, Y = samples(97, seed=1)


def shipped_metrics() -> list[str]:
    """Every metric that Keras ships whose value is a number, or several."""
    skipped = {"Metric", "MeanMetricWrapper"}
    members = vars(keras.metrics).items()
    return sorted(
        name
        for name, member in members
        if isinstance(member, type) and issubclass(member, keras.metrics.Metric) and name not in skipped
    )


ARGUMENTS = {
    **dict.fromkeys(("PrecisionAtRecall", "RecallAtPrecision"), (0.5,)),
    **dict.fromkeys(("SensitivityAtSpecificity", "SpecificityAtSensitivity"), (0.5,)),
    "IoU": (2, [0, 1]),
    "BinaryIoU": ([0, 1],),
    "MeanIoU": (2,),
    "OneHotIoU": (3, [0, 1]),
    "OneHotMeanIoU": (3,),
}
# Means over batches of values that are not means over samples: they depend on the batches, also in one process.
MEANS_OVER_BATCHES = {"PearsonCorrelation", "ConcordanceCorrelation"}


@pytest.mark.parametrize("name", shipped_metrics())
def test_metric_over_uneven_shards(name):
    """Rank 0 has three samples, the others the rest."""
    if name in MEANS_OVER_BATCHES:
        pytest.skip("depends on the batches, also in one process")
    metric = getattr(keras.metrics, name)(*ARGUMENTS.get(name, ()))
    rng = np.random.default_rng(0)
    count = 61
    if name.startswith("Sparse"):
        y, p = rng.integers(0, 3, count).astype(np.float32), rng.dirichlet(np.ones(3), count).astype(np.float32)
    elif name.startswith(("Categorical", "OneHot", "F", "TopK", "KL")):
        y = np.eye(3, dtype=np.float32)[rng.integers(0, 3, count)]
        p = rng.dirichlet(np.ones(3), count).astype(np.float32)
    elif name in ("IoU", "MeanIoU"):
        y, p = rng.integers(0, 2, (2, count)).astype(np.float32)
    else:
        y, p = (rng.random((count, 1)) > 0.5).astype(np.float32), rng.random((count, 1)).astype(np.float32)
    cuts = [0, 3, *np.linspace(3, count, SIZE).astype(int)[1:]]

    class Holder(keras.Model):
        """A model with this metric alone."""

        metrics = (metric,)

        def get_metrics_result(self):
            return {"value": metric.result()}

    def update(part):
        batch = (y[part],) if name in ("Mean", "Sum") else (y[part], p[part])
        metric.update_state(*batch)

    update(slice(cuts[RANK], cuts[RANK + 1]))
    reduced = reduced_results(Holder(), COLLECTIVES)["value"]
    metric.reset_state()
    update(slice(None))
    assert reduced == pytest.approx(np.asarray(metric.result()).tolist(), rel=1e-5)


def test_a_metric_of_several_numbers_is_logged_as_lists_and_reported_as_numbers():
    class Reports(hvdtrain.Reporter):
        def __init__(self):
            self.values = {}

        def evaluated(self, step, values):
            self.values = dict(values)

    model = dense_model()
    targets = keras.ops.one_hot(Y, NUM_CLASSES).numpy()
    cross_entropy = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", cross_entropy, metrics=[keras.metrics.F1Score(average=None)])
    logs = {}
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, each: logs.update(each))
    reports = Reports()
    source = Arrays(X, targets)
    summary = make_trainer(model, source, source, batch_size=8, epochs=1, callbacks=[callback], reporter=reports).fit()
    expected = model.evaluate(X, targets, verbose=0, return_dict=True)["f1_score"]
    assert logs["val_f1_score"] == pytest.approx(expected.tolist(), rel=1e-5)
    assert len(logs["f1_score"]) == NUM_CLASSES
    numbers = {f"f1_score_{i}": pytest.approx(float(value), rel=1e-5) for i, value in enumerate(expected)}
    assert {name: value for name, value in reports.values.items() if name != "loss"} == numbers
    assert {name: value for name, value in summary["eval"].items() if name != "loss"} == numbers
    assert set(summary["metrics"]) == set(numbers)


def test_a_metric_that_is_not_a_sum_is_refused():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight(initializer=keras.initializers.Constant(-np.inf), name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return self.value

        def reset_state(self):
            self.value.assign(-np.inf)

    for evaluation in (Arrays(X, Y), None):
        model = dense_model()
        model.compile(optimizer="sgd", loss=loss(), metrics=[Largest()])
        with pytest.raises(UsageError, match="largest"):
            make_trainer(model, Arrays(X, Y), evaluation, batch_size=8, epochs=2).fit()


def test_the_slowest_rank_is_identified():
    class Slow(keras.layers.Layer):
        def call(self, inputs):
            def wait(x):
                time.sleep(0.005 if RANK == SIZE - 1 else 0)
                return x

            outputs = tf.numpy_function(wait, [inputs], tf.float32)
            outputs.set_shape(inputs.shape)
            return inputs + tf.stop_gradient(outputs - inputs)

    keras.utils.set_random_seed(7)
    model = keras.Sequential([layers.Input((6,)), Slow(), layers.Dense(NUM_CLASSES)])
    model.compile(optimizer="sgd", loss=loss(), jit_compile=False)
    trainer = make_trainer(model, Arrays(X, Y), batch_size=4, steps=30)
    summary = trainer.fit()
    assert COLLECTIVES.allgather(summary["skew"]) == [summary["skew"]] * SIZE
    assert summary["skew"]["slowest_rank"] == SIZE - 1
    assert summary["skew"]["slowest_share"] > 0.6
    # The other ranks wait for it.
    waited_s = np.median(np.concatenate(trainer.parts.time_shares.all_steps, axis=1)[:, :, 2], axis=1)
    assert waited_s[: SIZE - 1].min() > 0.002
    assert 0 <= summary["communication_fraction"] <= 1
    shares = [summary[f"{part}_fraction"] for part in ("input", "compute", "communication")]
    assert sum(shares) == pytest.approx(1, abs=0.01) or summary["compute_fraction"] == 0
