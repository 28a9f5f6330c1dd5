"""Hooks for all tests."""

import os
import signal

# Tests compute on CPUs, also where there are GPUs; those that need a GPU show it to the jobs they start.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# A shell ignores Ctrl-C in what it starts in the background, and jobs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config):
    """The quick tier as a whole runs in two processes. Launched jobs use all cores, and single files start sooner."""
    is_quick_tier = config.option.markexpr == "not slow and not long" and config.args == config.getini("testpaths")
    return min(2, os.cpu_count() or 1) if is_quick_tier else 0
