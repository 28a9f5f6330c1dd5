"""Labelled images in a folder with a subfolder for each class."""

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.downloads import require_local
from hvdtrain.data.numbered import NumberedSource, Parts
from hvdtrain.data.pipeline import Augment
from hvdtrain.errors import DataError, UsageError
from hvdtrain.system import error_text

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_IMAGES_COMPARED = 16
_IMAGES_AT_ONCE = 16


class ImageFolder(NumberedSource):
    """Images in ``folder/class/…``, as ``keras.utils.image_dataset_from_directory`` reads them.

    Files are found once, at any depth, and read batch by batch. A sample's number is its place in the sorted list of
    paths, its label the place of its class in :attr:`class_names`. x has shape ``[height, width, channels]``, float32
    from 0 to 255; y is an int32. An image that cannot be read is skipped up to the quota of ``bad_samples``.

    Args:
        folder: the same on every rank.
        image_size: height and width in pixels that images are resized to, bilinearly.
        channels: 1 (grayscale), 3 (RGB) or 4 (RGBA).
        augment: as for :class:`~hvdtrain.data.Arrays`.

    Raises:
        DataError: the folder has no images.
        UsageError: ``image_size`` or ``channels`` is invalid.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        image_size: tuple[int, int] = (256, 256),
        channels: int = 3,
        augment: Augment | None = None,
    ):
        super().__init__(augment)
        require_local("an image folder", folder)
        if channels not in (1, 3, 4):
            raise UsageError(f"channels must be 1, 3 or 4. Received: {channels!r}")
        if len(image_size) != 2 or not all(isinstance(each, int) and each > 0 for each in image_size):
            raise UsageError(f"image_size must be height and width in pixels. Received: {image_size!r}")
        self._size, self._channels = tuple(image_size), channels
        self._folder = Path(folder)
        classes = sorted(each for each in self._folder.glob("*") if each.is_dir())
        found = [
            (path.relative_to(self._folder).as_posix(), label)
            for label, each in enumerate(classes)
            for path in sorted(Path(within, name) for within, _, names in os.walk(each) for name in names)
            if path.suffix.lower() in _SUFFIXES
        ]
        if not found:
            raise DataError(
                f"an image folder must have a subfolder for each class, with {', '.join(_SUFFIXES)} files. Received: "
                f"{self._folder}, with {len(classes)} subfolders and no such file"
            )
        self.class_names = [each.name for each in classes]
        """Names of the subfolders, by label."""
        self._names = [name for name, _ in found]
        self._labels = np.array([label for _, label in found], np.int32)
        self.num_samples = len(found)

    def facts(self) -> dict[str, Any]:
        """The number of images, and a digest of their names and of the bytes of 16 of them."""
        digest = hashlib.sha256("\n".join(self._names).encode(errors="surrogateescape"))
        for number in np.unique(np.linspace(0, self.num_samples - 1, _IMAGES_COMPARED).astype(np.int64)):
            with contextlib.suppress(OSError):  # A bad sample, when it is read.
                digest.update((self._folder / self._names[number]).read_bytes())
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads each of these images separately and returns those that fail."""
        bad = []
        for number in map(int, numbers):
            path = str(self._folder / self._names[number])
            try:
                self._image(tf.constant(os.fsencode(path)))
            except tf.errors.OpError as error:
                shown = path.encode(errors="backslashreplace").decode()
                bad.append(BadSample(number, shown, error_text.message(error) or type(error).__name__))
        return bad

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Paths and labels, outside of the graphs of datasets, which would each hold a copy."""
        with tf.init_scope(), tf.device("CPU"):
            # As bytes: names need not be valid UTF-8.
            paths = [os.fsencode(self._folder / name) for name in self._names]
            return tf.constant(paths), tf.constant(self._labels)

    def _read(self, numbers: tf.Tensor) -> Parts:
        paths, labels = self._tensors
        spec = tf.TensorSpec((*self._size, self._channels), tf.float32)
        images = tf.map_fn(
            self._image, tf.gather(paths, numbers), fn_output_signature=spec, parallel_iterations=_IMAGES_AT_ONCE
        )
        return images, tf.gather(labels, numbers)

    def _image(self, path: tf.Tensor) -> tf.Tensor:
        pixels = tf.io.decode_image(tf.io.read_file(path), channels=self._channels, expand_animations=False)
        image = tf.image.resize(pixels, self._size)
        return tf.ensure_shape(image, (*self._size, self._channels))
