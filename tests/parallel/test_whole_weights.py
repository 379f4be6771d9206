"""Replicated weights, and weights that are gathered once per step, do not change any gradient."""

import itertools

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid
from tests.parallel.test_sharded_weights import GatherCounter, runtime_of
from tests.support.grids import TINY_MODEL, build_tiny_stage, full, global_tensor, grid_name, tiny_batch

LAYERS = TINY_MODEL.layers
PLAIN = {"cache_layers": 0}
SETTINGS = [
    {"cache_layers": 1, "replicated_layers": 1},
    {"cache_layers": "all", "replicated_layers": LAYERS},
    {"cache_layers": "all", "cache_scope": "step"},
    {"cache_layers": 1, "cache_scope": "step", "replicated_layers": 1},
]


def gradients_of_a_step(sizes, microbatches, parallel, recompute=False, shard=False):
    """Return the global gradients of a step, whatever ranks hold their parts."""
    grid = Grid(sizes)
    stage = build_tiny_stage(grid, recompute=recompute, **parallel)
    runtime = runtime_of(stage, bucket_bytes=4000, shard=shard)
    batches = [tiny_batch(grid, microbatch) for microbatch in range(microbatches)]
    runtime.forward_backward(batches, microbatches, 1.0)
    return [global_tensor(p.grad, p.spec, grid) for p in runtime.reducer.optimizer_shards]


def gradients_of_all_settings(sizes, microbatches, recompute, shard):
    return [gradients_of_a_step(sizes, microbatches, setting, recompute, shard) for setting in SETTINGS]


@pytest.mark.parametrize(
    ("sizes", "microbatches", "recompute", "shard"),
    [
        (GridSizes(2, 1, 2, 1), 2, True, False),
        (GridSizes(1, 1, 2, 2), 1, True, True),
        full(GridSizes(1, 2, 2, 2), 3, False, True),
        full(GridSizes(1, 1, 4, 1), 2, False, False),
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(ranks, sizes, microbatches, recompute, shard):
    (expected,) = ranks.run(1, gradients_of_a_step, GridSizes(), microbatches, PLAIN)
    for found in ranks.run(sizes.devices, gradients_of_all_settings, sizes, microbatches, recompute, shard)[0]:
        for gradient, serial in zip(found, expected, strict=True):
            assert (gradient - serial).norm() <= 1e-12 * serial.norm()


def communication_of_a_step(sizes, microbatches, parallel):
    """Gathers started, those that were late, and the bytes sent along z."""
    grid = Grid(sizes)
    stage = build_tiny_stage(grid, dtype=torch.float32, **parallel)
    counter = GatherCounter(stage.weights)
    batches = [tiny_batch(grid, microbatch) for microbatch in range(microbatches)]
    runtime_of(stage).forward_backward(batches, microbatches, 1.0)
    return counter.started, counter.late, grid.z.traffic.read()["bytes"]


@pytest.mark.parametrize("sizes", [GridSizes(2, 1, 2, 1), GridSizes(1, 1, 4, 1)], ids=grid_name)
def test_microbatches_share_one_gather_and_one_scatter_of_a_step(ranks, sizes):
    one, three = (
        ranks.run(sizes.devices, communication_of_a_step, sizes, count, {"cache_layers": "all", "cache_scope": "step"})
        for count in (1, 3)
    )
    assert one == three
    for gathers, late, _ in one:
        assert (gathers, late) == (4 * LAYERS + 1, 1)


def test_weights_that_are_gathered_are_gathered_ahead_past_whole_ones(ranks):
    for microbatches, whole in itertools.product((1, 2), (1, LAYERS)):
        parallel = {"replicated_layers": whole, "cache_layers": "all"}
        for _, late, _ in ranks.run(2, communication_of_a_step, GridSizes(1, 1, 2, 1), microbatches, parallel):
            assert late == microbatches * (1 + 4 * whole)  # a replicated weight is available when it is needed
