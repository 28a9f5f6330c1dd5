"""Makes launch/lab and tests/parallel, which are not packages, importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "launch" / "lab"), str(ROOT / "tests" / "parallel")]
