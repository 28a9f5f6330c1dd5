"""On all ranks: each program trains as in one process on the whole batch, or is refused."""

import functools
import json
import re
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import program_tasks
import pytest
import table
import tensorflow as tf
from models import SHARED_GPUS
from program_tasks import InOrder
from programs import ADAPTIVE_WITH_EMBEDDINGS, PROGRAMS, REFUSED
from programs.samples import NUM_SAMPLES
from programs.whole_batch import contrastive_language_image_pretraining
from trainers import make_trainer

import hvdtrain
from hvdtrain.commands import cli, session
from hvdtrain.distributed import runtime
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import HvdtrainError, UsageError

TOPOLOGY = hvdtrain.init(gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 16
STEPS = NUM_SAMPLES // GLOBAL_BATCH
BATCH = GLOBAL_BATCH // SIZE


@functools.cache
def train_alone(program):
    def wrap(optimizer):
        if program.__name__ in ADAPTIVE_WITH_EMBEDDINGS:
            return hvdtrain.DistributedOptimizer(optimizer, collectives=SingleProcessCollectives())
        return optimizer

    model, x, y = made(program, wrap)
    model.run_eagerly = True  # for so few steps, a graph costs more than it saves
    initial = weights(model)
    model.fit(x, y, GLOBAL_BATCH, shuffle=False, verbose=0)
    assert max(np.max(np.abs(a - b)) for a, b in zip(weights(model), initial, strict=True)) > 1e-4
    return weights(model), {name: values[-1] for name, values in model.history.history.items()}


def train_with_fit(program, folder):
    model, x, y = made(program, hvdtrain.DistributedOptimizer)
    own = np.arange(NUM_SAMPLES).reshape(STEPS, SIZE, BATCH)[:, RANK].ravel()
    hvdtrain.broadcast(model)
    model.fit(*tf.nest.map_structure(lambda each: each[own], (x, y)), BATCH, shuffle=False, verbose=0)
    return model, None


def train_with_trainer(program, folder):
    model, x, y = made(program, lambda optimizer: optimizer)
    last = {}
    logs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, values: last.update(values))
    make_trainer(model, InOrder(x, y), batch_size=BATCH, steps=STEPS, callbacks=[logs]).fit()
    return model, last


def train_with_task(program, folder):
    """Runs the command line in this process."""

    def end_job(error, collectives, step, watch):
        if watch is not None:
            watch.close()
        raise error

    options = {"task": f"program_tasks:{program.__name__}", "steps": STEPS, "batch-size": BATCH, "run-dir": folder}
    with mock.patch.object(session, "end_job", end_job):
        assert cli.main([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    loss = {} if summary["loss"] is None else {"loss": summary["loss"]}  # A train_step may name its losses.
    return program_tasks.MODELS[program.__name__], {**loss, **summary["metrics"]}


WAYS = dict(zip(table.WAYS, (train_with_fit, train_with_trainer, train_with_task), strict=True))


def made(program, wrap):
    keras.utils.set_random_seed(1)
    return program(wrap)


def weights(model):
    return [variable.numpy() for variable in model.weights]


def parameters():
    """Every program in every way; CI runs every seventh program in one of them."""
    for number, program in enumerate(PROGRAMS):
        for way in WAYS:
            often = number % 7 == 0 and way == list(WAYS)[number // 7 % len(WAYS)]
            yield pytest.param(program, way, id=f"{program.__name__}-{way}", marks=[] if often else pytest.mark.long)


def checked_difference(model, alone) -> float:
    """How far the weights are from those of one process; fails if it is too far, or if the ranks differ."""
    for theirs in COLLECTIVES.allgather(weights(model)):
        for mine, other in zip(weights(model), theirs, strict=True):
            assert np.array_equal(mine, other)
    difference = max(
        np.max(np.abs(ours - theirs)) / max(1, np.max(np.abs(theirs)))
        for ours, theirs in zip(weights(model), alone, strict=True)
    )
    assert difference < 1e-6
    return difference


@pytest.mark.parametrize(("program", "way"), parameters())
def test_program(program, way, tmp_path, record_property):
    folder = Path(COLLECTIVES.allgather(str(tmp_path / "run"))[0])
    refusal = REFUSED.get(program.__name__)
    if refusal is not None:
        with pytest.raises(HvdtrainError if way == "task" else UsageError, match=re.escape(refusal)) as caught:
            WAYS[way](program, folder)
        assert "\n" not in str(caught.value)
        record_property(table.RESULT, f"refused: {refusal}")
        return
    alone, values_alone = train_alone(program)
    model, values = WAYS[way](program, folder)
    difference = checked_difference(model, alone)
    if values is not None:
        assert values == pytest.approx(values_alone, rel=1e-4, abs=1e-5)
    record_property(table.RESULT, f"equal ({difference:.0e})")


# Options of DistributedOptimizer and of Trainer, and the beginning of the messages by which they refuse programs.
OPTIONS = {
    "balance": ({}, {"balance": True, "balance_every": 2}, None),
    "bad_samples": ({}, {"bad_samples": 5}, None),
    "groups": ({"groups": 1}, {}, None),
    "jit_compile": ({}, {"jit_compile": True}, "jit_compile=True excludes a "),
    "on_nan": ({}, {"on_nan": "skip"}, "on_nan='skip' excludes a "),
    "quorum": ({}, {"quorum": SIZE}, "quorum excludes a "),
    "shard_optimizer": ({"shard_optimizer": True}, {}, "a sharded optimizer must update each element"),
    "sparse_as_dense": ({"sparse_as_dense": True}, {}, None),
    "steps_per_execution": ({}, {"steps_per_execution": 3}, None),
    "sync_batchnorm": ({}, {"sync_batchnorm": True}, None),
}


def programs_and_options():
    """Every program with every option; CI runs each option with one of them."""
    for i, program in enumerate(PROGRAMS):
        for j, option in enumerate(OPTIONS):
            marks = [] if i == 2 * j + 1 else pytest.mark.long
            yield pytest.param(program, option, id=f"{program.__name__}-{option}", marks=marks)


@pytest.mark.parametrize(("program", "option"), programs_and_options())
def test_program_with_an_option(program, option):
    for_optimizer, for_trainer, refusal = OPTIONS[option]

    def train():
        model, x, y = made(program, functools.partial(hvdtrain.DistributedOptimizer, **for_optimizer))
        make_trainer(model, InOrder(x, y), batch_size=BATCH, steps=STEPS, **for_trainer).fit()
        return model

    if program.__name__ in REFUSED:
        with pytest.raises(HvdtrainError):
            train()
        return
    try:
        model = train()
    except HvdtrainError as error:
        if refusal is None or not re.match(refusal, str(error)):
            raise
        return
    checked_difference(model, train_alone(program)[0])


def test_gathers_of_a_step_do_not_wait_for_each_other():
    """TensorFlow would communicate the numbers of samples, which are constants, while it compiles a step: one after
    the other, and in most of these trainings in another order on each rank."""
    for _ in range(6):
        train_with_fit(contrastive_language_image_pretraining, None)
