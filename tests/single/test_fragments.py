"""Unit tests of fragments: what belongs to each, and when each is averaged; tests/parallel covers several ranks."""

import keras
import pytest
from keras import layers

import hvdtrain
from hvdtrain import LocalSGDConfig, ParameterAverager
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd import averaged_variables
from hvdtrain.local_sgd.flat_variables import num_bytes
from hvdtrain.local_sgd.fragment_division import divided
from hvdtrain.local_sgd.fragment_schedule import FragmentSchedule

hvdtrain.init()


def network(*widths: int) -> keras.Model:
    blocks = [each for width in widths for each in (layers.Dense(width), layers.BatchNormalization())]
    model = keras.Sequential([layers.Input((8,)), *blocks, layers.Dense(3)])
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def variables_of(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    return averaged_variables.trained(model), averaged_variables.followed(model) + averaged_variables.slots(model)


@pytest.mark.parametrize("widths", [(8, 8, 8), (64, 2, 300, 5, 5), (2, 4, 8, 16, 32)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fragments_are_whole_layers_of_about_equal_bytes(widths, count):
    trained, followed = variables_of(network(*widths))
    fragments = divided(trained, followed, count)
    everything = [id(each) for fragment in fragments for each in (*fragment.trained, *fragment.followed)]
    assert sorted(everything) == sorted(map(id, [*trained, *followed]))
    layer_of = {}
    for index, fragment in enumerate(fragments):
        for variable in fragment.trained:
            layer_of.setdefault(variable.path.rpartition("/")[0], set()).add(index)
    assert all(len(indices) == 1 for indices in layer_of.values())
    largest = max(
        num_bytes(each for each in [*trained, *followed] if path in each.path or path.replace("/", "_") in each.path)
        for path in layer_of
    )
    for fragment in fragments:
        bytes_of = num_bytes([*fragment.trained, *fragment.followed])
        assert bytes_of <= num_bytes([*trained, *followed]) / count + largest


def test_layers_of_equal_size_are_interleaved():
    model = keras.Sequential([layers.Input((4,)), *(layers.Dense(4) for _ in range(7))])
    trained = averaged_variables.trained(model)
    fragments = divided(trained, [], 3)
    for index, fragment in enumerate(fragments):
        expected = [each.path for layer in model.layers[index::3] for each in layer.trainable_variables]
        assert [each.path for each in fragment.trained] == expected


def test_statistics_averages_and_slots_go_with_their_layer():
    model = network(8, 8)
    for fragment in divided(*variables_of(model), 3):
        for variable in fragment.trained:
            name = f"/{variable.path.replace('/', '_')}_"
            assert sum(name in each.path for each in fragment.followed) == 3  # the EMA and two moments
    found = divided(*variables_of(model), 5)
    for layer in model.layers:
        ids = {id(each) for each in layer.weights}
        assert sum(any(id(each) in ids for each in (*one.trained, *one.followed)) for one in found) == 1


def test_one_fragment_has_all_variables_in_their_order():
    trained, followed = variables_of(network(8))
    (fragment,) = divided(trained, followed, 1)
    assert list(map(id, fragment.trained)) == list(map(id, trained))
    assert list(map(id, fragment.followed)) == list(map(id, followed))


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(UsageError, match=r"fragments must be at most the number of layers.* 4, and 3 layer\(s\)"):
        ParameterAverager(network(8), LocalSGDConfig(fragments=4))


@pytest.mark.parametrize(("count", "every"), [(1, 1), (1, 16), (2, 5), (3, 16), (4, 4), (7, 30)])
def test_each_fragment_is_averaged_once_in_a_cycle(count, every):
    schedule = FragmentSchedule(count)
    lengths, order = [], []
    for _ in range(3 * count):
        lengths.append(schedule.steps(every))
        order.append(schedule.next)
        schedule.advance()
    assert order == 3 * list(range(count))
    assert max(lengths) - min(lengths) <= 1
    # From one average of a fragment to its next.
    assert {sum(lengths[start : start + count]) for start in range(2 * count)} == {every}


def test_steps_until_due_end_at_what_comes_first():
    options = {"sync_every": 10, "fragments": 2, "overlap": True, "fragment_delay": 3}
    averager = ParameterAverager(network(8), LocalSGDConfig(**options))
    seen = []
    for _ in range(6):
        seen.append(averager.steps_until_due)
        averager.step(samples=1, steps=seen[-1])
    # An average is sent after 5 steps, merged 3 later, and the next sent 2 after that.
    assert seen == [5, 3, 2, 3, 2, 3]
    assert (averager.max_staleness_steps, averager.total_staleness_steps) == (3, 9)


def test_many_fragments_are_compiled_without_a_warning(caplog):
    """TensorFlow warns if functions of the same code are traced one after the other."""
    averager = ParameterAverager(network(8, 8, 8), LocalSGDConfig(sync_every=7, fragments=7))
    for _ in range(7):
        averager.step()
    assert averager.rounds == 7
    assert not caplog.records
