"""What ``--jit-compile`` would gain, measured in processes of their own: XLA makes other steps of its process slower.

Every rank starts one, at the same time, in which the rank's steps are made without communication, which XLA does not
change.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.commands.autotune.trials import Candidate
from hvdtrain.commands.building import local_data_dir, make_model, read_task
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import Session, run_on_ranks
from hvdtrain.config import exclusions
from hvdtrain.config.fields import as_dict, facts_of, with_options
from hvdtrain.config.wording import flag_of
from hvdtrain.data import Data
from hvdtrain.distributed import runtime
from hvdtrain.optim.learning_rate import hold_weights
from hvdtrain.system import devices, environment
from hvdtrain.system.atomic_files import write_text
from hvdtrain.system.json_files import read_object
from hvdtrain.training.config import sync_config
from hvdtrain.training.plan import sample_plan
from hvdtrain.training.step_runner import StepRunner
from hvdtrain.training.step_trials import BLOCK_S, BLOCKS, interleaved

_OPTIONS, _RESULT = "options.json", "result.json"
_START_S = 8.0
"""About how long a process takes to import TensorFlow and to read the task."""
_COMPILE_FACTOR = 4
"""About how much longer XLA compiles a step than TensorFlow takes to trace it."""
_MAX_S = 120.0
_MIN_GAIN = 0.05
"""The two are measured one after the other, so that a smaller difference may be another program's load."""


def is_possible(config: RunConfig) -> bool:
    """Whether XLA is a choice that is left to make, and a single process can measure it."""
    training = config.training
    is_open = training.jit_compile is None and not devices.has_gpu()  # On a GPU, XLA is the default.
    facts = {**facts_of(config), exclusions.JIT_COMPILE: ""}
    return is_open and not training.balancing.is_active and exclusions.first_broken(facts) is None


def cost_s(default: Candidate) -> float:
    """About how many seconds :func:`report` takes.

    Args:
        default: the same steps, as this process makes them.
    """
    return _START_S + (1 + _COMPILE_FACTOR) * default.start_s + 2 * BLOCKS * max(BLOCK_S, default.step_s)


def report(config: RunConfig, data: Data, session: Session, *, timeout_s: float) -> str:
    """What XLA would gain, for a line on the console. Collective: all ranks must call it.

    Args:
        timeout_s: seconds after which it is given up.
    """
    collectives, stall_timeout_s = session.collectives, config.job_watch.stall_timeout
    limits_s = [timeout_s, _MAX_S, *([stall_timeout_s / 2] if stall_timeout_s else [])]
    session.job_watch.heartbeat("trying XLA", 0)
    found = collectives.allgather(_run(_options(config, data, session), min(limits_s)))
    flag = flag_of("jit_compile")
    if None in found:
        return f"{flag} could not be tried"
    plain_ms, xla_ms = (1000 * max(each) for each in zip(*found, strict=True))
    times = f"without communication {xla_ms:.3f} ms with it, {plain_ms:.3f} ms without"
    if xla_ms > (1 - _MIN_GAIN) * plain_ms:
        return f"{flag} would not make steps shorter ({times})"
    gain = f"{1 - xla_ms / plain_ms:.0%}"
    return f"{flag}, which rounds differently and is not chosen here, would make them {gain} shorter ({times})"


def _options(config: RunConfig, data: Data, session: Session) -> dict[str, Any]:
    """The options with which one process makes the steps of this rank."""
    plan = sample_plan(data.training, config.training, session.collectives)
    own = config.training.batch_size if plan.rank_batch_sizes is None else plan.rank_batch_sizes[plan.rank]
    alone = {
        **{"batch_size": own, "global_batch_size": None, "rescale": False},
        **{"threads": runtime.current().topology.threads, "timeline": None, "join": None},
        **{"autotune": False, "run_dir": None},
    }
    return {**as_dict(config), **alone}


def _run(options: Mapping[str, Any], timeout_s: float) -> tuple[float, float] | None:
    """The seconds of a step without and with XLA; None if they could not be measured."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-xla-") as folder:
        (Path(folder) / _OPTIONS).write_text(json.dumps(options))
        command = [sys.executable, "-m", __name__, folder]
        environ = environment.lone_process_environment()
        try:
            subprocess.run(command, env=environ, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_s)
            found = read_object(Path(folder) / _RESULT)
            return float(found["plain_s"]), float(found["xla_s"])
        except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
            return None


def _measure(folder: Path) -> int:
    config = with_options(RunConfig(), read_object(folder / _OPTIONS))

    def work(config: RunConfig, session: Session) -> None:
        runtime.init(seed=config.training.seed)
        task, data = read_task(config, local_data_dir(config, session.collectives))

        def make(trial: RunConfig) -> StepRunner:
            model = make_model(trial, task, data, session.collectives)
            hold_weights(model)
            training = sync_config(trial.training)
            runner = StepRunner(
                model, data.training, training, collectives=session.collectives, job_watch=session.job_watch
            )
            runner.start()
            return runner

        def seconds(jit_compile: bool) -> float:
            trial = Candidate(with_options(config, {"jit_compile": jit_compile}), make, session)
            return interleaved([trial])[0]

        # XLA last; see above.
        found = {"plain_s": seconds(False), "xla_s": seconds(True)}
        write_text(folder / _RESULT, json.dumps(found))

    return run_on_ranks(config, None, work)


if __name__ == "__main__":
    sys.exit(_measure(Path(sys.argv[1])))
