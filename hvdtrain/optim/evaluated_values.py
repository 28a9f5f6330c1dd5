"""``model.evaluate`` with ``hvdtrain.callbacks.distributed``: it returns the values over all ranks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.optim.values_of_parts import tell_of_evaluate
from hvdtrain.seams import keras_internals


def with_values_over_ranks(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """``keras.Model.evaluate``, which returns the ``evaluated_values`` of a callback that has them."""
    signature = inspect.signature(evaluate)

    @functools.wraps(evaluate)
    def evaluate_over_ranks(model: keras.Model, *arguments: Any, **named: Any) -> Any:
        call = signature.bind(model, *arguments, **named)
        callbacks = call.arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):  # model.fit's own validation
            return evaluate(*call.args, **call.kwargs)
        found = [each for each in keras.tree.flatten(callbacks) if hasattr(each, "evaluated_values")]
        if not found:
            tell_of_evaluate(call.arguments.get("x"))
            return evaluate(*call.args, **call.kwargs)
        returns_dict = call.arguments.get("return_dict", False)
        call.arguments["return_dict"] = True
        evaluate(*call.args, **call.kwargs)
        values = dict(found[0].evaluated_values)
        return values if returns_dict else keras_internals.FLATTEN_RESULTS.of(model)(values)

    return evaluate_over_ranks
