"""The distributed optimizer on one rank: bit-identical to plain Keras, and no trace in a saved model."""

import importlib
import subprocess
import sys
import zipfile
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.errors import UsageError
from hvdtrain.optim import bounded_updates
from hvdtrain.tasks import digits

hvdtrain.init()

PLAIN = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
SHIPPED = sorted(
    name
    for name, member in vars(keras.optimizers).items()
    if isinstance(member, type) and issubclass(member, keras.optimizers.Optimizer) and name not in PLAIN
)
USUAL = ("Adam", "AdamW", "RMSprop", "SGD")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([layers.Input((5,)), layers.Dense(7, activation="tanh"), layers.Dense(2)])


def fitted(optimizer, *, is_built: bool = False) -> list[bytes]:
    rng = np.random.default_rng(0)
    model = make_model()
    model.compile(optimizer=optimizer, loss="mse")
    if is_built:
        optimizer.build(model.trainable_variables)
    x, y = rng.normal(size=(64, 5)).astype(np.float32), rng.normal(size=(64, 2)).astype(np.float32)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return [variable.numpy().tobytes() for variable in [*model.weights, *model.optimizer.variables]]


def test_all_of_keras_is_covered():
    assert len(SHIPPED) >= 12


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in USUAL else pytest.mark.slow) for each in SHIPPED]
)
def test_bit_identical_to_the_plain_optimizer(name, monkeypatch):
    make = getattr(keras.optimizers, name)
    options = {"global_clipnorm": 0.5, "use_ema": True}
    try:
        # Keras loses the initial state of this optimizer if it is built in the first step.
        expected = fitted(make(**options), is_built=name == "ScheduleFreeAdamW")
    except AttributeError as error:
        pytest.skip(f"Keras {keras.__version__}'s own {name} fails on TensorFlow: {error}")
    initial = [variable.numpy().tobytes() for variable in make_model().weights]
    assert not set(initial) & set(expected), "plain Keras updated nothing"
    assert fitted(hvdtrain.DistributedOptimizer(make(**options))) == expected
    if name not in ("Adam", "Lamb", "Muon", "Nadam"):
        return
    monkeypatch.setattr(bounded_updates, "GROUP_BYTES", 4)  # Every variable is a group.
    assert fitted(hvdtrain.DistributedOptimizer(make(**options))) == expected


@pytest.mark.parametrize(
    ("group_bytes", "groups"), [(16 << 20, [{0, 1, 2, 3}]), (80, [{2, 3}, {1}, {0}]), (4, [{3}, {2}, {1}, {0}])]
)
def test_a_group_of_variables_is_updated_after_the_one_before(group_bytes, groups, monkeypatch):
    """So that Adam's temporary tensors are those of one group."""
    monkeypatch.setattr(bounded_updates, "GROUP_BYTES", group_bytes)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam())
    variables = make_model().trainable_variables
    assert [4 * each.value.shape.num_elements() for each in variables] == [140, 28, 56, 8]
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step(*gradients):
        optimizer.apply(list(gradients), variables)

    graph = step.get_concrete_function(*(tf.zeros(each.shape) for each in variables)).graph
    handles = {
        id(inner): i
        for i, each in enumerate(variables)
        for outer, inner in graph.captures
        if outer is each.value.handle
    }
    updates = {
        handles[id(each.inputs[0])]: each
        for each in graph.get_operations()
        if each.type == "AssignSubVariableOp" and id(each.inputs[0]) in handles
    }
    assert updates.keys() == {0, 1, 2, 3}
    place = {i: number for number, group in enumerate(groups) for i in group}
    for i, update in updates.items():
        before = operations_before(update)
        assert {j for j, other in updates.items() if other in before} == {j for j in place if place[j] < place[i]}


def operations_before(operation):
    """All operations that end before this one begins."""
    found, open_ones = set(), [operation]
    while open_ones:
        one = open_ones.pop()
        more = {*(each.op for each in one.inputs), *one.control_inputs} - found
        found |= more
        open_ones += more
    return found


class UpdateOfAll(keras.optimizers.SGD):
    """A user's own update of all variables together."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        assert len(grads) == 4
        super()._backend_update_step(grads, trainable_variables, learning_rate)


def test_an_update_of_all_variables_together_is_called_once(monkeypatch):
    monkeypatch.setattr(bounded_updates, "GROUP_BYTES", 4)
    assert fitted(hvdtrain.DistributedOptimizer(UpdateOfAll())) == fitted(keras.optimizers.SGD())


class ScaledSGD(keras.optimizers.SGD):
    """A user's own update."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, 2 * learning_rate)


def five_steps(optimizer, dtype):
    """With a dense and a sparse variable; the bytes of all variables, and the operations of a step."""
    rng = np.random.default_rng(3)
    dense = keras.Variable(rng.normal(size=(7, 5)), dtype=dtype)
    table = keras.Variable(rng.normal(size=(9, 4)), dtype=dtype)
    optimizer.build([dense, table])

    @tf.function
    def step(gradient, rows, values):
        sparse = tf.IndexedSlices(values, rows, tf.constant([9, 4]))
        optimizer.apply([gradient, sparse], [dense, table])

    for _ in range(5):
        gradient, values = (tf.constant(rng.normal(size=shape), dtype) for shape in ((7, 5), (3, 4)))
        step(gradient, tf.constant([8, 0, 3]), values)
    operations = step.get_concrete_function(gradient, tf.constant([8, 0, 3]), values).graph.get_operations()
    weights = [dense, table, *optimizer.variables]
    return [keras.ops.convert_to_numpy(each).tobytes() for each in weights], operations


@pytest.mark.parametrize(
    ("make", "dtype", "is_fused"),
    [
        (partial(keras.optimizers.SGD, momentum=0.9), "float32", True),
        (partial(keras.optimizers.SGD, momentum=0.9, nesterov=True, weight_decay=0.01), "float32", True),
        (partial(keras.optimizers.SGD, momentum=0.8), "float64", True),
        (partial(keras.optimizers.SGD, keras.optimizers.schedules.CosineDecay(0.1, 5), 0.9), "float32", True),
        (partial(keras.optimizers.SGD, momentum=0.9), "bfloat16", False),
        (keras.optimizers.SGD, "float32", False),
        (partial(ScaledSGD, momentum=0.9), "float32", False),
    ],
)
def test_the_fused_update_of_sgd_with_momentum_is_bit_identical(make, dtype, is_fused):
    expected, _ = five_steps(make(), dtype)
    found, operations = five_steps(hvdtrain.DistributedOptimizer(make()), dtype)
    assert found == expected
    # The sparse variable keeps Keras' own update.
    assert [each.type for each in operations].count("ResourceApplyKerasMomentum") == int(is_fused)


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.Adagrad])
def test_a_table_with_sparse_gradients_is_never_read_as_a_whole(make, monkeypatch):
    """TensorFlow would copy it in each step."""
    monkeypatch.setattr(bounded_updates, "GROUP_BYTES", 4)
    _, operations = five_steps(hvdtrain.DistributedOptimizer(make()), "float32")
    read = [each.outputs[0].shape for each in operations if each.type == "ReadVariableOp"]
    assert tf.TensorShape([9, 4]) not in read
    assert "ResourceScatterSub" in [each.type for each in operations]


class SlowAdagrad(keras.optimizers.Adagrad):
    """A user's own update."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


@pytest.mark.parametrize(
    ("make", "dtype", "uses_rows"),
    [
        (keras.optimizers.Adagrad, "float32", True),
        (partial(keras.optimizers.Adagrad, 0.1, weight_decay=0.01, epsilon=1e-3), "float32", True),
        (partial(keras.optimizers.Adagrad, keras.optimizers.schedules.CosineDecay(0.1, 5)), "float64", True),
        (keras.optimizers.Adagrad, "bfloat16", True),
        (SlowAdagrad, "float32", False),
    ],
)
def test_adagrad_takes_roots_of_the_rows_of_a_sparse_gradient(make, dtype, uses_rows):
    expected, _ = five_steps(make(), dtype)
    found, operations = five_steps(hvdtrain.DistributedOptimizer(make()), dtype)
    assert found == expected
    roots = [each.outputs[0].shape for each in operations if each.type == "Sqrt" and each.outputs[0].shape.rank == 2]
    assert (tf.TensorShape([9, 4]) in roots) is not uses_rows


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_trainer_is_bit_identical_to_plain_fit(name, steps_per_execution):
    """Two epochs of 100 samples in batches of 32: the last batch is short."""
    source = digits.read_data(None).training
    x, y = source.x[:100], source.y[:100]
    plan = SamplePlan(num_samples=100, batch_size=32, seed=9)

    def make():
        keras.utils.set_random_seed(4)
        model = digits.make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=name, loss=loss, jit_compile=False)
        return model

    ours, plain = make(), make()
    trainer = make_trainer(ours, Arrays(x, y), batch_size=32, epochs=2, seed=9, steps_per_execution=steps_per_execution)
    trainer.fit()
    with pytest.raises(UsageError, match="must be called once"):
        trainer.fit()
    for epoch in range(2):
        order = plan.order(epoch)
        plain.fit(x[order], y[order], batch_size=32, shuffle=False, verbose=0)
    assert [v.numpy().tobytes() for v in ours.weights] == [v.numpy().tobytes() for v in plain.weights]


def test_state_class_and_schedule_are_kept():
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 * 0.5 ** keras.ops.cast(step, "float32")

    optimizer = keras.optimizers.Adam(Halving())
    model = make_model()
    optimizer.build(model.trainable_variables)
    optimizer.variables[0].assign(5)
    distributed = hvdtrain.DistributedOptimizer(optimizer)
    assert type(distributed) is keras.optimizers.Adam
    assert int(distributed.iterations) == 5
    assert float(distributed.learning_rate) == pytest.approx(0.1 / 32)


@pytest.mark.slow
def test_a_saved_model_has_no_trace_of_horovod(tmp_path):
    path = tmp_path / "model.keras"
    model = make_model()
    model.compile(optimizer=hvdtrain.DistributedOptimizer(keras.optimizers.Adam(clipnorm=1.0)), loss="mse")
    model.fit(np.ones((8, 5)), np.ones((8, 2)), verbose=0)
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist()).lower()
    assert b"horovod" not in content
    assert b"hvdtrain" not in content
    code = (
        "import sys; sys.modules['horovod'] = sys.modules['hvdtrain'] = None; import keras\n"
        f"optimizer = keras.models.load_model({str(path)!r}).optimizer\n"
        "print(type(optimizer).__name__, int(optimizer.iterations))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["Adam", "1"], done.stderr
    # Once loaded it is plain, and can be made distributed again with its state.
    loaded = keras.models.load_model(path)
    assert int(hvdtrain.DistributedOptimizer(loaded.optimizer).iterations) == 1


class Keras2Optimizer:
    __module__ = "tf_keras.src.optimizers.adam"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hvdtrain.DistributedOptimizer("adam"), "must be an optimizer of Keras 3 .* Received: 'adam'"),
        (lambda: hvdtrain.DistributedOptimizer(Keras2Optimizer()), "with the optimizers of tf-keras and Horovod's own"),
        (lambda: hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), op="median"), "op must be one of average, sum"),
        (
            lambda: hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), compression="zip"),
            "compression must be none, fp16",
        ),
        (lambda: hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), groups=0), "groups must be at least 1"),
        (
            lambda: hvdtrain.DistributedOptimizer(hvdtrain.DistributedOptimizer(keras.optimizers.SGD())),
            "must be wrapped once",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("module", ["horovod.tensorflow.keras", "horovod.keras"])
def test_horovods_own_optimizer_is_refused_when_it_is_made(module):
    hvd = importlib.import_module(module)
    with pytest.raises(RuntimeError, match=r"Keras 2: .* Received: Keras 3\..*hvdtrain\.DistributedOptimizer"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def test_horovods_own_optimizer_of_another_build_is_refused(monkeypatch):
    import horovod._keras
    import horovod.tensorflow.keras as hvd

    unchecked = horovod._keras._create_distributed_optimizer
    monkeypatch.setattr(horovod._keras, "create_distributed_optimizer", unchecked)
    hvdtrain.init()
    model = make_model()
    theirs = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(UsageError, match="Horovod has not wrapped"):
        hvdtrain.DistributedOptimizer(theirs)
    model.compile(optimizer=theirs, loss="mse")
    x = np.ones((2, *model.input_shape[1:]), np.float32)
    with pytest.raises(UsageError, match="averages nothing under Keras 3"):
        model.fit(x, model.predict(x, verbose=0), verbose=0)


def test_a_model_of_another_keras_is_refused():
    with pytest.raises(UsageError, match=r"must be a model of Keras 3\. Received: builtins\.object"):
        hvdtrain.broadcast(object())


def test_a_model_that_tensorflow_distributes_is_refused():
    rule = (
        r"must be made outside of the strategies of tf\.distribute: .* Received: MirroredStrategy\. Leave out its scope"
    )
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = make_model()
        model.compile("sgd", "mse")
        with pytest.raises(UsageError, match=rule):
            hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(UsageError, match=rule):
        hvdtrain.broadcast(model)
    data = np.ones((4, *model.input_shape[1:]), np.float32), np.ones((4, *model.output_shape[1:]), np.float32)
    with pytest.raises(UsageError, match=rule):
        hvdtrain.Trainer(model, data, hvdtrain.TrainConfig(steps=1))
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1))


def test_an_optimizer_that_bypasses_the_reduction_is_refused():
    class OwnWay(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    model = make_model()
    gradients = [np.ones(v.shape, np.float32) for v in model.trainable_variables]
    with pytest.raises(UsageError, match="Received: OwnWay, which applied them without"):
        hvdtrain.DistributedOptimizer(OwnWay()).apply(gradients, model.trainable_variables)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_a_multi_optimizer_must_be_built():
    """Its optimizers are made while it is built; if it were wrapped before, none of them would be averaged."""
    sgd = keras.optimizers.SGD()
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: sgd)
    with pytest.raises(UsageError, match="before it is built"):
        hvdtrain.DistributedOptimizer(optimizer)
    model = make_model()
    optimizer.build(model.trainable_variables)
    gradients = [np.ones(v.shape, np.float32) for v in model.trainable_variables]
    hvdtrain.DistributedOptimizer(optimizer).apply(gradients, model.trainable_variables)


def test_broadcast_needs_a_built_model():
    with pytest.raises(UsageError, match="must be built before its variables are broadcast"):
        hvdtrain.broadcast(keras.Sequential([keras.layers.Dense(1)]))
    hvdtrain.broadcast(make_model())  # not compiled, as in loops of one's own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1, "epochs": 1}, "steps excludes epochs"),
        ({}, "either steps or epochs"),
        ({"steps": 1, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    ],
)
def test_bad_trainers(options, message):
    model = make_model()
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(UsageError, match=message):
        make_trainer(model, Arrays(np.ones((4, 5)), np.ones((4, 2))), batch_size=2, **options)
