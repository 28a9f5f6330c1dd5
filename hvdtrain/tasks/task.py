"""Task: the model, data, loss and defaults that ``--task`` names."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from hvdtrain.config.fields import did_you_mean
from hvdtrain.data import Data
from hvdtrain.errors import DataError, UsageError
from hvdtrain.loggers.reporter import Reporter

# Metrics that compile() chooses by the shape of the output.
_KERAS_CHOOSES = ("accuracy", "acc", "crossentropy", "ce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data, for ``--task``. All ranks call its functions, which must return the same on each.

    ::

        TASK = hvdtrain.Task(model=make_model, data=read_data, loss="mse", defaults={"epochs": 5})
    """

    model: Callable[[Data], keras.Model]
    """Returns the model: not compiled, unless ``optimizer`` is None."""
    data: Callable[[Path | None], Data]
    """Reads the data from ``--data-dir`` (None if not set)."""
    loss: str | Callable[[], keras.losses.Loss] | None = None
    """The name of a Keras loss, or a function that returns a loss; None for models that compute their own."""
    metrics: Callable[[], list[Any]] = list
    """Returns the ``metrics`` argument of ``compile``."""
    loss_weights: Sequence[float] | Mapping[str, float] | None = None
    """The ``loss_weights`` argument of ``compile``."""
    optimizer: str | Callable[[], keras.optimizers.Optimizer] | None = "adam"
    """A value of ``--optimizer``, or a function that returns an optimizer, whose settings command-line options
    override. None: ``model`` returns a compiled model, with one or several optimizers."""
    callbacks: Callable[[], list[keras.callbacks.Callback]] = list
    """Returns Keras callbacks, the same on every rank. Writers such as ModelCheckpoint run on rank 0."""
    reporters: Callable[[Path], list[Reporter]] = lambda run_dir: []
    """Returns further reporters, in addition to the console and the files of the run directory. Receives that
    directory; called on rank 0 only."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults of command-line options, named with underscores: ``{"batch_size": 128, "epochs": 10}``."""
    make_sample_data: Callable[[Path], None] | None = None
    """Writes small, learnable files in the task's format to a folder (``--make-sample-data``)."""

    def __post_init__(self) -> None:
        for name in ("model", "data", "metrics", "callbacks", "reporters"):
            self._require(name, callable(getattr(self, name)), "a function")
        for name in ("loss", "optimizer"):
            value = getattr(self, name)
            self._require(name, value is None or isinstance(value, str) or callable(value), "a name or a function")
        if self.optimizer is None and (self.loss is not None or self.metrics is not list or self.loss_weights):
            raise UsageError(
                "a task without an optimizer must have a compiled model, and so no loss, metrics or loss_weights of "
                "its own. Received: some of them. Pass them to model.compile in the function model."
            )
        weights = self.loss_weights.values() if isinstance(self.loss_weights, Mapping) else self.loss_weights or ()
        is_weighted = isinstance(weights, Iterable) and all(isinstance(each, (int, float)) for each in weights)
        self._require("loss_weights", is_weighted, "a list of numbers, or a dict of them by output")
        is_mapping = isinstance(self.defaults, Mapping) and all(isinstance(each, str) for each in self.defaults)
        self._require("defaults", is_mapping, "a dict of options")
        self._require(
            "make_sample_data", self.make_sample_data is None or callable(self.make_sample_data), "a function"
        )

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise UsageError(f"{name} of a task must be {rule}. Received: {getattr(self, name)!r:.200}")

    def make_loss(self) -> Any:
        """The ``loss`` argument of ``compile``."""
        return self.loss() if callable(self.loss) else self.loss

    def compile(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        """Compiles a model with the task's loss, loss weights and metrics.

        Raises:
            UsageError: Keras has no loss or metric of that name.
        """
        loss, metrics = self.make_loss(), self.metrics()
        # Keras looks names up in the first step, and its error states neither their origin nor the closest name.
        _require_names("loss", [loss], keras.losses)
        _require_names("metrics", keras.tree.flatten(metrics), keras.metrics, more=_KERAS_CHOOSES)
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics, **self._weights())

    def make_model(self, data: Data) -> keras.Model:
        """Makes the model. Raises UsageError if it is not a Keras model, or neither compiled nor to be compiled."""
        model = self.model(data)
        if not isinstance(model, keras.Model):
            raise UsageError(f"a task's model(data) must return a keras.Model. Received: {model!r:.200}")
        if self.optimizer is None:
            if not model.compiled:
                raise UsageError(
                    "model(data) of a task without an optimizer must return a compiled model. Received: "
                    f"{model.name}, which is not compiled. Call model.compile, or set the task's optimizer."
                )
            return model
        if model.compiled:
            raise UsageError(
                "a task's model(data) must return a model that is not compiled, because it is compiled with the "
                f"task's loss, metrics and optimizer. Received: {model.name}, which is compiled. Leave compile out "
                "(load_model: compile=False), or set the task's optimizer to None."
            )
        try:
            inspect.signature(model.compile).bind(optimizer=None, loss=None, metrics=None, **self._weights())
        except TypeError as error:
            raise UsageError(
                "a task's model must have Keras' compile, with the arguments optimizer, loss and metrics. Received: "
                f"{type(model).__name__}.compile, which overrides it ({error}). Compile the model in the function "
                "model, and set the task's optimizer to None."
            ) from None
        return model

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        """Makes the callbacks. Raises UsageError if they are not a list of Keras callbacks."""
        return self._made_list("callbacks", self.callbacks(), keras.callbacks.Callback)

    def make_reporters(self, run_dir: Path) -> list[Reporter]:
        """Makes the reporters. Raises UsageError if they are not a list of reporters."""
        return self._made_list("reporters", self.reporters(run_dir), Reporter)

    def _weights(self) -> dict[str, Any]:
        # A compile method of the model's own need not have this argument.
        return {} if self.loss_weights is None else {"loss_weights": self.loss_weights}

    @staticmethod
    def _made_list(name: str, made: Any, of_type: type) -> list[Any]:
        if not isinstance(made, list) or not all(isinstance(each, of_type) for each in made):
            raise UsageError(f"a task's {name} must return a list of {of_type.__name__}. Received: {made!r:.200}")
        return made

    def read_data(self, data_dir: Path | None) -> Data:
        """Reads the data. Raises UsageError if the task returns another type."""
        data = self.data(data_dir)
        if not isinstance(data, Data):
            raise UsageError(f"a task's data(data_dir) must return hvdtrain.data.Data. Received: {data!r}")
        return data


def _require_names(what: str, values: Sequence[object], module: ModuleType, *, more: Sequence[str] = ()) -> None:
    """Raises UsageError for a name that Keras does not know."""
    for name in values:
        if not isinstance(name, str) or name in more:
            continue
        try:
            module.get(name)
        except ValueError:
            hint = did_you_mean(name, [*dir(module), *more])
            raise UsageError(
                f"{what} of a task must be known to {module.__name__.removesuffix('.api')}. Received: {name!r}.{hint}"
            ) from None


@dataclasses.dataclass(frozen=True)
class DataFiles:
    """The files that a built-in task reads from ``--data-dir``."""

    task: str
    name: str
    published: str | None = None
    """Where to download them; None: the user's own."""

    def find(self, data_dir: Path | None, pattern: str, description: str | None = None) -> list[Path]:
        """The files below ``--data-dir`` that match a pattern, sorted.

        Args:
            description: human-readable form of the pattern.

        Raises:
            DataError: no file matches; the message says where to get the data or how to generate sample data.
        """
        found = [] if data_dir is None else sorted(path for path in data_dir.glob(pattern) if path.is_file())
        if not found:
            place = "no --data-dir" if data_dir is None else f"--data-dir {data_dir}, which contains none"
            source = f"{self.name}, published at {self.published}" if self.published else self.name
            raise DataError(
                f"--task {self.task} needs {description or pattern} in --data-dir. Received: {place}. The data set is "
                f"{source}. To try the task with generated data: python -m hvdtrain --task {self.task} "
                "--make-sample-data DIR, then --data-dir DIR."
            )
        return found
