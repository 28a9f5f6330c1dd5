"""Log output of a run: console, progress bar, JSON lines, TensorBoard. Only rank 0 logs."""
