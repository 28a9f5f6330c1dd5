"""The built-in tasks on sample data of their formats: trained, resumed, evaluated and exported by the command line."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launcher import run_commands

from hvdtrain.tasks import sample_data

pytestmark = pytest.mark.slow

# Options of the run, and the accuracy that it must reach on the sample data.
TASKS = {
    "cifar10": (["--steps", "40", "--batch-size", "32", "--learning-rate", "0.05"], 0.95),
    "mnist": (["--steps", "60", "--batch-size", "32"], 0.9),
    "tabular": (["--steps", "200"], 0.97),
    "text": (["--steps", "40", "--learning-rate", "0.01"], 0.97),
}


def run_all(lines, folder: Path, *, ranks: int, timeout_s: float) -> None:
    for done in run_commands(lines, ranks=ranks, folder=folder, timeout_s=timeout_s):
        assert done.code == 0, done.output


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run of each task on 2 ranks, and with one that ended half-way and was resumed."""
    # TensorFlow takes some paths for patterns.
    folder = tmp_path_factory.mktemp("tasks") / "no [pattern\\"
    folder.mkdir()
    lines = []
    for task, (options, _) in TASKS.items():
        data_dir = folder / "data" / task
        sample_data.write(task, data_dir)
        line = ["--task", task, "--data-dir", data_dir, *options, "--run-dir"]
        lines.append([*line, folder / task])
        half = str(int(options[1]) // 2)
        lines += [[*line, folder / f"{task}-halves", "--steps", half], [*line, folder / f"{task}-halves"]]
    run_all(lines, folder / "output", ranks=2, timeout_s=420)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_task_learns_and_resumes_bit_identically(task, runs):
    whole, halves = summary(runs / task), summary(runs / f"{task}-halves")
    assert whole["eval"]["accuracy"] >= TASKS[task][1]
    assert whole["ranks"] == 2
    assert halves["resumed_from"] == whole["steps"] // 2
    assert halves["weights_sha256"] == whole["weights_sha256"]
    assert halves["eval"] == whole["eval"]


@pytest.mark.long
def test_evaluation_is_the_same_on_any_number_of_ranks(runs, tmp_path):
    lines = [["eval", "--run-dir", runs / task] for task in TASKS]
    for ranks in (1, 2, 4):
        run_all(lines, tmp_path / f"on-{ranks}", ranks=ranks, timeout_s=240)
    for task in TASKS:
        evaluations = [json.loads(line) for line in (runs / task / "evaluations.jsonl").read_text().splitlines()]
        assert len(evaluations) == 3
        expected = summary(runs / task)["eval"]
        for each in evaluations:
            assert each["step"] == summary(runs / task)["steps"]
            assert each["accuracy"] == expected["accuracy"]
            assert each["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_tensorboard_shows_all_variables_of_tabular(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs / "tabular" / "tensorboard" / "train"), size_guidance={"tensors": 0}).Reload()
    tags = events.Tags()
    variables = [f"tabular/{layer}/{kind}" for layer in ("hidden", "logit") for kind in ("kernel", "bias")]
    histograms = {
        *(f"weights/{name}" for name in variables),
        *(f"gradients/{name}" for name in variables),
        *("activations/hidden", "activations/logit"),
    }
    assert histograms | {"loss", "accuracy"} <= set(tags["tensors"]), tags
    for name in histograms:
        assert [event.step for event in events.Tensors(name)] == [100, 200], name
    # Without the numbers that Keras appends to the names of layers.
    layers = {node.name.split("/")[1].partition("_")[0] for node in events.Graph().node if "/" in node.name}
    assert layers == {"hidden", "logit"}


OPEN = """
import json, sys
sys.modules["horovod"] = sys.modules["hvdtrain"] = sys.modules["mpi4py"] = None
import numpy as np
kind, *files = sys.argv[1:]
for path, inputs, outputs in zip(files[::3], files[1::3], files[2::3]):
    x = np.load(inputs)
    if kind == "keras":
        import keras
        y = keras.models.load_model(path)(x)
    elif kind == "saved_model":
        import tensorflow as tf
        (y,) = tf.saved_model.load(path).signatures["serving_default"](tf.constant(x)).values()
    else:
        import onnxruntime
        session = onnxruntime.InferenceSession(path)
        (y,) = session.run(None, {session.get_inputs()[0].name: x})
    np.save(outputs, np.asarray(y))
"""


def test_exported_models_load_without_hvdtrain_and_predict_the_same(runs, tmp_path):
    import keras

    tmp_path = tmp_path / "no [pattern\\"
    tmp_path.mkdir()
    suffixes = {"keras": ".keras", "saved_model": "", "onnx": ".onnx"}
    lines = [
        ["export", "--run-dir", runs / task, "--format", kind, "--output", tmp_path / f"{task}{suffix}"]
        for kind, suffix in suffixes.items()
        for task in TASKS
    ]
    run_all(lines, tmp_path / "output", ranks=2, timeout_s=400)
    rng = np.random.default_rng(0)
    expected = {}
    for task in TASKS:
        model = keras.models.load_model(runs / task / "model.keras")
        shape = (5, *model.input_shape[1:])
        x = rng.integers(0, 40, shape).astype(np.int32) if task == "text" else rng.normal(size=shape).astype(np.float32)
        np.save(tmp_path / f"{task}-x.npy", x)
        expected[task] = model(x)
    # TensorFlow reads the path of a SavedModel as a pattern when it loads one, so that it finds nothing in this folder.
    tmp_path = tmp_path.rename(tmp_path.parent / "plain")
    for kind, suffix in suffixes.items():
        names = [name for task in TASKS for name in (f"{task}{suffix}", f"{task}-x.npy", f"{task}-{kind}.npy")]
        command = [sys.executable, "-c", OPEN, kind, *(str(tmp_path / name) for name in names)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        for task in TASKS:
            assert np.allclose(np.load(tmp_path / f"{task}-{kind}.npy"), expected[task], atol=1e-5), (task, kind)


OWN_TASK = """
import keras
import numpy as np
import hvdtrain
from hvdtrain.data import Arrays, Data
from hvdtrain.loggers.reporter import Reporter

X = np.linspace(0, 1, 64, dtype=np.float32)[:, None]


class Log(Reporter):
    def __init__(self, path):
        self.path = path

    def progressed(self, step, values):
        with open(self.path, "a") as file:
            print(step, *sorted(values), file=file)


TASK = hvdtrain.Task(
    model=lambda data: keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]),
    data=lambda folder: Data(Arrays(X, 2 * X)),
    loss="mse",
    callbacks=lambda: [keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1)],
    reporters=lambda run_dir: [Log(run_dir / "own.log")],
    defaults={"epochs": 50, "batch_size": 16, "log_every": 2},
)
"""


def test_callbacks_and_reporters_of_a_task(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_TASK)
    run_all([["--task", path, "--run-dir", tmp_path / "run"]], tmp_path / "output", ranks=2, timeout_s=90)
    assert summary(tmp_path / "run")["steps"] == 4  # Two epochs: the loss never falls by 1e9.
    lines = (tmp_path / "run" / "own.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["2", "4"]
    assert all("loss" in line.split() for line in lines)


BUILT_BY_ITS_FIRST_STEP = """
import keras
import numpy as np
import hvdtrain
from hvdtrain.data import Arrays, Data

X = np.linspace(0, 1, 64, dtype=np.float32)[:, None]


@keras.saving.register_keras_serializable()
class TwoOutputs(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.a, self.b = keras.layers.Dense(1, name="a"), keras.layers.Dense(1, name="b")

    def call(self, x):
        return {"a": self.a(x), "b": self.b(x)}


TASK = hvdtrain.Task(
    model=lambda data: TwoOutputs(),
    data=lambda folder: Data(Arrays(X, {"a": 2 * X, "b": -X}), Arrays(X, {"a": 2 * X, "b": -X})),
    loss=lambda: {"a": "mse", "b": "mse"},
    loss_weights={"a": 1.0, "b": 0.0},
    optimizer=lambda: keras.optimizers.SGD(0.1),
    defaults={"epochs": 2, "batch_size": 16},
)
"""


def test_a_model_that_its_first_step_builds_is_trained_resumed_evaluated_and_exported(tmp_path):
    import keras

    path, run_dir, exported = tmp_path / "own.py", tmp_path / "run", tmp_path / "exported.keras"
    path.write_text(BUILT_BY_ITS_FIRST_STEP)
    lines = [
        ["--task", path, "--run-dir", run_dir, "--seed", "3", "--steps", "2"],
        ["--task", path, "--run-dir", run_dir, "--seed", "3"],
        ["eval", "--run-dir", run_dir],
        ["export", "--run-dir", run_dir, "--output", exported],
    ]
    run_all(lines, tmp_path / "output", ranks=2, timeout_s=90)
    assert summary(run_dir)["resumed_from"] == 2
    (evaluated,) = (run_dir / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluated)["loss"] == pytest.approx(summary(run_dir)["eval"]["loss"], rel=1e-6)
    spec = importlib.util.spec_from_file_location("own", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # Registers the class.
    model = keras.models.load_model(exported)
    assert model.get_layer("a").bias.numpy() != 0
    assert model.get_layer("b").bias.numpy() == 0  # Its loss has the weight 0.


WITHOUT_CALL = """
import keras
import numpy as np
import tensorflow as tf
import hvdtrain
from hvdtrain.data import Arrays, Data

X = np.linspace(0, 1, 64, dtype=np.float32)[:, None]


@keras.saving.register_keras_serializable()
class WithoutCall(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.part = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)], name="part")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.part(data[0]) - data[1]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


TASK = hvdtrain.Task(
    model=lambda data: WithoutCall(), data=lambda folder: Data(Arrays(X, 2 * X)), loss="mse", defaults={"steps": 3}
)
"""


def test_a_model_without_call_is_exported_as_keras_only(tmp_path):
    path, run_dir = tmp_path / "own.py", tmp_path / "run"
    path.write_text(WITHOUT_CALL)
    export = ["export", "--run-dir", run_dir]
    lines = [["--task", path, "--run-dir", run_dir], export, [*export, "--format", "saved_model"]]
    trained, exported, refused = run_commands(lines, ranks=1, folder=tmp_path / "output", timeout_s=90)
    assert (trained.code, exported.code, refused.code) == (0, 0, 64), refused.output
    message = "--format saved_model needs a model with a call method. Received: WithoutCall, which has none."
    assert message in refused.only_message
    spec = importlib.util.spec_from_file_location("own", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # Registers the class.
    import keras

    for name in ("model.keras", "export.keras"):
        assert keras.models.load_model(run_dir / name).get_layer("part").count_params() == 2


COMPILES_ITSELF = """
import keras
import numpy as np
import tensorflow as tf
import hvdtrain
from hvdtrain.data import Arrays, Data

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


class Adversaries(keras.Model):
    # Keras cannot save it: make is a function.
    def __init__(self, make):
        super().__init__()
        self.generator, self.critic = make(3, "generator"), make(1, "critic")

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

    def train_step(self, x):
        with tf.GradientTape() as tape:
            difference = keras.ops.mean(self.critic(self.generator(x))) - keras.ops.mean(self.critic(x))
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(difference, variables), variables)
        with tf.GradientTape() as tape:
            loss = -keras.ops.mean(self.critic(self.generator(x)))
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(loss, variables), variables)
        return {"difference": difference, "generator_loss": loss}


def make_model(data):
    def make(units, name):
        return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(units)], name=name)

    model = Adversaries(make)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(keras.optimizers.Adam(decay), keras.optimizers.SGD(0.05))
    return model


TASK = hvdtrain.Task(model=make_model, data=lambda folder: Data(Arrays(X)), optimizer=None, defaults={"steps": 8})
"""


def test_a_task_with_several_optimizers_that_keras_cannot_save(tmp_path):
    path, whole, halves = tmp_path / "own.py", tmp_path / "whole", tmp_path / "halves"
    path.write_text(COMPILES_ITSELF)
    line = ["--task", path, "--seed", "3", "--batch-size", "8", "--run-dir"]
    lines = [[*line, whole], [*line, halves, "--steps", "4"], [*line, halves], [*line, whole, "--clip-norm", "1"]]
    trained, *_, refused = run_commands(lines, ranks=2, folder=tmp_path / "output", timeout_s=120)
    assert trained.code == 0, trained.output
    assert "learning rate: ExponentialDecay (adam), 0.05 (sgd)" in trained.output.replace("  ", " "), trained.output
    assert "Keras cannot save this model (Adversaries) as model.keras. Its weights are in " in trained.output
    assert (whole / "model.weights.h5").exists()
    assert not (whole / "model.keras").exists()
    assert summary(halves)["resumed_from"] == 4
    assert summary(halves)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert refused.code == 64
    assert "--clip-norm needs a task that has an optimizer" in refused.only_message
