"""Samples that a model preprocesses before it trains on them, as the models of KerasHub do in ``model.fit``."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.pipeline import parallel_calls
from hvdtrain.data.sample_draws import SampleDraws
from hvdtrain.data.source import Source
from hvdtrain.data.splits import Data

Preprocess = Callable[[Any, Any, Any], Any]
"""Maps a batch's x, y and sample weights (None where there are none) to those that ``train_step`` takes."""


class Preprocessed:
    """A source whose batches pass through a function, which must leave the number of samples as it is."""

    def __init__(self, source: Source, preprocess: Preprocess):
        self._source = source
        self._preprocess = preprocess

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def keeps_order(self) -> bool:
        return self._source.keeps_order

    @property
    def can_change(self) -> bool:
        return self._source.can_change

    @property
    def bad_samples(self) -> Sequence[BadSample]:
        return self._source.bad_samples

    def facts(self) -> dict[str, Any]:
        return self._source.facts()

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        return self._source.find_bad(numbers)

    def training_batches(self, draws: SampleDraws) -> tf.data.Dataset:
        batches = self._source.training_batches(draws)
        return batches.map(lambda data, factor: (self._preprocessed(data), factor), parallel_calls())

    def evaluation_batches(self, draw: Callable[[], list[np.ndarray]]) -> tf.data.Dataset:
        batches = self._source.evaluation_batches(draw)
        return batches.map(lambda *data: self._preprocessed(data), parallel_calls())

    def _preprocessed(self, data: Any) -> Any:
        return self._preprocess(*keras.utils.unpack_x_y_sample_weight(data))


def preprocessed(source: Source, model: keras.Model) -> Source:
    """The samples as ``train_step`` takes them: preprocessed, if the model has KerasHub's ``preprocess_samples``."""
    preprocess = getattr(model, "preprocess_samples", None)
    if preprocess is None or isinstance(source, Preprocessed):
        return source
    return Preprocessed(source, preprocess)


def preprocessed_data(data: Data, model: keras.Model) -> Data:
    """The same for training and evaluation samples."""
    evaluation = None if data.evaluation is None else preprocessed(data.evaluation, model)
    return dataclasses.replace(data, training=preprocessed(data.training, model), evaluation=evaluation)
