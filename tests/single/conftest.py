"""What several files of tests start."""

import pytest
from made_up_jobs import Job


@pytest.fixture
def start(tmp_path):
    """Starts jobs, of which nothing is left afterwards."""
    jobs = []

    def start(scenario: str, size: int = 2, *, stall_timeout_s: float = 0.0) -> Job:
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(Job(scenario, size, folder, stall_timeout_s))
        return jobs[-1]

    yield start
    for job in jobs:
        for rank in job.ranks:
            rank.kill()
            rank.communicate()
