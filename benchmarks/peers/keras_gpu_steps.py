"""Keras' or hvdtrain's steps for gpu_steps.py.

    keras_gpu_steps.py PEER TASK BATCH_SIZE PRECISION

PEER is Keras or hvdtrain; with "-no-xla", neither chooses XLA.
"""

import sys

from served_steps import serve

import hvdtrain

topology = hvdtrain.init(seed=0)
import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.tasks.loading import load_task
from hvdtrain.training.clock import Clock
from hvdtrain.training.step_runner import StepRunner


def main() -> None:
    peer, task_name, batch_size, precision = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    name, without_xla = peer.partition("-")[0], peer.endswith("-no-xla")
    if precision != "float32":
        keras.config.set_dtype_policy(f"mixed_{precision}")
    task = load_task(task_name)
    data = task.read_data(None)
    optimizer = (
        keras.optimizers.SGD(0.01, momentum=0.9) if task.optimizer == "momentum" else keras.optimizers.Adam(1e-4)
    )
    model = task.make_model(data)
    task.compile(model, optimizer if name == "Keras" else hvdtrain.DistributedOptimizer(optimizer))
    if without_xla:
        model.jit_compile = False

    if name == "Keras":
        uses_xla = bool(model.jit_compile)
        model.make_train_function()
        samples = tf.data.Dataset.from_tensor_slices((data.training.x, data.training.y)).repeat()
        batches = iter(samples.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))

        def steps(num_steps: int) -> None:
            for _ in range(num_steps):
                model.train_function(batches)
            model.trainable_variables[-1].numpy()
    else:
        collectives = runtime.current().collectives
        config = hvdtrain.TrainConfig(batch_size=batch_size, steps=1)
        runner = StepRunner(model, data.training, config, collectives=collectives, job_watch=JobWatch(collectives))
        runner.start()
        uses_xla = bool(runner.config.jit_compile)

        def steps(num_steps: int) -> None:
            runner.run_steps(num_steps, Clock())
            model.trainable_variables[-1].numpy()

    facts = {"device": topology.device, "XLA": uses_xla, "tensorflow": tf.__version__, "keras": keras.__version__}
    serve(steps, facts)


main()
