"""The programs as tasks: ``--task program_tasks:convnet``."""

import inspect
from unittest import mock

import keras
from programs import COMPILES_ITSELF, LOSS_WEIGHTS, PROGRAMS

import hvdtrain
from hvdtrain.data import Arrays, Data

MODELS = {}
"""The model that a task made last, by the name of its program."""


class InOrder(Arrays):
    keeps_order = True


def as_task_that_compiles(program):
    def made():
        keras.utils.set_random_seed(1)
        return program(lambda optimizer: optimizer)

    def make_model(data):
        MODELS[program.__name__] = made()[0]
        return MODELS[program.__name__]

    return hvdtrain.Task(model=make_model, data=lambda data_dir: Data(InOrder(*made()[1:])), optimizer=None)


def as_task(program):
    if program.__name__ in COMPILES_ITSELF:
        return as_task_that_compiles(program)

    def parts():
        """The program's model, not compiled, its data, and the arguments that it passes to ``compile``."""
        passed = {}

        def compile(model, *arguments, **named):
            passed.update(inspect.signature(keras_compile).bind(model, *arguments, **named).arguments)
            del passed["self"]
            # A task has no field for anything else: the model has to bring it.
            if passed.keys() - {"optimizer", "loss", "metrics", "loss_weights"}:
                keras_compile(model, *arguments, **named)

        keras_compile = keras.Model.compile
        keras.utils.set_random_seed(1)
        with mock.patch.object(keras.Model, "compile", compile):
            model, x, y = program(lambda optimizer: optimizer)
        return model, InOrder(x, y), passed

    def make_model(data):
        MODELS[program.__name__] = parts()[0]
        return MODELS[program.__name__]

    return hvdtrain.Task(
        model=make_model,
        data=lambda data_dir: Data(parts()[1]),
        loss=lambda: parts()[2].get("loss"),
        loss_weights=LOSS_WEIGHTS.get(program.__name__),
        metrics=lambda: parts()[2].get("metrics", []),
        optimizer=lambda: parts()[2].get("optimizer", keras.optimizers.RMSprop()),
    )


globals().update({program.__name__: as_task(program) for program in PROGRAMS})
