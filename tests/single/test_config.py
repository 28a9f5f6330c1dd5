"""The configuration fails when it is built, with the rule, what came and the flag."""

import math

import pytest

from hvdtrain import config
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1. Received: 0"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"learning_rate": math.nan}, "--learning-rate must be a finite number above 0. Received: nan"),
        ({"learning_rate": -0.1}, "--learning-rate must be a finite number above 0"),
        ({"clip_norm": 0.0}, "--clip-norm must be a finite number above 0"),
        ({"lr_decay": "linear"}, "--lr-decay must be one of none, exponential, cosine. Received: 'linear'"),
        ({"compression": "zip"}, "--compression must be one of none, fp16"),
        ({"ema": 1.0}, "--ema must be at least 0 and below 1. Received: 1.0"),
        ({"weight_decay": -0.1}, "--weight-decay must be a finite number of at least 0"),
        ({"groups": 0}, "--groups must be at least 1"),
        ({"bad_samples": -1}, "--bad-samples must be at least 0"),
        ({"mixed_precision": "fp8"}, "--mixed-precision must be one of none, float16, bfloat16"),
        ({"on_nan": "ignore"}, "--on-nan must be one of stop, skip"),
        ({"profile_steps": "20"}, "--profile-steps must be two steps, first:last"),
        ({"profile_steps": "9:3"}, "--profile-steps must be two steps, first:last"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "--clip-norm and --clip-value exclude each other"),
        ({"steps": 5, "epochs": 1}, "--steps and --epochs exclude each other"),
    ],
)
def test_a_broken_rule_is_named(values, message):
    with pytest.raises(UsageError) as caught:
        TrainConfig(**values)
    assert message in str(caught.value)
    assert caught.value.exit_code == 64


def test_the_range_to_profile():
    assert TrainConfig(profile_steps="20:30").profile_range == (20, 30)
    assert TrainConfig().profile_range == (0, 0)


def test_every_field_is_documented():
    assert all(len(field.metadata["help"]) > 10 for field in config.options(TrainConfig))


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('batch-size = 16\nlearning_rate = 1\noptimizer = "sgd"\ndeterministic = true\n')
    built = config.build({"batch_size": "8"}, str(file))
    assert (built.batch_size, built.learning_rate, built.optimizer, built.deterministic) == (8, 1.0, "sgd", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 3", "unknown key 'batchsize'"),
        ("batch-size = 'three'", "--batch-size must be a whole number. Received: 'three'"),
        ("batch-size = 2.5", "--batch-size must be a whole number. Received: 2.5"),
        ("steps = true", "--steps must be a whole number. Received: True"),
        ("deterministic = 1", "--deterministic must be true or false. Received: 1"),
        ("task = 5", "--task must be a text. Received: 5"),
        ("this is not TOML", "must be TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        config.build({}, str(file))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match="--config must name a readable TOML file"):
        config.build({}, "/nowhere/run.toml")
