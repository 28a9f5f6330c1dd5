"""Finds the checkpoint to restore: the latest intact one, or a named one, of the same run and model."""

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import plain_values, storage
from hvdtrain.checkpoint.config import CHECKPOINTS
from hvdtrain.checkpoint.folders import LocalFolder, local_copy
from hvdtrain.checkpoint.model_state import ModelState
from hvdtrain.config.wording import option
from hvdtrain.errors import DataError
from hvdtrain.system.terminal import report

RESUME = ("auto", "never", "must")


class CheckpointSelection:
    """Reads checkpoints on rank 0.

    Args:
        folder: the checkpoints of this run.
        model_state: the state of the model, which a checkpoint must fit.
    """

    def __init__(self, folder: LocalFolder, model_state: ModelState):
        self._folder = folder
        self._directory = folder.directory
        self._model_state = model_state

    def to_resume(self, resume: str | Path, identity: Mapping[str, Any], stack: ExitStack) -> storage.Content | None:
        """Returns the checkpoint to resume from, and sets later ones aside; None if the run starts at step 0.

        Args:
            resume: see :meth:`~hvdtrain.Checkpointer.restore`.
            identity: what the checkpoint must have in common with this run.
            stack: keeps a downloaded checkpoint until it has been read.

        Raises:
            DataError: there is no usable checkpoint, or it belongs to another run.
            OSError: the folder cannot be read or written.
        """
        storage.require_ours(self._directory)
        storage.recover(self._directory)
        self._folder.fetch()
        own = storage.checkpoints_in(self._directory)
        if str(resume) == "never":
            if own:
                raise DataError(
                    f"{option('resume', 'never')} requires a folder without checkpoints. Received: "
                    f"{self._folder.name}, which holds {len(own)}. It was left untouched; use another "
                    f"{option('run_dir', argument='folder')}, or {option('resume', 'auto')}."
                )
            return None
        candidates = own
        if str(resume) not in RESUME:
            candidates = self._named(resume, stack.enter_context(self._folder.named(resume)))
        found = self._latest_intact(candidates)
        if found is not None:
            saved = plain_values.join(found.manifest["kept"]["identity"], found.tensors)
            _require_same(identity, saved, found.path)
            self._model_state.require_same_variables(found.manifest)
            self._folder.set_aside_later(found.manifest["step"])
            return found
        if str(resume) == "must":
            raise DataError(f"{option('resume', 'must')} requires a checkpoint. Received: none in {self._folder.name}")
        return None

    def to_load(self, path: str | Path | None, stack: ExitStack) -> storage.Content:
        """Returns the checkpoint to load; changes nothing in the folder.

        Args:
            path: see :meth:`~hvdtrain.Checkpointer.load`.
            stack: keeps a downloaded checkpoint until it has been read.

        Raises:
            DataError: there is no intact checkpoint, or it is of another model.
            OSError: the folder cannot be read.
        """
        folder = stack.enter_context(self._folder.reading() if path is None else local_copy(path))
        candidates = storage.checkpoints_in(folder) if path is None else _checkpoints_at(folder)
        found = self._latest_intact(candidates)
        if found is None:
            raise DataError(f"there must be a checkpoint. Received: none in {path or self._folder.name}")
        self._model_state.require_same_variables(found.manifest)
        return found

    def _latest_intact(self, candidates: list[Path]) -> storage.Content | None:
        """Returns the last intact checkpoint; None if there are no candidates."""
        num_damaged = 0
        for folder in reversed(candidates):
            problem = storage.damage(folder)
            if problem is None:
                try:
                    return self._read(folder)
                except storage.MalformedError as error:
                    problem = str(error)
            num_damaged += 1
            report(0, f"{folder} is damaged: {problem}")
        if num_damaged:
            raise DataError(
                f"there must be an intact checkpoint in {candidates[0].parent}. Received: {num_damaged}, all damaged. "
                "Nothing was deleted. Restore one from a backup, or train from scratch with another "
                f"{option('run_dir', argument='folder')}."
            )
        return None

    def _read(self, folder: Path) -> storage.Content:
        found = storage.read(folder)
        with storage.refusing_malformed(storage.MANIFEST):
            kept, specs = found.manifest["kept"], found.ranks.specs
            places: list[tuple[Any, Container[str]]] = [
                (kept["state"], found.tensors),
                (kept["identity"], found.tensors),
            ]
            places += [(value, {name for name, *_ in own}) for value, own in zip(kept["ranks"], specs, strict=True)]
            for value, arrays in places:
                if missing := [name for name in plain_values.array_names(value) if name not in arrays]:
                    raise LookupError(f"there is no array {missing[0]!r}")
            dict(plain_values.join(kept["identity"], found.tensors))
            self._model_state.require_well_formed(found.manifest, found.tensors, specs)
        return found

    def _named(self, named: str | Path, path: Path) -> list[Path]:
        found, own = _checkpoints_at(path), storage.checkpoints_in(self._directory)
        if not found:
            raise DataError(
                f"{option('resume')} must be auto, never, must, or the path of a checkpoint or run. Received: "
                f"{named}, which holds no checkpoint"
            )
        if own and not any(each.samefile(mine) for each in found for mine in own):
            raise DataError(
                "a run that starts from another run's checkpoint requires its own folder. Received: "
                f"{self._folder.name}, which holds checkpoints. Use another {option('run_dir', argument='folder')}."
            )
        return found


@contextmanager
def usable(directory: str | Path) -> Iterator[None]:
    """Turns an error of the file system into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the folder of checkpoints must be readable and writable. Received: {directory} ({error}). Change its "
            "permissions, or use another folder."
        ) from error


def _checkpoints_at(path: Path) -> list[Path]:
    """Returns the checkpoint with a path, or those in a folder or run."""
    for folder in (path, path / CHECKPOINTS):
        if found := storage.checkpoints_in(folder):
            return found
    return [each for each in storage.checkpoints_in(path.parent) if each.name == path.name]


def _require_same(here: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    differences = [
        f"{name}: {saved.get(name, 'missing')} in the checkpoint, {here.get(name, 'missing')} here"
        for name in sorted({*here, *saved})
        if here.get(name) != saved.get(name)
    ]
    if differences:
        raise DataError(
            f"a run must resume from its own checkpoint. Received: one of another run, {folder}: "
            f"{'; '.join(differences)}. It was left untouched; use the options of that run, or another "
            f"{option('run_dir', argument='folder')}."
        )
