"""``python -m hvdtrain export``: a run's model as a file that opens where neither hvdtrain nor Horovod is installed."""

from collections.abc import Callable
from pathlib import Path

import keras

from hvdtrain import runtime
from hvdtrain.building import compile_plainly
from hvdtrain.config import ExportConfig
from hvdtrain.data import evaluation_dataset
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.failure import JobWatch, on_first_rank
from hvdtrain.session import run_on_ranks
from hvdtrain.trained_run import TrainedRun, open_run, run_folder
from hvdtrain.weight_average import keeps_average

_SUFFIXES = {"keras": ".keras", "saved_model": "", "onnx": ".onnx"}


def run(config: ExportConfig | None, refused: HvdtrainError | None) -> int:
    """Exports, or tells every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(
        config, refused, start=lambda: runtime.init(threads=config.threads if config else None), work=_export
    )


def _export(config: ExportConfig, watch: JobWatch) -> None:
    folder = run_folder(config.run_dir, config.task)
    target = _target(config, folder)
    trained = open_run(folder, config.data_dir)
    restored = trained.load(config.checkpoint)
    on_first_rank(lambda: _write(trained, config.format, target), runtime.current().collectives)
    if runtime.current().topology.rank == 0:
        print(f"{target}: the model of step {restored.step}", flush=True)


def _target(config: ExportConfig, folder: Path) -> Path:
    suffix = _SUFFIXES[config.format]
    path = Path(config.output) if config.output else folder / f"export{suffix or '_saved_model'}"
    if suffix and path.suffix != suffix:
        raise UsageError(f"--output must end in {suffix} for --format {config.format}. Received: {path}")
    return path


def _write(trained: TrainedRun, kind: str, target: Path) -> None:
    if target.exists():
        raise DataError(f"--output must be a new place. Received: {target}, which is there. It was left untouched.")
    model = trained.model
    if keeps_average(model.optimizer):
        model.optimizer.finalize_variable_values(model.trainable_variables)
    compile_plainly(model, trained.config, trained.task)
    # Keras exports what has been called.
    x, *_ = next(iter(evaluation_dataset(trained.data.evaluation or trained.data.training, 1, rank=0, size=1)))
    model(x, training=False)
    writers: dict[str, Callable[[keras.Model, Path], None]] = {
        "keras": lambda model, path: model.save(path),
        "saved_model": lambda model, path: model.export(path, format="tf_saved_model", verbose=False),
        "onnx": _write_onnx,
    }
    aside = target.with_name(f".writing-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        writers[kind](model, aside)
        aside.rename(target)
    except OSError as error:
        raise DataError(f"--output must be a place that can be written. Received: {target} ({error})") from error


def _write_onnx(model: keras.Model, path: Path) -> None:
    try:
        model.export(path, format="onnx", verbose=False)
    except ImportError as error:
        raise UsageError(
            f"--format onnx needs packages that are not installed. Received: {error}. Install them: pip install "
            "hvdtrain[onnx]"
        ) from error
