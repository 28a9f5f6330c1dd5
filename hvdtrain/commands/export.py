"""``python -m hvdtrain export``: a run's model as a file that opens without hvdtrain and Horovod."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import keras

from hvdtrain.commands.building import compile_plainly
from hvdtrain.commands.config import ExportConfig
from hvdtrain.commands.session import Session, run_on_ranks
from hvdtrain.commands.trained_run import TrainedRun, open_run
from hvdtrain.data import evaluation_dataset
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_first_rank
from hvdtrain.layers import whole_tables
from hvdtrain.optim.ema import keep_ema_weights
from hvdtrain.runs.run_files import open_run_files
from hvdtrain.stores.local_copies import reading_folder
from hvdtrain.stores.store import Store
from hvdtrain.stores.urls import is_url, join
from hvdtrain.system.atomic_files import replaced_on_success
from hvdtrain.tasks.names import run_dir_of

_SUFFIXES = {"keras": ".keras", "saved_model": "", "onnx": ".onnx"}


def run(config: ExportConfig | None, refused: HvdtrainError | None) -> int:
    """Exports, or reports on every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(config, refused, _export)


def _export(config: ExportConfig, session: Session) -> None:
    run_dir = run_dir_of(config.run_dir, config.task)
    target = _target(config, run_dir)
    with open_run_files(run_dir) as files:
        trained = open_run(files, config.task, config.data_dir, session.collectives)
        restored = trained.load(config.checkpoint)
    num_ranks = session.collectives.size
    keep_ema_weights(trained.model)
    with whole_tables(trained.model, collectives=session.collectives):
        on_first_rank(lambda: _write(trained, config.format, target, num_ranks), session.collectives)
    if session.collectives.rank == 0:
        with contextlib.suppress(OSError):  # The model has been written, even if this line cannot be.
            print(f"{target}: the model of step {restored.step}", flush=True)


def _target(config: ExportConfig, run_dir: str) -> str:
    suffix = _SUFFIXES[config.format]
    target = config.output or join(run_dir, f"export{suffix or '_saved_model'}")
    if suffix and Path(target).suffix != suffix:
        raise UsageError(f"--output must end in {suffix} for --format {config.format}. Received: {target}")
    return target


def _write(trained: TrainedRun, file_format: str, target: str, num_ranks: int) -> None:
    """Writes the model to a path or URL."""
    if not is_url(target):
        _write_here(trained, file_format, Path(target), num_ranks)
        return
    store = Store(target)
    _require_new(target, bool(store.files()))
    with reading_folder() as folder:
        model = folder / Path(target).name
        _write_here(trained, file_format, model, num_ranks)
        for file in [model] if model.is_file() else sorted(each for each in model.rglob("*") if each.is_file()):
            store.upload(file, file.relative_to(model).as_posix() if file != model else "")


def _require_new(target: str | Path, exists: bool) -> None:
    if exists:
        raise DataError(f"--output must not exist yet. Received: {target}, which exists. It was left untouched.")


def _write_here(trained: TrainedRun, file_format: str, target: Path, num_ranks: int) -> None:
    _require_new(target, target.exists())
    model = trained.model
    compile_plainly(model, trained.config, trained.task, num_ranks)
    if type(model).call is not keras.Model.call:
        # Keras exports only models that have been called.
        x, *_ = next(iter(evaluation_dataset(trained.data.evaluation or trained.data.training, 1, rank=0, size=1)))
        model(x, training=False)
    elif file_format != "keras":
        raise UsageError(
            f"--format {file_format} needs a model with a call method. Received: {type(model).__name__}, which has "
            "none. Use --format keras."
        )
    writers: dict[str, Callable[[keras.Model, Path], None]] = {
        "keras": lambda model, path: model.save(path),
        "saved_model": lambda model, path: model.export(path, format="tf_saved_model", verbose=False),
        "onnx": _write_onnx,
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced_on_success(target) as aside:
            writers[file_format](model, aside)
    except OSError as error:
        raise DataError(f"--output must be a place that can be written. Received: {target} ({error})") from error


def _write_onnx(model: keras.Model, path: Path) -> None:
    try:
        model.export(path, format="onnx", verbose=False)
    except ImportError as error:
        raise UsageError(
            f"--format onnx needs packages that are not installed. Received: {error}. Install them: "
            "HVDTRAIN_EXTRAS=onnx launch/run …, or pip install 'hvdtrain[onnx]'"
        ) from error
