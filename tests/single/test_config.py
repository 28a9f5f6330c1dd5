"""Configurations fail when they are built, with the rule, what was received and the flag."""

import dataclasses
import inspect
import math

import pytest
from trainers import train_config

from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.config import EvalConfig, ExportConfig, RunConfig
from hvdtrain.config.fields import Config, as_dict, option_names, with_options
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.loggers.config import LoggingConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1. Received: 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"seed": -1}, "seed must be from 0 to 4294967295"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number above 0. Received: nan"),
        ({"learning_rate": -0.1}, "learning_rate must be a finite number above 0"),
        ({"clip_norm": 0.0}, "clip_norm must be a finite number above 0"),
        ({"lr_decay": "linear"}, "lr_decay must be one of none, exponential, cosine. Received: 'linear'"),
        ({"compression": "zip"}, "compression must be none, fp16, or powersgd:RANK"),
        ({"ema": 1.0}, "ema must be at least 0 and below 1. Received: 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number, at least 0"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"bad_samples": -1}, "bad_samples must be at least 0"),
        ({"guard_every": 0}, "guard_every must be at least 1"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of none, float16, bfloat16"),
        ({"on_nan": "halt"}, "on_nan must be one of stop, skip, ignore. Received: 'halt'"),
        ({"profile_steps": "20"}, "profile_steps must be two steps, first:last"),
        ({"profile_steps": "9:3"}, "profile_steps must be two steps, first:last"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm excludes clip_value"),
        ({"steps": 5, "epochs": 1}, "steps excludes epochs"),
        # Combinations that cannot work.
        ({"mode": "local", "gradient_accumulation_steps": 4}, "mode='local' excludes gradient_accumulation_steps"),
        ({"mode": "local", "sync_batchnorm": True}, "mode='local' excludes sync_batchnorm=True"),
        ({"mode": "local", "op": "adasum"}, "mode='local' excludes op='adasum'"),
        ({"shard_optimizer": True, "mode": "local"}, "mode='local' excludes shard_optimizer=True"),
        ({"shard_optimizer": True, "quorum": 1}, "quorum excludes shard_optimizer=True"),
        ({"shard_optimizer": True, "op": "adasum"}, "shard_optimizer=True excludes op='adasum'"),
        ({"shard_optimizer": True, "compression": "fp16"}, "shard_optimizer=True excludes compression"),
        (
            {"mode": "local", "overlap": True, "average_slots": "average", "wait_free": True},
            "overlap=True excludes average_slots='average'",
        ),
        ({"jit_compile": True, "deterministic": True}, "jit_compile=True excludes deterministic=True"),
        ({"jit_compile": True, "sync_batchnorm": True}, "jit_compile=True excludes sync_batchnorm=True"),
        ({"rescale": True, "global_batch_size": 64}, "rescale=True excludes global_batch_size"),
        ({"rescale": True, "mode": "local"}, "rescale=True excludes mode='local'"),
        ({"rescale": True, "quorum": 1}, "rescale=True excludes quorum"),
        ({"rescale": True, "remainder": "drop"}, "rescale=True excludes remainder='drop'"),
        ({"rescale": True, "lr_decay": "cosine"}, "rescale=True excludes lr_decay"),
        (
            {"rescale": True, "lr_scaling": "sqrt", "warmup_steps": 9},
            "rescale=True excludes lr_scaling with warmup_steps",
        ),
        ({"op": "adasum", "groups": 2}, "op='adasum' excludes groups"),
        ({"sync_every": 8}, "sync_every needs mode='local'"),
        ({"wait_free": True}, "wait_free needs mode='local'"),
        # Values of other types, as a task's defaults may be.
        ({"batch_size": "8"}, "batch_size must be a whole number. Received: '8'"),
        ({"batch_size": True}, "batch_size must be a whole number. Received: True"),
        ({"ema_ramp": 1}, "ema_ramp must be true or false. Received: 1"),
        ({"batch": 3}, "unknown option 'batch'"),
    ],
)
def test_a_broken_rule_is_named(values, message):
    with pytest.raises(UsageError) as caught:
        with_options(RunConfig(), values)
    assert message in str(caught.value)
    assert caught.value.exit_code == 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync_every": 0}, "sync_every must be at least 1"),
        ({"outer": "nesterov", "outer_momentum": 2.0}, "at least 0 and below 1"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "at least 0 and below 1"),
        ({"outer": "nesterov", "outer_learning_rate": 0.0}, "above 0 and at most 2"),
        ({"outer_learning_rate": 5.0, "outer_momentum": 7.0}, "outer_learning_rate needs outer='nesterov'"),
        ({"outer_momentum": 0.5}, "outer_momentum needs outer='nesterov'"),
        ({"outer": "adam"}, "outer must be one of average, nesterov"),
        ({"average_slots": "reset"}, "average_slots must be one of average, keep"),
        ({"sync_schedule": "linear"}, "sync_schedule must be one of constant, adacomm"),
        ({"average_across": "rack"}, "average_across must be one of rank, host"),
        ({"sync_steps_first": -1}, "sync_steps_first must be at least 0"),
        ({"overlap": True, "average_slots": "average"}, "overlap=True excludes average_slots='average'"),
        ({"wait_free": True, "average_slots": "average"}, "wait_free=True excludes average_slots='average'"),
        ({"wait_free": True, "average_across": "host"}, "wait_free=True excludes average_across='host'"),
        ({"wait_free": True, "sync_schedule": "adacomm"}, "wait_free=True excludes sync_schedule='adacomm'"),
        ({"fragments": 0}, r"fragments must be at least 1 and at most sync_every \(16\)\. Received: 0"),
        ({"fragments": 5, "sync_every": 4}, r"fragments must be at least 1 and at most sync_every \(4\)\. Received: 5"),
        (
            {"fragment_delay": 17, "overlap": True},
            r"fragment_delay must be .* at most sync_every \(16\)\. Received: 17",
        ),
        ({"fragment_delay": 0, "overlap": True}, "fragment_delay must be at least 1"),
        ({"fragment_delay": 3}, "fragment_delay needs overlap=True"),
        ({"merge_alpha": 0.0}, "merge_alpha must be above 0 and at most 1"),
        ({"merge_alpha": 1.5}, "merge_alpha must be above 0 and at most 1"),
        ({"merge_alpha": 0.5, "average_slots": "average"}, "merge_alpha excludes average_slots='average'"),
        (
            {"wait_free": True, "overlap": True, "fragment_delay": 2},
            "wait_free=True excludes fragment_delay",
        ),
        ({"round_quorum": 2}, "round_quorum needs wait_free=True"),
        ({"wait_free": True, "round_grace": 0.5}, "round_grace needs round_quorum"),
        ({"wait_free": True, "round_quorum": 0}, "round_quorum must be at least 1"),
        ({"fragments": 2, "sync_schedule": "adacomm"}, "sync_schedule='adacomm' excludes fragments"),
    ],
)
def test_local_sgd_has_rules(values, message):
    with pytest.raises(UsageError, match=message):
        LocalSGDConfig(**values)


def test_the_range_to_profile():
    assert LoggingConfig(profile_steps="20:30").profile_range == (20, 30)
    assert LoggingConfig().profile_range is None


COMMANDS = [RunConfig, BenchConfig, EvalConfig, ExportConfig]


@pytest.mark.parametrize("kind", COMMANDS)
def test_options_have_one_name_each(kind):
    names = option_names(kind)
    assert len(set(names)) == len(names)


def parts_of(kind: type[Config]) -> set[type[Config]]:
    parts = {kind}
    for field in dataclasses.fields(kind):
        if callable(field.default_factory):
            part = type(field.default_factory())
            parts |= parts_of(part) if issubclass(part, Config) else set()
    return parts


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_option_is_documented_below_its_field(kind):
    for part in parts_of(kind):
        lines = inspect.getsource(part).splitlines()
        for name in vars(part).get("__annotations__", {}):
            (index,) = (i for i, line in enumerate(lines) if line.startswith(f"    {name}:"))
            if dataclasses.is_dataclass(part.__dataclass_fields__[name].type) or "parse=False" in lines[index]:
                continue
            rest = "\n".join(lines[index:])
            assert '"""' in rest.split("\n    \n")[0], f"{part.__name__}.{name} has no documentation"


def test_options_survive_a_round_trip():
    config = with_options(RunConfig(), {"mode": "local", "sync_every": 4, "batch_size": 8, "learning_rate": 0.1})
    assert with_options(RunConfig(), as_dict(config)) == config
    assert (config.training.local_sgd.sync_every, config.learning_rate.learning_rate) == (4, 0.1)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        train_config().batch_size = 3


def test_checkpoints_of_local_sgd_know_their_run_by_all_options():
    """This text is part of the identity of a run, see training/identity.py."""
    text = str(LocalSGDConfig())
    assert all(f"{field.name}=" in text for field in dataclasses.fields(LocalSGDConfig))
