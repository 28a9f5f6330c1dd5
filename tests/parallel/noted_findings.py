"""The findings of the checks that a training makes."""

import pytest

from hvdtrain.training.equality.step_check import Finding, StepCheck


def noted_findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """A list to which each check from now on adds what it finds."""
    findings: list[Finding] = []
    run = StepCheck.run

    def noted(check: StepCheck, batch: object) -> Finding:
        findings.append(run(check, batch))
        return findings[-1]

    monkeypatch.setattr(StepCheck, "run", noted)
    return findings
