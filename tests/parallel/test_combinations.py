"""Every pair of options that no rule excludes trains, on two ranks, in as few runs as cover them all."""

import itertools

import pytest
from launcher import LONG, run_commands

from hvdtrain.commands.config import RunConfig
from hvdtrain.config.exclusions import ANY, DETERMINISTIC, OPTIONS, RULES, Needs, Option, first_broken
from hvdtrain.config.fields import option_names
from hvdtrain.config.wording import naming_flags, option

pytestmark = pytest.mark.slow

VALUES = {
    **{"gradient_accumulation_steps": 2, "steps_per_execution": 2, "global_batch_size": 24, "bad_samples": 1},
    **{"shares": "2,1", "balance_every": 2, "max_batch_size": 64, "quorum": 1, "step_deadline": 9.0, "step_grace": 0.5},
    **{"max_missed_updates": 8, "sync_every": 2, "outer_learning_rate": 0.5, "outer_momentum": 0.5},
    **{"fragments": 2, "fragment_delay": 2, "merge_alpha": 0.5, "round_quorum": 1, "round_grace": 0.5},
    **{"sync_dtype": "int4", "sync_steps_first": 2, "compression": "powersgd:2", "compression_after": 1, "groups": 2},
    **{"clip_norm": 1.0, "clip_value": 1.0, "ema": 0.9, "lr_scaling": "linear", "lr_decay": "cosine"},
    **{"warmup_steps": 2, "lr_decay_steps": 3, "lr_decay_epochs": 1, "steps": 4, "epochs": 1},
}
# --replay needs the record of another run, --average-across host several hosts, --autotune some minutes.
LEFT_OUT = {"record", "replay", "average_across", "autotune", "autotune_limit"}
CHOSEN = [each for each in OPTIONS if each.name in option_names(RunConfig) and each.name not in LEFT_OUT]
# Without these, an option has its default; op and mode have several values.
STEPS = Option("steps")


def are_compatible(options: list[Option]) -> bool:
    values = {each.name: each.value for each in options}
    return len(values) == len(set(options)) and first_broken(dict.fromkeys(options, "")) is None


def with_needs(options: list[Option]) -> list[Option]:
    chosen = list(dict.fromkeys(options))
    for each in chosen:
        chosen += [
            rule.other for rule in RULES if isinstance(rule, Needs) and rule.option == each and rule.other not in chosen
        ]
    return chosen


def covering_runs() -> list[list[Option]]:
    """Sets of compatible options that cover every compatible pair."""
    pairs = {frozenset(pair) for pair in itertools.combinations(CHOSEN, 2) if are_compatible(with_needs(list(pair)))}
    runs = []
    while pairs:
        chosen: list[Option] = []
        # From the pairs that are left, and then in the order of the table.
        for candidate in [
            each for pair in sorted((sorted(pair, key=repr) for pair in pairs), key=repr) for each in pair
        ]:
            grown = with_needs([*chosen, candidate])
            if are_compatible(grown):
                chosen = grown
        covered = {frozenset(pair) for pair in itertools.combinations(chosen, 2)}
        assert pairs & covered
        pairs -= covered
        runs.append(chosen)
    # One job makes all of them, and operations of TensorFlow stay deterministic.
    return sorted(runs, key=lambda chosen: DETERMINISTIC in chosen)


def line(options: list[Option]) -> list[str]:
    with naming_flags():
        words = [option(each.name, VALUES[each.name] if each.value is ANY else each.value) for each in options]
    length = [] if {"steps", "epochs"} & {each.name for each in options} else ["--steps 4"]
    return [part for word in [*words, *length] for part in word.split()]


@pytest.mark.parametrize("every", [6, LONG(1)])
def test_pairs_that_go_together_train(every, tmp_path):
    runs = covering_runs()[::every]
    lines = [[*line(each), "--run-dir", str(tmp_path / f"run{i}")] for i, each in enumerate(runs)]
    assert 5 <= every * len(runs) <= 40
    done = run_commands(lines, ranks=2, folder=tmp_path / "jobs", timeout_s=900)
    for words, each in zip(lines, done, strict=True):
        assert each.code == 0, f"{' '.join(words)}\n{each.output[-4000:]}"
