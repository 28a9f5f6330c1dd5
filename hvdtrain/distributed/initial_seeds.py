"""The seeds from which ranks have drawn their rows of sharded tables: instead of rows, ranks compare and send these."""

import dataclasses
from collections.abc import Callable, Sequence

import keras

from hvdtrain.distributed.collectives import Collectives


@dataclasses.dataclass
class InitialSeed:
    """The seed of a table's initial rows on this rank."""

    value: int
    draw: Callable[[int], None]
    """Replaces the rows by those of another seed."""
    counts: bool = True
    """Whether the rows are still those of the seed, and not restored ones."""


def keep_seed(table: keras.Variable, seed: InitialSeed) -> None:
    """Records the seed of a table."""
    vars(table)["hvdtrain_seed"] = seed


def forget_seed(table: keras.Variable) -> None:
    """Notes that a table's rows were restored on all ranks."""
    if (seed := _seed_of(table)) is not None:
        seed.counts = False


def share_seeds(variables: Sequence[keras.Variable], collectives: Collectives) -> None:
    """Draws the rows of tables from rank 0's seeds, if those of ranks differ; all ranks must call it."""
    seeds = [each for variable in variables if (each := _seed_of(variable)) is not None and each.counts]
    if not seeds:
        return
    first = collectives.allgather([each.value for each in seeds])[0]
    for seed, value in zip(seeds, first, strict=True):
        if seed.value != value:
            seed.draw(value)
            seed.value = value


def first_with_other_seed(variables: Sequence[keras.Variable], collectives: Collectives) -> str | None:
    """The path of the first table whose initial rows are not of one seed; None if all are. All ranks must call it."""
    tables = [each for each in variables if (seed := _seed_of(each)) is not None and seed.counts]
    if not tables:
        return None
    everyone = collectives.allgather([seed.value for each in tables if (seed := _seed_of(each)) is not None])
    return next((t.path for t, *seeds in zip(tables, *everyone, strict=True) if len(set(seeds)) > 1), None)


def _seed_of(table: keras.Variable) -> InitialSeed | None:
    seed: InitialSeed | None = vars(table).get("hvdtrain_seed")
    return seed
