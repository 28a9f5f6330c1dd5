"""The laboratory is a module of launch/lab, which is no package; and the launcher of jobs is that of tests/parallel."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "launch" / "lab"), str(ROOT / "tests" / "parallel")]
