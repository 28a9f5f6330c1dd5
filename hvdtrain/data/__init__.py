"""Sharded, deterministic input."""

from hvdtrain.data.arrays import Arrays
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.source import BadSample, Source
from hvdtrain.data.stream import Stream
from hvdtrain.data.tfrecords import TFRecords

__all__ = ["Arrays", "BadSample", "Source", "Stream", "TFRecords", "evaluation_dataset", "training_dataset"]
