"""Programs that learn distances between samples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

import hvdtrain
from programs.own_loss import OwnLoss
from programs.samples import CLASSES, FEATURES, LABELS, cross_entropy


def tower(outputs=4):
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs)])


class Triplets(OwnLoss, keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tower()

    def loss_of(self, x, y):
        anchor, positive, negative = (self.embedding(each) for each in x)
        near, far = (ops.sum(ops.square(anchor - each), axis=-1) for each in (positive, negative))
        return ops.mean(ops.maximum(near - far + 0.5, 0))


def margin_of_given_triplets(wrap):
    """Siamese network with a triplet loss: anchor, positive and negative come with the data."""
    model = Triplets()
    model.compile(optimizer=wrap(optimizers.SGD(0.1, momentum=0.9)))
    return model, (FEATURES, FEATURES + 0.1, FEATURES[::-1].copy()), LABELS


class Prototypes(layers.Layer):
    """The negative squared distances to a vector for each class."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=(CLASSES, shape[-1]), initializer="glorot_uniform")

    def call(self, x):
        return -ops.sum(ops.square(x[:, None] - self.vectors), axis=-1)


def distances_to_prototypes(wrap):
    """Metric learning with a trained prototype for each class."""
    model = keras.Sequential([tower(), Prototypes()])
    model.compile(wrap(optimizers.Adam(1e-2)), cross_entropy(), metrics=["accuracy"])
    return model, FEATURES, LABELS


class AngularMargin(losses.Loss):
    """Deng et al., arXiv:1801.07698."""

    def call(self, y_true, y_pred):
        own = ops.one_hot(y_true, CLASSES)
        angles = ops.arccos(ops.clip(y_pred, -0.999, 0.999)) + 0.2 * own
        return ops.categorical_crossentropy(own, 4 * ops.cos(angles), from_logits=True)


def additive_angular_margin(wrap):
    """ArcFace: cosines between unit vectors of samples and of classes, in a loss of its own."""
    inputs = layers.Input((6,))
    x = layers.UnitNormalization()(tower()(inputs))
    classes = layers.Dense(CLASSES, use_bias=False, kernel_constraint=keras.constraints.UnitNorm())
    model = keras.Model(inputs, classes(x))
    model.compile(wrap(optimizers.SGD(0.1, momentum=0.9)), AngularMargin())
    return model, FEATURES, LABELS


def circle_loss_of_the_whole_batch(wrap):
    """`WholeBatch` of Keras' Circle loss, which compares the samples of a batch."""
    model = keras.Sequential([tower(), layers.UnitNormalization()])
    model.compile(wrap(optimizers.SGD(0.01)), hvdtrain.WholeBatch(losses.Circle(gamma=4)))
    return model, FEATURES, LABELS


class BarlowTwins(OwnLoss, keras.Model):
    """Zbontar et al., arXiv:2103.03230."""

    def __init__(self):
        super().__init__()
        self.encoder = tower()

    def loss_of(self, x, y):
        first, second = (self.normalized(hvdtrain.gather(self.encoder(each, training=True))) for each in x)
        correlation = ops.matmul(ops.transpose(first), second) / ops.cast(ops.shape(first)[0], "float32")
        weights = 0.1 + 0.9 * ops.eye(correlation.shape[0])
        return ops.sum(weights * ops.square(correlation - ops.eye(correlation.shape[0])))

    def normalized(self, x):
        return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)


def barlow_twins(wrap):
    """Barlow Twins: the correlation of two views over the whole batch, by `hvdtrain.gather`."""
    model = BarlowTwins()
    model.compile(optimizer=wrap(optimizers.SGD(0.05)))
    return model, (FEATURES, (FEATURES * 0.9 + 0.2 * FEATURES[::-1]).astype(np.float32)), LABELS


class SelfSupervised(OwnLoss, keras.Model):
    """Chen and He, arXiv:2011.10566."""

    def __init__(self):
        super().__init__()
        self.encoder = tower()
        self.predictor = keras.Sequential([layers.Input((4,)), layers.Dense(4, activation="relu"), layers.Dense(4)])

    def loss_of(self, x, y):
        first, second = (self.encoder(each, training=True) for each in x)
        pairs = ((self.predictor(first), second), (self.predictor(second), first))
        return sum(-ops.mean(self.cosine(p, ops.stop_gradient(z))) for p, z in pairs) / 2

    def cosine(self, p, z):
        return tf.reduce_sum(tf.math.l2_normalize(p, axis=1) * tf.math.l2_normalize(z, axis=1), axis=1)


def siamese_representation_learning(wrap):
    """SimSiam: two views, a predictor and a gradient that stops."""
    model = SelfSupervised()
    model.compile(optimizer=wrap(optimizers.SGD(0.1, momentum=0.6)))
    return model, (FEATURES, FEATURES[:, ::-1].copy()), LABELS


PROGRAMS = [
    margin_of_given_triplets,
    distances_to_prototypes,
    additive_angular_margin,
    circle_loss_of_the_whole_batch,
    barlow_twins,
    siamese_representation_learning,
]
