"""Checks that values are finite before they are averaged: one that is not would make all replicas non-finite."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.wording import option
from hvdtrain.errors import NonFiniteError


def are_finite(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether all elements are finite."""
    return all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in tensors)


def non_finite_paths(variables: Sequence[keras.Variable]) -> list[str]:
    """The paths of the variables with an element that is not finite."""
    return [variable.path for variable in variables if not np.all(np.isfinite(variable.numpy()))]


def non_finite_error(paths_of_ranks: Sequence[Sequence[str]], rank: int | None = None) -> NonFiniteError:
    """The error for variables of some ranks.

    Args:
        paths_of_ranks: for each rank, the paths of its non-finite variables; the last ranks may be missing.
        rank: the only rank that raises it; None: all ranks do.
    """
    culprits = [
        f"{len(paths)} variable(s) of rank {rank}, {paths[0]!r} first"
        for rank, paths in enumerate(paths_of_ranks)
        if paths
    ]
    return NonFiniteError(
        f"parameters must be finite to be averaged. Received: {'; '.join(culprits) or 'an overflow of their sum'}. "
        f"Lower the learning rate, or clip gradients ({option('clip_norm', argument='global_clipnorm')}).",
        rank=rank,
    )
