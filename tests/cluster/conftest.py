"""Makes launch/lab and tests/parallel, which are not packages, importable."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "launch" / "lab"), str(ROOT / "tests" / "parallel")]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items):
    """Tests on virtual hosts run one after the other: these have fixed names."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "cluster"):
            item.add_marker(pytest.mark.xdist_group("hosts"))
