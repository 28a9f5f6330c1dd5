"""Programs with Keras' own ``train_step``: models, losses and optimizers of published examples."""

import keras
import numpy as np
from keras import layers, losses, ops, optimizers

from programs.samples import (
    CLASSES,
    FEATURES,
    IMAGES,
    IS_WORD,
    LABELS,
    LENGTH,
    PIXEL_LABELS,
    SERIES,
    TARGETS,
    TEXT,
    WORDS,
    cross_entropy,
)


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
]
