"""Makes the programs, and the modules of the tests on several ranks, importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

sys.path[:0] = [str(TESTS / "conformance"), str(TESTS), str(TESTS / "parallel")]
