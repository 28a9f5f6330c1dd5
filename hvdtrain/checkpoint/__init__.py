"""Checkpoints: whole or absent, verified, written by rank 0 in the background, resumed to the bit."""

from hvdtrain.checkpoint.checkpointer import RESUME, Checkpointer, Restored, newest_step
from hvdtrain.checkpoint.model_state import Averaged

__all__ = ["RESUME", "Averaged", "Checkpointer", "Restored", "newest_step"]
