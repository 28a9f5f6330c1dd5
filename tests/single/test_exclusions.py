"""What excludes what: every rule is about facts that exist, is worded for users, and is checked where they are
known."""

import importlib.util
import itertools
from pathlib import Path

import pytest

from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.config import EvalConfig, RunConfig
from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import ANY, RULES, Excludes, Needs, Option, first_broken
from hvdtrain.config.fields import as_dict, default_of, facts_of, option_names, with_options
from hvdtrain.config.wording import naming_flags
from hvdtrain.errors import UsageError

ROOT = Path(__file__).parents[2]
# A value of each option that no rule names a value of.
VALUES = {
    **{"steps": 3, "epochs": 2, "gradient_accumulation_steps": 2, "steps_per_execution": 4, "global_batch_size": 64},
    **{"bad_samples": 1, "shares": "2,1", "balance_every": 7, "max_batch_size": 64, "quorum": 1, "step_deadline": 9.0},
    **{"step_grace": 0.5, "max_missed_updates": 8, "record": "file", "replay": "file", "sync_every": 4},
    **{"outer_learning_rate": 0.5, "outer_momentum": 0.5, "sync_dtype": "int4", "sync_steps_first": 5},
    **{"fragments": 2, "fragment_delay": 3, "merge_alpha": 0.5, "round_quorum": 1, "round_grace": 0.5},
    **{"compression": "fp16", "compression_after": 2, "groups": 2, "clip_norm": 1.0, "clip_value": 1.0, "ema": 0.9},
    **{"lr_scaling": "linear", "lr_decay": "cosine", "warmup_steps": 2, "lr_decay_steps": 3, "lr_decay_epochs": 3},
    **{"checkpoint": "path", "link_mbit": 1.0, "link_latency_ms": 1.0, "within_mbit": 1.0, "within_latency_ms": 1.0},
}
# Of commands that are not configured by classes.
ELSEWHERE = {"mpi", "gloo", "hosts", "hostfile"}


def value_of(option: Option):
    return VALUES[option.name] if option.value is ANY else option.value


OF_A_RUN = [each for each in exclusions.OPTIONS if each.name in option_names(RunConfig)]


def with_what_they_need(options):
    """The options, and those that they need to have an effect."""
    chosen = list(options)
    for each in chosen:
        chosen += [
            rule.other for rule in RULES if isinstance(rule, Needs) and rule.option == each and rule.other not in chosen
        ]
    return chosen


def configured(options):
    return with_options(RunConfig(), {each.name: value_of(each) for each in options})


def test_rules_are_about_options_that_exist():
    known = {name for kind in (RunConfig, BenchConfig, EvalConfig) for name in option_names(kind)}
    for each in exclusions.OPTIONS:
        assert each.name in known | ELSEWHERE, each
        if each.name in option_names(RunConfig):
            assert each in facts_of(
                with_options(RunConfig(), {"mode": "local"} if each == exclusions.LOCAL else {})
            ) or (not each.holds(default_of(RunConfig, each.name), default_of(RunConfig, each.name)))


def test_no_pair_has_two_rules():
    pairs = [frozenset(rule.facts) for rule in RULES if isinstance(rule, Excludes)]
    assert len(set(pairs)) == len(pairs)
    assert not [rule for rule in RULES if isinstance(rule, Excludes) and len(set(rule.facts)) < 2]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.facts)))
def test_a_rule_is_worded_for_its_reader(rule):
    facts = exclusions.facts_from(*rule.facts) if isinstance(rule, Excludes) else exclusions.facts_from(rule.option)
    assert rule.is_broken(facts)
    in_python = rule.message(facts)
    assert "--" not in in_python.replace("launch/run --restarts", "")
    with naming_flags():
        on_the_command_line = rule.message(exclusions.facts_from(*facts))
    for option in rule.facts:
        if isinstance(option, Option):
            assert f"--{option.name.replace('_', '-')}" in on_the_command_line
            assert option.name in in_python
    for message in (in_python, on_the_command_line):
        assert "excludes" in message or "needs" in message
        assert "Received: " in message
        assert message.endswith(".")
        assert ".." not in message


@pytest.mark.parametrize("i", range(len(OF_A_RUN)), ids=lambda i: str(OF_A_RUN[i]))
def test_each_pair_of_options_is_refused_by_a_rule_or_configures_a_run(i):
    """A pair is refused where the configuration that has both is made, with the words of its rule."""
    one = OF_A_RUN[i]
    for other in OF_A_RUN[i + 1 :]:
        if other.name == one.name:
            continue
        options = with_what_they_need([one, other])
        if len({each.name for each in options}) < len(options):
            continue  # They need different values of an option.
        facts = dict.fromkeys(options, "")
        rule = first_broken(facts)
        if rule is None:
            found = as_dict(configured(options))
            assert all(found[each.name] == value_of(each) for each in options)
        else:
            with pytest.raises(UsageError, match="excludes"):
                configured(options)


@pytest.mark.parametrize("one", OF_A_RUN, ids=str)
def test_no_option_excludes_all_others(one):
    others = [with_what_they_need([one, other]) for other in OF_A_RUN if other.name != one.name]
    assert any(first_broken(dict.fromkeys(options, "")) is None for options in others)


def test_every_need_is_required():
    for rule in RULES:
        if isinstance(rule, Needs) and rule.option.name in option_names(RunConfig):
            with pytest.raises(UsageError, match=f"{rule.option.name} needs "):
                configured([rule.option])
            configured(with_what_they_need([rule.option]))


def test_conditions_are_asked_somewhere():
    """Each condition is named outside of the table, where it is known."""
    texts = [path.read_text() for path in (ROOT / "hvdtrain").rglob("*.py") if path.name != "exclusions.py"]
    names = [name for name, value in vars(exclusions).items() if isinstance(value, exclusions.Condition)]
    assert len(names) >= 12
    for name in names:
        assert any(name in text for text in texts), name


def test_the_page_is_that_of_the_rules():
    spec = importlib.util.spec_from_file_location("combinations", ROOT / "docs/_site/combinations.py")
    combinations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(combinations)
    assert combinations.DOCUMENT.read_text() == combinations.render()
    assert len(list(itertools.chain(RULES))) > 90
