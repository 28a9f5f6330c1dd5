"""``python -m hvdtrain bench``: how long a task's steps take on these ranks, and what they wait for."""
