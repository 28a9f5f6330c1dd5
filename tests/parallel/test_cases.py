"""Starts the files of cases on real ranks. Few jobs, many assertions in each: TensorFlow starts slowly."""

import pytest
from launcher import run_cases

pytestmark = pytest.mark.slow

# Files of cases and the number of ranks, to how many cases have to pass.
JOBS = {
    ("numerics+large_messages", 2): 29,
    ("options+averager+fragments", 2): 56,
    ("optimizer+balancing", 2): 45,
    ("training", 2): 34,
    ("faults+few_bits", 2): 27,
    ("callbacks+metrics", 2): 50,
    ("fit+differing_ranks+equality+different_sizes+guards+own_operations+idle_ranks", 2): 86,
    ("after_training+own_values+keras_downloads+cache_files", 2): 73,
    ("resume", 2): 12,
    ("local_sgd+local_members+rounds", 2): 57,
    ("subsets", 4): 13,
    ("quorum", 2): 10,
    ("compression+sharded_optimizer", 2): 55,
    ("sharded_tables+embedding_groups+table_checkpoints", 2): 43,
}
# A training after the other: on 4 ranks and 2 cores several minutes of them. With the cases that are marked long.
LONG_JOBS = {(name, 4): minimum for (name, ranks), minimum in JOBS.items() if ranks == 2}
LONG_JOBS |= {("sharded_optimizer", 2): 43, ("compression+sharded_optimizer", 4): 68}
LONG_JOBS |= {("options", 1): 22, ("optimizer+balancing", 4): 44, ("numerics+large_messages", 2): 42, ("quorum", 2): 22}
LONG_JOBS |= {
    ("fit+differing_ranks+equality+different_sizes+guards+own_operations+idle_ranks", 4): 51,
    ("after_training+own_values+keras_downloads+cache_files", 3): 73,
    ("local_sgd+local_members+rounds", 4): 60,
    ("numerics+large_messages", 4): 36,
    ("resume", 4): 15,
    ("sharded_tables+embedding_groups+table_checkpoints", 2): 52,
    ("sharded_tables+embedding_groups+table_checkpoints", 3): 52,
}


@pytest.mark.parametrize(("name", "ranks"), JOBS)
def test_cases(name, ranks, tmp_path):
    run_cases(name, ranks=ranks, minimum=JOBS[name, ranks], folder=tmp_path, timeout_s=500)


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), LONG_JOBS)
def test_all_cases(name, ranks, tmp_path):
    run_cases(
        name, "-m", "long or not long", ranks=ranks, minimum=LONG_JOBS[name, ranks], folder=tmp_path, timeout_s=900
    )


@pytest.mark.long
@pytest.mark.parametrize(("name", "minimum"), [("balancing", 10), ("quorum", 22)])
def test_stragglers_on_gloo(name, minimum, tmp_path):
    more = ["-m", "long or not long"]
    run_cases(name, *more, ranks=2, launcher="horovodrun --gloo", minimum=minimum, folder=tmp_path, timeout_s=900)
