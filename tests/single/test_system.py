"""What a process decides from its environment, with made-up environments and GPUs."""

import dataclasses
import os
import resource
import subprocess
import sys

import psutil
import pytest
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.system import devices, environment, network, process_limit, processes, tensorflow_start
from hvdtrain.system.cores import inter_op_threads, threads_per_rank
from hvdtrain.system.launcher import Launcher, find_launcher


@pytest.mark.parametrize(("stall_timeout_s", "expected"), [(600, "660"), (0.5, "61"), (0, "86460")])
def test_gloo_does_not_end_a_start_before_the_stall_timeout(stall_timeout_s, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    environment.set_gloo_timeout(stall_timeout_s)
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == expected
    environment.set_gloo_timeout(5)
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == expected  # What is set stays.


@pytest.mark.parametrize(("ranks", "expected"), [(1, "3"), (12, "3"), (13, "4"), (48, "12"), (64, "16")])
def test_the_ranks_of_an_elastic_job_have_longer_to_connect_if_there_are_many(ranks, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "660"})
    environment.set_gloo_timeout_of_restarts(ranks)
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launcher("none", 0, 1, 1, False)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Launcher("Open MPI", 3, 4, 2, False),
        ),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"},
            Launcher("horovodrun --gloo", 1, 2, 2, False),
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}, Launcher("PMI", 5, 8, 4, False)),
        (
            {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "8"},
            Launcher("Slurm", 2, 4, None, True),
        ),
        # srun --mpi=pmix; outside of Slurm PMIx does not say how many.
        ({"PMIX_RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, Launcher("PMI", 1, 4, None, False)),
        ({"PMIX_RANK": "1"}, Launcher("PMI", 1, 1, None, False)),
        ({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, Launcher("Cray PALS", 1, 1, 2, False)),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, Launcher("Flux", 1, 2, None, False)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, Launcher("MVAPICH", 1, 2, None, False)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, Launcher("IBM JSM", 1, 2, None, False)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, Launcher("Intel MPI", 1, 1, 2, False)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            Launcher("torchrun", 1, 2, 2, False),
        ),
        ({"RANK": "1"}, Launcher("none", 0, 1, 1, False)),
        # A batch script of Slurm is no task of a step: one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launcher("none", 0, 1, 1, False)),
    ],
)
def test_launchers_are_distinguished(env, expected):
    assert dataclasses.replace(find_launcher(env), has_one_command=False) == expected


def test_ranks_of_one_command_are_known():
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert find_launcher({**ranks, "OMPI_NUM_APP_CTX": "1"}).has_one_command
    assert find_launcher({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}).has_one_command
    # mpirun -np 1 one : -np 1 another
    assert not find_launcher({**ranks, "OMPI_NUM_APP_CTX": "2"}).has_one_command
    assert not find_launcher({"PMI_RANK": "1", "PMI_SIZE": "2"}).has_one_command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "Flux started 2 or more, but MPI connects 1"),
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, "Cray PALS started 2 or more"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "torchrun started 4 or more"),
    ],
)
def test_ranks_that_mpi_does_not_connect_are_refused(env, said):
    """Each would train alone, and write into the same folder."""
    program = [sys.executable, "-c", "import hvdtrain; hvdtrain.init()"]
    done = subprocess.run(program, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr


def test_mpi_binding_is_detected():
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_bound_at_launch": "1"}
    assert find_launcher(env).bound_to_cores


def test_defaults_never_replace_what_is_set(tmp_path):
    defaults = environment.environment_defaults({}, str(tmp_path))
    assert defaults["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OPAL_PREFIX" not in defaults
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    kept = environment.environment_defaults(
        {**several, "HOROVOD_CYCLE_TIME": "5", "TF_CPP_MIN_LOG_LEVEL": "0"}, str(tmp_path)
    )
    assert "HOROVOD_CYCLE_TIME" not in kept
    assert "TF_CPP_MIN_LOG_LEVEL" not in kept


def test_ranks_of_one_host_open_no_ports(tmp_path):
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    one_host = several | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    one_rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    for env in (one_host, one_rank):
        assert environment.environment_defaults(env, str(tmp_path))["OMPI_MCA_btl"] == "^tcp"
    for env in ({}, several, several | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, one_host | {"OMPI_MCA_btl": "self,tcp"}):
        assert "OMPI_MCA_btl" not in environment.environment_defaults(env, str(tmp_path))


def test_open_mpi_from_the_wheel_receives_its_prefix(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    assert environment.environment_defaults({}, str(tmp_path))["OPAL_PREFIX"] == str(tmp_path)


def test_horovods_cycle_is_short_on_several_ranks(tmp_path):
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    unknown = {"PMIX_RANK": "0"}
    for env in (several, several | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, unknown):
        assert environment.environment_defaults(env, str(tmp_path))["HOROVOD_CYCLE_TIME"] == "0.1"
    for env in ({}, several | {"OMPI_COMM_WORLD_SIZE": "1"}):
        assert "HOROVOD_CYCLE_TIME" not in environment.environment_defaults(env, str(tmp_path))


@pytest.mark.parametrize(
    ("cores", "bound", "cycle_ms"), [(2, False, "0.02"), (64, False, "0.02"), (1, False, "0.1"), (1, True, "0.02")]
)
def test_horovods_cycle_is_shortest_where_ranks_of_one_host_have_a_core_each(
    cores, bound, cycle_ms, tmp_path, monkeypatch
):
    monkeypatch.setattr(environment, "usable_cores", lambda: cores)
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    env |= {"OMPI_MCA_orte_bound_at_launch": "1"} if bound else {}
    assert environment.environment_defaults(env, str(tmp_path))["HOROVOD_CYCLE_TIME"] == cycle_ms


_ONE_HOST, _TWO_HOSTS = Launcher("Open MPI", 0, 2, 2, False), Launcher("Open MPI", 0, 4, 2, False)
_UNKNOWN, _ALONE = Launcher("PMI", 0, 2, None, False), Launcher("none", 0, 1, 1, False)


@pytest.mark.parametrize(
    ("launcher", "gpus", "deterministic", "given", "threshold"),
    [
        (_ONE_HOST, [], False, None, "0"),
        (_ONE_HOST, [], False, "1000", "1000"),
        (_ONE_HOST, ["GPU:0"], False, None, None),
        (_TWO_HOSTS, [], False, None, None),
        (_UNKNOWN, [], False, None, None),
        (_ALONE, [], False, None, None),
        (_TWO_HOSTS, ["GPU:0"], True, "1000", "0"),
    ],
)
def test_horovod_fuses_messages_where_that_pays(launcher, gpus, deterministic, given, threshold, monkeypatch):
    variables = {"HOROVOD_FUSION_THRESHOLD": given} if given else {}
    monkeypatch.setattr(os, "environ", variables)
    environment.choose_fusion(launcher, deterministic=deterministic, has_gpu=bool(gpus))
    assert variables.get("HOROVOD_FUSION_THRESHOLD") == threshold


@pytest.mark.parametrize(
    ("threads", "gpus", "one"), [(1, [], True), (2, [], False), (0, [], False), (1, ["GPU:0"], False)]
)
def test_a_rank_with_one_core_is_recognized(threads, gpus, one, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: threads)
    assert devices.computes_on_one_core() == one


def test_one_process_starts_with_gloo_and_does_not_pass_it_on(monkeypatch):
    monkeypatch.delenv("HOROVOD_CONTROLLER", raising=False)
    with environment.horovod_start_environment(find_launcher({})):
        assert os.environ["HOROVOD_CONTROLLER"] == "gloo"
    assert "HOROVOD_CONTROLLER" not in os.environ
    with environment.horovod_start_environment(Launcher("Open MPI", 0, 2, 2, False)):
        assert "HOROVOD_CONTROLLER" not in os.environ
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    with environment.horovod_start_environment(find_launcher({})):
        assert os.environ["HOROVOD_CONTROLLER"] == "mpi"
    assert os.environ["HOROVOD_CONTROLLER"] == "mpi"


@pytest.mark.parametrize(
    ("cores", "local_size", "bound", "threads"),
    [(8, 4, False, 2), (7, 2, False, 3), (2, 4, False, 1), (16, 2, True, 16), (1, 1, False, 1)],
)
def test_cores_are_shared_fairly(cores, local_size, bound, threads):
    assert threads_per_rank(cores, local_size, bound) == threads


@pytest.mark.parametrize(("threads", "operations"), [(1, 1), (2, 2), (4, 2), (9, 5)])
def test_operations_at_a_time(threads, operations):
    assert inter_op_threads(threads) == operations


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "local_size", "gpu"),
    [(4, 0, 4, 0), (4, 3, 4, 3), (2, 3, 4, 1), (1, 1, 2, 0), (0, 0, 2, None), (8, 1, 2, 1)],
)
def test_a_gpu_for_each_rank(num_gpus, local_rank, local_size, gpu):
    assert devices.choose_gpu(num_gpus, local_rank, local_size) == gpu


class FakeTensorFlow:
    """Records what is asked of ``tf.config``."""

    def __init__(self, num_gpus: int, already_used: bool = False):
        self.calls: list[tuple] = []
        self.config = self
        self.experimental = self
        self.threading = self
        self._gpus = [f"gpu{i}" for i in range(num_gpus)]
        self._already_used = already_used

    def list_physical_devices(self, kind=None):
        return self._gpus if kind == "GPU" else []

    def list_logical_devices(self):
        return []

    def __getattr__(self, name):
        def record(*arguments):
            if self._already_used and ("parallelism" in name or "visible" in name):
                raise RuntimeError("context is initialised")
            self.calls.append((name, *arguments))

        return record


def test_configuring_devices_pins_a_gpu_and_lets_its_memory_grow(monkeypatch):
    fake = FakeTensorFlow(num_gpus=2)
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    assert devices.configure_devices(local_rank=1, local_size=2, threads=3, bound_to_cores=False) == "GPU:1"
    assert ("set_visible_devices", "gpu1", "GPU") in fake.calls
    assert ("set_memory_growth", "gpu1", True) in fake.calls
    assert ("set_intra_op_parallelism_threads", 3) in fake.calls


def test_the_memory_of_a_gpu_can_be_limited(monkeypatch):
    fake = FakeTensorFlow(num_gpus=1)
    fake.LogicalDeviceConfiguration = lambda memory_limit: memory_limit
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    assert devices.configure_devices(0, 1, threads=None, bound_to_cores=True, gpu_memory_mib=2048) == "GPU:0"
    assert ("set_logical_device_configuration", "gpu0", [2048]) in fake.calls
    assert not any(call[0] == "set_memory_growth" for call in fake.calls)


def test_a_gpu_that_was_used_before_cannot_be_assigned(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", FakeTensorFlow(num_gpus=1, already_used=True))
    with pytest.raises(UsageError, match=r"hvdtrain.init\(\) must be called before TensorFlow uses the GPUs"):
        devices.configure_devices(0, 1, threads=None, bound_to_cores=True)


def test_configuring_devices_without_a_gpu(monkeypatch):
    fake = FakeTensorFlow(num_gpus=0)
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    assert devices.configure_devices(local_rank=0, local_size=1, threads=None, bound_to_cores=True) == "CPU"
    assert not any(call[0] == "set_visible_devices" for call in fake.calls)


def test_threads_that_can_no_longer_be_set_are_an_error_only_if_requested(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", FakeTensorFlow(num_gpus=0, already_used=True))
    assert devices.configure_devices(local_rank=0, local_size=1, threads=None, bound_to_cores=False) == "CPU"
    with pytest.raises(RuntimeError):
        devices.configure_devices(local_rank=0, local_size=1, threads=2, bound_to_cores=False)


def test_only_known_start_up_messages_are_held_back(capfd):
    with tensorflow_start.without_startup_messages():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called\nE0000 a real error\n")
    assert capfd.readouterr().err == "E0000 a real error\n"


class FakeProcess:
    """A process with a parent."""

    def __init__(self, pid, arguments=(), parent=None, status=psutil.STATUS_RUNNING):
        self.pid = pid
        self._arguments = list(arguments)
        self._parent = parent
        self._status = status

    def cmdline(self):
        return self._arguments

    def status(self):
        return self._status

    def parents(self):
        return [] if self._parent is None else [self._parent, *self._parent.parents()]


@pytest.mark.parametrize(
    ("shell", "found"),
    [
        (("/bin/sh", "-c", " mpirun --allow-run-as-root -np 2 python train.py"), 40),
        (("/bin/sh", "-c", "python train.py"), None),
        (("mpirun", "-np", "2"), None),
        ((), None),
    ],
)
def test_horovodrun_is_found_above_its_mpirun(shell, found, monkeypatch):
    init = FakeProcess(1, ["init"])
    mpirun = FakeProcess(50, ["mpirun", "-np", "2"], parent=FakeProcess(40, shell, parent=init))
    monkeypatch.setattr(psutil, "Process", lambda: FakeProcess(60, ["python"], parent=mpirun))
    assert processes.horovodrun_above() == found


def test_an_inaccessible_process_is_no_horovodrun(monkeypatch):
    def refuse():
        raise psutil.AccessDenied(50)

    monkeypatch.setattr(psutil, "Process", refuse)
    assert processes.horovodrun_above() is None


def test_a_process_that_has_ended_does_not_run():
    running = subprocess.Popen(["sleep", "60"])
    ended = subprocess.Popen(["true"])
    try:
        # Waits for its end without collecting it, so that it stays a zombie.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert processes.is_running(running.pid)
        assert not processes.is_running(ended.pid)
        ended.wait()
        assert not processes.is_running(ended.pid)
    finally:
        running.kill()
        running.wait()


def test_a_host_whose_name_has_no_address_is_refused(monkeypatch):
    network.require_address_of_name()
    monkeypatch.setattr(network, "host_name", lambda: "nowhere.invalid")
    with pytest.raises(
        UsageError, match=r"must have an address\. Received: 'nowhere\.invalid' .* Add it to /etc/hosts"
    ):
        network.require_address_of_name()


@pytest.mark.parametrize(
    ("room", "user", "is_short"), [(5, 1000, True), (-3, 1000, True), (100, 1000, False), (5, 0, False)]
)
def test_few_processes_are_reported(room, user, is_short, monkeypatch):
    """The limit is this user's, with all that it runs already; root has none."""
    running = process_limit._num_running(os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(process_limit, "_num_running", lambda user: running)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (running + room, resource.RLIM_INFINITY))
    found = process_limit.shortage()
    assert running >= psutil.Process().num_threads()
    assert (found is not None) == is_short
    if found is not None:
        assert f"may start {max(0, room)} more processes and threads" in found
        assert f"(ulimit -u is {running + room})" in found
