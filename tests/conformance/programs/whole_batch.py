"""Programs whose loss is one of the whole batch, not a mean over samples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

import hvdtrain
from programs.samples import FEATURES, IMAGES, LABELS, PIXEL_LABELS, TARGETS
from programs.used_gradients import UsesGradients


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
        everyone = ops.cast(hvdtrain.gather(shares), "float32")
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
    supervised_contrastive_learning,
    dice_loss_of_the_whole_batch,
    contrastive_language_image_pretraining,
    mixture_of_experts,
]
