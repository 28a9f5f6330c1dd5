"""Makes trainers from options by their flat names, for the tests of one process and of several ranks."""

import hvdtrain
from hvdtrain.config.fields import with_options
from hvdtrain.data import Data


def train_config(**options) -> hvdtrain.TrainConfig:
    """``train_config(batch_size=8, on_nan="skip")``."""
    return with_options(hvdtrain.TrainConfig(), options)


def make_trainer(
    model,
    training,
    evaluation=None,
    *,
    callbacks=(),
    reporter=None,
    checkpointer=None,
    job_watch=None,
    collectives=None,
    **options,
) -> hvdtrain.Trainer:
    """A trainer whose configuration holds the options."""
    return hvdtrain.Trainer(
        model,
        Data(training, evaluation),
        train_config(**options),
        callbacks=callbacks,
        reporter=reporter,
        checkpointer=checkpointer,
        job_watch=job_watch,
        collectives=collectives,
    )
