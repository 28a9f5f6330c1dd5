"""Starts the files of cases on real ranks. Few jobs, many assertions in each: TensorFlow starts slowly."""

import pytest
from launcher import run_cases


@pytest.mark.parametrize("ranks", [2, 4])
def test_optimizer(ranks, tmp_path):
    run_cases("optimizer", ranks=ranks, minimum=40, folder=tmp_path, timeout_s=400)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training(ranks, tmp_path):
    run_cases("training", ranks=ranks, minimum=33, folder=tmp_path, timeout_s=400)


@pytest.mark.parametrize("ranks", [2, 4])
def test_options(ranks, tmp_path):
    run_cases("options", ranks=ranks, minimum=30, folder=tmp_path, timeout_s=400)


@pytest.mark.parametrize("ranks", [2, 4])
def test_callbacks(ranks, tmp_path):
    run_cases("callbacks", ranks=ranks, minimum=50, folder=tmp_path, timeout_s=400)
