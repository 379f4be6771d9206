"""The overlaps change when weights and gradients travel, never what arrives; and nothing travels twice."""

import itertools

import pytest
import torch

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.model.gpt2.model import GPT
from gpt4d.model.init import initialize
from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream
from tests.grids import TINY_MODEL, batch_part

GRID = GridSizes(2, 1, 2, 1)
LAYERS = TINY_MODEL.layers


def build(overlap, cache_layers=0, recompute=False, dtype=torch.float64, compute_dtype=None, grid=None):
    weights = WeightStream(grid or Grid(GRID), compute_dtype or dtype, dtype, overlap=overlap)
    model = GPT(TINY_MODEL, weights, recompute=recompute, cache_layers=cache_layers)
    initialize(model, 1, weights.grid)
    return model


def batch(grid, microbatch=0):
    generator = torch.Generator().manual_seed(microbatch)
    ids = torch.randint(0, TINY_MODEL.vocab_size, (4, 12), generator=generator)
    return batch_part(ids, grid), batch_part(ids.roll(-1, 1), grid), batch_part(torch.arange(4), grid)


def three_steps(grid, overlap, cache_layers, recompute, compute_dtype):
    """Gradients of three updates of two microbatches each, with an evaluation in between."""
    model = build(overlap, cache_layers, recompute, torch.float32, compute_dtype, grid)
    found = []
    for _ in range(3):
        model.train()
        for microbatch in range(2):
            model.loss_sum(*batch(grid, microbatch)).backward()
        model.weights.finish()
        with torch.no_grad():
            for parameter in model.parameters():
                found.append(parameter.grad.clone())
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
            model.eval()
            model.loss_sum(*batch(grid, 3))
    return found


def every_combination(recompute, compute_dtype):
    """On a rank: the settings under which a gradient's bits differ from those with everything off."""
    grid = Grid(GRID)
    plain = three_steps(grid, OverlapConfig(False, False, False), 0, recompute, compute_dtype)
    different = []
    for switches in itertools.product((False, True), repeat=3):
        for prefetch, cache_layers in ((3, 0), (1, LAYERS)):
            overlap = OverlapConfig(*switches, prefetch=prefetch)
            found = three_steps(grid, overlap, cache_layers, recompute, compute_dtype)
            if not all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)):
                different.append((overlap, cache_layers))
    return different


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_overlap_changes_a_bit_of_a_gradient(ranks, recompute, compute_dtype):
    assert ranks.run(4, every_combination, recompute, compute_dtype) == [[]] * 4


class Watched:
    """Notes each gather over z, and whether it had been started by the time it was asked for."""

    def __init__(self, weights):
        self.started = self.late = 0
        start, take = weights._start_gather, weights._take

        def counted_start(shard):
            self.started += 1
            return start(shard)

        def counted_take(shard):
            self.late += shard not in weights._here
            return take(shard)

        weights._start_gather, weights._take = counted_start, counted_take


def gathers_of_a_step(recompute, cache_layers, microbatches):
    model = build(OverlapConfig(), cache_layers, recompute)
    for step in range(3):
        watched = Watched(model.weights) if step == 2 else None
        for microbatch in range(microbatches):
            model.loss_sum(*batch(model.weights.grid, microbatch)).backward()
        model.weights.finish()
        assert not model.weights._here, "a gathered weight outlives the step"
    return watched.started, watched.late


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("cache_layers", [0, 1, LAYERS])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_each_weight_is_gathered_ahead_and_no_more_often_than_it_must(ranks, recompute, cache_layers, microbatches):
    """A block has four weights: gathered for its forward and, unless cached, once for its recomputation and backward
    together. The table is gathered for the embedding, and for the head's forward and backward together."""
    per_microbatch = 2 + 4 * LAYERS + 4 * (LAYERS - cache_layers)
    for started, late in ranks.run(4, gathers_of_a_step, recompute, cache_layers, microbatches):
        assert started == microbatches * per_microbatch
        assert late == microbatches  # the first gather of a microbatch has nothing to hide behind


class Detour(GPT):
    """A model that takes another way through its blocks at every call."""

    turn = 0

    def forward(self, ids, numbers):
        blocks = list(self.blocks)
        self.turn += 1
        self.blocks = torch.nn.ModuleList(blocks[:: -1 if self.turn % 2 else 1] * (1 + self.turn % 3))
        try:
            return super().forward(ids, numbers)
        finally:
            self.blocks = torch.nn.ModuleList(blocks)


def detours(overlap):
    weights = WeightStream(Grid(GRID), torch.float64, torch.float64, overlap=overlap)
    model = Detour(TINY_MODEL, weights, cache_layers=1)
    initialize(model, 1, weights.grid)
    found = []
    for step in range(6):
        model.loss_sum(*batch(weights.grid, step)).backward()
        weights.finish()
        found += [p.grad.clone() for p in model.parameters()]
    return found


def compare_detours():
    return all(
        torch.equal(a, b)
        for a, b in zip(detours(OverlapConfig(prefetch=2)), detours(OverlapConfig(False, False, False)), strict=True)
    )


def test_a_changed_order_of_layers_is_relearnt_and_right_all_along(ranks):
    assert all(ranks.run(4, compare_detours))


def bytes_over_z(recompute, cache_layers):
    model = build(OverlapConfig(), cache_layers, recompute, torch.float32)
    grid = model.weights.grid
    for _ in range(2):
        grid.z.traffic.read()
        model.loss_sum(*batch(grid)).backward()
        model.weights.finish()
    sizes = [p.numel() * 4 for p in model.parameters() if "z" in p.spec.layout.axes]
    return grid.z.traffic.read()["bytes"], sum(sizes), model.tokens.weight.numel() * 4


@pytest.mark.parametrize(("cache_layers", "gathers"), [(0, 2), (LAYERS, 1)])
def test_the_cache_saves_one_gather_of_each_weight_and_is_counted_so(ranks, cache_layers, gathers):
    for counted, shards, table in ranks.run(4, bytes_over_z, True, cache_layers):
        # Per shard byte, (G-1) are sent for a gather and for a scatter; the table's gradient comes in two parts.
        blocks = shards - table
        assert counted == blocks * (gathers + 1) + table * (2 + 2)


def collectives_in_order():
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


def test_collectives_under_way_at_once_do_not_disturb_each_other(ranks):
    ranks.run(4, collectives_in_order)


def test_a_recomputation_leaves_out_the_last_product_of_each_block(monkeypatch):
    from gpt4d.parallel.layers.linear import LinearFunction

    products = []
    forward = LinearFunction.forward
    monkeypatch.setattr(LinearFunction, "forward", staticmethod(lambda *args: products.append(1) or forward(*args)))
    grid = Grid()
    model = build(OverlapConfig(), recompute=True, grid=grid)
    model.loss_sum(*batch(grid)).backward()
    assert len(products) == LAYERS * (4 + 3) + 1  # and the head
