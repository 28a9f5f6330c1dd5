"""Tasks: a model, its data and its defaults; one file per built-in task."""
