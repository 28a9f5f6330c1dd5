"""The configuration of a command: frozen, validated when it is built, the one source of --help."""

from hvdtrain.config.bench import BenchConfig
from hvdtrain.config.given import build
from hvdtrain.config.options import LEARNING, LOCAL, RANKS, WHAT, Config, converted, flag_of, options
from hvdtrain.config.reading import EvalConfig, ExportConfig
from hvdtrain.config.train import TrainConfig

__all__ = [
    "LEARNING",
    "LOCAL",
    "RANKS",
    "WHAT",
    "BenchConfig",
    "Config",
    "EvalConfig",
    "ExportConfig",
    "TrainConfig",
    "build",
    "converted",
    "flag_of",
    "options",
]
