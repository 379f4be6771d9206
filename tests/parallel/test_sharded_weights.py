"""Overlaps and caches change the time of transfers of weights and gradients, never a result. Nothing is sent twice."""

import itertools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.parallel.comm import collectives, message_size
from gpt4d.parallel.comm.cpu import gloo, hosts
from gpt4d.parallel.engine.prefetch import weight_order
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import StageRuntime, whole_model
from gpt4d.parallel.pipeline.schedule import Action, single_stage
from tests.support.grids import TINY_MODEL, build_tiny_stage, full, tiny_batch, token_loss

GRID = GridSizes(2, 1, 2, 1)
# Three switches, of which each pair has each pair of values in one of the choices.
PAIRWISE = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
LAYERS = TINY_MODEL.layers


def runtime_of(stage, **options):
    reducer = GradientReducer(stage.weights, dict(stage.module.named_parameters()), **options)
    return StageRuntime(stage, reducer, whole_model(token_loss))


def three_steps(grid, overlap, cache_layers, recompute, precision, **parallel):
    """Gradients of three updates of two microbatches each, with an evaluation in between."""
    stage = build_tiny_stage(grid, overlap, cache_layers, recompute, torch.float32, precision, **parallel)
    runtime, gradients = runtime_of(stage), []
    for _ in range(3):
        runtime.forward_backward([tiny_batch(grid, microbatch) for microbatch in range(2)], 2, 1.0)
        with torch.no_grad():
            for parameter in stage.module.parameters():
                gradients.append(parameter.grad.clone())
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        runtime.evaluate([tiny_batch(grid, 3)], 1)
    return gradients


def settings_that_change_bits(recompute, precision, switches):
    """On a rank: the settings under which a gradient's bits differ from the bits without overlaps and caches."""
    grid = Grid(GRID)
    plain = three_steps(grid, OverlapConfig(False, False, False), 0, recompute, precision)
    different = []
    for choice in switches:
        for prefetch, cache_layers in ((3, 0), (1, LAYERS)):
            overlap = OverlapConfig(*choice, prefetch=prefetch)
            gradients = three_steps(grid, overlap, cache_layers, recompute, precision)
            if not all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True)):
                different.append((overlap, cache_layers))
    return different


@pytest.mark.parametrize("switches", [PAIRWISE, full(list(itertools.product((False, True), repeat=3)))], ids=len)
@pytest.mark.parametrize(("recompute", "precision"), [(False, "bf16"), (True, "fp32")], ids=["bf16", "fp32-recompute"])
def test_no_overlap_changes_a_bit_of_a_gradient(ranks, recompute, precision, switches):
    assert ranks.run(4, settings_that_change_bits, recompute, precision, switches) == [[]] * 4


def settings_of_copies_that_change_bits():
    """Return the settings that keep converted weights on a grid without z under which a gradient's bits differ."""
    keep = [("all", "microbatch"), ("all", "step"), (1, "step")]
    plain, *others = (
        three_steps(Grid(), None, layers, False, "bf16", cache_scope=scope) for layers, scope in [(0, None), *keep]
    )
    equal = [all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True)) for gradients in others]
    return [setting for setting, same in zip(keep, equal, strict=True) if not same]


def test_no_kept_copy_of_a_converted_weight_changes_a_bit_of_a_gradient(ranks):
    assert ranks.run(1, settings_of_copies_that_change_bits) == [[]]


class GatherCounter:
    """Counts gathers over z, and those that had not been started when their weight was needed."""

    def __init__(self, weights):
        self.started = self.late = 0
        schedule, device = weights.schedule, weights.schedule.device
        start, use = device.start_gather, schedule.gather

        def count_start(weight):
            self.started += 1
            return start(weight)

        def count_use(weight, phase):
            self.late += weight not in schedule.ready and weight not in schedule.gathering
            return use(weight, phase)

        device.start_gather, schedule.gather = count_start, count_use


def gathers_of_a_step(recompute, cache_layers, microbatches):
    grid = Grid(GRID)
    stage = build_tiny_stage(grid, None, cache_layers, recompute)
    counter = GatherCounter(stage.weights)
    batches = [tiny_batch(grid, microbatch) for microbatch in range(microbatches)]
    runtime_of(stage).forward_backward(batches, microbatches, 1.0)
    return counter.started, counter.late


@pytest.mark.parametrize(
    ("recompute", "cache_layers", "microbatches"),
    [(False, 0, 2), (False, 1, 1), (False, LAYERS, 2), (True, 0, 1), (True, 1, 2), (True, LAYERS, 1)],
)
def test_each_weight_is_gathered_ahead_and_as_rarely_as_possible(ranks, recompute, cache_layers, microbatches):
    """Each weight of a block is gathered for the forward and, unless cached, once for recomputation and backward.

    A block has four weights. The table is gathered for the embedding, and once for the head's forward and backward.
    """
    per_microbatch = 2 + 4 * LAYERS + 4 * (LAYERS - cache_layers)
    for started, late in ranks.run(4, gathers_of_a_step, recompute, cache_layers, microbatches):
        assert started == microbatches * per_microbatch
        assert late == microbatches  # the first gather of a microbatch has nothing to hide behind


def begin(stage, actions):
    """Start a step of these actions."""
    schedule = stage.weights.schedule
    schedule.begin(schedule.plan(weight_order(actions, stage.layer_weights), stage.cached))


# Two and three microbatches in flight, as stages of a pipeline have them.
IN_FLIGHT = ["F0 F1 B0 B1", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 F2 B2 B1 B0"]


def gradients_in_flight(text, recompute, cache_layers):
    """Gradients of a step that follows a schedule, the gathers it took, and whether any weight was left over."""
    grid = Grid(GRID)
    stage = build_tiny_stage(grid, None, cache_layers, recompute)
    actions = [Action(word[0], int(word[1:])) for word in text.split()]
    counter = GatherCounter(stage.weights)
    begin(stage, actions)
    losses = {}
    for kind, microbatch, _ in actions:
        if kind == "F":
            losses[microbatch] = stage.module.loss_sum(*tiny_batch(grid, microbatch))
        else:
            losses.pop(microbatch).backward()
    stage.weights.finish()
    return [p.grad for p in stage.module.parameters()], counter.started, counter.late


def compare_in_flight(text, recompute, cache_layers):
    microbatches = text.count("F")
    one_by_one = " ".join(f"F{i} B{i}" for i in range(microbatches))
    expected, _, _ = gradients_in_flight(one_by_one, recompute, cache_layers)
    gradients, started, late = gradients_in_flight(text, recompute, cache_layers)
    error = max((a - b).norm() / b.norm() for a, b in zip(gradients, expected, strict=True))
    return error.item(), started, late


@pytest.mark.parametrize("text", IN_FLIGHT)
@pytest.mark.parametrize(("recompute", "cache_layers"), [(False, 0), (True, 1)])
def test_several_microbatches_in_flight_give_the_same_gradients(ranks, text, recompute, cache_layers):
    for error, _, _ in ranks.run(4, compare_in_flight, text, recompute, cache_layers):
        assert error <= 1e-13


def test_a_cached_weight_is_gathered_once_for_all_microbatches_in_flight(ranks):
    """Both forwards and both backwards use one gather of each of the blocks' weights."""
    for _, started, _ in ranks.run(4, compare_in_flight, "F0 F1 B0 B1", True, LAYERS):
        # The table: an embedding, a head with the next embedding, a head with its backward, the last backward.
        assert started == 4 * LAYERS + 4


def logits_after_an_update():
    """Logits of two forwards after an order that was cut short and an update: a stale weight shows in the first."""
    grid = Grid(GRID)
    stage = build_tiny_stage(grid, cache_layers=LAYERS)
    begin(stage, single_stage(1))
    stage.module(*tiny_batch(grid)[::2])  # a forward alone: the cache waits for a backward
    with pytest.raises(AssertionError, match="did not use"):
        stage.weights.finish()
    with torch.no_grad():
        for parameter in stage.module.blocks.parameters():
            parameter.mul_(5)
    return [stage.module(*tiny_batch(grid)[::2]).detach() for _ in range(2)]


def test_no_gathered_weight_outlives_a_step(ranks):
    for first, second in ranks.run(4, logits_after_an_update):
        assert torch.equal(first, second)


def use_in_another_order():
    grid = Grid(GRID)
    stage = build_tiny_stage(grid)
    schedule = stage.weights.schedule
    schedule.begin(schedule.plan(weight_order(single_stage(1), {0: stage.layer_weights[0][::-1]})))
    stage.module(*tiny_batch(grid)[::2])


def test_a_use_that_the_order_does_not_have_is_an_error(ranks):
    from tests.support.rank_pool import RankFailure

    with pytest.raises(RankFailure, match="where the model's description has"):
        ranks.run(4, use_in_another_order)


def bytes_over_z(recompute, cache_layers):
    grid = Grid(GRID)
    stage = build_tiny_stage(grid, None, cache_layers, recompute, torch.float32)
    begin(stage, single_stage(1))
    stage.module.loss_sum(*tiny_batch(grid)).backward()
    stage.weights.finish()
    sizes = [p.numel() * 4 for p in stage.module.parameters() if "z" in p.spec.layout.axes]
    return grid.z.traffic.read()["bytes"], sum(sizes), stage.module.tokens.weight.numel() * 4


@pytest.mark.parametrize(("cache_layers", "gathers"), [(0, 2), (LAYERS, 1)])
def test_the_cache_saves_one_gather_of_each_weight(ranks, cache_layers, gathers):
    for counted, shards, table in ranks.run(4, bytes_over_z, True, cache_layers):
        # Per shard byte, (G-1) are sent for a gather and for a scatter; the table's gradient comes in two parts.
        blocks = shards - table
        assert counted == blocks * (gathers + 1) + table * (2 + 2)


def three_collectives_at_once():
    """Two gathers and a sum in flight at once end with the right values."""
    grid = Grid(GRID)
    first = collectives.start_all_gather(torch.full((2,), float(grid.z.index)), grid.z)
    second = collectives.start_reduce_scatter(torch.arange(4.0) + grid.z.index, grid.z)
    third = collectives.start_all_reduce(torch.ones(3), grid.x)
    assert second.wait().tolist() == [[1.0, 3.0], [5.0, 7.0]][grid.z.index]
    assert first.wait().tolist() == [0.0, 0.0, 1.0, 1.0]
    assert third.wait().tolist() == third.wait().tolist() == [2.0] * 3
    traffic = grid.z.traffic.read()
    assert traffic["bytes"] == 2 * 4 + 2 * 4 and traffic["exposed_s"] > 0
    assert grid.z.traffic.read() == {"bytes": 0.0, "exposed_s": 0.0, "hidden_s": 0.0}


def test_collectives_in_flight_do_not_disturb_each_other(ranks):
    ranks.run(4, three_collectives_at_once)


def exchanged_in_messages(message_bytes):
    """Return the messages of three collectives through the network, and their results."""
    counts = Counter()

    def counted(kind, exchange):
        return lambda *args, **options: counts.update([kind]) or exchange(*args, **options)

    with (
        patch.object(hosts, "connect", gloo.GlooTransport),
        patch.object(message_size, "YIELDING_PIECE_BYTES", message_bytes),
        patch.object(dist, "all_to_all_single", counted("reduce_scatter", dist.all_to_all_single)),
        patch.object(dist, "all_reduce", counted("all_reduce", dist.all_reduce)),
        patch.object(gloo, "all_gather", counted("all_gather", gloo.all_gather)),
    ):
        grid = Grid(GridSizes(1, 1, 4, 1))
        full = torch.arange(4 * 3 * 7.0).view(12, 7) * (grid.z.index + 1)
        part = collectives.start_reduce_scatter(full, grid.z).wait()
        return counts, grid.z.all_reduce(full), grid.z.all_gather(part)


@pytest.mark.parametrize(("message_bytes", "messages"), [(1 << 18, 1), (20, 4)])
def test_short_messages_make_the_same_result(ranks, message_bytes, messages):
    expected = torch.arange(84.0).view(12, 7) * 10
    for counts, total, gathered in ranks.run(4, exchanged_in_messages, message_bytes):
        assert counts == dict.fromkeys(("reduce_scatter", "all_reduce", "all_gather"), messages)
        assert torch.equal(total, expected) and torch.equal(gathered, expected)


def products_of_a_step():
    from gpt4d.parallel.layers.product import ProductCall

    grid = Grid()
    stage = build_tiny_stage(grid, recompute=True)
    products, start = [], ProductCall.start_product
    with patch.object(ProductCall, "start_product", lambda *args: products.append(1) or start(*args)):
        stage.module.loss_sum(*tiny_batch(grid)).backward()
    return len(products)


def test_a_recomputation_omits_the_last_product_of_each_block(ranks):
    (products,) = ranks.run(1, products_of_a_step)
    assert products == LAYERS * (4 + 3) + 1  # and the head
