"""``python -m hvdtrain bench``: what a step of a task takes on these ranks, and what it waits for."""

from hvdtrain.bench.command import run

__all__ = ["run"]
