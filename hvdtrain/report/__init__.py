"""What a run tells while it goes on; nothing off rank 0."""

from hvdtrain.report.console import ConsoleReporter
from hvdtrain.report.json_lines import JsonLinesReporter
from hvdtrain.report.progress import ProgressBarReporter
from hvdtrain.report.reporter import Reporter, RunShape, SeveralReporters
from hvdtrain.report.tensorboard import TensorBoardReporter

__all__ = [
    "ConsoleReporter",
    "JsonLinesReporter",
    "ProgressBarReporter",
    "Reporter",
    "RunShape",
    "SeveralReporters",
    "TensorBoardReporter",
    "console_reporter",
]


def console_reporter(is_terminal: bool) -> Reporter:
    """A progress bar on a terminal; lines elsewhere, which files and batch systems can keep."""
    return ProgressBarReporter() if is_terminal else ConsoleReporter()
