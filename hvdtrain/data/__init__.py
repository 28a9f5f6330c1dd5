"""Sharded, deterministic input: sources of samples, and the datasets each rank trains and evaluates on."""

from hvdtrain.data.arrays import Arrays
from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.downloads import fetch
from hvdtrain.data.image_folder import ImageFolder
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.random_access import Batches, RandomAccess
from hvdtrain.data.source import Source
from hvdtrain.data.splits import Data
from hvdtrain.data.stream import Stream
from hvdtrain.data.table import Table
from hvdtrain.data.tfrecords import TFRecords

__all__ = [
    "Arrays",
    "BadSample",
    "Batches",
    "Data",
    "ImageFolder",
    "RandomAccess",
    "Source",
    "Stream",
    "TFRecords",
    "Table",
    "evaluation_dataset",
    "fetch",
    "training_dataset",
]
