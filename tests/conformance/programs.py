"""Programs in the style of published Keras examples, on generated data: each trains for a few steps.

A program is a function that receives ``wrap``, applied to each optimizer, and returns a compiled model, its inputs and
its targets. None has a random layer: those draw other numbers on each rank than in one process.

The first line of a program's docstring stands in docs/conformance.md.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

import hvdtrain

NUM_SAMPLES = 96
CLASSES = 5
LENGTH, WORDS = 8, 20

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(NUM_SAMPLES, 8, 8, 3)).astype(np.float32)
FEATURES = RNG.normal(size=(NUM_SAMPLES, 6)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, NUM_SAMPLES).astype(np.int32)
TARGETS = (FEATURES @ RNG.normal(size=(6, 2))).astype(np.float32)
LENGTHS = 1 + RNG.integers(0, LENGTH, NUM_SAMPLES)
IS_WORD = np.arange(LENGTH) < LENGTHS[:, None]
TEXT = np.where(IS_WORD, RNG.integers(1, WORDS, (NUM_SAMPLES, LENGTH)), 0).astype(np.int32)
SERIES = np.where(IS_WORD[..., None], RNG.normal(size=(NUM_SAMPLES, LENGTH, 3)), 0).astype(np.float32)
PIXEL_LABELS = RNG.integers(-1, CLASSES, (NUM_SAMPLES, 8, 8)).astype(np.int32)


def cross_entropy(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def convnet(wrap):
    """Simple MNIST convnet."""
    model = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(wrap(optimizers.Adam(1e-3)), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, IMAGES, LABELS


def separable_convnet_with_augmentation_layers(wrap):
    """Image classification from scratch: rescaling, residual blocks, global pooling."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Rescaling(0.5)(inputs)
    for filters in (8, 16):
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")(x)
        x = layers.SeparableConv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.add([layers.MaxPooling2D(3, strides=2, padding="same")(x), residual])
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
    model.compile(wrap(optimizers.Adam(3e-3)), cross_entropy(), metrics=["acc"])
    return model, IMAGES, LABELS


def regression_with_huber_loss(wrap):
    """Regression with Huber loss, RMSprop and R2Score."""
    model = keras.Sequential([layers.Input((6,)), layers.Dense(16, activation="gelu"), layers.Dense(2)])
    model.compile(wrap(optimizers.RMSprop(1e-3)), losses.Huber(), metrics=["mae", keras.metrics.R2Score()])
    return model, FEATURES, TARGETS


def text_classification_with_a_transformer(wrap):
    """Token and position embedding, one transformer block."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8)(inputs) + layers.Embedding(LENGTH, 8)(ops.arange(LENGTH))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="relu")(x)))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    model.compile(wrap(optimizers.Adam(1e-3)), cross_entropy(), metrics=["accuracy"])
    return model, TEXT, LABELS


def bidirectional_lstm_with_masks(wrap):
    """Text classification with a bidirectional LSTM; the mask of the embedding reaches both."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Bidirectional(layers.LSTM(4))(x)))
    model.compile(wrap(optimizers.Adam(1e-2)), cross_entropy())
    return model, TEXT, LABELS


def named_entity_recognition(wrap):
    """A label for each word, ignoring the padding."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.GRU(8, return_sequences=True)(layers.Embedding(WORDS, 8)(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    model.compile(wrap(optimizers.SGD(0.5)), cross_entropy(ignore_class=-1))
    return model, TEXT, np.where(IS_WORD, TEXT % CLASSES, -1)


def language_model_with_masks(wrap):
    """Predicts the next word; the mask of the embedding reaches the loss."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(WORDS, 8, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(WORDS)(x))
    model.compile(wrap(optimizers.AdamW(1e-2, global_clipnorm=0.1)), cross_entropy())
    return model, TEXT, np.roll(TEXT, -1, axis=1)


def sequence_to_sequence(wrap):
    """Two inputs: the encoder's state starts the decoder."""
    source, target = layers.Input((LENGTH,), dtype="int32"), layers.Input((LENGTH,), dtype="int32")
    embedding = layers.Embedding(WORDS, 8)
    _, *state = layers.LSTM(8, return_state=True)(embedding(source))
    decoded = layers.LSTM(8, return_sequences=True)(embedding(target), initial_state=state)
    model = keras.Model([source, target], layers.Dense(WORDS)(decoded))
    model.compile(wrap(optimizers.RMSprop(1e-3)), cross_entropy())
    return model, (TEXT, TEXT[:, ::-1].copy()), np.roll(TEXT, -1, axis=1)


def time_series_with_masking(wrap):
    """Masked time series: Masking and a GRU, mean squared error of each time step."""
    model = keras.Sequential(
        [layers.Input((LENGTH, 3)), layers.Masking(), layers.GRU(8, return_sequences=True), layers.Dense(1)]
    )
    model.compile(wrap(optimizers.SGD(0.1, momentum=0.9)), "mse")
    return model, SERIES, SERIES.sum(axis=-1, keepdims=True)


def siamese_network(wrap):
    """A shared tower and a contrastive loss of each pair."""
    tower = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
    left, right = layers.Input((6,)), layers.Input((6,))
    distance = ops.sqrt(ops.sum(ops.square(tower(left) - tower(right)), axis=1, keepdims=True) + 1e-6)
    model = keras.Model([left, right], distance)

    def contrastive(y_true, y_pred):
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * ops.square(ops.maximum(1 - y_pred, 0)))

    model.compile(wrap(optimizers.RMSprop(1e-3)), contrastive)
    return model, (FEATURES, FEATURES[::-1].copy()), (LABELS[:, None] % 2).astype(np.float32)


LOSS_WEIGHTS = {"tags": 0.3, "label": 1.0}


def several_outputs_with_loss_weights(wrap):
    """Two outputs with weighted losses, one of them masked."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    tags = layers.Dense(CLASSES, name="tags")(layers.GRU(8, return_sequences=True)(x))
    label = layers.Dense(CLASSES, name="label")(layers.GRU(8)(x))
    model = keras.Model(inputs, {"tags": tags, "label": label})
    model.compile(
        wrap(optimizers.Adam(1e-2)),
        {"tags": cross_entropy(), "label": cross_entropy()},
        loss_weights=LOSS_WEIGHTS,
    )
    return model, TEXT, {"tags": TEXT % CLASSES, "label": LABELS}


def structured_data(wrap):
    """Named inputs and preprocessing layers."""
    age, kind = layers.Input((1,), name="age"), layers.Input((1,), name="kind", dtype="int32")
    normalization = layers.Normalization(mean=0.1, variance=2.0)
    x = layers.concatenate([normalization(age), layers.CategoryEncoding(CLASSES, output_mode="one_hot")(kind)])
    model = keras.Model({"age": age, "kind": kind}, layers.Dense(1)(layers.Dense(8, activation="relu")(x)))
    model.compile(wrap(optimizers.Adam(1e-2)), losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, {"age": FEATURES[:, :1], "kind": LABELS[:, None]}, (TARGETS[:, :1] > 0).astype(np.float32)


def transfer_learning(wrap):
    """A frozen, nested base model with BatchNormalization under a new head."""
    base = keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU()])
    base.trainable = False
    inputs = layers.Input((8, 8, 3))
    x = layers.GlobalAveragePooling2D()(base(inputs, training=False))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    model.compile(wrap(optimizers.Adam(1e-2)), cross_entropy())
    return model, IMAGES, LABELS


def segmentation(wrap):
    """A small U-Net with a label for each pixel, some of them unknown."""
    inputs = layers.Input((8, 8, 3))
    down = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    middle = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(down)
    up = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(middle)
    model = keras.Model(inputs, layers.Conv2D(CLASSES, 1)(layers.concatenate([up, down])))
    model.compile(wrap(optimizers.Adam(1e-3)), cross_entropy(ignore_class=-1))
    return model, IMAGES, PIXEL_LABELS


def regularizers_and_constraints(wrap):
    """L1L2 and activity regularizers, MaxNorm; SGD with Nesterov momentum."""
    l1_l2 = keras.regularizers.L1L2(1e-3, 1e-3)
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, "relu", kernel_regularizer=l1_l2, activity_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(2, kernel_constraint=keras.constraints.MaxNorm(1.0)),
        ]
    )
    model.compile(wrap(optimizers.SGD(0.05, momentum=0.9, nesterov=True)), "mse")
    return model, FEATURES, TARGETS


def moving_average_and_schedule(wrap):
    """Exponential moving average of the weights, cosine decay with warm-up."""
    schedule = optimizers.schedules.CosineDecay(0.1, 20, warmup_target=0.2, warmup_steps=3)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(16, "tanh"), layers.Dense(2)])
    model.compile(wrap(optimizers.SGD(schedule, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)), "mse")
    return model, FEATURES, TARGETS


def summed_loss(wrap):
    """A loss with reduction='sum'."""
    model = keras.Sequential([layers.Input((6,)), layers.Dense(2)])
    model.compile(wrap(optimizers.SGD(0.001)), losses.MeanSquaredError(reduction="sum"))
    return model, FEATURES, TARGETS


def dice_loss(wrap):
    """Divides by sums over the batch."""
    model = keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(1, 3, padding="same", activation="sigmoid")])
    model.compile(wrap(optimizers.Adam(1e-2)), losses.Dice())
    return model, IMAGES, (PIXEL_LABELS[..., None] > 1).astype(np.float32)


class VAE(keras.Model):
    """Variational autoencoder, as published: never called itself; without its noise."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Input((2,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
            reconstruction = ops.mean(ops.sum(ops.square(x - self.decoder(mean)), axis=1))
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total)
        self.kl_loss_tracker.update_state(kl)
        return {"loss": self.total_loss_tracker.result(), "kl_loss": self.kl_loss_tracker.result()}


def variational_autoencoder(wrap):
    """Variational autoencoder: a train_step of its own, in a model that is never called."""
    model = VAE()
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)))
    return model, FEATURES, LABELS


class GAN(keras.Model):
    """DCGAN: two optimizers in one step; the noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Input((2,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real, noise = data[0], data[1]
        combined = ops.concatenate([self.generator(noise), real])
        labels = ops.concatenate([ops.ones((ops.shape(real)[0], 1)), ops.zeros((ops.shape(real)[0], 1))])
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros_like(fakes), fakes)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def generative_adversarial_network(wrap):
    """DCGAN: a train_step with two optimizers."""
    model = GAN()
    model.compile(wrap(optimizers.Adam(1e-2)), wrap(optimizers.Adam(5e-3)), losses.BinaryCrossentropy(from_logits=True))
    return model, FEATURES, TARGETS


class Distiller(keras.Model):
    """Knowledge distillation: ``compute_loss`` of its own, a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential([layers.Input((6,)), layers.Dense(16, "relu"), layers.Dense(CLASSES)])
        self.teacher.trainable = False
        self.student = keras.Sequential([layers.Input((6,)), layers.Dense(CLASSES)])
        self.distillation_loss_fn = losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher = ops.softmax(self.teacher(x, training=False) / 3)
        distillation = self.distillation_loss_fn(teacher, ops.softmax(y_pred / 3)) * 9
        return 0.1 * super().compute_loss(x, y, y_pred, sample_weight) + 0.9 * distillation


def knowledge_distillation(wrap):
    """Knowledge distillation: a compute_loss of its own, a frozen teacher."""
    model = Distiller()
    model.build((None, 6))
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)), loss=cross_entropy(), metrics=["accuracy"])
    return model, FEATURES, LABELS


class TwoLosses(keras.Model):
    """Customizing fit: ``compute_loss`` in a train_step, ``add_loss`` in a layer."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class SmallActivations(layers.Layer):
    def call(self, inputs):
        self.add_loss(1e-2 * ops.mean(ops.square(inputs)))
        return inputs


def custom_train_step_with_added_losses(wrap):
    """Customizing fit: compute_loss in a train_step, add_loss in a layer."""
    inputs = layers.Input((6,))
    x = SmallActivations()(layers.Dense(16, activation="relu")(inputs))
    model = TwoLosses(inputs, layers.Dense(2)(x))
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)), loss="mse", metrics=["mae"])
    return model, FEATURES, TARGETS


class UsesGradients(keras.Model):
    """Its train_step uses the gradients before it applies them: ``used`` says how."""

    used = staticmethod(lambda gradients: gradients)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        self.optimizer.apply_gradients(zip(self.used(gradients), self.trainable_variables, strict=True))
        return self.results(loss)

    def loss_and_gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def results(self, loss):
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}


def classifier(kind):
    inputs = layers.Input((6,))
    return kind(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="tanh")(inputs)))


def compiled_classifier(kind, optimizer):
    model = classifier(kind)
    model.compile(optimizer=optimizer, loss=cross_entropy())
    return model, FEATURES, LABELS


class ClippedByGlobalNorm(UsesGradients):
    used = staticmethod(lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0])


def clipping_in_the_train_step(wrap):
    """A train_step clips by the norm of all gradients."""
    return compiled_classifier(ClippedByGlobalNorm, wrap(optimizers.SGD(0.5)))


class SignsOfGradients(UsesGradients):
    used = staticmethod(lambda gradients: [tf.sign(each) for each in gradients])


def signs_of_gradients(wrap):
    """A train_step applies the signs of the gradients."""
    return compiled_classifier(SignsOfGradients, wrap(optimizers.SGD(0.01, momentum=0.9)))


class NormalizedGradients(UsesGradients):
    used = staticmethod(lambda gradients: [each / (tf.norm(each) + 1e-3) for each in gradients])


def normalized_gradients(wrap):
    """A train_step divides each gradient by its norm."""
    return compiled_classifier(NormalizedGradients, wrap(optimizers.SGD(0.1)))


class SharpnessAware(UsesGradients):
    """Foret et al., arXiv:2010.01412."""

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        scale = 0.5 / (tf.linalg.global_norm(gradients) + 1e-12)
        steps = [each * scale for each in gradients]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        _, gradients = self.loss_and_gradients(x, y)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.results(loss)


def sharpness_aware_minimization(wrap):
    """Sharpness-aware minimization: the first gradient moves the weights, the second updates them."""
    return compiled_classifier(SharpnessAware, wrap(optimizers.SGD(0.3)))


class AccumulatesGradients(UsesGradients):
    """Updates after every second batch by the sum of gradients, which it clips."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sums = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self.trainable_variables]
        self.num_batches = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        for total, each in zip(self.sums, gradients, strict=True):
            total.assign_add(each)
        is_due = tf.cast(self.num_batches.assign_add(1) % 2 == 0, tf.float32)
        clipped, _ = tf.clip_by_global_norm([is_due * each for each in self.sums], 0.2)
        self.optimizer.apply(clipped, self.trainable_variables)
        for total in self.sums:
            total.assign((1 - is_due) * total)
        return self.results(loss)


def gradients_summed_by_hand(wrap):
    """Gradient accumulation by hand: a train_step sums the gradients of two batches, clips and applies them."""
    return compiled_classifier(AccumulatesGradients, wrap(optimizers.SGD(0.5)))


class LogsGradientNorm(UsesGradients):
    """Applies the gradients as they are, and logs their norm."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.norm = keras.metrics.Mean(name="gradient_norm")

    @property
    def metrics(self):
        return [*super().metrics, self.norm]

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.norm.update_state(tf.linalg.global_norm(gradients))
        return {**self.results(loss), "gradient_norm": self.norm.result()}


def norm_of_the_gradient_as_a_metric(wrap):
    """A train_step logs the norm of the gradients that it applies."""
    return compiled_classifier(LogsGradientNorm, wrap(optimizers.Adam(0.01)))


class AdaptiveClipping(optimizers.SGD):
    """Brock et al., arXiv:2102.06171: clips each gradient by the norm of its variable."""

    def apply(self, grads, trainable_variables=None):
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        most = [0.02 * tf.maximum(tf.norm(each), 1e-3) for each in variables]
        super().apply([tf.clip_by_norm(g, norm) for g, norm in zip(grads, most, strict=True)], trainable_variables)


def optimizer_with_an_apply_of_its_own(wrap):
    """Adaptive gradient clipping in an optimizer's own apply."""
    return compiled_classifier(keras.Model, wrap(AdaptiveClipping(0.5)))


def supervised_contrastive(y_true, y_pred):
    """Khosla et al., arXiv:2004.11362: samples of one class attract each other, all others repel."""
    z = ops.normalize(y_pred, axis=-1)
    same = ops.cast(ops.reshape(y_true, (-1, 1)) == ops.reshape(y_true, (1, -1)), "float32")
    logits = ops.matmul(z, ops.transpose(z)) / 0.5
    return losses.categorical_crossentropy(same / ops.sum(same, axis=1, keepdims=True), logits, from_logits=True)


def supervised_contrastive_learning(wrap):
    """Supervised contrastive learning: `WholeBatch` of a loss that compares all samples of a batch."""
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
    model.compile(wrap(optimizers.SGD(0.1)), hvdtrain.WholeBatch(supervised_contrastive))
    return model, FEATURES, LABELS


def dice_loss_of_the_whole_batch(wrap):
    """`WholeBatch` of the Dice loss, which divides by sums over the batch."""
    model = keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(1, 3, padding="same", activation="sigmoid")])
    model.compile(wrap(optimizers.Adam(1e-2)), hvdtrain.WholeBatch(losses.Dice()))
    return model, IMAGES, (PIXEL_LABELS[..., None] > 1).astype(np.float32)


class CLIP(UsesGradients):
    """Two towers; each sample is told from all others of the batch."""

    def train_step(self, data):
        (left, right), _ = data
        with tf.GradientTape() as tape:
            p, q = (ops.normalize(hvdtrain.gather(each), axis=-1) for each in self([left, right], training=True))
            logits = ops.matmul(p, ops.transpose(q)) / 0.3
            own = ops.arange(ops.shape(logits)[0])
            loss = sum(
                ops.mean(losses.sparse_categorical_crossentropy(own, each, from_logits=True))
                for each in (logits, ops.transpose(logits))
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.results(loss)


def contrastive_language_image_pretraining(wrap):
    """CLIP: two towers whose outputs a train_step passes to `hvdtrain.gather`."""
    left, right = layers.Input((6,)), layers.Input((6,))
    towers = [keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(4)]) for _ in range(2)]
    model = CLIP([left, right], [towers[0](left), towers[1](right)])
    model.compile(optimizer=wrap(optimizers.Adam(0.01)))
    return model, (FEATURES, FEATURES[::-1].copy()), LABELS


class BalancedExperts(layers.Layer):
    """A mixture of experts; the loss of Shazeer et al., arXiv:1701.06538, is a product of means over the batch."""

    def build(self, shape):
        self.gate = layers.Dense(3, activation="softmax")
        self.experts = [layers.Dense(8, activation="tanh") for _ in range(3)]
        for each in (self.gate, *self.experts):
            each.build(shape)

    def call(self, x):
        shares = self.gate(x)
        everyone = hvdtrain.gather(shares)
        chosen = ops.mean(ops.one_hot(ops.argmax(everyone, axis=-1), 3), axis=0)
        self.add_loss(3 * ops.sum(chosen * ops.mean(everyone, axis=0)))
        return sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def mixture_of_experts(wrap):
    """Mixture of experts: `add_loss` of a product of means over the batch, of what a layer gathers."""
    inputs = layers.Input((6,))
    model = keras.Model(inputs, layers.Dense(2)(BalancedExperts()(inputs)))
    model.compile(wrap(optimizers.Adam(0.01)), "mse")
    return model, FEATURES, TARGETS


PROGRAMS = [
    convnet,
    separable_convnet_with_augmentation_layers,
    regression_with_huber_loss,
    text_classification_with_a_transformer,
    bidirectional_lstm_with_masks,
    named_entity_recognition,
    language_model_with_masks,
    sequence_to_sequence,
    time_series_with_masking,
    siamese_network,
    several_outputs_with_loss_weights,
    structured_data,
    transfer_learning,
    segmentation,
    regularizers_and_constraints,
    moving_average_and_schedule,
    summed_loss,
    dice_loss,
    variational_autoencoder,
    generative_adversarial_network,
    knowledge_distillation,
    custom_train_step_with_added_losses,
    clipping_in_the_train_step,
    signs_of_gradients,
    normalized_gradients,
    sharpness_aware_minimization,
    gradients_summed_by_hand,
    norm_of_the_gradient_as_a_metric,
    optimizer_with_an_apply_of_its_own,
    supervised_contrastive_learning,
    dice_loss_of_the_whole_batch,
    contrastive_language_image_pretraining,
    mixture_of_experts,
]

ADAPTIVE_WITH_EMBEDDINGS = {
    "language_model_with_masks",
    "text_classification_with_a_transformer",
    "bidirectional_lstm_with_masks",
    "sequence_to_sequence",
    "several_outputs_with_loss_weights",
}
"""Programs whose embeddings plain Keras trains otherwise, because it does not add up the entries of a row."""

REFUSED = {
    "summed_loss": "a loss with reduction='sum' needs DistributedOptimizer(…, op='sum')",
    "dice_loss": "the loss of a batch must be the mean of the losses of its samples",
}
"""Programs that cannot be equal to one process, and what the refusal says."""

REFUSED_AS_TASK = {
    **REFUSED,
    "moving_average_and_schedule": "a task's optimizer must have a number for its learning rate",
    "generative_adversarial_network": "a task's model must have Keras' compile",
}
"""Those that ``--task`` refuses. A Task has one optimizer, and its schedules are options."""
