"""``hvdtrain.predict``: predictions for samples that the ranks divide among themselves, in the order of the samples."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.transfer import ArrayWriter, specs_of, to_first_rank
from hvdtrain.data import Source, evaluation_dataset
from hvdtrain.data.sample_plan import shard_batches
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.replica_consistency import shared_statistics
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.optim.only_checks import print_on_rank_0
from hvdtrain.training.evaluation import shared_source
from hvdtrain.training.idle_lookups import IdleLookups
from hvdtrain.training.predicted_share import PredictedShare
from hvdtrain.training.prediction_files import Write, open_prediction_file, require_format
from hvdtrain.training.uncalled_methods import uncalled


def predict(
    model: keras.Model,
    data: Any,
    *,
    batch_size: int = 32,
    output: str | Path | None = None,
    on_all_ranks: bool = False,
    collectives: Collectives | None = None,
) -> Any:
    """Predictions for all samples, in their order, as ``model.predict`` returns them. All ranks must call it.

    Each rank predicts for its share of the samples, and rank 0 receives all predictions.

    Args:
        model: built.
        data: all samples, the same on every rank, as for :func:`hvdtrain.evaluate`; targets are not used.
        batch_size: samples per rank and batch.
        output: a file that rank 0 writes instead, for predictions that do not fit into memory: ``.npy`` (for a model
            with one output), ``.csv`` or ``.parquet``. It is complete or absent.
        on_all_ranks: return the predictions on every rank.
        collectives: the ranks that predict together (default: those of ``hvdtrain.init()``).

    Returns:
        An array, or a structure of arrays, of shape ``[num_samples, …]``. None with ``output``, and without
        ``on_all_ranks`` on all ranks but 0.

    Raises:
        DisagreementError: on every rank: ranks differ in arguments or data.
        JobError: on every rank: an argument breaks its rule, a sample cannot be read, or the file cannot be written.
    """
    ranks = collectives or runtime.current().collectives
    source = shared_source(data, model, "hvdtrain.predict", batch_size, ranks)
    if (text := uncalled(model, "predict", "hvdtrain.predict calls predict_step itself")) is not None:
        print_on_rank_0(f"{text}.", ranks)
    if output is not None:
        on_every_rank(lambda: _require_file(Path(output), on_all_ranks), ranks)
        write_predictions(model, source, Path(output), batch_size=batch_size, collectives=ranks)
        return None
    blocks: list[Sequence[np.ndarray]] = []
    with PredictedShare(model, in_files=False) as share:
        _predict(share, model, source, batch_size, ranks)
        _to_first_rank(share, blocks.append, ranks)
        structure = ranks.allgather(share.structure)[0]
    columns = [np.concatenate(column) for column in zip(*blocks, strict=True)]
    if on_all_ranks:
        columns = ranks.allgather(columns)[0]
    return keras.tree.pack_sequence_as(structure, columns) if columns else None


def write_predictions(
    model: keras.Model,
    source: Source,
    path: Path,
    *,
    batch_size: int,
    collectives: Collectives,
    on_batch: Callable[[], None] = lambda: None,
) -> None:
    """Writes predictions to a file on rank 0, holding a part of them in memory at a time. All ranks must call it.

    Args:
        on_batch: called on each rank before each of its batches.

    Raises:
        JobError: on every rank: the file cannot be written.
    """
    with PredictedShare(model, in_files=True) as share, contextlib.ExitStack() as stack:
        _predict(share, model, source, batch_size, collectives, on_batch)
        structure = collectives.allgather(share.structure)[0]

        def opened() -> Write:
            if collectives.rank > 0:
                return lambda columns: None
            return stack.enter_context(open_prediction_file(path, structure, source.num_samples))

        _to_first_rank(share, on_every_rank(opened, collectives), collectives)
        on_every_rank(stack.pop_all().close, collectives)


def _require_file(path: Path, on_all_ranks: bool) -> None:
    require_format(path)
    if on_all_ranks:
        raise UsageError("on_all_ranks must not be set with output. Received: both. Leave one of them out.")


def _predict(
    share: PredictedShare,
    model: keras.Model,
    source: Source,
    batch_size: int,
    ranks: Collectives,
    on_batch: Callable[[], None] = lambda: None,
) -> None:
    lookups = IdleLookups(model, model.predict_step, ranks)

    def predict_share() -> None:
        model.make_predict_function()
        batches, num_made = evaluation_dataset(source, batch_size, ranks.rank, ranks.size), 0
        lookups.begin(len(shard_batches(source.num_samples, batch_size, ranks.rank, ranks.size)))
        for batch in batches:
            on_batch()
            share.add(batch)
            num_made += 1
        lookups.end(num_made, batches.element_spec)

    with shared_statistics(model, ranks):
        if lookups.are_needed:
            predict_share()  # A rank that raises no longer answers the lookups of others, which would wait in them.
        else:
            on_every_rank(predict_share, ranks)


def _to_first_rank(share: PredictedShare, write: Write, ranks: Collectives) -> None:
    """Rank 0 writes the predictions of all ranks, in rank order. All ranks must call it.

    Raises:
        JobError: on every rank: they could not be written.
    """
    blocks = list(share.blocks())
    problem: Exception | None = None
    for sender, num_blocks in enumerate(ranks.allgather(len(blocks))):
        for i in range(num_blocks):
            own = blocks[i] if sender == ranks.rank else []
            columns = _received(own, sender, ranks)
            if ranks.rank > 0 or problem is not None:
                continue  # Other ranks send what remains.
            try:
                write(columns)
            except Exception as error:
                problem = error

    def raise_problem() -> None:
        if problem is not None:
            raise problem

    on_every_rank(raise_problem, ranks)


def _received(own: Sequence[np.ndarray], sender: int, ranks: Collectives) -> Sequence[np.ndarray]:
    """What a rank has sent, on rank 0."""
    if sender == 0:
        return own
    specs = ranks.allgather(specs_of({str(i): each for i, each in enumerate(own)}))[sender]
    received: list[np.ndarray] = []
    writer = ArrayWriter(specs, lambda name, array: received.append(array))
    to_first_rank(own, ranks, lambda rank, piece: writer.write(piece))
    return received
