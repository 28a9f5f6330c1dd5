"""Programs with text, speech and films."""

import keras
import numpy as np
from keras import layers, losses, ops, optimizers

from programs.own_loss import OwnLoss
from programs.samples import (
    CLASSES,
    FEATURES,
    IMAGES,
    IS_WORD,
    LABELS,
    LENGTH,
    SERIES,
    TEXT,
    WORDS,
    cross_entropy,
)


def positions(length):
    return layers.Embedding(length, 8)(ops.arange(length))


def transformer_block(x, **options):
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, **options))
    return layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))


IS_HIDDEN = IS_WORD & (np.arange(TEXT.size).reshape(TEXT.shape) % 3 == 0)


class MaskedLanguageModel(OwnLoss, keras.Model):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.loss_fn = cross_entropy(reduction="mean_with_sample_weight")

    def loss_of(self, x, y):
        words, is_hidden = x
        return self.loss_fn(y, self(words, training=True), sample_weight=is_hidden)


def masked_language_model(wrap):
    """BERT: hidden words are predicted; sample weights in a train_step leave out the others."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = transformer_block(layers.Embedding(WORDS + 1, 8)(inputs) + positions(LENGTH))
    model = MaskedLanguageModel(inputs, layers.Dense(WORDS)(x))
    model.compile(optimizer=wrap(optimizers.SGD(0.2, momentum=0.9)))
    return model, (np.where(IS_HIDDEN, WORDS, TEXT), IS_HIDDEN.astype(np.float32)), TEXT


def causal_language_model(wrap):
    """GPT: causal attention; the embedding of the words is also the output layer."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(WORDS, 8)
    x = transformer_block(embedding(inputs) + positions(LENGTH), use_causal_mask=True)
    model = keras.Model(inputs, embedding(x, reverse=True))
    model.compile(wrap(optimizers.SGD(0.2, momentum=0.9)), cross_entropy(ignore_class=0))
    return model, TEXT, np.roll(TEXT, -1, axis=1)


def translation_with_a_transformer(wrap):
    """Encoder and decoder with self-attention, causal attention and cross-attention; masks of both texts."""
    source, target = layers.Input((LENGTH,), dtype="int32"), layers.Input((LENGTH,), dtype="int32")
    encoded = transformer_block(layers.Embedding(WORDS, 8, mask_zero=True)(source))
    x = layers.Embedding(WORDS, 8, mask_zero=True)(target)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)]))
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, encoded)]))
    model = keras.Model([source, target], layers.Dense(WORDS)(x))
    model.compile(wrap(optimizers.SGD(0.2, momentum=0.9)), cross_entropy(), metrics=["accuracy"])
    return model, (TEXT, np.where(IS_WORD, TEXT[:, ::-1], 0)), np.roll(TEXT, -1, axis=1)


def speech_recognition(wrap):
    """Connectionist temporal classification of a bidirectional GRU's outputs."""
    model = keras.Sequential(
        [
            layers.Input((LENGTH, 3)),
            layers.Conv1D(8, 3, padding="same", activation="relu"),
            layers.Bidirectional(layers.GRU(6, return_sequences=True)),
            layers.Dense(CLASSES + 1),
        ]
    )
    model.compile(wrap(optimizers.Adam(1e-3)), losses.CTC())
    characters = 1 + TEXT[:, :3] % CLASSES
    return model, SERIES, np.where(np.arange(3) <= LABELS[:, None] % 3, characters, 0)


class EmbeddingBag(layers.Layer):
    """The mean of the vectors of a text's words, weighted."""

    def __init__(self, size, dimension):
        super().__init__()
        self.embedding = layers.Embedding(size, dimension)

    def call(self, words, weights):
        return ops.sum(self.embedding(words) * weights[..., None], axis=1) / ops.sum(weights, axis=1, keepdims=True)


def bags_of_words(wrap):
    """Text vectors: weighted means of the embeddings of texts of different lengths."""
    words, weights = layers.Input((LENGTH,), dtype="int32"), layers.Input((LENGTH,))
    x = EmbeddingBag(WORDS, 8)(words, weights)
    model = keras.Model([words, weights], layers.Dense(CLASSES)(x))
    model.compile(wrap(optimizers.Adagrad(0.1)), cross_entropy(), metrics=["accuracy"])
    return model, (TEXT, (IS_WORD * (1 + np.arange(LENGTH))).astype(np.float32)), LABELS


def convolutions_over_characters(wrap):
    """Text classification with convolutions of several widths and a maximum over time."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8)(inputs)
    x = [layers.GlobalMaxPooling1D()(layers.Conv1D(4, width, activation="relu")(x)) for width in (2, 3, 4)]
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.Concatenate()(x)))
    model.compile(wrap(optimizers.SGD(0.2)), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model, TEXT, (FEATURES[:, :1] > 0).astype(np.float32)


def question_answering(wrap):
    """Extractive question answering: softmaxes over the words for the begin and the end of the answer."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = transformer_block(layers.Embedding(WORDS, 8)(inputs) + positions(LENGTH))
    scores = layers.Dense(2, use_bias=False)(x)
    ends = [layers.Softmax(name=name)(scores[..., i]) for i, name in enumerate(("begin", "end"))]
    model = keras.Model(inputs, ends)
    model.compile(wrap(optimizers.SGD(0.1)), [losses.SparseCategoricalCrossentropy() for _ in ends])
    begins = LABELS % 3
    return model, TEXT, (begins, begins + TEXT[:, 0] % CLASSES)


def fourier_transforms_instead_of_attention(wrap):
    """FNet: Fourier transforms mix the words of a text."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8)(inputs) + positions(LENGTH)
    mixed, _ = ops.fft2((x, ops.zeros_like(x)))
    x = layers.LayerNormalization()(x + mixed)
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="relu")(x)))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    model.compile(wrap(optimizers.SGD(0.1, momentum=0.9)), cross_entropy())
    return model, TEXT, LABELS


def addition_of_numbers(wrap):
    """Sums of numbers as text: an LSTM reads one-hot characters, its output is repeated for one that writes."""
    model = keras.Sequential(
        [
            layers.Input((LENGTH, WORDS)),
            layers.LSTM(8),
            layers.RepeatVector(3),
            layers.LSTM(8, return_sequences=True),
            layers.TimeDistributed(layers.Dense(CLASSES, activation="softmax")),
        ]
    )
    model.compile(wrap(optimizers.Adam(1e-2)), "categorical_crossentropy", metrics=["accuracy"])
    one_hot = np.eye(WORDS, dtype=np.float32)
    return model, one_hot[TEXT], one_hot[TEXT[:, :3] % CLASSES][..., :CLASSES]


def next_frame_of_a_film(wrap):
    """Next-frame prediction with ConvLSTM2D and Conv3D."""
    model = keras.Sequential(
        [
            layers.Input((3, 8, 8, 1)),
            layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True, activation="relu"),
            layers.LayerNormalization(),
            layers.Conv3D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    model.compile(wrap(optimizers.SGD(0.1)), "binary_crossentropy")
    film = np.moveaxis(IMAGES, -1, 1)[..., None].copy()
    return model, film, (np.roll(film, -1, axis=1) > 0).astype(np.float32)


PROGRAMS = [
    masked_language_model,
    causal_language_model,
    translation_with_a_transformer,
    speech_recognition,
    bags_of_words,
    convolutions_over_characters,
    question_answering,
    fourier_transforms_instead_of_attention,
    addition_of_numbers,
    next_frame_of_a_film,
]
