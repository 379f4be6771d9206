"""The order of weights with several microbatches in flight: which weights are kept, and which are gathered ahead."""

import random

import pytest

from gpt4d.parallel.engine import prefetch
from gpt4d.parallel.engine.prefetch import BACKWARD, FORWARD, RECOMPUTATION, LayerWeights, WeightUse, weight_order
from gpt4d.parallel.pipeline.schedule import Action


def random_layers(draw: random.Random) -> list[LayerWeights]:
    """Random layers: a table tied to the last layer, blocks of one to three weights, a layer without input gradient."""
    recompute = draw.random() < 0.5
    layers = [LayerWeights(("table",)), LayerWeights(("input",))]
    for block in range(draw.randint(1, 4)):
        names = tuple(f"{block}.{weight}" for weight in range(draw.randint(1, 3)))
        again = names[: draw.choice((-1, len(names)))] if recompute else ()
        layers.append(LayerWeights(names, again, names[::-1]))
    return [*layers, LayerWeights(), LayerWeights(("table",), (), ("table",))]


def random_schedule(draw: random.Random) -> list[Action]:
    """Return a valid schedule: every backward comes after its forward, any number of microbatches in flight."""
    microbatches, actions = draw.randint(1, 6), []
    waiting, in_flight = list(range(microbatches)), []
    while waiting or in_flight:
        if waiting and (not in_flight or draw.random() < 0.5):
            in_flight.append(waiting.pop(0))
            actions.append(Action("F", in_flight[-1]))
        else:
            actions.append(Action("B", in_flight.pop(draw.randrange(len(in_flight)))))
    return actions


def executed(actions: list[Action], layers: list[LayerWeights]) -> list[WeightUse]:
    """Return the uses, action by action, as the module makes them."""
    uses = []
    for kind, microbatch, _ in actions:
        phases = [(FORWARD, layer.forward) for layer in layers]
        if kind == "B":
            pairs = [((RECOMPUTATION, x.recomputation), (BACKWARD, x.backward)) for x in layers[::-1]]
            phases = [phase for pair in pairs for phase in pair]
        uses += [WeightUse(phase, weight, microbatch) for phase, weights in phases for weight in weights]
    return uses


def is_needed(order: list[WeightUse], position: int, cached: set[str]) -> bool:
    """Return whether the weight must stay after this use, by definition: a search through all other uses."""
    use, past, future = order[position], order[: position + 1], order[position + 1 :]
    if use.phase == FORWARD and future and future[0].weight == use.weight:
        return True  # the use that follows at once
    if use.phase == RECOMPUTATION:
        return True  # the backward of the same microbatch follows
    started = {other.microbatch for other in past if other.weight == use.weight and other.phase == FORWARD}
    backward = (other for other in future if other.weight == use.weight and other.phase != FORWARD)
    return use.weight in cached and any(other.microbatch in started for other in backward)


@pytest.mark.parametrize("seed", range(100))
def test_weights_are_kept_as_long_as_a_microbatch_in_flight_needs_them(seed):
    draw = random.Random(seed)
    layers, actions = random_layers(draw), random_schedule(draw)
    order = weight_order(actions, {0: layers})
    assert order == executed(actions, layers)
    names = sorted({use.weight for use in order})
    cached = set(draw.sample(names, draw.randint(0, len(names))))
    kept = prefetch.kept_after_use(order, cached)
    assert kept == [is_needed(order, position, cached) for position in range(len(order))]


@pytest.mark.parametrize("seed", range(50))
def test_weights_are_gathered_ahead_up_to_the_next_forward(seed):
    draw = random.Random(seed)
    order = weight_order(random_schedule(draw), {0: random_layers(draw)})
    for position, count in ((draw.randrange(len(order)), draw.randint(0, 4)) for _ in range(20)):
        expected, previous = [], order[position]
        for use in order[position + 1 : position + 1 + count]:
            if previous.phase == BACKWARD and use.phase == FORWARD:
                break
            expected.append(use.weight)
            previous = use
        assert list(prefetch.prefetch_plan(order, count)[position]) == expected


def test_while_whole_weights_are_used_only_as_many_more_are_gathered_ahead():
    """Every second block is replicated: the window does not grow from one such block to the next."""
    blocks = [LayerWeights(tuple(f"{block}.{weight}" for weight in range(4))) for block in range(6)]
    order = weight_order([Action("F", 0)], {0: blocks})
    whole = {name for block in blocks[1::2] for name in block.forward}
    ahead = prefetch.prefetch_plan(order, 2, whole)
    assert ahead[0] == ("0.1", "0.2")
    assert ahead[2] == ("0.3", "2.0")
    assert ahead[3] == ("2.0", "2.1", "2.2", "2.3", "4.0", "4.1")  # behind the four uses of block 1
    assert ahead[7] == ("2.0", "2.1")
    assert ahead[19] == ()
    for count, gathered in ((0, whole), (2, {use.weight for use in order})):
        assert not any(prefetch.prefetch_plan(order, count, gathered))
