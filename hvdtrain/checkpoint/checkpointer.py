"""Saves the state of a training job on rank 0 and restores it on all ranks."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint import plain_values, random_state, rank_states, storage
from hvdtrain.checkpoint.background_writer import BackgroundWriter
from hvdtrain.checkpoint.draft import Draft
from hvdtrain.checkpoint.folders import open_folder
from hvdtrain.checkpoint.model_state import Averaged, Captured, ModelState
from hvdtrain.checkpoint.selection import CheckpointSelection, usable
from hvdtrain.checkpoint.transfer import Spec, specs_of
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import DataError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.system import versions
from hvdtrain.system.supervisor_client import note_checkpoint
from hvdtrain.system.terminal import report

_MAX_FAILURES = 3
_NOTEWORTHY_WAIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored on all ranks."""

    step: int
    path: Path
    state: Any
    """The ``state`` that rank 0 passed to :meth:`Checkpointer.save`."""
    rank_state: Any
    """The ``rank_state`` that this rank passed; None with a different number of ranks."""
    manifest: Mapping[str, Any]


class Checkpointer:
    """Writes and restores checkpoints of a model, its optimizer and all random state.

    Rank 0 writes a checkpoint in the background: to a temporary folder, synced to disk, read back and renamed, so
    that readers see a complete checkpoint or none. Saving blocks training until the previous write has finished, and
    until rank 0 has received the per-rank state of the other ranks, in pieces of bounded size: their models and
    optimizers in local SGD, otherwise little. A write can take as much additional memory as the model and its
    optimizer.

    Args:
        directory: new, empty, or a folder of checkpoints; only rank 0 accesses it. Or the URL of one in an object
            store, such as ``"s3://bucket/run/checkpoints"``: rank 0 writes to a local folder and uploads each
            checkpoint in the background.
        model: built and compiled; the same on all ranks.
        keep: the number of checkpoints to keep.
        facts: additional entries of the manifest; ``versions`` is always included.
        identity: what a resumed run must have in common with this one.
        collectives: the collectives of the job's ranks (default: those of ``hvdtrain.init()``).
        after_save: called on rank 0 after each checkpoint, in the background; its error counts as a failure to write.

    Raises:
        UsageError: ``keep`` is below 1, or the packages for a URL are not installed.
    """

    def __init__(
        self,
        directory: str | Path,
        model: keras.Model,
        *,
        keep: int = 3,
        facts: Mapping[str, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
        collectives: Collectives | None = None,
        after_save: Callable[[], None] = lambda: None,
    ):
        if keep < 1:
            raise UsageError(f"keep must be at least 1. Received: {keep}")
        self._folder = open_folder(directory)
        self._directory = self._folder.directory
        self._after_save = after_save
        self._model = model
        self._keep = keep
        self._facts = {"versions": versions.versions(), **(facts or {})}
        self._identity = dict(identity or {})
        self._collectives = collectives or runtime.current().collectives
        self._writer = BackgroundWriter(self._warn)
        self._has_reported_wait = False
        # Whether all checkpoints in the folder belong to this run: rank 0 has restored one, found none, or renamed the
        # others.
        self._owns_all = False
        self._model_state = ModelState(model, self._collectives)
        self._selection = CheckpointSelection(self._folder, self._model_state)

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
        """Saves a checkpoint. Collective: all ranks must call it, at the same step.

        It becomes the latest checkpoint: an existing one of the same step is replaced, and those of later steps are
        renamed. Unless :meth:`restore` was called, existing checkpoints are taken to be another run's, and the first
        save renames them all.

        Args:
            state: additional state of rank 0: numbers, strings, arrays, and lists, tuples, sets and dicts of these.
            rank_state: additional state of each rank, of the same types.
            identity: added to the constructor's ``identity``.
            averaged: local SGD: a context in which the model holds the averaged weights. They are saved for readers
                of the checkpoint, in addition to the weights of each rank.
            wait: return when the checkpoint is on disk.

        Raises:
            JobError: on all ranks, with exit code 65, after three consecutive failures to write; with ``wait``, if
                this checkpoint could not be written.
        """
        self._require_few_failures(_MAX_FAILURES)
        captured = self._model_state.capture(averaged)
        plain: dict[str, np.ndarray] = {}
        value = plain_values.split({"random": random_state.capture(), "state": rank_state}, plain, "state")
        own = {**captured.own, **plain}
        for _ in range(_MAX_FAILURES if wait else 1):
            gathered = rank_states.gather(own, value, self._collectives, lambda specs: self._begin(step, specs))
            if gathered is not None:
                self._commit(step, gathered, captured, state, {**self._identity, **(identity or {})})
            if not wait:
                return
            self._writer.wait()
            if not self._collectives.allgather(self._writer.consecutive_failures)[0]:
                return
        self._require_few_failures(1)

    def _begin(self, step: int, specs: Sequence[Sequence[Spec]]) -> Draft:
        start_s = time.monotonic()
        self._writer.wait()
        waited_s = time.monotonic() - start_s
        if waited_s > _NOTEWORTHY_WAIT_S and not self._has_reported_wait:
            self._has_reported_wait = True
            report(
                0,
                f"step {step} waited {waited_s:.0f} s until the checkpoint before was written to {self._folder.name}: "
                "save less often, or to a faster place. Later waits are not reported.",
            )
        return Draft(self._directory, step, specs)

    def _commit(
        self, step: int, gathered: rank_states.Gathered, captured: Captured, state: Any, identity: Mapping[str, Any]
    ) -> None:
        """Writes the rest of a checkpoint in the background."""
        arrays: dict[str, np.ndarray] = {}
        kept = {
            "state": plain_values.split(state, arrays, "state"),
            "identity": plain_values.split(identity, arrays, "identity"),
            "ranks": gathered.values,
        }
        tensors, manifest = {**captured.tensors, **arrays}, {**self._facts, **captured.description, "kept": kept}

        def write() -> None:
            gathered.draft().commit(tensors, manifest)
            storage.delete_all_but(self._directory, self._keep)
            self._folder.publish(step, self._keep)
            self._after_save()
            note_checkpoint(step)

        self._writer.start(write)

    def restore(self, resume: str | Path = "auto", *, identity: Mapping[str, Any] | None = None) -> Restored | None:
        """Restores a checkpoint on all ranks. Collective: all ranks must call it.

        Rank 0 reads it and broadcasts the state. Damaged checkpoints are reported and skipped. Checkpoints later than
        the restored one are renamed, never deleted.

        Args:
            resume: ``auto``: the latest, if there is one; ``must``: the latest; ``never``: none, and the folder must
                hold none; or the path of a checkpoint, or of a folder of checkpoints.
            identity: added to the constructor's ``identity``.

        Returns:
            The restored checkpoint; None if there is none.

        Raises:
            JobError: on all ranks, with exit code 65, if there is no usable checkpoint, or it belongs to another run.
        """

        with ExitStack() as stack:
            return self._restore(resume, {**self._identity, **(identity or {})}, stack)

    def _restore(self, resume: str | Path, identity: Mapping[str, Any], stack: ExitStack) -> Restored | None:
        opened: storage.Content | None = None

        def find() -> tuple[str, dict[str, Any], list[Spec]] | None:
            nonlocal opened
            with usable(self._folder.name):
                opened = self._selection.to_resume(resume, identity, stack)
                self._folder.claim()
            self._owns_all = True
            if opened is None:
                return None
            names = plain_values.array_names(opened.manifest["kept"]["state"])
            return str(opened.path), opened.manifest, specs_of({name: opened.tensors[name] for name in names})

        found = on_first_rank(find, self._collectives)
        if found is None:
            return None
        path, manifest, specs = found
        kept, ranks = manifest.pop("kept"), None if opened is None else opened.ranks
        tensors = None if opened is None else opened.tensors
        same_ranks = manifest["ranks"] == self._collectives.size
        variables = self._model_state.own_variables(manifest) if same_ranks else {}
        self._model_state.restore_shared(manifest, tensors, without=variables.values())
        arrays = {} if tensors is None else {name: tensors[name] for name, *_ in specs}
        state = plain_values.join(kept["state"], rank_states.broadcast_arrays(arrays, specs, self._collectives))
        rank_state = None
        if same_ranks:
            own = rank_states.scatter(ranks, kept["ranks"], variables, self._collectives)
            random_state.restore(own["random"])
            rank_state = own["state"]
        else:
            self._model_state.restore_on_other_ranks(manifest, None if ranks is None else ranks.array)
        return Restored(manifest["step"], Path(path), state, rank_state, manifest)

    def load(self, path: str | Path | None = None) -> Restored:
        """Loads the model and optimizer of a checkpoint on all ranks. Collective: all ranks must call it.

        Changes nothing in the folder, to which another job may be writing. Per-rank state is not loaded, so that the
        model is the same on any number of ranks.

        Args:
            path: of a checkpoint, or of a folder of checkpoints; None: the latest.

        Raises:
            JobError: on all ranks, with exit code 65, if there is no intact checkpoint, or it is of another model.
        """
        with ExitStack() as stack:
            return self._load(path, stack)

    def _load(self, path: str | Path | None, stack: ExitStack) -> Restored:
        opened: storage.Content | None = None

        def find() -> tuple[str, dict[str, Any]]:
            nonlocal opened
            with usable(path or self._folder.name):
                opened = self._selection.to_load(path, stack)
            return str(opened.path), opened.manifest

        found, manifest = on_first_rank(find, self._collectives)
        self._model_state.restore_shared(manifest, None if opened is None else opened.tensors, without=())
        return Restored(manifest["step"], Path(found), None, None, manifest)

    def take_over(self) -> None:
        """Continues the run's existing checkpoints: call it on a process that becomes rank 0 during training."""
        storage.recover(self._directory)
        self._owns_all = True

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the current write on rank 0."""
        self._writer.wait(timeout_s)

    def _require_few_failures(self, limit: int) -> None:
        def check() -> None:
            if self._collectives.rank == 0:
                with usable(self._folder.name):
                    storage.require_ours(self._directory)
                    self._set_others_aside()
            if self._writer.consecutive_failures >= limit:
                raise DataError(
                    "checkpoints must be writable. Received: "
                    f"{self._writer.consecutive_failures} consecutive failures in {self._folder.name}, the last: "
                    f"{self._writer.last_error}. Earlier checkpoints are intact; free disk space and restart the job "
                    "to resume from the last one."
                ) from self._writer.last_error

        on_every_rank(check, self._collectives)

    def _set_others_aside(self) -> None:
        """Renames the checkpoints of another run, which must not be restored or deleted as this run's."""
        others = [] if self._owns_all else storage.checkpoints_in(self._directory)
        for each in others:
            storage.set_aside(each)
        if not self._owns_all:
            self._folder.set_aside_later(-1)
        if others:
            names = ", ".join(each.name for each in others)
            report(
                0,
                f"saving to {self._directory} without resuming: renamed its checkpoints {names} to ….aside. To resume "
                "from the latest instead, call restore() before the first save.",
            )
        self._owns_all = True

    def _warn(self, error: Exception) -> None:
        report(0, f"could not write a checkpoint to {self._folder.name}: {error}. Earlier checkpoints are intact.")
