"""A training step in two compiled halves: this rank's gradients, and the update with those of all contributors."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.gradient_buckets import BucketLayout, bucket_layout
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients
from hvdtrain.training.step_snapshot import StepSnapshot
from hvdtrain.training.train_step import TrainStep

Buckets = Sequence[tf.Tensor]


class SplitStep:
    """The halves of a model's ``train_step``; both are compiled when it is made.

    Args:
        model: built, with its metrics; its optimizer is distributed.
        element_spec: of the data, as ``train_step`` takes it.
    """

    def __init__(self, model: keras.Model, train_step: TrainStep, element_spec: Any):
        self._train_step = train_step
        pipelines = train_step.pipelines
        leaf, pipeline = pipelines[0]
        reduction = pipeline.reduce
        self._groups = reduction.config.groups
        reduced = dataclasses.replace(reduction, is_done=True, reducer=self._as_reduced)
        train_step.use_pipelines([(leaf, dataclasses.replace(pipeline, reduce=reduced))])
        self._variables: Sequence[keras.Variable] = []
        self._layout: BucketLayout | None = None
        self._own: Buckets = []
        self._snapshot = StepSnapshot(model, train_step.times)
        weight_spec = tf.TensorSpec([], keras.config.floatx())
        self._compute = tf.function(self._gradients, input_signature=[element_spec, weight_spec], autograph=False)
        sent = self._compute.get_concrete_function().structured_outputs
        self.zeros: Buckets = [tf.zeros(each.shape, each.dtype) for each in sent]
        """Gradients of no sample."""
        buckets = [tf.TensorSpec(each.shape, each.dtype) for each in self.zeros]
        scalars = [tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.bool)]
        self._update = tf.function(self._updated, input_signature=[buckets, buckets, *scalars], autograph=False)
        # Now: during the first update, other ranks would wait.
        self._update.get_concrete_function()

    def gradients(self, data: Any, weight: float) -> Buckets:
        """Computes this rank's gradients of a micro-batch, multiplied by its weight.

        Metrics, statistics and random state are those after the micro-batch, until :meth:`drop`.

        Raises:
            UsageError: the model's loss cannot be combined over ranks.
        """
        with self._train_step.explained_errors():
            found = self._compute(data, tf.constant(weight, keras.config.floatx()))
            tf.test.experimental.sync_devices()  # A GPU would still compute.
        return found

    def drop(self) -> None:
        """Undoes what :meth:`gradients` changed, because the micro-batch was too late."""
        self._snapshot.undo(self._train_step.steps_made + 1)

    def update(self, own: Buckets, sums: Buckets, weight: float, *, has_contributed: bool) -> None:
        """Updates the model with a mean gradient; all ranks make the same updates.

        Args:
            own: this rank's gradients, zeros if it has not contributed.
            sums: of the gradients of all contributors.
            weight: the sum of their weights.

        Raises:
            NonFiniteError: on every rank: the gradient is not finite, with ``on_nan='stop'``.
        """
        with self._train_step.explained_errors():
            self._update(list(own), list(sums), tf.constant(weight, tf.float64), tf.constant(has_contributed))

    # What is traced, from here on.

    def _gradients(self, data: Any, weight: tf.Tensor) -> Buckets:
        self._snapshot.take()
        found, variables = self._train_step.gradients(data, weight)
        pairs = [(each, variable) for each, variable in zip(found, variables, strict=True) if each is not None]
        self._variables = [variable for _, variable in pairs]
        dense = [tf.ensure_shape(tf.convert_to_tensor(each), variable.shape) for each, variable in pairs]
        self._layout = bucket_layout(dense, self._groups)
        return self._layout.pack(dense)

    def _updated(self, own: Buckets, sums: Buckets, weight: tf.Tensor, has_contributed: tf.Tensor) -> None:
        assert self._layout is not None
        self._own = own
        mean = [each / tf.cast(weight, each.dtype) for each in sums]
        self._train_step.update(self._layout.unpack(mean), self._variables, has_contributed)

    def _as_reduced(self, gradients: Sequence[Gradient]) -> ReducedGradients:
        assert self._layout is not None
        return ReducedGradients(self._own, self._layout.pack(gradients), self._layout.unpack)
