"""Chooses the fastest settings for a run: from the cache, or by trials if they take a small share of the run."""

import gc

import keras

from hvdtrain.commands.autotune import choices, xla_trial
from hvdtrain.commands.autotune.choices import Choice
from hvdtrain.commands.autotune.trials import Candidate, Settings, cost_s, describe, settings_to_try, try_settings
from hvdtrain.commands.building import make_model
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import Session
from hvdtrain.config.fields import as_dict, with_options
from hvdtrain.config.wording import flag_of
from hvdtrain.data import Data
from hvdtrain.distributed import runtime
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.optim.learning_rate import hold_weights
from hvdtrain.tasks.task import Task
from hvdtrain.training.config import sync_config
from hvdtrain.training.plan import sample_plan, total_steps
from hvdtrain.training.step_runner import StepRunner


def tune(config: RunConfig, task: Task, data: Data, session: Session) -> RunConfig:
    """The configuration with the fastest settings, the same on every rank; all ranks must call it.

    Training afterwards is not affected by what was tried.

    Raises:
        StoppedEarly: the job was asked to stop.
    """
    tuning = _Tuning(config, task, data, session)
    chosen, line = tuning.choose()
    keras.backend.clear_session()
    gc.collect()  # Models and their compiled steps refer to each other.
    runtime.init(seed=config.training.seed)
    if session.collectives.rank == 0:
        print(f"autotune: {line}", flush=True)
    return chosen


class _Tuning:
    def __init__(self, config: RunConfig, task: Task, data: Data, session: Session):
        self._config, self._task, self._data, self._session = config, task, data, session
        # Between two averages, a rank's steps in local SGD are those of a single process.
        is_local = config.training.mode == "local"
        self._step_collectives = SingleProcessCollectives() if is_local else session.collectives
        self._steps = total_steps(config.training, sample_plan(data.training, config.training, session.collectives))

    def choose(self) -> tuple[RunConfig, str]:
        """The configuration with the fastest settings, and a line that says why."""
        config, collectives = self._config, self._session.collectives
        settings, tries_xla = settings_to_try(config, collectives), xla_trial.is_possible(config)
        if not settings and not tries_xla:
            return config, "nothing to try"
        tried = [*settings, *(["jit_compile"] if tries_xla else [])]
        model = on_every_rank(lambda: self._held_model(config), collectives)
        path = choices.path_of(choices.key(config, tried, model, self._data.training, collectives))
        del model
        known = on_first_rank(lambda: choices.read(path, settings), collectives)
        origin = f" (as measured in an earlier run; to measure again, delete {path})"
        if known is None or (known.options is None and self._pays(known)):
            known, origin = self._measure(settings, tries_xla), ""
            on_first_rank(lambda: choices.write(path, known), collectives)
        if known.options is None:
            return config, self._why_not(known)
        return with_options(config, known.options), known.summary + origin

    def _pays(self, choice: Choice) -> bool:
        return choice.cost_s <= self._allowed_s(choice.step_s)

    def _allowed_s(self, step_s: float) -> float:
        return self._config.autotune_limit * self._steps * step_s

    def _why_not(self, choice: Choice) -> str:
        run_s = self._steps * choice.step_s
        return (
            f"settings were not tried: it would take about {choice.cost_s:.0f} s, and the run {run_s:.0f} s "
            f"({self._steps:,} steps of {1000 * choice.step_s:.3g} ms). {flag_of('autotune_limit')} is "
            f"{self._config.autotune_limit:g}"
        )

    def _measure(self, settings: Settings, tries_xla: bool) -> Choice:
        default = self._candidate(self._config)
        cost = cost_s(settings, default) + (xla_trial.cost_s(default) if tries_xla else 0.0)
        choice = Choice(default.step_s, cost)
        if not self._pays(choice):
            return choice
        chosen, trials = try_settings(default, settings, self._candidate)
        parts = [describe(trials, chosen)] if trials else []
        if tries_xla:
            parts.append(xla_trial.report(chosen, self._data, self._session, timeout_s=self._allowed_s(default.step_s)))
        values = as_dict(chosen)
        return Choice(default.step_s, cost, {name: values[name] for name in settings}, "; ".join(parts))

    def _candidate(self, trial: RunConfig) -> Candidate:
        return Candidate(trial, self._runner, self._session)

    def _held_model(self, trial: RunConfig) -> keras.Model:
        model = make_model(trial, self._task, self._data, self._step_collectives)
        hold_weights(model)
        return model

    def _runner(self, trial: RunConfig) -> StepRunner:
        session = self._session
        runner = on_every_rank(
            lambda: StepRunner(
                self._held_model(trial),
                self._data.training,
                sync_config(trial.training),
                collectives=self._step_collectives,
                job_watch=session.job_watch,
                logging=trial.training.logging,
            ),
            session.collectives,
        )
        runner.start()
        return runner
