"""How many more samples per second a quorum would make, from the step times of a run that waited for all ranks."""

import numpy as np


def estimated_speedup(durations: np.ndarray, quorum: int, step_grace: float) -> float:
    """Samples per second with ``--quorum``, relative to steps that wait for all ranks.

    Ranks compute one micro-batch after another, each as long as measured. One that is late misses its update, and
    those that close until its micro-batch is ready: it then begins one for the update that is open. Without the limit
    of ``--max-missed-updates``.

    Args:
        durations: seconds of each rank's micro-batches; shape ``[ranks, steps]``.
        step_grace: see :class:`QuorumConfig`.
    """
    num_ranks, num_steps = durations.shape
    made = np.zeros(num_ranks, np.int64)
    """The micro-batches that each rank has begun."""

    def begin(ranks: np.ndarray, begin_s: float | np.ndarray) -> None:
        ready_s[ranks] = begin_s + durations[ranks, made[ranks] % num_steps]
        made[ranks] += 1

    ready_s, now_s, num_used = np.zeros(num_ranks), 0.0, 0
    is_late = np.zeros(num_ranks, bool)
    begin(np.arange(num_ranks), 0.0)
    for _ in range(num_steps):
        while True:
            on_time = np.sort(ready_s[~is_late])
            closes_s = np.inf  # The update needs ranks that still compute for an earlier one.
            if len(on_time) >= quorum:
                quorum_s = on_time[quorum - 1]
                closes_s = min(quorum_s + step_grace * (quorum_s - now_s), on_time[-1])
            late = np.flatnonzero(is_late & (ready_s < closes_s))
            if not late.size:
                break
            first = late[[np.argmin(ready_s[late])]]
            is_late[first] = False
            begin(first, ready_s[first])
        is_used = ~is_late & (ready_s <= closes_s)
        is_late = ~is_used
        num_used += int(is_used.sum())
        now_s = closes_s
        begin(np.flatnonzero(is_used), now_s)
    return float(num_used / now_s * durations.max(axis=0).mean() / num_ranks)
