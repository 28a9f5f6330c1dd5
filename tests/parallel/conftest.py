"""Makes the modules beside the tests importable, and provides the fixtures of the cases."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
pytest.register_assert_rewrite("models", "stopped_runs", "trainings")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder, the same on every rank."""
    from trainings import COLLECTIVES  # starts Horovod: only the cases may do so

    return Path(COLLECTIVES.allgather(str(tmp_path))[0])


@pytest.fixture
def watch():
    """A JobWatch of all ranks."""
    from trainings import COLLECTIVES

    from hvdtrain.fault_tolerance.job_watch import JobWatch

    with JobWatch(COLLECTIVES) as watch:
        yield watch
