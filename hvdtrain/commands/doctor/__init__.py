"""``python -m hvdtrain doctor``: checks the environment of a job and suggests fixes."""

from hvdtrain.commands.doctor.command import main

__all__ = ["main"]
