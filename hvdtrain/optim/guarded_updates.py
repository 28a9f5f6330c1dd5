"""Updates that are made only by steps whose reduced gradients were checked."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.optim.hook_state import GradientHooks


def unless_skipped(action: Callable[..., None], hooks: GradientHooks) -> Callable[..., None]:
    """Performs an action unless the step is skipped."""

    def run(*arguments: Any) -> None:
        if hooks.applies is None:
            action(*arguments)
        else:
            keras.ops.cond(hooks.applies.read_value(), lambda: action(*arguments), lambda: None)

    return run


def when_checked(action: Callable[..., None], hooks: GradientHooks) -> Callable[..., None]:
    """Performs an action when gradients are reduced and checked, so that a step that raises has updated nothing.

    Weight decay does not depend on gradients, nor does Nadam's product of momenta.
    """

    def run(*arguments: Any) -> None:
        with tf.control_dependencies(hooks.checked):
            action(*arguments)

    return run
