"""Programs with images, views of scenes and clouds of points."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

from programs.own_loss import OwnLoss
from programs.samples import CLASSES, FEATURES, IMAGES, LABELS, PIXEL_LABELS, SERIES, cross_entropy

PATCHES = 16


def patches_of(images):
    return layers.Dense(8)(layers.Reshape((PATCHES, 12))(ops.image.extract_patches(images, 2)))


def vision_transformer(wrap):
    """Vision transformer: patches, learned positions, a pre-normalized block, label smoothing."""
    inputs = layers.Input((8, 8, 3))
    x = patches_of(inputs) + layers.Embedding(PATCHES, 8)(ops.arange(PATCHES))
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 4)(y, y)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(y))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(layers.LayerNormalization()(x))))
    loss = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(wrap(optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-4)), loss, metrics=["accuracy"])
    return model, IMAGES, np.eye(CLASSES, dtype=np.float32)[LABELS]


def mlp_mixer(wrap):
    """MLP-Mixer: layers across patches and across channels in turn."""
    inputs = layers.Input((8, 8, 3))
    x = patches_of(inputs)
    y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
    y = layers.Dense(PATCHES)(layers.Dense(8, activation="gelu")(y))
    x = x + layers.Permute((2, 1))(y)
    x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    model.compile(wrap(optimizers.Adam(1e-3)), cross_entropy(), metrics=["accuracy"])
    return model, IMAGES, LABELS


def inverted_residuals(wrap):
    """MobileNetV2: depthwise convolutions between an expansion and a projection, group normalization."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    for _ in range(2):
        y = layers.ReLU(6.0)(layers.GroupNormalization(4)(layers.Conv2D(16, 1, use_bias=False)(x)))
        y = layers.ReLU(6.0)(layers.GroupNormalization(4)(layers.DepthwiseConv2D(3, padding="same")(y)))
        x = x + layers.Conv2D(8, 1)(y)
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
    model.compile(wrap(optimizers.SGD(0.05, momentum=0.9)), cross_entropy())
    return model, IMAGES, LABELS


def squeeze_and_excitation(wrap):
    """Squeeze-and-excitation: a gate for each channel; several labels for an image, binary focal cross-entropy."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    x = x * layers.Dense(8, activation="sigmoid")(layers.Dense(2, activation="relu")(gate))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalMaxPooling2D()(x)))
    loss = losses.BinaryFocalCrossentropy(apply_class_balancing=True, from_logits=True)
    model.compile(wrap(optimizers.Adam(1e-3)), loss, metrics=["binary_accuracy"])
    return model, IMAGES, (PIXEL_LABELS[:, 0, :CLASSES] > 1).astype(np.float32)


class PixelShuffle(layers.Layer):
    """Shi et al., arXiv:1609.05158."""

    def call(self, x):
        return tf.nn.depth_to_space(x, 2)


def super_resolution(wrap):
    """Super-resolution: a sub-pixel convolution network."""
    model = keras.Sequential(
        [
            layers.Input((4, 4, 3)),
            layers.Conv2D(8, 3, padding="same", activation="tanh", kernel_initializer="orthogonal"),
            layers.Conv2D(12, 3, padding="same", kernel_initializer="orthogonal"),
            PixelShuffle(),
        ]
    )
    model.compile(wrap(optimizers.Adam(1e-3)), "mse", metrics=["mae"])
    return model, np.ascontiguousarray(IMAGES[:, ::2, ::2]), IMAGES


class DetectionLoss(losses.Loss):
    """RetinaNet's: focal loss of classes and Huber loss of boxes, divided by the boxes of an image."""

    def call(self, y_true, y_pred):
        kind = y_true[..., 4]
        is_box, is_known = ops.cast(kind >= 0, "float32"), ops.cast(kind > -2, "float32")
        one_hot = ops.one_hot(ops.cast(kind, "int32"), CLASSES)
        focal = losses.binary_focal_crossentropy(one_hot, y_pred[..., 4:], apply_class_balancing=True, from_logits=True)
        box = losses.huber(y_true[..., :4], y_pred[..., :4])
        num_boxes = ops.maximum(ops.sum(is_box, axis=-1), 1)
        return ops.sum(CLASSES * focal * is_known + box * is_box, axis=-1) / num_boxes


def object_detection(wrap):
    """RetinaNet: heads for classes and boxes of anchors; one loss, divided by the boxes of each image."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    boxes, classes = (
        layers.Reshape((16, each))(layers.Conv2D(each, 3, padding="same")(layers.Conv2D(8, 1, activation="relu")(x)))
        for each in (4, CLASSES)
    )
    model = keras.Model(inputs, layers.Concatenate()([boxes, classes]))
    model.compile(wrap(optimizers.SGD(0.02, momentum=0.9)), DetectionLoss())
    kinds = PIXEL_LABELS[:, ::2, ::2].reshape(len(IMAGES), 16, 1) - 1
    boxes = IMAGES[:, :4, :4].reshape(len(IMAGES), 16, 3)
    return model, IMAGES, np.concatenate([boxes, boxes[..., :1], kinds], axis=-1).astype(np.float32)


DETECTION_WEIGHTS = {"boxes": 2.0, "classes": 1.0, "contains": 0.5}


def detection_with_several_losses(wrap):
    """Three heads of a detector with weighted losses of their own."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Flatten()(layers.Conv2D(4, 3, strides=2, activation="relu")(inputs))
    heads = {
        "boxes": layers.Dense(4, name="boxes")(x),
        "classes": layers.Dense(CLASSES, name="classes")(x),
        "contains": layers.Dense(1, name="contains")(x),
    }
    model = keras.Model(inputs, heads)
    model.compile(
        wrap(optimizers.Adam(1e-3)),
        {
            "boxes": losses.Huber(),
            "classes": cross_entropy(),
            "contains": losses.BinaryCrossentropy(from_logits=True),
        },
        loss_weights=DETECTION_WEIGHTS,
        metrics={"classes": ["accuracy"], "boxes": ["mae"]},
    )
    contains = (FEATURES[:, 4:5] > 0).astype(np.float32)
    return model, IMAGES, {"boxes": FEATURES[:, :4], "classes": LABELS, "contains": contains}


class DepthEstimator(OwnLoss, keras.Model):
    def loss_of(self, x, y):
        depth = self(x, training=True)
        (dy_true, dx_true), (dy, dx) = tf.image.image_gradients(y), tf.image.image_gradients(depth)
        smoothness = ops.mean(ops.abs(dx * ops.exp(-ops.abs(dx_true)))) + ops.mean(
            ops.abs(dy * ops.exp(-ops.abs(dy_true)))
        )
        similarity = ops.mean(1 - tf.image.ssim(y, depth, max_val=1, filter_size=5))
        return 0.85 * similarity + 0.1 * ops.mean(ops.abs(y - depth)) + 0.9 * smoothness


def depth_estimation(wrap):
    """Monocular depth estimation: structural similarity and edges in a train_step."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="tanh")(inputs)
    x = layers.UpSampling2D()(layers.AveragePooling2D(2)(x)) + x
    model = DepthEstimator(inputs, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x))
    model.compile(optimizer=wrap(optimizers.SGD(0.1)))
    return model, IMAGES, np.abs(IMAGES[..., :1]) / 4


class RadianceField(OwnLoss, keras.Model):
    """Colors and densities of the points of a ray, and the distances between these."""

    def loss_of(self, x, y):
        points, distances = x
        colors, density = ops.split(self(points, training=True), [3], axis=-1)
        opacity = 1 - ops.exp(-ops.relu(density[..., 0]) * distances)
        passed = tf.math.cumprod(1 - opacity + 1e-10, axis=-1, exclusive=True)
        seen = ops.sum((opacity * passed)[..., None] * ops.sigmoid(colors), axis=1)
        return ops.mean(ops.square(y - seen))


def neural_radiance_field(wrap):
    """NeRF: encoded positions along rays, volume rendering in the loss."""
    inputs = layers.Input((None, 3))
    encoded = [inputs, *(f(2.0**i * inputs) for i in range(2) for f in (ops.sin, ops.cos))]
    x = layers.Dense(16, activation="relu")(layers.Concatenate()(encoded))
    model = RadianceField(inputs, layers.Dense(4)(x))
    model.compile(optimizer=wrap(optimizers.Adam(1e-3)))
    colors = 1 / (1 + np.exp(-FEATURES[:, 3:]))
    return model, (IMAGES[:, 0], np.abs(IMAGES[:, 1, :, 0])), colors


def point_cloud_classification(wrap):
    """PointNet: a transformation of the points that the network predicts, and a maximum over them."""
    inputs = layers.Input((8, 3))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1, activation="relu")(inputs))
    transform = layers.Dense(
        9, kernel_initializer="zeros", bias_initializer=lambda *_, **__: ops.reshape(ops.eye(3), 9)
    )
    x = layers.Dot((2, 1))([inputs, layers.Reshape((3, 3))(transform(x))])
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(16, 1, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))
    model.compile(wrap(optimizers.Adam(1e-3)), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, SERIES, LABELS


PROGRAMS = [
    vision_transformer,
    mlp_mixer,
    inverted_residuals,
    squeeze_and_excitation,
    super_resolution,
    object_detection,
    detection_with_several_losses,
    depth_estimation,
    neural_radiance_field,
    point_cloud_classification,
]
