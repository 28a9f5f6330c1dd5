"""The memory that a check takes: it makes a step twice, and keeps what both make of each variable."""

import keras

from hvdtrain.distributed.bounded_messages import num_bytes
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.system.memory import available_bytes


def lacking_memory(model: keras.Model, collectives: Collectives) -> str | None:
    """Why memory does not suffice for a check; None if it does. The same on all ranks, which must all call it."""
    needed = collectives.local_size * _needed_bytes(model)
    available = available_bytes()
    hosts = collectives.allgather((needed, available) if needed > available else None)
    lacking = next((each for each in hosts if each is not None), None)
    if lacking is None:
        return None
    needed, available = lacking
    return (
        f"a check would take {needed / 1e9:,.1f} GB on a host, of whose memory {available / 1e9:,.1f} GB are available"
    )


def _needed_bytes(model: keras.Model) -> int:
    """What a rank takes beyond its variables, without activations, which a step of training takes as well."""
    trainable = sum(num_bytes(v.value) for v in whole_variables(model.trainable_weights))
    state = sum(num_bytes(v.value) for v in whole_variables([*model.weights, *optimizer_variables(model)]))
    # What both steps make of the variables; gradients of both, and an optimizer's intermediate results.
    return 2 * state + 5 * trainable
