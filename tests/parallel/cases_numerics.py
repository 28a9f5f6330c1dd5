"""On all ranks: programs whose loss, gradients or state are not plain means over samples equal one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import relative_difference, values
from trainers import make_trainer
from trainings import COLLECTIVES, RANK, SIZE, assert_equal_replicas, dtype_policy

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.errors import UsageError

BATCH = 8
STEPS = 12
WORDS, LENGTH, CLASSES = 11, 6, 5


def text(num_samples: int) -> np.ndarray:
    """Sequences of words, of different lengths: the last ones, on the last rank, are the shortest."""
    rng = np.random.default_rng(3)
    words = rng.integers(1, WORDS, (num_samples, LENGTH))
    # Within each batch of BATCH samples lengths differ, and from one batch to the next.
    lengths = 1 + (np.arange(num_samples) // BATCH + np.arange(num_samples)) % LENGTH
    return np.where(np.arange(LENGTH) < lengths[:, None], words, 0).astype(np.int32)


X = text(STEPS * SIZE * BATCH)
LABELS = (X.sum(axis=1) % CLASSES).astype(np.int32)
WORD_LABELS = np.where(X > 0, (X * 3 + 1) % CLASSES, -1).astype(np.int32)


def classifier(mask_zero: bool = False, **options) -> keras.Model:
    """A model with embeddings, whose rows are used many times in a batch."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    words = layers.Embedding(WORDS, 4, mask_zero=mask_zero)(inputs)
    positions = layers.Embedding(LENGTH, 4)(keras.ops.arange(LENGTH))
    hidden = layers.Dense(8, activation="tanh", **options)(layers.GlobalAveragePooling1D()(words + positions))
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


def tagger(mask_zero: bool) -> keras.Model:
    """Predicts a label for each word."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    words = layers.Embedding(WORDS, 4, mask_zero=mask_zero)(inputs)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(CLASSES))(words))


def compiled(make_model, optimizer, loss) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = make_model()
    model.compile(optimizer=optimizer, loss=loss)
    return model


def cross_entropy(**options) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def train_alone(model, x, y, sample_weight=None) -> keras.Model:
    """One process, with the batches of all ranks together."""
    # TensorFlow traces a function in which variables are created twice.
    model.optimizer.build(model.trainable_variables)
    model.fit(x, y, SIZE * BATCH, sample_weight=sample_weight, shuffle=False, verbose=0)
    return model


_REFERENCES: dict[str, keras.Model] = {}


def once(name: str, train) -> keras.Model:
    """The model that ``train()`` returns: several cases are compared with the same training in one process."""
    if name not in _REFERENCES:
        _REFERENCES[name] = train()
    return _REFERENCES[name]


def train_with_fit(model, x, y, sample_weight=None) -> keras.Model:
    """``model.fit`` on this rank's part of each global batch."""
    hvdtrain.broadcast(model)
    own = np.concatenate([np.arange(BATCH) + (step * SIZE + RANK) * BATCH for step in range(STEPS)])
    weights = None if sample_weight is None else sample_weight[own]
    model.fit(x[own], y[own], BATCH, sample_weight=weights, shuffle=False, verbose=0)
    return model


def train_with_trainer(model, x, y, sample_weight=None, **options) -> keras.Model:
    class InOrder(Arrays):
        keeps_order = True

    options = {"batch_size": BATCH, "steps": STEPS, "check_every": 0, **options}
    make_trainer(model, InOrder(x, y, sample_weight), **options).fit()
    return model


WAYS = {"fit": train_with_fit, "trainer": train_with_trainer}


def distributed(optimizer, **options):
    return hvdtrain.DistributedOptimizer(optimizer, **options)


def difference(model: keras.Model, alone: keras.Model) -> float:
    assert_equal_replicas(model)
    return relative_difference(values(model.trainable_variables), values(alone.trainable_variables))


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05, epsilon=1e-3),
    "adamw_clip": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.05),
    "sgd_clip": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
}


class DenseGradients(keras.Model):
    """For comparison: one process whose gradients of embeddings are dense, with each row summed."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.convert_to_tensor(each) for each in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize(
    ("way", "name", "sparse_as_dense"),
    [
        pytest.param("fit", "adam", False, marks=pytest.mark.long),
        pytest.param("fit", "adam", True, marks=pytest.mark.long),
        ("fit", "sgd_clip", False),
        ("trainer", "adamw_clip", False),
        pytest.param("trainer", "rmsprop", True, marks=pytest.mark.long),
        pytest.param("trainer", "rmsprop", False, marks=pytest.mark.long),
        pytest.param("trainer", "adagrad", False, marks=pytest.mark.long),
    ],
)
def test_rows_of_an_embedding_are_summed_before_the_update(way, name, sparse_as_dense):
    """Adaptive optimizers square the gradient: a row that is used twice must count as one."""

    def dense_gradients():
        model = classifier()
        return DenseGradients(model.inputs, model.outputs)

    reference = lambda: train_alone(compiled(dense_gradients, OPTIMIZERS[name](), cross_entropy()), X, LABELS)
    alone = once(f"dense gradients, {name}", reference)
    optimizer = distributed(OPTIMIZERS[name](), sparse_as_dense=sparse_as_dense)
    model = WAYS[way](compiled(classifier, optimizer, cross_entropy()), X, LABELS)
    assert difference(model, alone) < 1e-5


def test_accumulated_embedding_gradients_equal_those_of_one_batch():
    optimizers = [OPTIMIZERS["adam"]() for _ in range(2)]
    optimizers[1].gradient_accumulation_steps = 2
    once, twice = (
        train_with_trainer(
            compiled(classifier, distributed(optimizer), cross_entropy()),
            X,
            LABELS,
            batch_size=BATCH // steps,
            gradient_accumulation_steps=steps,
        )
        for steps, optimizer in enumerate(optimizers, start=1)
    )
    assert difference(once, twice) < 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unmasked", marks=pytest.mark.long),
        pytest.param("ignore_class", marks=pytest.mark.long),
        *("both", "mean_with_sample_weight"),
    ],
)
def test_losses_that_divide_by_their_own_count(name, way):
    y, weights, loss = WORD_LABELS, None, cross_entropy(ignore_class=-1)
    if name == "unmasked":
        y, loss = np.maximum(WORD_LABELS, 0), cross_entropy()
    if name == "mean_with_sample_weight":
        loss = cross_entropy(reduction="mean_with_sample_weight")
        y = np.maximum(WORD_LABELS, 0)
        weights = np.where(X > 0, 1.0 + X % 3, 0).astype(np.float32)

    def make_model():
        return tagger(mask_zero=name == "both")

    reference = lambda: train_alone(compiled(make_model, keras.optimizers.SGD(0.5), loss), X, y, weights)
    alone = once(f"tagger, {name}", reference)
    model = WAYS[way](compiled(make_model, distributed(keras.optimizers.SGD(0.5)), loss), X, y, weights)
    assert difference(model, alone) < 1e-5
    if way == "fit":
        losses = [each.history.history["loss"][0] for each in (model, alone)]
        assert COLLECTIVES.sum([np.float64(losses[0])])[0] / SIZE == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_masked_losses_of_an_uneven_last_step(accumulation):
    """Ranks have different numbers of samples, and different numbers of words in them."""
    num_samples = SIZE * BATCH + SIZE + 1
    x, y = X[:num_samples], WORD_LABELS[:num_samples]
    options = {} if accumulation == 1 else {"gradient_accumulation_steps": accumulation}
    alone = compiled(lambda: tagger(False), keras.optimizers.SGD(0.5), cross_entropy(ignore_class=-1))
    plan = [x[: SIZE * BATCH], x[SIZE * BATCH :]], [y[: SIZE * BATCH], y[SIZE * BATCH :]]
    for batch_x, batch_y in zip(*plan, strict=True):
        if accumulation == 1:
            alone.train_on_batch(batch_x, batch_y)
    model = compiled(
        lambda: tagger(False), distributed(keras.optimizers.SGD(0.5, **options)), cross_entropy(ignore_class=-1)
    )
    train_with_trainer(model, x, y, batch_size=BATCH // accumulation, steps=2, gradient_accumulation_steps=accumulation)
    if accumulation == 1:
        assert difference(model, alone) < 1e-5
    assert_equal_replicas(model)


def masked_mean(y_true, y_pred):
    """As in many tutorials: divides by a count that hvdtrain cannot see."""
    values = keras.losses.sparse_categorical_crossentropy(keras.ops.maximum(y_true, 0), y_pred, from_logits=True)
    mask = keras.ops.cast(y_true >= 0, values.dtype)
    return keras.ops.sum(values * mask) / keras.ops.sum(mask)


def mean(y_true, y_pred):
    values = keras.losses.sparse_categorical_crossentropy(keras.ops.maximum(y_true, 0), y_pred, from_logits=True)
    return keras.ops.mean(values)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_one_number_must_be_a_mean_over_samples(way):
    reference = lambda: train_alone(compiled(lambda: tagger(False), keras.optimizers.SGD(0.5), mean), X, WORD_LABELS)
    alone = once("tagger, mean", reference)
    model = WAYS[way](compiled(lambda: tagger(False), distributed(keras.optimizers.SGD(0.5)), mean), X, WORD_LABELS)
    assert difference(model, alone) < 1e-5
    model = compiled(lambda: tagger(False), distributed(keras.optimizers.SGD(0.5)), masked_mean)
    with pytest.raises(UsageError, match=r"^the loss of a batch must be the mean of the losses of its samples"):
        WAYS[way](model, X, WORD_LABELS)


@pytest.mark.parametrize("way", WAYS)
def test_regularizers_with_summed_gradients(way):
    def make_model():
        return classifier(kernel_regularizer=keras.regularizers.L2(0.01))

    loss = cross_entropy(reduction="sum")
    reference = lambda: train_alone(compiled(make_model, keras.optimizers.SGD(0.01), loss), X, LABELS)
    alone = once("regularized", reference)
    optimizer = distributed(keras.optimizers.SGD(0.01), op="sum")
    assert difference(WAYS[way](compiled(make_model, optimizer, loss), X, LABELS), alone) < 1e-5


def test_the_ema_overwrites_the_weights_once_per_step():
    def optimizer(**options):
        return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, **options)

    alone = train_alone(compiled(classifier, optimizer(), cross_entropy()), X, LABELS)
    accumulating = distributed(optimizer(gradient_accumulation_steps=2))
    model = compiled(classifier, accumulating, cross_entropy())
    train_with_trainer(model, X, LABELS, batch_size=BATCH // 2, gradient_accumulation_steps=2)
    alone.optimizer.finalize_variable_values(alone.trainable_variables)
    assert difference(model, alone) < 1e-5


class Counting(layers.Layer):
    """Counts in different ways what passes in training."""

    def build(self, shape):
        def count(name, **options):
            return self.add_weight(name=name, shape=(), initializer="zeros", trainable=False, **options)

        self.words = count("words", dtype="int64")
        self.calls = count("calls", dtype="int32")
        self.samples = count("samples", dtype="int32", aggregation="sum")
        self.weight = count("weight", aggregation="sum")
        self.on_rank_0 = count("on_rank_0", dtype="int32", aggregation="only_first_replica")

    def call(self, inputs, training=False):
        if training:
            self.words.assign_add(keras.ops.cast(keras.ops.sum(inputs > 0), "int64"))
            self.calls.assign_add(1)
            self.samples.assign_add(keras.ops.shape(inputs)[0])
            self.weight.assign_add(0.5 * keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
            self.on_rank_0.assign_add(keras.ops.cast(keras.ops.sum(inputs > 0), "int32"))
        return inputs


def test_integer_state_counts_over_all_ranks(tmp_path):
    def counting_classifier():
        inputs = layers.Input((LENGTH,), dtype="int32")
        hidden = layers.Embedding(WORDS, 4)(Counting(name="counting")(inputs))
        return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(hidden)))

    def counts(model):
        layer = model.get_layer("counting")
        return [float(v.numpy()) for v in (layer.words, layer.calls, layer.samples, layer.weight)]

    folder = COLLECTIVES.allgather(str(tmp_path))[0]
    alone = train_alone(compiled(counting_classifier, keras.optimizers.SGD(0.5), cross_entropy()), X, LABELS)
    rank_0 = sum((X[(step * SIZE) * BATCH :][:BATCH] > 0).sum() for step in range(STEPS))
    for steps in (5, STEPS):  # stopped and resumed
        model = compiled(counting_classifier, distributed(keras.optimizers.SGD(0.5)), cross_entropy())
        checkpointer = hvdtrain.Checkpointer(folder, model)
        train_with_trainer(model, X, LABELS, checkpointer=checkpointer, steps=steps, check_every=2)
    assert difference(model, alone) < 1e-5
    assert counts(model) == counts(alone)
    assert int(model.get_layer("counting").on_rank_0.numpy()) == rank_0


@pytest.mark.parametrize("wraps_later", [False, True])
def test_a_gradient_tape_equals_one_process(wraps_later):
    def train(model, own, tape_of):
        optimizer, loss = keras.optimizers.SGD(0.5), cross_entropy()

        @tf.function
        def step(x, y):
            with tf.GradientTape() if wraps_later else tape_of(None) as tape:
                value = loss(y, model(x, training=True))
            gradients = (tape_of(tape) if wraps_later else tape).gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for number in range(STEPS):
            batch = own(np.arange(SIZE * BATCH) + number * SIZE * BATCH)
            step(tf.constant(X[batch]), tf.constant(LABELS[batch]))
        return values(model.weights)

    keras.utils.set_random_seed(3)
    alone = train(classifier(), lambda batch: batch, lambda tape: tf.GradientTape() if tape is None else tape)
    keras.utils.set_random_seed(3)
    ours = train(classifier(), lambda batch: np.split(batch, SIZE)[RANK], hvdtrain.DistributedGradientTape)
    assert relative_difference(ours, alone) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_optimizers_of_different_names_reduce_together(way):
    """Keras numbers the names of optimizers: rank 0 has made others before."""
    for _ in range(2 if RANK == 0 else 0):
        keras.optimizers.SGD(0.1)
    optimizer = distributed(keras.optimizers.SGD(0.5))
    assert len(set(COLLECTIVES.allgather(optimizer.name))) == SIZE or SIZE > 2
    reference = lambda: train_alone(compiled(classifier, keras.optimizers.SGD(0.5), cross_entropy()), X, LABELS)
    alone = once("classifier", reference)
    assert difference(WAYS[way](compiled(classifier, optimizer, cross_entropy()), X, LABELS), alone) < 1e-5


def test_float16_gradients_whose_sum_overflows():
    reduce = COLLECTIVES.gradient_reducer(ReductionConfig(op="average"))
    (reduced,) = reduce([tf.fill([5], tf.constant(40000.0, tf.float16))]).gradients
    assert np.array_equal(reduced.numpy(), np.full(5, 40000.0, np.float16))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [pytest.param("bfloat16", marks=pytest.mark.long), "float16"])
def test_pure_half_precision(policy, way):
    """Gradients are reduced in float32: what remains is the rounding of the weights."""

    def dense_classifier():
        hidden = layers.Dense(8, activation="tanh")
        return keras.Sequential([layers.Input((LENGTH,)), hidden, layers.Dense(CLASSES)])

    x = X.astype(np.float32) / WORDS
    with dtype_policy(policy):
        reference = lambda: train_alone(
            compiled(dense_classifier, keras.optimizers.SGD(0.1), cross_entropy()), x, LABELS
        )
        alone = once(policy, reference)
        model = compiled(dense_classifier, distributed(keras.optimizers.SGD(0.1)), cross_entropy())
        WAYS[way](model, x, LABELS)
        assert all(np.isfinite(each.astype(np.float32)).all() for each in values(model.weights))
        assert all(variable.dtype == policy for variable in model.weights)
        ours, theirs = ([np.float32(each) for each in values(each.weights)] for each in (model, alone))
        assert relative_difference(ours, theirs) < (0.1 if policy == "bfloat16" else 0.02)
        # The gradient of a sum of thousands: its square is beyond float16.
        steep = compiled(dense_classifier, distributed(keras.optimizers.SGD(1e-4)), cross_entropy())
        WAYS[way](steep, 400 * x, LABELS)
        assert all(np.isfinite(each.astype(np.float32)).all() for each in values(steep.weights))


def test_masked_losses_of_a_filler():
    """The last step has a sample for rank 0 alone."""
    x, y = X[: SIZE * BATCH + 1], WORD_LABELS[: SIZE * BATCH + 1]
    alone = compiled(lambda: tagger(False), keras.optimizers.SGD(0.5), cross_entropy(ignore_class=-1))
    for part in (slice(SIZE * BATCH), slice(SIZE * BATCH, None)):
        alone.train_on_batch(x[part], y[part])
    model = compiled(lambda: tagger(False), distributed(keras.optimizers.SGD(0.5)), cross_entropy(ignore_class=-1))
    train_with_trainer(model, x, y, batch_size=BATCH, steps=2)
    assert difference(model, alone) < 1e-5


def test_a_loop_averages_gradients_before_it_clips_them():
    def loop(model, average, x, y):
        loss = cross_entropy()
        for begin in range(0, len(x), BATCH * (1 if average else SIZE)):
            end = begin + BATCH * (1 if average else SIZE)
            with tf.GradientTape() as tape:
                value = loss(y[begin:end], model(x[begin:end]))
            gradients = tape.gradient(value, model.trainable_variables)
            gradients = [tf.convert_to_tensor(each) for each in gradients]
            if average:
                gradients = hvdtrain.average(gradients)
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
            model.optimizer.apply(gradients, model.trainable_variables)
        return model

    alone = loop(compiled(classifier, keras.optimizers.SGD(0.5), None), False, X, LABELS)
    model = compiled(classifier, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.5)), None)
    own = np.arange(len(X)).reshape(STEPS, SIZE, BATCH)[:, RANK].ravel()
    assert difference(loop(model, True, X[own], LABELS[own]), alone) < 1e-5
    assert_equal_replicas(model)


class PlainStep(keras.Model):
    """Its train_step does not call scale_loss, as those of many examples."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_synchronized_moments_of_ranks_with_different_batches():
    """Each rank's part of the moments is weighted as its loss, also if only the gradients are weighted."""

    def normalizing() -> keras.Model:
        inputs = layers.Input((LENGTH,))
        hidden = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
        return PlainStep(inputs, layers.Dense(CLASSES)(hidden))

    x = X.astype(np.float32)
    alone = train_alone(compiled(normalizing, keras.optimizers.SGD(0.1), cross_entropy()), x, LABELS)
    model = compiled(normalizing, keras.optimizers.SGD(0.1), cross_entropy())
    shares = ",".join(str(1 + rank % 2) for rank in range(SIZE))
    train_with_trainer(model, x, LABELS, shares=shares, sync_batchnorm=True)
    assert difference(model, alone) < 1e-4  # in single precision


class OneLossOfTwo(keras.Model):
    """One optimizer scales the loss, and two apply its gradients."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, variables)
        self.optimizer.apply(gradients[2:], variables[2:])
        self.other_optimizer.apply(gradients[:2], variables[:2])
        return {"loss": loss}


@pytest.mark.parametrize("way", ["fit", "trainer"])
def test_a_loss_that_one_optimizer_scales_for_two_is_weighted_once(way):
    def of_two() -> keras.Model:
        inputs = layers.Input((LENGTH,))
        model = OneLossOfTwo(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="tanh")(inputs)))
        model.other_optimizer = keras.optimizers.SGD(0.1)
        return model

    x, alone = X.astype(np.float32), compiled(of_two, keras.optimizers.SGD(0.1), cross_entropy())
    alone.other_optimizer.build(alone.trainable_variables[:2])
    alone.optimizer.build(alone.trainable_variables[2:])
    alone.fit(x, LABELS, SIZE * BATCH, shuffle=False, verbose=0)
    model = compiled(of_two, keras.optimizers.SGD(0.1), cross_entropy())
    if way == "fit":
        model.optimizer = distributed(model.optimizer)
        model.other_optimizer = distributed(model.other_optimizer)
        train_with_fit(model, x, LABELS)
    else:
        shares = ",".join(str(1 + rank % 2) for rank in range(SIZE))
        train_with_trainer(model, x, LABELS, shares=shares)
    assert difference(model, alone) < 1e-5
