"""The async mode: local updates with periodic parameter averaging."""

from hvdtrain.averaging.averager import ParameterAverager
from hvdtrain.averaging.options import LocalTraining

__all__ = ["LocalTraining", "ParameterAverager"]
