"""Goodput of 16 to 4,096 ranks that fail, simulated: useful samples, of those that all ranks could compute alone.

    launch/run python benchmarks/simulated_goodput.py            # the tables of docs/results.md
    launch/run python benchmarks/simulated_goodput.py --check    # compared with the real jobs of elastic_goodput.py

A simulation of discrete events: ranks fail at random, return, and join; in between, a job trains at the speed that
``simulated_speed.py`` finds for it. Everything that a lost rank has computed since its last contribution to a complete
average is lost; in jobs that restart, what all ranks have computed since the last checkpoint. The same seed gives the
same result. Saves results/simulated_goodput.json.

Measured, in docs/results.md unless named otherwise:

* 0.28 s from a kill to the next step, 0.40 s while a rank joins (3 ranks, two hosts: Elastic jobs); on more ranks, the
  exchange of addresses in addition (results/rendezvous.json), but not the connections;
* 0.23 s until a lost rank is named and 0.27 s until the others have ended, in jobs that restart (1,024 ranks: Many
  ranks); 5.3 s from the start of a job to its first step (Step times).

Assumed: 54 s until another machine has taken the place of a lost one, so that it trains again after a minute;
checkpoints that cost a second of training and are written in ten, at J. W. Young's interval (1974); newcomers receive
their state by a tree of messages between hosts; sync mode in elastic jobs with ``--on-unequal ignore``; the steps,
gradients and links of ``simulated_averaging.py``; slow ranks never fail.
"""

import argparse
import dataclasses
import heapq
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from simulated_averaging import BETWEEN, RANKS
from simulated_speed import Setting, Speed, Way, alone_per_s, interval, speed

from hvdtrain.commands.bench.scaling_model import Link

RESULTS = Path(__file__).resolve().parent / "results"
MTBF_HOURS = (10, 50, 100, 500, 1000, 5000)
FAR = Link(20e-3, 1e9)
SEEDS, FAILURES = 3, 300
RETURNS_S = 9.0
"""In the jobs of elastic_goodput.py: a pause that grows from 1 s, and the start of a process on shared cores."""


@dataclasses.dataclass(frozen=True)
class Pauses:
    """What a failure costs, in seconds."""

    after_loss_s: Callable[[int], float]
    """From a failure to the next step of the ranks that are left."""
    at_join_s: Callable[[int], float]
    away_s: float
    """From a failure until another process is ready to join."""
    restart_s: float = 0.0
    """From a failure to the next step of a job that restarts."""
    checkpoint_s: float = 1.0
    """Training time lost for a checkpoint."""
    write_s: float = 10.0
    """From its start until a job could resume from it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the samples, in steps of a rank at the start."""

    computed: float
    useful: float
    lost: float
    could_all: float
    """What all ranks could compute alone."""
    could_living: float
    """… those that are there."""
    failures: int

    @property
    def goodput(self) -> float:
        return self.useful / self.could_all


def at_random(rank_mtbf_s: float, seed: int) -> Callable[[float, int], float]:
    """Times of the next failure: independent ones of each rank."""
    rng = np.random.default_rng(seed)
    return lambda now_s, living: now_s + rng.exponential(rank_mtbf_s / living) if rank_mtbf_s < math.inf else math.inf


def at_intervals(every_s: float) -> Callable[[float, int], float]:
    """Times of the next failure: regular ones."""
    return lambda now_s, living: every_s * (math.floor(now_s / every_s + 1e-9) + 1)


def elastic(
    setting: Setting, way: Way, pauses: Pauses, next_failure: Callable[[float, int], float], seconds: float
) -> Outcome:
    """A job whose ranks change while it trains."""
    now_s = computed = lost = could_living = resumes_s = 0.0
    living, joining, failures = setting.ranks, 0, 0
    ready: list[float] = []
    trained_s = 0.0
    """Since the ranks last changed."""
    kept_s = 0.0
    """Trained before that, since the last contribution to a complete average."""
    fails_s = next_failure(now_s, living)
    while now_s < seconds:
        pace, alone_per_second = _speed(setting, way, living), alone_per_s(setting, living, setting.slow)
        is_paused = now_s < resumes_s
        next_s = resumes_s if is_paused else ready[0] if ready else math.inf
        event_s = max(now_s, min(seconds, fails_s, next_s))
        could_living += alone_per_second * (event_s - now_s)
        if not is_paused:
            computed += pace.share * alone_per_second * (event_s - now_s)
            trained_s += event_s - now_s
        now_s = event_s
        if now_s >= fails_s:
            failures += 1
            kept_s = _unaveraged_s(pace, trained_s, kept_s)
            if way.every:
                lost += kept_s * (
                    alone_per_s(setting, 1, 0) if way.wait_free else pace.share * alone_per_second / living
                )
            else:
                lost += kept_s * pace.share * alone_per_second  # All repeat the step.
                kept_s = 0.0
            trained_s = 0.0
            if living > max(1, setting.slow):
                living -= 1
                heapq.heappush(ready, now_s + pauses.away_s)
            for _ in range(joining):
                heapq.heappush(ready, now_s)
            joining = 0
            resumes_s = now_s + pauses.after_loss_s(living) + _waits_s(setting, way, living)
            fails_s = next_failure(now_s, living)
        elif is_paused:
            living, joining = living + joining, 0
            fails_s = next_failure(now_s, living)
        else:
            while ready and ready[0] <= now_s:
                heapq.heappop(ready)
                joining += 1
            if joining:
                trained_s = kept_s = 0.0
                resumes_s = now_s + pauses.at_join_s(living + joining) + _waits_s(setting, way, living)
                # The ranks that are there average before.
                resumes_s += setting.average_s(setting.num_bytes, living) if way.every else 0.0
                resumes_s += setting.share_state_s(living + joining)
    could_all = alone_per_s(setting, setting.ranks, setting.slow) * seconds
    return Outcome(computed, computed - lost, lost, could_all, could_living, failures)


def _unaveraged_s(pace: Speed, trained_s: float, kept_s: float) -> float:
    """How long ago ranks made the last contribution whose average is complete; in sync mode, began the step."""
    rounds = max(0, math.floor((trained_s - pace.average_s) / pace.round_s))
    return trained_s - rounds * pace.round_s + (kept_s if rounds == 0 else 0.0)


def _speed(setting: Setting, way: Way, living: int) -> Speed:
    """Of about this number of ranks, so that few are simulated."""
    about = max(1, setting.ranks // 16)
    return speed(setting, way, max(1, round(living / about)) * about)


def _waits_s(setting: Setting, way: Way, living: int) -> float:
    """The mean time for which ranks that do not step together wait for each other's steps when members change."""
    return setting.step_s * setting.ranks / living / 2 if way.every else 0.0


def restarting(
    setting: Setting,
    way: Way,
    pauses: Pauses,
    next_failure: Callable[[float, int], float],
    seconds: float,
    checkpoint_every_s: float,
) -> Outcome:
    """A job that restarts all ranks from the last checkpoint, with another machine for the lost one."""
    now_s = computed = lost = 0.0
    failures = 0
    alone = alone_per_s(setting, setting.ranks, setting.slow)
    cycle_s = checkpoint_every_s + pauses.checkpoint_s
    rate = speed(setting, way, setting.ranks).share * alone * checkpoint_every_s / cycle_s
    while now_s < seconds:
        fails_s = next_failure(now_s, setting.ranks)
        trained_s = min(fails_s, seconds) - now_s
        computed += rate * trained_s
        now_s = fails_s
        if now_s >= seconds:
            break
        saved_s = max(0, math.floor((trained_s - pauses.write_s) / cycle_s)) * cycle_s
        lost += rate * (trained_s - saved_s)
        failures += 1
        while (fails_s := next_failure(now_s, setting.ranks)) < now_s + pauses.restart_s:
            now_s = fails_s
            failures += 1
        now_s += pauses.restart_s
    return Outcome(computed, computed - lost, lost, alone * seconds, alone * seconds, failures)


def young_s(pauses: Pauses, job_mtbf_s: float) -> float:
    """The interval of checkpoints that loses the least time, to first order."""
    return max(pauses.write_s, min(math.sqrt(2 * pauses.checkpoint_s * job_mtbf_s), 86400.0))


WAYS: dict[str, Way] = {
    "sync, restarts": Way(),
    "quorum of 15/16, restarts": Way(quorum_share=15 / 16),
    "fragments, overlap, restarts": Way(every=1, overlap=True, fragments=4),
    "sync, elastic": Way(),
    "local, elastic": Way(every=1),
    "overlap, elastic": Way(every=1, overlap=True),
    "wait-free, elastic": Way(every=1, wait_free=True),
}
"""Where ``every`` is not 0, it is chosen for the link."""


def built_pauses() -> Pauses:
    """As measured; the requests for addresses between and beyond the measured numbers of ranks by a power law."""
    measured = json.loads((RESULTS / "rendezvous.json").read_text())
    ranks, taken_s = np.log([int(each) for each in measured]), np.log(list(measured.values()))

    def addresses_s(living: int) -> float:
        return float(np.exp(np.interp(math.log(max(living, 1)), ranks, taken_s)))

    few = addresses_s(3)
    return Pauses(
        after_loss_s=lambda living: 0.28 + max(0.0, addresses_s(living) - few),
        at_join_s=lambda living: 0.40 + max(0.0, addresses_s(living) - few),
        away_s=54 + 5.3,
        restart_s=0.23 + 0.27 + 54 + 5.3,
    )


def constant_pauses() -> Pauses:
    """As if members changed as fast on any number of ranks as on three."""
    return dataclasses.replace(built_pauses(), after_loss_s=lambda living: 0.28, at_join_s=lambda living: 0.40)


def goodput(
    name: str, ranks: int, mtbf_hours: float, *, between: Link, slow_share: float, pauses: Pauses
) -> list[float]:
    """The goodput of each seed."""
    restarts = name.endswith("restarts")
    setting = Setting(ranks, between, hierarchical=restarts, slow=math.ceil(ranks * slow_share))
    way = WAYS[name]
    if way.every:
        way = dataclasses.replace(way, every=interval(setting, way))
    job_mtbf_s = 3600 * mtbf_hours / ranks
    seconds = FAILURES * job_mtbf_s if mtbf_hours < math.inf else 1e6
    outcomes = []
    for seed in range(SEEDS if mtbf_hours < math.inf else 1):
        failures = at_random(3600 * mtbf_hours, seed)
        if restarts:
            every_s = young_s(pauses, job_mtbf_s)
            outcomes.append(restarting(setting, way, pauses, failures, seconds, every_s))
        else:
            outcomes.append(elastic(setting, way, pauses, failures, seconds))
    return [each.goodput for each in outcomes]


def tables() -> list[dict[str, Any]]:
    """Prints a table for each number of ranks and each setting."""
    rows = []
    for title, ranks, options in [
        *((f"{ranks} ranks, as built", ranks, {"pauses": built_pauses()}) for ranks in RANKS),
        *((f"{ranks} ranks, members change in 0.3 s", ranks, {"pauses": constant_pauses()}) for ranks in RANKS),
        ("1024 ranks, 1 of 64 at half speed, members change in 0.3 s", 1024, {"slow_share": 1 / 64}),
        ("1024 ranks, 1 Gbit/s and 20 ms between hosts, members change in 0.3 s", 1024, {"between": FAR}),
    ]:
        chosen = {"between": BETWEEN, "slow_share": 0.0, "pauses": constant_pauses(), **options}
        print(f"\n| {title} | " + " | ".join(f"{hours:,} h" for hours in MTBF_HOURS) + " | no failures |")
        print("|---" * (len(MTBF_HOURS) + 2) + "|")
        for name in WAYS:
            cells = []
            for hours in (*MTBF_HOURS, math.inf):
                found = goodput(name, ranks, hours, **chosen)
                cells.append(statistics.mean(found))
                row = {"setting": title, "ranks": ranks, "way": name, "rank_mtbf_hours": hours}
                rows.append({**row, "goodput": found})
            print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |", flush=True)
    return rows


def check() -> None:
    """Compares with real jobs of four ranks, one of which takes twice as long, with kills at equal intervals.

    Jobs without kills give what is lost at the start and at the end. After each change of members, sync mode compares
    a step with that of one process, as at the start: in the other modes, this time is missing there.
    """
    ways = {
        "sync": Way(),
        "local": Way(every=8),
        "overlap": Way(every=8, overlap=True),
        "wait-free": Way(every=8, wait_free=True),
    }
    rows = json.loads((RESULTS / "elastic_goodput.json").read_text())
    pause_s = sum(row["paused seconds"] for row in rows) / sum(row["pauses"] for row in rows)
    ends_s = {}
    for row in rows:
        if row["kills"] == 0:
            ends_s[row["mode"]] = row["seconds"] * (1 - row["share"] / speed(_real(row), ways[row["mode"]], 4).share)
    check_s = ends_s["sync"] - ends_s["local"]
    print(f"a pause: {pause_s:.2f} s; a check: {check_s:.2f} s; start and end of a job:", ends_s)
    errors = []
    for row in rows:
        if row["kills"] == 0:
            continue
        after_s = pause_s + (check_s if row["mode"] == "sync" else 0.0)
        pauses = Pauses(lambda living, s=after_s: s, lambda living, s=after_s: s, away_s=RETURNS_S)
        setting, own_s = _real(row), ends_s[row["mode"]]
        kills = at_intervals(row["kill_every_s"])
        found = elastic(setting, ways[row["mode"]], pauses, kills, row["seconds"] - own_s)
        share = found.useful / (found.could_living + own_s * alone_per_s(setting, 4, 1))
        errors.append(share / row["share"] - 1)
        print(
            f"{row['mode']}, a kill every {row['kill_every_s']:g} s: real {row['share']:.3f} with {row['kills']:g} "
            f"kills, simulated {share:.3f} with {found.failures}: {errors[-1]:+.1%}"
        )
    print(f"median error {statistics.median(abs(each) for each in errors):.1%}, largest {max(map(abs, errors)):.1%}")


def _real(row: dict[str, Any]) -> Setting:
    return Setting(4, BETWEEN, slow=1, step_s=row["step_alone_s"], varies=False, num_bytes=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with results/elastic_goodput.json")
    if parser.parse_args().check:
        check()
        return
    rows = tables()
    (RESULTS / "simulated_goodput.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
