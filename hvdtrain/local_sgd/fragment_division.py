"""Divides the averaged variables of a model into fragments of about equal bytes, each of whole layers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import keras

from hvdtrain.config.wording import option
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd import averaged_variables
from hvdtrain.local_sgd.flat_variables import num_bytes


class FragmentVariables(NamedTuple):
    """The variables of one fragment, in the order of the model."""

    trained: Sequence[keras.Variable]
    followed: Sequence[keras.Variable]


def divided(
    trained: Sequence[keras.Variable], followed: Sequence[keras.Variable], count: int
) -> list[FragmentVariables]:
    """Divides variables into ``count`` fragments, interleaved over the depth of the model.

    Layer after layer goes to the fragment that has the fewest bytes, the first of several: layers of equal size go to
    fragments in turn, as in the "strided" fragments of arXiv:2501.18512. No fragment has more than its equal part of
    the bytes plus those of the largest layer.

    Args:
        followed: statistics, EMA and slots. Those of a trained variable go with its layer.

    Raises:
        UsageError: there are fewer layers than fragments.
    """
    layers = _by_layer(trained, followed)
    if len(layers) < count:
        raise UsageError(
            f"{option('fragments')} must be at most the number of layers with weights. Received: {count}, and "
            f"{len(layers)} layer(s). Use fewer fragments."
        )
    sizes = [0] * count
    members: list[set[int]] = [set() for _ in range(count)]
    for variables in layers:
        smallest = sizes.index(min(sizes))
        sizes[smallest] += num_bytes(variables)
        members[smallest].update(map(id, variables))
    return [FragmentVariables(_those_in(trained, own), _those_in(followed, own)) for own in members]


def max_fragments(model: keras.Model) -> int:
    """The most fragments that a model can be divided into."""
    return len(_by_layer(averaged_variables.trained(model), averaged_variables.followed(model)))


def _by_layer(trained: Sequence[keras.Variable], followed: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """The variables of each layer, in the order of the model."""
    layers: dict[str, list[keras.Variable]] = {}
    names = {f"/{variable.path.replace('/', '_')}_": variable.path for variable in trained}
    for variable in [*trained, *followed]:
        layers.setdefault(_layer_of(variable, names), []).append(variable)
    return list(layers.values())


def _those_in(variables: Iterable[keras.Variable], ids: set[int]) -> list[keras.Variable]:
    return [variable for variable in variables if id(variable) in ids]


def _layer_of(variable: keras.Variable, names: Mapping[str, str]) -> str:
    """The path of a variable's layer; for one of an optimizer, of the layer whose variable it is about.

    Args:
        names: how Keras names trained variables in paths such as ``adam/sequential_dense_kernel_momentum``, and their
            own paths.
    """
    about = max((name for name in names if name in variable.path), key=len, default=None)
    return (variable.path if about is None else names[about]).rpartition("/")[0]
