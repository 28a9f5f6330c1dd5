"""``hvdtrain.evaluate``: loss and metrics of a model over samples that the ranks divide among themselves."""

from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data import Source, evaluation_dataset
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import EvaluationFeed
from hvdtrain.data.preprocessed import preprocessed
from hvdtrain.data.splits import as_source
from hvdtrain.distributed import runtime
from hvdtrain.distributed.agreement import require_agreement, require_same_call
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.replica_consistency import shared_statistics
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.optim.only_checks import print_on_rank_0
from hvdtrain.seams import keras_internals
from hvdtrain.training.callbacks import NoCallbacks
from hvdtrain.training.eval_step import EvalStep, build_metrics
from hvdtrain.training.evaluator import Evaluator
from hvdtrain.training.uncalled_methods import uncalled


def evaluate(
    model: keras.Model, data: Any, *, batch_size: int = 32, collectives: Collectives | None = None
) -> dict[str, Any]:
    """Loss and metrics over all samples, as one process computes them. All ranks must call it.

    Each rank evaluates its share of the samples, and the sums behind the values are added over ranks, so that the
    values are exact for shares of different sizes too, and equal on every rank. The losses of the outputs of a model
    with several are means over batches, as in Keras.

    Args:
        model: compiled.
        data: all samples, the same on every rank: a source of ``hvdtrain.data``, or what Keras takes
            (``tf.data.Dataset``, PyDataset, arrays as ``(x, y[, sample_weight])``, also in lists and dicts; a list of
            arrays for a model with several inputs is x). For data that are already divided among the ranks, pass
            ``hvdtrain.callbacks.distributed()`` to ``model.evaluate`` instead.
        batch_size: samples per rank and batch; a ``tf.data.Dataset`` of batches is batched again.
        collectives: the ranks that evaluate together (default: those of ``hvdtrain.init()``).

    Returns:
        The values by name: numbers, or lists of numbers for metrics such as ``F1Score(average=None)``.

    Raises:
        DisagreementError: on every rank: ranks differ in arguments or data.
        JobError: on every rank: an argument breaks its rule, or a sample cannot be read.
        UsageError: the model is not compiled, or the state of a metric is not a sum.
    """
    ranks = collectives or runtime.current().collectives
    source = shared_source(data, model, "hvdtrain.evaluate", batch_size, ranks)
    if (text := uncalled(model, "evaluate", "hvdtrain.evaluate calls test_step itself")) is not None:
        print_on_rank_0(f"{text}.", ranks)
    if not model.compiled:
        raise UsageError("the model must be compiled to be evaluated. Received: one that is not. Call model.compile.")
    dataset = evaluation_dataset(source, batch_size, ranks.rank, ranks.size)
    # Also on a rank that has no sample: its metrics must have the same variables as the others'.
    build_metrics(model, (dataset.element_spec, tf.TensorSpec([])))
    evaluator = Evaluator(
        model,
        EvaluationFeed(source, batch_size, ranks, BadSampleQuota(0, ranks)),
        ranks,
        uses_ema=False,
        synchronized=partial(shared_statistics, model, ranks),
        job_watch=JobWatch(ranks),
        step=_eval_step(model),
        ends_together=True,
    )
    values = evaluator.run(NoCallbacks(), step=0)
    assert values is not None
    return values


def shared_source(data: Any, model: keras.Model, function: str, batch_size: int, ranks: Collectives) -> Source:
    """The source of data that ranks read together.

    Args:
        data: as for :func:`evaluate`; a list of an array for each of several inputs of the model is x, as in Keras.
        function: what the user has called.

    Raises:
        JobError: on every rank: no source can read the data.
        DisagreementError: on every rank: their data or batch sizes differ.
    """

    def opened() -> Source:
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1. Received: {batch_size}")
        is_x = isinstance(data, list) and len(data) == len(getattr(model, "inputs", None) or ()) > 1
        return as_source((data,) if is_x and all(hasattr(each, "shape") for each in data) else data)

    require_same_call(function, ranks)
    source = on_every_rank(opened, ranks)
    require_agreement(f"arguments of {function}", {"batch_size": batch_size, **source.facts()}, ranks)
    BadSampleQuota(0, ranks).note_known(source.bad_samples)
    return preprocessed(source, model)


def _eval_step(model: keras.Model) -> EvalStep:
    """The step that was compiled for this model, unless ``model.compile`` was called since."""
    compiled_with = keras_internals.COMPILED_METRICS.of(model), keras_internals.LOSS_TRACKER.of(model)
    kept = vars(model).get("hvdtrain_eval_step")
    if kept is not None and all(one is other for one, other in zip(kept[0], compiled_with, strict=True)):
        step: EvalStep = kept[1]
        return step
    before = model.test_function, model.jit_compile, model.steps_per_execution
    step = EvalStep(model)
    model.test_function, model.jit_compile, model.steps_per_execution = before
    # Past Keras' __setattr__, which looks for variables.
    vars(model)["hvdtrain_eval_step"] = compiled_with, step
    return step
