"""``python -m hvdtrain doctor``: what matters for a job here, and a remedy for what is wrong."""

from hvdtrain.doctor.command import main

__all__ = ["main"]
