"""Real jobs with many more ranks than cores: they start, stop, lose ranks and resume, with the results of one process.

``--junitxml=FILE`` records the times as properties; benchmarks/results/many_ranks.json holds some of them.
"""

import json
import re
import time
from pathlib import Path

import psutil
import pytest
from elastic_runs import TRAIN, assert_equal_runs, summary, train_alone
from launcher import ROOT, Finished, Job
from test_elastic_jobs import ElasticJob
from test_faults import steps_of_checkpoints

pytestmark = pytest.mark.long

# Those that do not fit into the memory are skipped.
RANKS = (16, 32, 48, 64)
MPI, GLOO = "mpirun", "horovodrun --gloo"
# An epoch is 8 steps of this batch, the last of which has 93 samples: with 64 ranks, some have one, others two.
BATCH = 192
STEPS = 24
NUM_SAMPLES = 1437
OPTIONS = ["--global-batch-size", str(BATCH), "--threads", "1", "--eval-every", "1000"]
# What a rank of this task occupies in addition to the pages that ranks share (measured: 282 MB).
RANK_BYTES = 300e6
# A rank takes 5 to 10 s of CPU time to start, on a machine that may have other load.
MARGIN_S, RANK_S = 300.0, 30.0


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The run that all others must equal."""
    return train_alone(tmp_path_factory.mktemp("one") / "run", STEPS, BATCH, timeout_s=600)


class ManyRanks:
    """Starts jobs, ends them in time, and records how long what took.

    Args:
        folder: for the run, and for files in which ranks note times.
        record: pytest's ``record_testsuite_property``.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, record):
        self.folder, self.run_dir = folder, folder / "run"
        self._monkeypatch, self._record = monkeypatch, record

    def require_memory(self, ranks: int) -> None:
        available = psutil.virtual_memory().available
        if available < ranks * RANK_BYTES:
            pytest.skip(f"{ranks} ranks need {ranks * RANK_BYTES / 1e9:.1f} GB, {available / 1e9:.1f} are available")

    def train(self, ranks: int, launcher: str, *options: str, steps: int = STEPS, event: tuple = ()) -> Finished:
        """Runs a job to its end.

        Args:
            event: ``step, rank, signal, where``; elastic_task.py describes them.
        """
        name = f"{ranks} ranks, {launcher}, {event[2] if event else 'to the end'}"
        events, times = self._new_folder(event)
        line = [*TRAIN, *OPTIONS, "--steps", str(steps), "--run-dir", str(self.run_dir), *options]
        return self.end(Job(line, ranks=ranks, launcher=launcher, cwd=ROOT), ranks, name, events, times)

    def train_elastic(self, ranks: int, events: list, steps: int) -> tuple[ElasticJob, Finished]:
        """Runs an elastic job to its end; records also how long each change of its ranks held it up."""
        _, times = self._new_folder(())
        job = ElasticJob(f"1:{ranks}", self.folder, events, *OPTIONS, length=("--steps", str(steps)))
        done = self.end(job, ranks, f"{ranks} ranks, elastic", None, times)
        if done.code == 0:
            changes = summary(self.run_dir)["membership_changes"]
            pauses = [[each["ranks"], round(each["pause_seconds"], 1)] for each in changes]
            self._record(f"{ranks} ranks, elastic: changes", json.dumps(pauses))
        return job, done

    def _new_folder(self, event: tuple) -> tuple[Path, Path]:
        folder = self.folder / f"job {time.monotonic_ns()}"
        (times := folder / "times").mkdir(parents=True)
        (events := folder / "events.json").write_text(json.dumps([event] if event else []))
        self._monkeypatch.setenv("HVDTRAIN_TEST_EVENTS", str(events))
        self._monkeypatch.setenv("HVDTRAIN_TEST_TIMES", str(times))
        return events, times

    def end(self, job: Job, ranks: int, name: str, events: Path | None, times: Path) -> Finished:
        """Waits for the end, of all processes too; records the times in seconds.

        Args:
            events: None: do not record how long after a signal the job ended.
            times: where the processes note them.
        """
        began = time.time()
        try:
            done = job.end(MARGIN_S + RANK_S * ranks)
            ended = time.time()
            until = time.monotonic() + 5
            while job.processes() and time.monotonic() < until:
                time.sleep(0.1)
            assert job.processes() == {}
        finally:
            job.kill()
        found = {"total_s": ended - began}
        first = [float(file.read_text().split(maxsplit=2)[1]) for file in times.glob("*.txt")]
        if first:
            found["first_step_s"] = sorted(first)[min(ranks, len(first)) - 1] - began
        if events is not None and (happened := events.with_name("events.json.0")).exists():
            found["signal_to_end_s"] = ended - float(happened.read_text().split()[0])
        self._record(name, json.dumps({key: round(value, 1) for key, value in found.items()}))
        return done


@pytest.fixture
def jobs(tmp_path, monkeypatch, record_testsuite_property) -> ManyRanks:
    return ManyRanks(tmp_path, monkeypatch, record_testsuite_property)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("launcher", [MPI, GLOO])
def test_equal_to_one_process(launcher, ranks, one_process, jobs):
    jobs.require_memory(ranks)
    done = jobs.train(ranks, launcher)
    assert done.code == 0, done.output
    assert summary(jobs.run_dir)["ranks"] == ranks
    assert summary(jobs.run_dir)["samples"] == STEPS // 8 * NUM_SAMPLES
    assert "weights: equal on all ranks" in done.output
    assert not done.messages
    assert_equal_runs(jobs.run_dir, one_process)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("launcher", [MPI, GLOO])
def test_a_stop_and_a_lost_rank_are_resumed_on_other_numbers(launcher, ranks, one_process, jobs):
    """Each of the three jobs has a different number of ranks, and the last a different launcher."""
    jobs.require_memory(ranks)
    stopped = jobs.train(ranks, launcher, event=(5, ranks // 2, "SIGTERM", "before"))
    # horovodrun --gloo returns 1 for any failure.
    assert stopped.code == (75 if launcher == MPI else 1), stopped.output
    (saved,) = steps_of_checkpoints(jobs.run_dir)
    assert 5 <= saved <= 12
    assert f"stopped at step {saved} of {STEPS} (SIGTERM on rank {ranks // 2} " in stopped.only_message

    fewer = ranks * 3 // 4
    lost = fewer - 1
    killed = jobs.train(fewer, launcher, "--checkpoint-every", "4", event=(19, lost, "SIGKILL", "within"))
    assert killed.code not in (0, 64, 65, 70, 75, 78), killed.output
    assert re.search(rf"lost connection to rank {lost} \(host .*\) at step 1[789]", killed.only_message), killed.output
    # Written in the background: complete or absent.
    saved = steps_of_checkpoints(jobs.run_dir)[-1]
    assert saved in (12, 16)

    done = jobs.train(4, GLOO if launcher == MPI else MPI)
    assert done.code == 0, done.output
    assert summary(jobs.run_dir)["resumed_from"] == saved
    assert_equal_runs(jobs.run_dir, one_process)


@pytest.mark.parametrize(("launcher", "ranks"), [(MPI, 16), (GLOO, 64)])
def test_local_sgd(launcher, ranks, tmp_path, jobs):
    """With an average after each step, plain SGD equals one process."""
    jobs.require_memory(ranks)
    sgd = ["--optimizer", "sgd", "--learning-rate", "0.1"]
    done = jobs.train(ranks, launcher, *sgd, "--mode", "local", "--sync-every", "1")
    assert done.code == 0, done.output
    assert_equal_runs(jobs.run_dir, train_alone(tmp_path / "one", STEPS, BATCH, 600, sgd))


@pytest.mark.parametrize(("launcher", "ranks"), [(GLOO, 16), (MPI, 64)])
def test_wait_free_local_sgd(launcher, ranks, jobs):
    jobs.require_memory(ranks)
    done = jobs.train(ranks, launcher, "--mode", "local", "--sync-every", "4", "--wait-free")
    assert done.code == 0, done.output
    found = summary(jobs.run_dir)
    assert (found["ranks"], found["steps"]) == (ranks, STEPS)
    assert found["averaging_rounds"] >= 1
    assert "weights: equal on all ranks" in done.output
    assert found["loss"] < 2.3


@pytest.mark.parametrize("ranks", RANKS)
def test_an_elastic_job(ranks, tmp_path, jobs):
    """Loses one rank, then two at once, starts others in their place, and lets one leave."""
    jobs.require_memory(ranks)
    steps = 112
    events = [
        [6, 0, "SIGKILL", "before"],
        [12, ranks // 2, "SIGKILL", "within"],
        [12, ranks // 2 - 1, "SIGKILL", "within"],
        [104, ranks - 1, "SIGTERM", "before"],
    ]
    job, done = jobs.train_elastic(ranks, events, steps)
    assert done.code == 0, done.output
    assert job.happened() == 4
    changes = summary(jobs.run_dir)["membership_changes"]
    assert ranks in [change["ranks"] for change in changes]
    assert changes[-1]["ranks"] == ranks - 1
    assert_equal_runs(jobs.run_dir, train_alone(tmp_path / "one", steps, BATCH, 600))
