"""Tables in the terminal."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000
"""Lines are not wrapped: the output may go to a file."""


def aligned(rows: Sequence[Sequence[str]], *, num_left: int = 1) -> list[str]:
    """Lines with the cells of rows in columns.

    Args:
        num_left: the first columns, which are aligned to the left; the others are to the right.
    """
    table = Table.grid(padding=(0, 2))
    for i in range(len(rows[0])):
        table.add_column(justify="left" if i < num_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    written = io.StringIO()
    Console(file=written, width=_ANY_WIDTH, color_system=None).print(table)
    return [line.rstrip() for line in written.getvalue().splitlines()]
