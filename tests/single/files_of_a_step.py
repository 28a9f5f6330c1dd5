"""Started in a process of its own: prints the files of the package that run in every step of a training."""

import collections
import sys
from pathlib import Path

import keras
import numpy as np
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays

PACKAGE = Path(hvdtrain.__file__).parent
STEPS, FIRST, LAST = 200, 50, 150


def main() -> None:
    hvdtrain.init()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    x = np.ones((STEPS, 3), np.float32)
    trainer = make_trainer(
        model, Arrays(x, x[:, :2]), batch_size=1, epochs=1, log_every=STEPS, guard_every=STEPS, check_every=0
    )
    calls: collections.Counter[str] = collections.Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls[str(Path(frame.f_code.co_filename).relative_to(PACKAGE))] += 1

    run_steps = trainer.parts.strategy.run

    def run_steps_counted(max_steps):
        sys.setprofile(count if FIRST <= trainer.step < LAST else None)
        run_steps(max_steps)

    trainer.parts.strategy.run = run_steps_counted
    trainer.fit()
    sys.setprofile(None)
    assert trainer.step == STEPS
    print(*sorted(name for name, number in calls.items() if number >= LAST - FIRST))


if __name__ == "__main__":
    main()
