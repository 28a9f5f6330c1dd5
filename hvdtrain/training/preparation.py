"""Compares the ranks before the first step, makes their replicas equal, and creates the variables that steps need."""

import keras

from hvdtrain.data import Source
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import build_optimizer
from hvdtrain.training.eval_step import build_metrics
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.tracing import trace_train_step


def prepare_ranks(
    model: keras.Model,
    source: Source,
    *,
    feed: TrainingFeed,
    quota: BadSampleQuota,
    record: GradientRecord,
    requires_metrics: bool,
    collectives: Collectives,
) -> None:
    """Compares data and models, and broadcasts rank 0's variables; all ranks must call it.

    Args:
        requires_metrics: see :func:`create_metrics`.

    Raises:
        JobError: on every rank: more samples are unreadable than allowed.
        DisagreementError: ranks differ in data or model.
    """
    require_agreement("training data", source.facts(), collectives)
    quota.note_known(source.bad_samples)
    build_optimizer(model)
    record.build(model.trainable_variables)
    require_agreement("model", replica_consistency.structure(model), collectives)
    replica_consistency.broadcast(model, collectives=collectives)
    create_metrics(model, feed, required=requires_metrics)


def create_metrics(model: keras.Model, feed: TrainingFeed, *, required: bool) -> None:
    """Creates the variables of the model's metrics.

    Args:
        required: False: leave it to the first step if Keras cannot derive them from model and data.
    """
    try:
        build_metrics(model, feed.element_spec)
    except Exception:
        # A user's own train_step need not call the model as Keras would.
        if required:
            trace_train_step(model, feed.element_spec)
