"""The table in docs/conformance.md lists the programs, the ways to train them and the breaks that exist."""

import re

import table
from breaks import break_of
from programs import PROGRAMS, REFUSED


def test_the_table_is_that_of_the_programs():
    rows = [line.strip("| ").split(" | ") for line in table.DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    results = {name.split("`")[1]: dict(zip(table.WAYS, cells, strict=True)) for name, *cells, _ in rows}
    found = {name.split("`")[1]: last for name, *_, last in rows}
    assert table.render(table.descriptions(), results, found) == table.DOCUMENT.read_text()
    assert list(results) == [name for name, _ in table.descriptions()]
    for name, cells in results.items():
        for way, cell in cells.items():
            refusal = REFUSED.get(name)
            expected = r"equal \(\de[-+]\d\d\)" if refusal is None else re.escape(f"refused: {refusal}")
            assert re.fullmatch(expected, cell), (name, way)
    for program in PROGRAMS:
        name, broken = program.__name__, break_of(program)
        assert found[name] == (table.NOT_BROKEN if name in REFUSED else f"{broken.words}: {broken.reports}")
