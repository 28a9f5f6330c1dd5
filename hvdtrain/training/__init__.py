"""The training loop, the compiled train step, evaluation, callbacks and metrics."""
