"""The launchers and the models of the cases are modules beside the tests; and what the cases need on every rank."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path) -> Path:
    """The same one on every rank."""
    from trainings import COLLECTIVES  # which starts Horovod, as none of the files of tests may

    return Path(COLLECTIVES.allgather(str(tmp_path))[0])


@pytest.fixture
def watch():
    """A watch over all ranks."""
    from trainings import COLLECTIVES

    from hvdtrain.failure import JobWatch

    with JobWatch(COLLECTIVES) as watch:
        yield watch
