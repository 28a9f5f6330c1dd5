"""Reads the next items of a sequence while the ones before are processed."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Sequence[Item], read: Callable[[Item], None]) -> Generator[Item, None, None]:
    """Yields each item when ``read`` has returned for it. A thread reads the later ones, in order, in the meantime.

    Closing it leaves out those that are not read yet.

    Raises:
        Exception: what ``read`` raised, in place of its item.
    """
    with ThreadPoolExecutor(1, "hvdtrain-read-ahead") as thread:
        reads = [thread.submit(read, item) for item in items]
        try:
            for item, finished in zip(items, reads, strict=True):
                finished.result()
                yield item
        finally:
            thread.shutdown(cancel_futures=True)
