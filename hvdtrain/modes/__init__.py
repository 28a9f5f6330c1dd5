"""How the ranks of a run train together: in step, or each by itself and meeting now and then."""

from hvdtrain.modes.calls import TrainingCalls
from hvdtrain.modes.local import LocalMode
from hvdtrain.modes.sync import SyncMode

__all__ = ["LocalMode", "SyncMode", "TrainingCalls"]
