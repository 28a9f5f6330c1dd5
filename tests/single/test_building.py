"""What is built from a configuration and a task: defaults, the optimizer, the learning rate."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.commands import building, cli
from hvdtrain.config.fields import as_dict
from hvdtrain.data import Arrays, Data
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.optim.distributed_optimizer import distribute, is_distributed
from hvdtrain.tasks.loading import load_task
from hvdtrain.tasks.task import Task

hvdtrain.init()
X = np.zeros((100, 3), np.float32)
DATA = Data(Arrays(X, X[:, :1]))


def task(**fields) -> Task:
    def model(data):
        return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])

    return Task(**{"model": model, "data": lambda folder: DATA, "loss": "mse", **fields})


def asked(*flags):
    return cli.parse(None, flags)


def filled(*flags, **fields):
    """The options, by their flat names, with the task's defaults."""
    return SimpleNamespace(**as_dict(building.with_task_defaults(asked(*flags), task(**fields))))


def test_the_task_sets_what_was_not_set():
    defaults = {"batch_size": 8, "epochs": 3, "log_every": 100, "ema": 0.9, "ema_ramp": True}
    found = filled("--batch-size", "4", defaults=defaults)
    assert (found.batch_size, found.epochs, found.log_every, found.ema, found.ema_ramp) == (4, 3, 100, 0.9, True)
    assert (found.optimizer, found.learning_rate) == ("adam", pytest.approx(1e-3))


def test_what_was_set_wins_even_if_it_is_the_default():
    assert filled("--log-every", "10", defaults={"log_every": 100}).log_every == 10


def test_bench_takes_the_defaults_that_it_has():
    config = cli.parse("bench", [])
    filled_in = building.with_task_defaults(config, task(defaults={"batch_size": 8, "epochs": 3}))
    assert filled_in.training.batch_size == 8


def test_steps_and_epochs_exclude_each_other():
    assert filled("--steps", "7", defaults={"epochs": 3}).epochs is None
    assert filled(defaults={"steps": 3}).epochs is None
    assert (filled("--epochs", "7", defaults={"steps": 3}).steps, filled().epochs) == (None, 1)
    decay = filled("--lr-decay-steps", "5", defaults={"lr_decay_epochs": 350})
    assert (decay.lr_decay_steps, decay.lr_decay_epochs) == (5, None)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"batch": 3}, "must be options of train. Received: 'batch'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_wrong_defaults_are_refused(defaults, message):
    with pytest.raises(UsageError, match=message):
        filled(defaults=defaults)


def test_an_optimizer_of_the_tasks_own_is_changed_by_flags():
    own = {"optimizer": lambda: keras.optimizers.Adam(0.25, beta_2=0.5)}
    config = building.with_task_defaults(asked("--clip-norm", "2", "--ema", "0.5"), task(**own))
    optimizer = building.make_optimizer(config, task(**own), building.peak_learning_rate(config, 1))
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert (float(optimizer.learning_rate), optimizer.beta_2, optimizer.global_clipnorm) == (0.25, 0.5, 2.0)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.5)
    assert float(filled("--learning-rate", "0.5", **own).learning_rate) == 0.5
    other = building.make_optimizer(
        building.with_task_defaults(asked("--optimizer", "sgd"), task(**own)), task(**own), 0.1
    )
    assert isinstance(other, keras.optimizers.SGD)


class Halved(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras cannot load by its name."""

    def __call__(self, step):
        return 0.5 ** tf.cast(step, tf.float32)

    def get_config(self):
        return {}


def test_a_schedule_of_the_tasks_own_is_kept_until_a_flag_replaces_it():
    own = {"optimizer": lambda: keras.optimizers.SGD(Halved(), momentum=0.5)}

    def rates(*flags):
        config = building.with_task_defaults(asked(*flags), task(**own))
        optimizer = building.make_model(config, task(**own), DATA, SingleProcessCollectives()).optimizer
        found = [type(optimizer).__name__]
        for step in (0, 1, 2):
            optimizer.iterations.assign(step)
            found.append(float(optimizer.learning_rate))
        return found

    assert rates("--clip-norm", "2") == ["SGD", 1, 0.5, 0.25]
    assert rates("--optimizer", "adam") == ["Adam", 1, 0.5, 0.25]
    assert rates("--learning-rate", "0.5", "--lr-decay", "none") == ["SGD", 0.5, 0.5, 0.5]
    with pytest.raises(UsageError, match=r"warmup_steps needs a number .*has a schedule, Halved"):
        rates("--warmup-steps", "3")


def test_a_task_may_compile_its_model():
    def model(data):
        made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.5), "mse")
        made.second = keras.optimizers.Adam(0.25)
        return made

    own = task(model=model, loss=None, optimizer=None)
    config = building.with_task_defaults(asked(), own)
    made = building.make_model(config, own, DATA, SingleProcessCollectives())
    assert is_distributed(made.optimizer)
    assert is_distributed(made.second)
    assert float(made.optimizer.learning_rate) == 0.5
    for flags in (("--learning-rate", "0.5"), ("--clip-norm", "2"), ("--optimizer", "sgd")):
        with pytest.raises(UsageError, match=r"needs a task that has an optimizer"):
            building.with_task_defaults(asked(*flags), own)
    with pytest.raises(UsageError, match=r"must return a compiled model"):
        building.make_model(config, task(loss=None, optimizer=None), DATA, SingleProcessCollectives())
    with pytest.raises(UsageError, match=r"must return a model that is not compiled"):
        task(model=model).make_model(DATA)
    with pytest.raises(UsageError, match=r"no loss, metrics or loss_weights of its own"):
        task(model=model, optimizer=None)


def test_cifar10_decays_every_350_epochs():
    cifar10 = load_task("cifar10")
    config = building.with_task_defaults(asked("--batch-size", "10"), cifar10)
    optimizer = building.make_model(config, cifar10, DATA, SingleProcessCollectives()).optimizer
    steps, rates = 350 * 10, []
    for step in (0, steps - 1, steps, 2 * steps):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001])
    found = as_dict(config)
    assert [found[name] for name in ("ema", "checkpoint_every", "log_every", "steps")] == [0.9999, 1000, 10, 100_000]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_momentum_of_the_average_rises(accumulation):
    model = task().model(DATA)
    optimizer = keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.3, gradient_accumulation_steps=accumulation if accumulation > 1 else None
    )
    distribute(optimizer, ReductionConfig(), ema_ramp=True)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        optimizer.apply([tf.ones_like(variable) for variable in model.trainable_variables], model.trainable_variables)

    expected = None
    for update in range(12):
        for _ in range(accumulation):
            step()
        weights = model.trainable_variables[0].numpy()
        momentum = min(0.3, (1 + update) / (10 + update)) if update else 0.0
        expected = weights if expected is None else momentum * expected + (1 - momentum) * weights
        assert np.allclose(optimizer._model_variables_moving_average[0].numpy(), expected, atol=1e-6)
    assert optimizer.ema_momentum == 0.3
