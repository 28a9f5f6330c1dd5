"""On all ranks: the check finds no difference in programs that are equal to one process, whatever options they use."""

import contextlib

import keras
import pytest
import table
import tensorflow as tf
from models import SHARED_GPUS
from noted_findings import noted_findings
from programs import PROGRAMS, REFUSED
from programs.samples import NUM_SAMPLES

import hvdtrain
from hvdtrain.errors import HvdtrainError, UnequalError

TOPOLOGY = hvdtrain.init(gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
BATCH = NUM_SAMPLES // SIZE // 2


def with_attributes(**attributes):
    def change(optimizer):
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        return optimizer

    return change


CHANGES = {
    "plain": with_attributes(),
    "accumulation": with_attributes(gradient_accumulation_steps=2),
    "clipping": with_attributes(global_clipnorm=0.05),
    "ema": with_attributes(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=1),
    "mixed_bfloat16": with_attributes(),
    "mixed_float16": with_attributes(),
    "different_sizes": with_attributes(),
}
"""What is changed in the optimizers of a program."""


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name if name.startswith("mixed") else before)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def parameters():
    """CI runs one program with each option."""
    for i, program in enumerate(PROGRAMS):
        for j, option in enumerate(CHANGES):
            marks = [] if i == 3 * j else pytest.mark.long
            yield pytest.param(program, option, id=f"{program.__name__}-{option}", marks=marks)


def train(program, option, wrap):
    keras.utils.set_random_seed(1)
    size = max(1, BATCH - RANK) if option == "different_sizes" else BATCH
    num_steps = 2 if option == "accumulation" else 1
    with policy(option):
        model, x, y = program(wrap)
        x, y = tf.nest.map_structure(lambda each: each[: size * num_steps], hvdtrain.shard(x, y))
        hvdtrain.broadcast(model)
        # For so few steps, a graph costs more than it saves; one shows how a train_step uses gradients.
        model.run_eagerly = type(model).train_step is keras.Model.train_step
        model.fit(x, y, size, shuffle=False, verbose=0)


@pytest.mark.parametrize(("program", "option"), parameters())
def test_no_false_alarm(program, option, record_property, monkeypatch):
    findings = noted_findings(monkeypatch)
    try:
        train(program, option, lambda optimizer: hvdtrain.DistributedOptimizer(CHANGES[option](optimizer)))
    except UnequalError:
        raise
    except HvdtrainError as error:
        assert option != "plain" or program.__name__ in REFUSED
        record_property(table.RESULT, f"refused: {error}")
        return
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        # Such as a loss of a program's own, of targets and predictions of different dtypes; or int8 with float16.
        assert option.startswith("mixed")
        with pytest.raises(type(error)):
            train(program, option, lambda optimizer: optimizer)
        record_property(table.RESULT, "not computed by one process either")
        return
    assert program.__name__ not in REFUSED
    assert len(findings) == 1
    record_property(table.RESULT, findings[0].unchecked or findings[0].noted or "equal")
