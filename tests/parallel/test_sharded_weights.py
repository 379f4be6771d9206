"""Overlaps and caches change the time of transfers of weights and gradients, never a result. Nothing is sent twice."""

import itertools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.parallel.comm import pending
from gpt4d.parallel.comm.cpu import gloo, hosts
from gpt4d.parallel.engine.prefetch import weight_order
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.product import ProductCall
from gpt4d.parallel.pipeline.schedule import Action, single_stage
from tests.support.grids import TINY_MODEL, build_tiny_stage, full, tiny_batch
from tests.support.parallel_runs import runtime_of
from tests.support.rank_pool import RankFailure

GRID = GridSizes(2, 1, 2, 1)
# Three switches, of which each pair has each pair of values in one of the choices.
PAIRWISE = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
LAYERS = TINY_MODEL.layers
# Two and three microbatches in flight, as stages of a pipeline have them.
IN_FLIGHT = ["F0 F1 B0 B1", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 F2 B2 B1 B0"]


def overlaps(switches):
    """Return settings of overlaps and caches with each choice of three switches."""
    others = (3, 0), (1, LAYERS)
    return [{"overlap": OverlapConfig(*c, prefetch=p), "cache_layers": n} for c in switches for p, n in others]


KEPT = ("all", "microbatch"), ("all", "step"), (1, "step")
COPIES = [{"cache_layers": layers, "cache_scope": scope} for layers, scope in KEPT]
NONE = {"overlap": OverlapConfig(False, False, False)}


def three_steps(grid, recompute, precision, settings):
    """Gradients of three updates of two microbatches each, with an evaluation in between."""
    stage = build_tiny_stage(grid, recompute=recompute, dtype=torch.float32, precision=precision, **settings)
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


def settings_that_change_bits(sizes, recompute, precision, choices):
    """On a rank: the settings under which a gradient's bits differ from the bits without overlaps and caches."""
    grid = Grid(sizes)
    plain, *others = (three_steps(grid, recompute, precision, settings) for settings in (NONE, *choices))
    equal = [all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True)) for gradients in others]
    return [settings for settings, same in zip(choices, equal, strict=True) if not same]


@pytest.mark.parametrize(
    ("sizes", "recompute", "precision", "choices"),
    [
        (GRID, False, "bf16", overlaps(PAIRWISE)),
        (GRID, True, "fp32", overlaps(PAIRWISE)[::3]),
        full(GRID, False, "bf16", overlaps(itertools.product((False, True), repeat=3))),
        full(GRID, True, "fp32", overlaps(itertools.product((False, True), repeat=3))),
        (GridSizes(), False, "bf16", COPIES),
    ],
    ids=["bf16", "recomputed", "all, bf16", "all, recomputed", "copies without z"],
)
def test_no_overlap_and_no_kept_copy_changes_a_bit_of_a_gradient(ranks, sizes, recompute, precision, choices):
    for different in ranks.run(sizes.devices, settings_that_change_bits, sizes, recompute, precision, choices):
        assert not different


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


def transfers_of_a_step(sizes, recompute, microbatches, parallel):
    """On a rank: gathers of a step, late ones, and bytes along z: sent, of shards, of the table, of the others."""
    grid = Grid(sizes)
    stage = build_tiny_stage(grid, recompute=recompute, dtype=torch.float32, **parallel)
    counter = GatherCounter(stage.weights)
    runtime_of(stage).forward_backward([tiny_batch(grid, i) for i in range(microbatches)], microbatches, 1.0)
    sizes = Counter()
    for parameter in stage.module.parameters():
        sizes["z" in parameter.spec.layout.axes] += parameter.numel() * 4
    table = stage.module.tokens.weight.numel() * 4
    return counter.started, counter.late, grid.z.traffic.read()["bytes"], sizes[True] - table, table, sizes[False]


@pytest.mark.parametrize(
    ("recompute", "cached", "microbatches"),
    [(False, 0, 2), (False, 1, 1), (False, LAYERS, 2), (True, 0, 1), (True, 1, 2), (True, LAYERS, 1)],
)
def test_each_weight_is_gathered_ahead_and_as_rarely_as_possible(ranks, recompute, cached, microbatches):
    """Each weight of a block is gathered for the forward and, unless cached, once for recomputation and backward.

    A block has four weights. The table is gathered for the embedding, and once for the head's forward and backward.
    """
    answers = ranks.run(4, transfers_of_a_step, GRID, recompute, microbatches, {"cache_layers": cached})
    for started, late, sent, blocks, table, others in answers:
        assert started == microbatches * (2 + 4 * LAYERS + 4 * (LAYERS - cached))
        assert late == microbatches  # the first gather of a microbatch has nothing to hide behind
        # Per shard byte, (G-1) are sent for a gather and for a scatter; the table's gradient comes in two parts. An
        # all-reduce of replicated parameters sends 2·(G-1)/G.
        gathers = 2 - cached / LAYERS
        assert sent == microbatches * (blocks * (gathers + 1) + table * (2 + 2)) + others


@pytest.mark.parametrize("sizes", [GRID, GridSizes(1, 1, 4, 1)], ids=str)
def test_microbatches_share_one_gather_and_one_scatter_of_a_step(ranks, sizes):
    parallel = {"cache_layers": "all", "cache_scope": "step"}
    one, three = (ranks.run(sizes.devices, transfers_of_a_step, sizes, False, count, parallel) for count in (1, 3))
    assert one == three
    for gathers, late, *_ in one:
        assert (gathers, late) == (4 * LAYERS + 1, 1)


def test_chunks_share_one_gather_and_one_scatter_of_each_weight(ranks):
    settings = GridSizes(1, 1, 2, 1), False, 1
    whole, cut = (ranks.run(2, transfers_of_a_step, *settings, {"chunks": chunks}) for chunks in (1, 2))
    assert cut == whole


def test_weights_that_are_gathered_are_gathered_ahead_past_replicated_ones(ranks):
    for microbatches, replicated in itertools.product((1, 2), (1, LAYERS)):
        parallel = {"replicated_layers": replicated, "cache_layers": "all"}
        for _, late, *_ in ranks.run(2, transfers_of_a_step, GridSizes(1, 1, 2, 1), False, microbatches, parallel):
            assert late == microbatches * (1 + 4 * replicated)  # a replicated weight is available when it is needed


def begin(stage, actions):
    """Start a step of these actions."""
    schedule = stage.weights.schedule
    schedule.begin(schedule.plan(weight_order(actions, stage.layer_weights), stage.cached))


def gradients_in_flight(text, recompute, cache_layers):
    """Return the gradients of a step that follows a schedule, and the number of gathers."""
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
    stage.weights.schedule.finish()
    return [p.grad for p in stage.module.parameters()], counter.started


def errors_in_flight(recompute, cache_layers):
    """On a rank: the relative error of each schedule's gradients, and the gathers of the first schedule."""
    errors, gathers = [], []
    for text in IN_FLIGHT:
        one_by_one = " ".join(f"F{i} B{i}" for i in range(text.count("F")))
        expected, _ = gradients_in_flight(one_by_one, recompute, cache_layers)
        gradients, started = gradients_in_flight(text, recompute, cache_layers)
        gathers.append(started)
        errors.append(max((a - b).norm() / b.norm() for a, b in zip(gradients, expected, strict=True)).item())
    return errors, gathers[0]


@pytest.mark.parametrize(("recompute", "cache_layers"), [(False, 0), full(True, 1), (True, LAYERS)])
def test_several_microbatches_in_flight_give_the_same_gradients_and_share_cached_weights(
    ranks, recompute, cache_layers
):
    for errors, gathers in ranks.run(4, errors_in_flight, recompute, cache_layers):
        assert max(errors) <= 1e-13
        # All blocks are cached: both forwards and both backwards use one gather of each of their weights. The table:
        # an embedding, a head with the next embedding, a head with its backward, the last backward.
        assert gathers == 4 * LAYERS + 4 or cache_layers < LAYERS


def logits_after_an_update():
    """Logits of two forwards after an order that was cut short and an update: a stale weight shows in the first."""
    grid = Grid(GRID)
    stage = build_tiny_stage(grid, cache_layers=LAYERS)
    begin(stage, single_stage(1))
    stage.module(*tiny_batch(grid)[::2])  # a forward alone: the cache waits for a backward
    with pytest.raises(AssertionError, match="did not use"):
        stage.weights.schedule.finish()
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
    with pytest.raises(RankFailure, match="where the model's description has"):
        ranks.run(4, use_in_another_order)


def three_collectives_at_once():
    """Two gathers and a sum in flight at once end with the right values."""
    grid = Grid(GRID)
    first = grid.z.start_all_gather(torch.full((2,), float(grid.z.index)))
    second = grid.z.start_reduce_scatter(torch.arange(4.0) + grid.z.index)
    third = grid.x.start_all_reduce(torch.ones(3))
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
        patch.object(pending, "YIELDING_PIECE_BYTES", message_bytes),
        patch.object(dist, "all_to_all_single", counted("reduce_scatter", dist.all_to_all_single)),
        patch.object(dist, "all_reduce", counted("all_reduce", dist.all_reduce)),
        patch.object(gloo, "all_gather", counted("all_gather", gloo.all_gather)),
    ):
        grid = Grid(GridSizes(1, 1, 4, 1))
        full = torch.arange(4 * 3 * 7.0).view(12, 7) * (grid.z.index + 1)
        part = grid.z.start_reduce_scatter(full).wait()
        return counts, grid.z.all_reduce(full), grid.z.all_gather(part)


@pytest.mark.parametrize(("message_bytes", "messages"), [(1 << 18, 1), (20, 4)])
def test_short_messages_make_the_same_result(ranks, message_bytes, messages):
    expected = torch.arange(84.0).view(12, 7) * 10
    for counts, total, gathered in ranks.run(4, exchanged_in_messages, message_bytes):
        assert counts == dict.fromkeys(("reduce_scatter", "all_reduce", "all_gather"), messages)
        assert torch.equal(total, expected) and torch.equal(gathered, expected)


def products_of_a_step():
    grid = Grid()
    stage = build_tiny_stage(grid, recompute=True)
    products, start = [], ProductCall.start_product
    with patch.object(ProductCall, "start_product", lambda *args: products.append(1) or start(*args)):
        stage.module.loss_sum(*tiny_batch(grid)).backward()
    return len(products)


def test_a_recomputation_omits_the_last_product_of_each_block(ranks):
    (products,) = ranks.run(1, products_of_a_step)
    assert products == LAYERS * (4 + 3) + 1  # and the head


def with_fsdp2(sizes, recompute):
    """Gradients of the same layers, sharded over x and y only, with FSDP2 over the ranks that were z."""
    grid = Grid(sizes._replace(z=1, data=sizes.z))
    model = build_tiny_stage(grid, recompute=recompute).module
    specs = {module: {n: p.spec for n, p in module.named_parameters(recurse=False)} for module in model.modules()}

    def describe(module, inputs):  # FSDP2 puts a parameter of its own in each place while the module computes
        for name, parameter in module.named_parameters(recurse=False):
            parameter.spec = specs[module][name]

    mesh = DeviceMesh.from_group(grid.data.group, "cpu")
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss_sum")
    model.set_gradient_divide_factor(1.0)  # our loss is a sum
    for module in model.modules():
        module.register_forward_pre_hook(describe)
    model.loss_sum(*tiny_batch(grid)).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def gradients_of_both(sizes, recompute):
    """On a rank: gradients of a step, whether z shards them, and the gradients with FSDP2."""
    stage = build_tiny_stage(Grid(sizes), recompute=recompute)
    runtime_of(stage).forward_backward([tiny_batch(stage.grid)], 1, 1.0)
    ours = {n: (p.grad, "z" in p.spec.layout.axes) for n, p in stage.module.named_parameters()}
    return ours, with_fsdp2(sizes, recompute)


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [((1, 1, 4, 1), False), ((2, 2, 2, 1), True), full((1, 1, 4, 1), True), full((2, 1, 2, 1), False)],
    ids=str,
)
def test_gradients_are_those_of_fsdp2_over_z(ranks, sizes, recompute):
    sizes = GridSizes(*sizes)
    found = ranks.run(sizes.devices, gradients_of_both, sizes, recompute)
    for rank, (ours, theirs) in enumerate(found):
        z = Grid.coordinates(rank, sizes)["z"]
        for name, (gradient, cut) in ours.items():
            expected = theirs[name].chunk(sizes.z)[z] if cut else theirs[name]
            assert (gradient - expected).norm() <= 1e-13 * expected.norm(), name
