"""Gradients, dense or sparse, before and after their reduction over ranks."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from hvdtrain.distributed.config import ReductionConfig

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class ReducedGradients:
    """Gradients after their reduction, still in the buckets in which they were sent."""

    sent: Sequence[tf.Tensor]
    """This rank's own buckets, before the reduction."""
    buckets: Sequence[tf.Tensor]
    """The reduced buckets; for sparse gradients, the values of all ranks."""
    unpack: Callable[[Sequence[tf.Tensor]], list[Gradient]]
    """Takes the gradients out of buckets; a scalar stands for all gradients of its bucket."""
    lost: Sequence[tf.Tensor] = ()
    """What compression has left out of this rank's buckets."""
    parts: Sequence[int] = ()
    """Positions of the buckets of which each rank holds a different part."""
    sum_over_ranks: "StepSum" = list
    """Adds up what ranks compute from these."""
    gather: "Callable[[Sequence[Gradient]], list[Gradient]]" = list
    """The whole gradients, from each rank's parts."""
    sums: Mapping[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    """For large buckets, by position in ``sent``: the sum of the elements before the reduction, whose result may
    overwrite them in memory."""

    @property
    def gradients(self) -> list[Gradient]:
        """The reduced gradients; this rank's parts of them if the optimizer is sharded."""
        return self.unpack(self.buckets)

    def total(self, numbers: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum over all gradients of a number for each bucket, the same on all ranks."""
        whole = [each for i, each in enumerate(numbers) if i not in self.parts]
        own = [each for i, each in enumerate(numbers) if i in self.parts]
        return tf.add_n([*whole, *(self.sum_over_ranks([tf.add_n(own)]) if own else [])])


GradientReducer = Callable[[Sequence[Gradient]], ReducedGradients]
StepSum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
"""Sums tensors over ranks inside a compiled step; float16 is sent and summed in float16."""


def single_rank_reducer(config: ReductionConfig) -> GradientReducer:
    """The reduction of a single rank: it sends nothing, and treats sparse gradients as on many ranks."""
    makes_dense = config.sparse_as_dense or not config.is_linear

    def reduce(gradients: Sequence[Gradient]) -> ReducedGradients:
        return unreduced([tf.convert_to_tensor(each) if makes_dense else with_unique_rows(each) for each in gradients])

    return reduce


def unreduced(gradients: Sequence[Gradient]) -> ReducedGradients:
    """Gradients that were not sent, each in a separate bucket."""

    def unpack(buckets: Sequence[tf.Tensor]) -> list[Gradient]:
        return [with_values(gradient, bucket) for gradient, bucket in zip(gradients, buckets, strict=True)]

    own = [values_of(each) for each in gradients]
    return ReducedGradients(own, own, unpack)


def is_sparse(gradient: Gradient) -> bool:
    """Whether a gradient is sparse, as of an embedding, and holds only the rows that were used."""
    return isinstance(gradient, tf.IndexedSlices)


def values_of(gradient: Gradient) -> tf.Tensor:
    """The elements of a gradient; for a sparse one, those of the rows that were used."""
    return gradient.values if is_sparse(gradient) else gradient


def sum_of_elements(tensor: tf.Tensor) -> tf.Tensor:
    """The sum of the elements, which is finite if all of them are; half precision is summed in single precision."""
    return tf.reduce_sum(tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor)


def with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    """A gradient with its values replaced; a sparse one keeps its rows."""
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sparse(gradient) else values


def with_unique_rows(gradient: Gradient) -> Gradient:
    """Adds up repeated rows of a sparse gradient; returns a dense one unchanged.

    A row that a batch uses twice is in an embedding's gradient twice, and one that two ranks use is in their
    concatenated gradients twice. Norms, and optimizers that square the gradient, need its sum.
    """
    if not is_sparse(gradient):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def most_rows(gradient: tf.IndexedSlices) -> int:
    """The most rows that a sparse gradient can have if each occurs once; 0 if unknown."""
    shape = tf.get_static_value(gradient.dense_shape)
    return 0 if shape is None else int(shape[0])


def with_shapes_of(variables: Sequence[tf.Variable], gradients: Sequence[Gradient]) -> list[Gradient]:
    """Gives gradients the static shapes of their variables.

    TensorFlow does not know them for a layer that is applied to each element of a sequence. Such gradients would be
    sent in separate messages, and could neither be divided into pieces or shards nor be compressed.
    """
    return [_with_shape(each, tf.TensorShape(v.shape)) for each, v in zip(gradients, variables, strict=True)]


def _with_shape(gradient: Gradient, shape: tf.TensorShape) -> Gradient:
    if not shape.is_fully_defined():
        return gradient
    if is_sparse(gradient):
        return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(shape.as_list(), tf.int64))
    gradient = tf.convert_to_tensor(gradient)  # A user's loop may compute it with NumPy.
    return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, shape)


def without_left_out_samples(reduced: ReducedGradients) -> ReducedGradients:
    """The mean over the samples that were not left out.

    Args:
        reduced: the last gradient is a scalar, the weight of each rank's samples, whose mean over ranks is less than 1
            if samples were left out.
    """
    unpack, weight = reduced.unpack, tf.convert_to_tensor(reduced.gradients[-1])
    return dataclasses.replace(divided(reduced, weight), unpack=lambda buckets: unpack(buckets)[:-1])


def divided(reduced: ReducedGradients, weight: tf.Tensor) -> ReducedGradients:
    """Gradients divided by a weight; zeros if it is zero."""
    buckets = [bucket * tf.cast(tf.math.divide_no_nan(1.0, weight), bucket.dtype) for bucket in reduced.buckets]
    return dataclasses.replace(reduced, buckets=buckets)


def with_parts(reduced: ReducedGradients, own: Mapping[int, Gradient], sum_over_ranks: StepSum) -> ReducedGradients:
    """Reduced gradients and, among them, others of which each rank has its part, and which are not sent.

    Args:
        own: by their positions among all gradients.
        sum_over_ranks: adds up what ranks compute from their parts.
    """
    num_sent, places = len(reduced.buckets), sorted(own)
    parts = [values_of(own[i]) for i in places]

    def merged(buckets: Sequence[tf.Tensor], others: Sequence[Gradient]) -> list[Gradient]:
        found = {i: with_values(own[i], bucket) for i, bucket in zip(places, buckets[num_sent:], strict=True)}
        rest = iter(others)
        return [found[i] if i in found else next(rest) for i in range(len(others) + len(found))]

    return dataclasses.replace(
        reduced,
        sent=[*reduced.sent, *parts],
        buckets=[*reduced.buckets, *parts],
        unpack=lambda buckets: merged(buckets, reduced.unpack(buckets[:num_sent])),
        parts=range(num_sent, num_sent + len(parts)),
        sum_over_ranks=sum_over_ranks,
    )


def reduced_but_local(
    reduce: GradientReducer, gradients: Sequence[Gradient], is_local: Sequence[bool], share: float
) -> ReducedGradients:
    """Reduces all gradients except those of local variables, which are multiplied by this rank's share of the batch."""
    shared = [gradient for gradient, local in zip(gradients, is_local, strict=True) if not local]
    reduced = iter(reduce(shared).gradients if shared else [])

    def own(gradient: Gradient) -> Gradient:
        gradient = with_unique_rows(gradient)
        return with_values(gradient, values_of(gradient) * tf.constant(share, gradient.dtype))

    return unreduced(
        [own(gradient) if local else next(reduced) for gradient, local in zip(gradients, is_local, strict=True)]
    )
