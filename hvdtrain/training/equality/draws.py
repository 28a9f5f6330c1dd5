"""Random draws of a check: a rank draws for its samples what one process draws for the same samples.

Dropout, noise and augmentation rightly differ between ranks. Within a check, the draws of the step of one process are
kept in order, and each draw of a rank's step takes its rows of them.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.seams import keras_internals, tensorflow_internals
from hvdtrain.training.equality.compiled_recurrence import require_eager
from hvdtrain.training.equality.samples import Rows
from hvdtrain.training.equality.written_variables import WrittenVariables

_MAX_SEED = 2**31 - 1


class Draws:
    """The draws of one step of a whole batch.

    Args:
        rows: the rows of this rank.
        seed: the same on every rank.
    """

    def __init__(self, rows: Rows, seed: int):
        self._rows = rows
        self._seed = seed
        self._kept: list[Any] = []

    @contextmanager
    def kept(self, written: WrittenVariables) -> Iterator[None]:
        """In the block, the step of the whole batch is made, and its draws are kept."""
        self._kept = []
        with self._replaced(written, self._keep, self._keep_shuffle):
            yield

    @contextmanager
    def repeated(self, written: WrittenVariables) -> Iterator[None]:
        """In the block, a step draws what was kept; its rows, if it is one of this rank's samples."""
        remaining = iter(list(self._kept))

        def repeat(draw: Callable[[], tf.Tensor]) -> tf.Tensor:
            own = draw()
            return self._rows_of(next(remaining, None), own)

        def repeat_shuffle(tensor: tf.Tensor, axis: int, shuffle: Callable[[], tf.Tensor]) -> tf.Tensor:
            order, size = next(remaining, None), int(tensor.shape[axis])
            if not isinstance(order, np.ndarray):
                return shuffle()
            if len(order) == size:
                return tf.gather(tensor, order, axis=axis)
            part = self._rows.part_of(len(order), size)
            return shuffle() if part is None else tf.gather(tensor, order[part] - part.start, axis=axis)

        with self._replaced(written, repeat, repeat_shuffle):
            yield

    def digest(self) -> float:
        """A number that is equal on all ranks if they have kept the same draws."""
        return float(sum(np.sum(np.asarray(each, np.float64) * (i + 1)) for i, each in enumerate(self._kept)))

    def _keep(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        self._kept.append(draw())
        return self._kept[-1]

    def _keep_shuffle(self, tensor: tf.Tensor, axis: int, shuffle: Callable[[], tf.Tensor]) -> tf.Tensor:
        parts = self._rows.parts_of(int(tensor.shape[axis]))
        if parts is None:
            self._kept.append(None)
            return shuffle()
        # An order in which each rank's samples stay together, so that its step can shuffle them alike.
        generator = np.random.RandomState(self._seed + len(self._kept))
        order = np.concatenate([part.start + generator.permutation(part.stop - part.start) for part in parts])
        self._kept.append(order)
        return tf.gather(tensor, order, axis=axis)

    def _rows_of(self, kept: Any, own: tf.Tensor) -> tf.Tensor:
        if kept is None or len(kept.shape) != len(own.shape):
            return own
        if kept.dtype != own.dtype:
            if not (kept.dtype.is_floating and own.dtype.is_floating):
                return own
            kept = tf.cast(kept, own.dtype)
        differing = [i for i, (a, b) in enumerate(zip(kept.shape, own.shape, strict=True)) if a != b]
        if not differing:
            return kept
        axis = differing[0]
        part = self._rows.part_of(int(kept.shape[axis]), int(own.shape[axis]))
        if len(differing) > 1 or part is None:
            return own
        return tf.gather(kept, tf.range(part.start, part.stop), axis=axis)

    @contextmanager
    def _replaced(
        self,
        written: WrittenVariables,
        draw: Callable[[Callable[[], tf.Tensor]], tf.Tensor],
        shuffle: Callable[[tf.Tensor, int, Callable[[], tf.Tensor]], tf.Tensor],
    ) -> Iterator[None]:
        def drawing(operation: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
            def call(*arguments: Any, **named: Any) -> tf.Tensor:
                if not tf.executing_eagerly():
                    require_eager()
                    return operation(*arguments, **named)
                return draw(lambda: operation(*arguments, **named))

            return call

        def shuffling(operation: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
            def call(tensor: Any, *arguments: Any, **named: Any) -> tf.Tensor:
                axis = named.get("axis", 0) if operation is keras_shuffle else 0
                if not tf.executing_eagerly():
                    require_eager()
                    return operation(tensor, *arguments, **named)
                return shuffle(tf.convert_to_tensor(tensor), axis, lambda: operation(tensor, *arguments, **named))

            return call

        keras_shuffle = keras_internals.SHUFFLE.value()
        with ExitStack() as stack:
            for seam in tensorflow_internals.DRAWS:
                stack.callback(seam.replace(drawing(seam.value())))
            for seam in (keras_internals.SHUFFLE, *tensorflow_internals.SHUFFLES):
                stack.callback(seam.replace(shuffling(seam.value())))
            stack.enter_context(self._seeded(written))
            yield

    @contextmanager
    def _seeded(self, written: WrittenVariables) -> Iterator[None]:
        """In the block, all generators draw alike on all ranks."""
        states: list[Any] = []  # Kept, so that no other object gets the identity of one.

        def seeded(state: tf.Variable) -> None:
            if not tf.executing_eagerly() or any(each is state for each in states):
                return
            states.append(state)
            written.note(state)
            values = (np.arange(state.shape.num_elements()) == 0) * (self._seed + len(states))
            state.assign(values.reshape(state.shape).astype(state.dtype.as_numpy_dtype))

        draw_seed = keras.random.SeedGenerator.next
        generator = tf.random.Generator
        skip = tensorflow_internals.SKIP.of(generator)

        def next_seed(generator: Any, *arguments: Any, **named: Any) -> tf.Tensor:
            seeded(generator.state.value)
            return draw_seed(generator, *arguments, **named)

        def skip_one(generator: Any, state: tf.Variable, *arguments: Any) -> tf.Tensor:
            seeded(state)
            return skip(generator, state, *arguments)

        python_state, numpy_state = random.getstate(), np.random.get_state()
        context = tensorflow_internals.CONTEXT.value()()
        seed_name, generator_name = tensorflow_internals.CONTEXT_SEEDS
        before = vars(context)[seed_name], vars(context).get(generator_name)
        with ExitStack() as stack:
            stack.callback(replace_method(keras.random.SeedGenerator, "next", next_seed))
            stack.callback(replace_method(generator, tensorflow_internals.SKIP.name, skip_one))
            # Not tf.random.set_seed: it would also reset the random operations of compiled functions.
            vars(context).update({seed_name: self._seed, generator_name: random.Random(self._seed)})
            random.seed(self._seed)
            np.random.seed(self._seed % _MAX_SEED)
            try:
                yield
            finally:
                vars(context).update(zip((seed_name, generator_name), before, strict=True))
                random.setstate(python_state)
                np.random.set_state(numpy_state)
