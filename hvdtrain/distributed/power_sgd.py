"""PowerSGD: low-rank approximations of gradients."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.compression import Compressed, Compression, Ranks
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Reduces each matrix M, shape ``[n, m]``, as a product of low rank (Vogels et al., arXiv:1905.13727).

    One step of power iteration, which starts with the Q of the step before: ``P = mean(M Q)``, orthonormalized, and
    ``Q = mean(M^T P)``; the mean of M is taken for ``P Q^T``. Two small allreduces replace a large one. Kernels with
    more than two dimensions are matrices of the most nearly square shape that keeps the order of their elements.
    Gradients that would not become at least twice as small are sent whole: vectors, small matrices, sparse gradients.

    Raises:
        UsageError: ``rank`` is below 1, or ``start_after`` below 0.
    """

    rank: int = 4
    """The number of columns of P and Q."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise UsageError(f"rank must be at least 1. Received: {self.rank}")

    def num_bytes(self, gradient: tf.TensorSpec) -> int | None:
        """The bytes of P and Q; see :meth:`Compression.num_bytes`."""
        if gradient.dtype not in (tf.float32, tf.float64) or gradient.shape.rank < 2:
            return None
        rows, columns = matrix_shape(gradient.shape)
        sent = self.rank * (rows + columns)
        return sent * gradient.dtype.size if 2 * sent <= rows * columns else None

    def initial_state(self, gradients: Sequence[tf.TensorSpec]) -> dict[str, np.ndarray]:
        """A random Q for each matrix, of a fixed seed."""
        generator = np.random.default_rng(0)
        return {
            f"q_{i}": generator.normal(size=(matrix_shape(each.shape)[1], self.rank)).astype(each.dtype.as_numpy_dtype)
            for i, each in enumerate(gradients)
        }

    def reduce(self, gradients: Sequence[tf.Tensor], state: Mapping[str, tf.Tensor], ranks: Ranks) -> Compressed:
        """See :meth:`Compression.reduce`."""
        matrices = [tf.reshape(each, matrix_shape(each.shape)) for each in gradients]
        before = [state[f"q_{i}"] for i in range(len(matrices))]
        p = ranks.mean([matrix @ q for matrix, q in zip(matrices, before, strict=True)])
        # Householder reflections: orthonormal also if columns of P are parallel or zero, as the gradients of few
        # samples make them, where Gram-Schmidt divides rounding errors by their norm.
        bases = [tf.linalg.qr(each)[0] for each in p]
        own = [tf.matmul(matrix, basis, transpose_a=True) for matrix, basis in zip(matrices, bases, strict=True)]
        q = ranks.mean(own)

        def product(basis: tf.Tensor, factor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.matmul(basis, factor, transpose_b=True), like.shape)

        return Compressed(
            [product(*each) for each in zip(bases, q, gradients, strict=True)],
            [product(*each) for each in zip(bases, own, gradients, strict=True)],
            {f"q_{i}": each for i, each in enumerate(q)},
        )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The most nearly square matrix that a kernel's elements fill in their order."""
    sizes = list(shape)
    splits = [(math.prod(sizes[:i]), math.prod(sizes[i:])) for i in range(1, len(sizes))]
    return min(splits, key=sum)
