"""How the ranks of a run train together: in step, or each by itself and meeting now and then."""

from hvdtrain.modes.calls import TrainingCalls
from hvdtrain.modes.choice import make_mode
from hvdtrain.modes.sync import SyncMode, Training

__all__ = ["SyncMode", "Training", "TrainingCalls", "make_mode"]
