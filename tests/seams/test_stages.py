"""Two stages side by side on disjoint halves of a job, and the order of weights with several microbatches in flight."""

import random
from dataclasses import replace

import pytest
import torch

from gpt4d.config import Config, GridSizes, TrainConfig
from gpt4d.parallel import gradient_reducer as gradient_sums
from gpt4d.parallel.engine.prefetch import (
    BACKWARD,
    FORWARD,
    RECOMPUTATION,
    LayerWeights,
    WeightUse,
    kept_after_use,
    prefetch_plan,
    weight_order,
)
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import StageRuntime, whole_model
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.step import build_stage, mask_replicas
from tests.support.grids import TINY_MODEL, tiny_batch, token_loss

HALVES = {0: ((0, 1, 2, 3), GridSizes(2, 2, 1, 1)), 1: ((4, 5, 6, 7), GridSizes(1, 1, 2, 2))}
# Both stages are built and computed concurrently, or the second one starts after the first one has finished.
FIRST = {"together": None, "lower half first": 0, "upper half first": 1}


def tiny_stage(index: int, grid: Grid):
    """Return the stage with this index. The stages differ in their weights and in the settings of their steps."""
    checkpointing = ("full", "none")[index]
    train = TrainConfig(seq_len=12, seed=10 + index, activation_checkpointing=checkpointing)
    stage = build_stage(Config(model=TINY_MODEL, train=train), grid, torch.device("cpu"), torch.float64)
    return replace(stage, index=index)


def forward_backward(stage) -> torch.Tensor:
    """Run a step of two microbatches; the loss of this rank is returned, its gradients are in place."""
    reducer = GradientReducer(stage.weights, dict(stage.module.named_parameters()))
    batches = [tiny_batch(stage.grid, microbatch + 2 * stage.index) for microbatch in range(2)]
    return StageRuntime(stage, reducer, whole_model(token_loss)).forward_backward(batches, 2, 7.0)


def run_own_stage(first: int | None) -> tuple:
    """On one of eight ranks: its stage's loss, the job's norm, its part of each gradient, and its places."""
    rank = torch.distributed.get_rank()
    index = next(i for i, (members, _) in HALVES.items() if rank in members)
    members, sizes = HALVES[index]
    grid = Grid(sizes, "cpu", members)
    stage = tiny_stage(index, grid)
    if first not in (None, index):  # wait for the first stage
        grid.world.all_reduce(torch.ones(1))
    loss = forward_backward(stage)
    if first == index:
        grid.world.all_reduce(torch.ones(1))
    losses = torch.zeros(len(HALVES), dtype=loss.dtype)
    losses[index] = mask_replicas(loss, grid)
    loss = grid.world.all_reduce(losses)[index].item()
    gradients = {
        name: (grid.local_slices(p.spec.shape, p.spec.layout), p.grad) for name, p in stage.module.named_parameters()
    }
    counted = [p for p in stage.module.parameters() if gradient_sums.counted_once(p, grid)]
    squared_norm = gradient_sums.squared_norm(counted, torch.device("cpu"))
    norm = grid.world.all_reduce(squared_norm).sqrt().item()
    ranks_of_job = int(grid.world.all_reduce(torch.tensor([2**rank])))
    return loss, norm, gradients, ranks_of_job, grid.index, list(grid.active_axes)


@pytest.fixture(scope="module")
def serial():
    """Loss and gradients of each stage on one device."""
    result = {}
    for index in HALVES:
        stage = tiny_stage(index, Grid.single_device())
        result[index] = forward_backward(stage).item(), {n: p.grad for n, p in stage.module.named_parameters()}
    return result


@pytest.mark.parametrize("order", FIRST)
def test_two_stages_on_disjoint_halves_of_the_job_compute_side_by_side(ranks, serial, order):
    results = ranks.run(8, run_own_stage, FIRST[order])
    expected_norm = sum(g.norm() ** 2 for _, gradients in serial.values() for g in gradients.values()) ** 0.5
    for index, (members, sizes) in HALVES.items():
        expected_loss, expected = serial[index]
        whole = {name: torch.full_like(gradient, torch.nan) for name, gradient in expected.items()}
        for rank in members:
            loss, norm, gradients, ranks_of_job, place, axes = results[rank]
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            assert norm == pytest.approx(expected_norm.item(), rel=1e-12)
            assert ranks_of_job == 255 and members[place] == rank
            assert axes == [axis for axis, size in sizes._asdict().items() if size > 1] + ["world"]
            for name, (part, gradient) in gradients.items():
                copy = whole[name][part]
                assert copy.isnan().all() or torch.equal(copy, gradient), "copies of a gradient differ"
                whole[name][part] = gradient
        for name, gradient in whole.items():
            assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_the_two_stages_differ(serial):
    """If the stages were equal, the test above could compare a stage with the wrong one."""
    assert serial[0][0] != pytest.approx(serial[1][0], rel=1e-3)


# ------------------------------------------------------------------------------- order of weights, without ranks


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
    next_use = future[0] if future else None
    if use.phase == FORWARD and next_use and next_use.weight == use.weight:
        return True  # the use that follows at once
    if use.phase == RECOMPUTATION:
        return True  # the backward of the same microbatch follows
    started = {other.microbatch for other in past if other.weight == use.weight and other.phase == FORWARD}
    backward = (other for other in future if other.weight == use.weight and other.phase != FORWARD)
    return use.weight in cached and any(other.microbatch in started for other in backward)


def test_weights_are_kept_as_long_as_a_microbatch_in_flight_needs_them():
    for seed in range(200):
        check_kept(seed)


def check_kept(seed: int) -> None:
    draw = random.Random(seed)
    layers, actions = random_layers(draw), random_schedule(draw)
    order = weight_order(actions, {0: layers})
    assert order == executed(actions, layers)
    names = sorted({use.weight for use in order})
    cached = set(draw.sample(names, draw.randint(0, len(names))))
    kept = kept_after_use(order, cached)
    assert kept == [is_needed(order, position, cached) for position in range(len(order))]
    memory: set[str] = set()
    for position, use in enumerate(order):
        if use.phase != FORWARD and use.weight in cached:
            assert use.weight in memory, "the backward gathers a cached weight again"
        if use.phase == BACKWARD and WeightUse(RECOMPUTATION, use.weight, use.microbatch) in order:
            assert use.weight in memory, "the backward gathers what its recomputation has gathered"
        memory.discard(use.weight)
        if kept[position]:
            memory.add(use.weight)
        later = {other.weight for other in order[position + 1 :]}
        assert memory <= later, "a weight stays that no later use needs"
    assert not memory


def test_weights_are_gathered_ahead_up_to_the_next_forward():
    for seed in range(50):
        check_ahead(seed)


def check_ahead(seed: int) -> None:
    draw = random.Random(seed)
    order = weight_order(random_schedule(draw), {0: random_layers(draw)})
    for position, count in ((draw.randrange(len(order)), draw.randint(0, 4)) for _ in range(20)):
        expected, previous = [], order[position]
        for use in order[position + 1 : position + 1 + count]:
            if previous.phase == BACKWARD and use.phase == FORWARD:
                break
            expected.append(use.weight)
            previous = use
        assert list(prefetch_plan(order, count)[position]) == expected


def test_while_whole_weights_are_used_only_as_many_more_are_gathered_ahead():
    """Every second block is replicated: the window does not grow from one such block to the next."""
    blocks = [LayerWeights(tuple(f"{block}.{weight}" for weight in range(4))) for block in range(6)]
    order = weight_order([Action("F", 0)], {0: blocks})
    whole = {name for block in blocks[1::2] for name in block.forward}
    ahead = prefetch_plan(order, 2, whole)
    assert ahead[0] == ("0.1", "0.2")
    assert ahead[2] == ("0.3", "2.0")
    assert ahead[3] == ("2.0", "2.1", "2.2", "2.3", "4.0", "4.1")  # behind the four uses of block 1
    assert ahead[7] == ("2.0", "2.1")
    assert ahead[19] == ()
    assert all(names == () for names in prefetch_plan(order, 0, whole))
    assert all(names == () for names in prefetch_plan(order, 2, {use.weight for use in order}))
