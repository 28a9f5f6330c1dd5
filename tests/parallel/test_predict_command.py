"""``python -m hvdtrain predict``: predictions of a run, on any number of ranks."""

import sys

import keras
import numpy as np
import pytest
from launcher import run_commands, run_job

from hvdtrain.tasks import digits

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "hvdtrain"]


def test_predictions_of_a_run(tmp_path):
    run = ["--run-dir", tmp_path / "run"]
    train, of_two, of_training, refused, without = run_commands(
        [
            ["--steps", 20, *run],
            ["predict", *run, "--output", tmp_path / "two.npy"],
            ["predict", *run, "--output", tmp_path / "training.csv", "--split", "training", "--batch-size", 100],
            ["predict", *run, "--output", tmp_path / "a.txt"],
            ["predict", *run],
        ],
        ranks=2,
        folder=tmp_path / "jobs",
        timeout_s=150,
    )
    assert (train.code, of_two.code, of_training.code) == (0, 0, 0), of_two.output + of_training.output
    assert f"{tmp_path / 'two.npy'}: 360 predictions of step 20" in of_two.output
    assert refused.code == 64
    assert without.code == 64
    assert "predict needs --output, a file that ends in .npy, .csv or .parquet." in without.only_message
    assert "--output must end in .npy, .csv, .parquet. Received: " in refused.only_message

    done = run_job(
        [*COMMAND, "predict", *map(str, run), "--output", str(tmp_path / "one.npy")], ranks=1, launcher="", timeout_s=60
    )
    assert done.code == 0, done.output
    one, two = np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy")
    assert one.shape == (360, 10)
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    assert len((tmp_path / "training.csv").read_text().splitlines()) == 1 + 1437

    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    source = digits.read_data(None).evaluation
    np.testing.assert_allclose(model.predict(source.x, verbose=0), one, rtol=1e-5, atol=1e-5)
