"""Writes docs/combinations.md from hvdtrain/config/exclusions.py: python docs/_site/combinations.py"""

from pathlib import Path

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Excludes, Fact, Option
from hvdtrain.config.wording import naming_flags

DOCUMENT = Path(__file__).parents[1] / "combinations.md"

_HEAD = """# What excludes what

Options and other facts about a job that do not go together. Each combination is refused with one message that says why,
before training begins. In Python, options are fields of
[`TrainConfig`](reference/api/configuration.md#hvdtrain.TrainConfig) and arguments of `DistributedOptimizer`, with the
same names. `docs/_site/combinations.py` writes this page from `hvdtrain/config/exclusions.py`.
"""


def render() -> str:
    """The document."""
    with naming_flags():
        return "\n".join([_HEAD, *_exclusions(), "", "## Options that need others", "", *_needs(), ""])


def _exclusions() -> list[str]:
    lines = ["| | excludes | because |", "|---|---|---|"]
    for rule in exclusions.RULES:
        if isinstance(rule, Excludes):
            one, *others = map(_text, rule.facts)
            remedy = f"; {rule.instead}" if rule.instead else ""
            lines.append(f"| {one} | {' with '.join(others)} | {rule.why}{remedy} |")
    return lines


def _needs() -> list[str]:
    lines = ["| option | needs |", "|---|---|"]
    found: dict[str, list[str]] = {}
    for rule in exclusions.RULES:
        if not isinstance(rule, Excludes):
            found.setdefault(_text(rule.option), []).append(" or ".join(map(_text, rule.others)))
    return [*lines, *(f"| {option} | {', '.join(others)} |" for option, others in found.items())]


def _text(fact: Fact) -> str:
    return f"`{fact}`" if isinstance(fact, Option) else str(fact)


if __name__ == "__main__":
    DOCUMENT.write_text(render())
