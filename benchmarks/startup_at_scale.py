"""What starting thousands of ranks reads from a shared file system, and what the ranks gather to compare themselves.

    launch/run python benchmarks/startup_at_scale.py

Counts the files that one rank opens when it starts (those that Python opens, and mapped libraries), and pickles the
messages of the comparisons of a ResNet-50 with Adam. Multiplied by the number of ranks, the results are predictions for
larger jobs. Saves results/startup_at_scale.json.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANKS = (2, 16, 64, 256, 1024, 4096)
_COUNT = """
import json, os, sys
opened = {}
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and os.path.isfile(arguments[0]):
        opened[os.path.realpath(arguments[0])] = os.path.getsize(arguments[0])
sys.addaudithook(note)
import hvdtrain
hvdtrain.init()
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
mapped = {path: os.path.getsize(path) for path in mapped if os.path.isfile(path)}
print(json.dumps({"python": [len(opened), sum(opened.values())], "libraries": [len(mapped), sum(mapped.values())]}))
"""


def opened() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def message_bytes() -> dict[str, dict[str, int]]:
    """What a rank sends: before, each rank everything; now a digest, or rank 0 everything and the others a count."""
    import keras

    from hvdtrain.distributed import replica_consistency
    from hvdtrain.distributed.optimizers import build_optimizer, optimizer_variables

    model = keras.applications.ResNet50(weights=None)
    model.compile("adam", "mse")
    build_optimizer(model)
    structure = replica_consistency.structure(model)
    digests = [bytes(32) for _ in [*model.weights, *optimizer_variables(model)]]
    return {
        "description of the model": {
            "before": len(pickle.dumps(("host", structure))),
            "now": len(pickle.dumps(digests[0])),
        },
        "digests of all variables": {"before": len(pickle.dumps(digests)), "now": len(pickle.dumps(None))},
    }


def main() -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    found: dict[str, Any] = {"run": {"opened by a rank": opened(), "message_bytes": message_bytes()}, "predicted": {}}
    for name, sizes in found["run"]["message_bytes"].items():
        found["predicted"][name] = {ranks: {when: each * ranks for when, each in sizes.items()} for ranks in RANKS}
    print(json.dumps(found, indent=1))
    (HERE / "results" / "startup_at_scale.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
