"""Saves and restores a training job: what rank 0 writes, what every rank gets back."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain import process, runtime
from hvdtrain.checkpoint import folders, random_state, tree
from hvdtrain.checkpoint.background import BackgroundWriter
from hvdtrain.checkpoint.model_state import Averaged, ModelState
from hvdtrain.collectives import Collectives
from hvdtrain.errors import DataError, UsageError
from hvdtrain.failure import on_every_rank, on_first_rank, tell
from hvdtrain.supervised import note_checkpoint

RESUME = ("auto", "never", "must")
_ALLOWED_FAILURES = 3


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that every rank has taken over."""

    step: int
    path: Path
    state: Any
    """What :meth:`Checkpointer.save` was given as ``state``, by rank 0."""
    rank_state: Any
    """What this rank gave as ``rank_state``; None on another number of ranks."""
    manifest: Mapping[str, Any]


class Checkpointer:
    """Checkpoints of a model, its optimizer and all random state, in a folder that rank 0 owns.

    A checkpoint is written aside by a thread, read back, synced to disk and renamed into place: a reader
    sees a whole one or none. Training waits for the write before, if that is still under way, and
    otherwise only for what ranks tell each other. While a write is under way it holds the values that
    variables had, which takes as much memory as the model and its optimizer.

    Args:
        directory: new, empty, or one of checkpoints; other ranks than 0 never look at it.
        model: built and compiled, the same on every rank.
        keep: how many checkpoints to keep.
        facts: what else a checkpoint is to tell; ``versions`` are added.
        collectives: what ranks talk by (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: ``keep`` is below 1.
    """

    def __init__(
        self,
        directory: str | Path,
        model: keras.Model,
        *,
        keep: int = 3,
        facts: Mapping[str, Any] | None = None,
        collectives: Collectives | None = None,
    ):
        if keep < 1:
            raise UsageError(f"keep must be at least 1. Received: {keep}")
        self._directory = Path(directory)
        self._model = model
        self._keep = keep
        self._facts = {"versions": process.versions(), **(facts or {})}
        self._collectives = collectives or runtime.current().collectives
        self._writer = BackgroundWriter(self._warn)
        self._model_state = ModelState(model, self._collectives)

    def save(
        self,
        step: int,
        *,
        state: Any = None,
        rank_state: Any = None,
        identity: Mapping[str, Any] | None = None,
        averaged: Averaged | None = None,
        wait: bool = False,
    ) -> None:
        """Saves; every rank has to call it, at the same step.

        Args:
            state, rank_state: what else to keep, of rank 0 and of each rank: numbers, texts, arrays, and
                lists, tuples, sets and dicts of these.
            identity: what a run must have in common with this one to go on from it.
            averaged: where ranks train alone, in which the model is that of all of them: so it is saved for whoever
                reads it, and each rank's own besides.
            wait: until it is on disk.

        Raises:
            JobError: on every rank, with exit code 65, where the file system has refused three times in a row,
                or at all with ``wait``.
        """
        self._require_few_failures(_ALLOWED_FAILURES)
        description, tensors = self._model_state.capture(averaged)
        rank_states = self._collectives.allgather({"random": random_state.capture(), "state": rank_state})
        if self._collectives.rank == 0:
            arrays: dict[str, np.ndarray] = {}
            kept = {"state": state, "ranks": rank_states, "identity": dict(identity or {})}
            manifest = {**self._facts, **description, "kept": tree.split(kept, arrays, "state")}

            def write() -> None:
                folders.write(self._directory, step, {**tensors, **arrays}, manifest)
                folders.delete_all_but(self._directory, self._keep)
                note_checkpoint(step)

            self._writer.start(write)
            if wait:
                self._writer.wait()
                for _ in range(_ALLOWED_FAILURES - 1):
                    if self._writer.failures_in_a_row:
                        self._writer.start(write)
                        self._writer.wait()
        if wait:
            self._require_few_failures(1)

    def restore(self, resume: str | Path = "auto", *, identity: Mapping[str, Any] | None = None) -> Restored | None:
        """Gives every rank the state of a checkpoint; every rank has to call it.

        Rank 0 reads, the others get it by broadcast. A damaged checkpoint is named and the one before it
        taken. Later ones than that taken are set aside: renamed, never deleted.

        Args:
            resume: ``auto``: the latest, if there is one; ``must``: the latest; ``never``: none, and there
                must be none; or the path of a checkpoint, or of a folder that holds some.
            identity: as :meth:`save` was given.

        Returns:
            What was restored; None: nothing.

        Raises:
            JobError: on every rank, with exit code 65, where there is no usable checkpoint, or one of another run.
        """

        read: tuple[Path, dict[str, Any], dict[str, np.ndarray], Any] | None = None

        def find() -> dict[str, Any] | None:
            nonlocal read
            read = self._find(resume, identity or {})
            return None if read is None else {"path": str(read[0]), "manifest": read[1], "kept": read[3]}

        found = on_first_rank(find, self._collectives)
        if found is None:
            return None
        manifest, kept = found["manifest"], found["kept"]
        self._model_state.restore(manifest, {} if read is None else read[2])
        same_ranks = manifest["ranks"] == self._collectives.size
        own = kept["ranks"][self._collectives.rank] if same_ranks else None
        if own is not None:
            random_state.restore(own["random"])
        rank_state = None if own is None else own["state"]
        return Restored(manifest["step"], Path(found["path"]), kept["state"], rank_state, manifest)

    def load(self, path: str | Path | None = None) -> Restored:
        """Gives every rank the model and optimizer of a checkpoint, to look at; every rank has to call it.

        Nothing in the folder changes, which may be that of a run that goes on. What was each rank's own is left
        out, so that the model is the same on any number of ranks.

        Args:
            path: of a checkpoint, or of a folder that holds some; None: the latest.

        Raises:
            JobError: on every rank, with exit code 65, where there is no whole checkpoint, or one of another model.
        """
        read: tuple[Path, dict[str, Any], dict[str, np.ndarray]] | None = None

        def find() -> tuple[str, dict[str, Any]]:
            nonlocal read
            candidates = folders.checkpoints_in(self._directory) if path is None else _checkpoints_at(Path(path))
            read = self._latest_whole(candidates)
            if read is None:
                raise DataError(f"there must be a checkpoint. Received: none in {path or self._directory}")
            self._model_state.require_same_variables(read[1])
            return str(read[0]), read[1]

        found, manifest = on_first_rank(find, self._collectives)
        self._model_state.restore(manifest, {} if read is None else read[2], with_own=False)
        return Restored(manifest["step"], Path(found), None, None, manifest)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the write that is under way, on rank 0."""
        self._writer.wait(timeout_s)

    def _find(
        self, resume: str | Path, identity: Mapping[str, Any]
    ) -> tuple[Path, dict[str, Any], dict[str, np.ndarray], Any] | None:
        folders.require_ours(self._directory)
        own = folders.checkpoints_in(self._directory)
        if str(resume) == "never":
            if own:
                raise DataError(
                    f"--resume never needs a place without checkpoints. Received: {self._directory}, which holds "
                    f"{len(own)}. Nothing was touched; give another --run-dir, or --resume auto to go on."
                )
            return None
        candidates = own if str(resume) in RESUME else self._named(Path(resume), own)
        whole = self._latest_whole(candidates)
        if whole is not None:
            folder, manifest, tensors = whole
            kept = tree.join(manifest.pop("kept"), tensors)
            _require_same(identity, kept["identity"], folder)
            self._model_state.require_same_variables(manifest)
            for later in own:
                if folders.step_of(later) > manifest["step"]:
                    tell(
                        0, f"goes on from step {manifest['step']}; {later} was set aside as {folders.set_aside(later)}"
                    )
            return folder, manifest, tensors, kept
        if str(resume) == "must":
            raise DataError(f"--resume must needs a checkpoint. Received: none in {self._directory}")
        return None

    def _latest_whole(self, candidates: list[Path]) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]] | None:
        """The last one that is not damaged, with its manifest and tensors; None: there are no candidates."""
        num_damaged = 0
        for folder in reversed(candidates):
            problem = folders.damage(folder)
            if problem is None:
                return folder, *folders.read(folder)
            num_damaged += 1
            tell(0, f"{folder} is damaged: {problem}")
        if num_damaged:
            raise DataError(
                f"there must be a whole checkpoint in {candidates[0].parent}. Received: {num_damaged}, all damaged. "
                "Nothing was deleted. Bring one back from a copy, or start anew with another --run-dir."
            )
        return None

    def _named(self, path: Path, own: list[Path]) -> list[Path]:
        found = _checkpoints_at(path)
        if not found:
            raise DataError(
                f"--resume must be auto, never, must, or the path of a checkpoint or of a run. Received: {path}, where "
                "there is no checkpoint"
            )
        if own and not any(each.samefile(mine) for each in found for mine in own):
            raise DataError(
                "a run that begins with another run's checkpoint needs a place of its own. Received: "
                f"{self._directory}, which holds checkpoints. Give another --run-dir."
            )
        return found

    def _require_few_failures(self, limit: int) -> None:
        def check() -> None:
            if self._collectives.rank == 0:
                folders.require_ours(self._directory)
            if self._writer.failures_in_a_row >= limit:
                raise DataError(
                    f"checkpoints must be writable. Received: {self._writer.failures_in_a_row} failures in a row in "
                    f"{self._directory}, the last: {self._writer.last_error}. Earlier checkpoints are untouched; make "
                    "room, and start the job again to go on from the last one."
                ) from self._writer.last_error

        on_every_rank(check, self._collectives)

    def _warn(self, error: Exception) -> None:
        tell(0, f"a checkpoint could not be written to {self._directory}: {error}. Earlier ones are untouched.")


def newest_step(directory: Path) -> int | None:
    """The step of the latest checkpoint in a folder, whole or not; None: there is none."""
    found = folders.checkpoints_in(directory)
    return folders.step_of(found[-1]) if found else None


def _checkpoints_at(path: Path) -> list[Path]:
    """A checkpoint by its path, or those of a folder or run."""
    for folder in (path, path / "checkpoints"):
        if found := folders.checkpoints_in(folder):
            return found
    return [each for each in folders.checkpoints_in(path.parent) if each.name == path.name]


def _require_same(here: Mapping[str, Any], there: Mapping[str, Any], folder: Path) -> None:
    differences = [
        f"{name}: {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    if differences:
        raise DataError(
            f"a run must go on as it began. Received: a checkpoint of another run, {folder}: {'; '.join(differences)}. "
            "It was left untouched; give the options it was made with, or another --run-dir."
        )
