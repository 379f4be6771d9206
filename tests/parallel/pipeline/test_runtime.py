"""A step over stages with different grids equals one device, also with tensors that skip stages: edges form a graph."""

import weakref
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.model.edges import edges, plain
from gpt4d.parallel.context import Context
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.resharding.transfer import ReshardingInFlight
from gpt4d.parallel.symbolic.stage import SymbolicGrid, SymbolicLayer, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import SymbolicTensor, backward
from gpt4d.plan import ParallelPlan, one_stage
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.parallel.counting_device import CountedOperations, CountingDevice
from tests.seams.plain_toy import RECOMPUTED, PlainToy, check_against, configure
from tests.support.grids import full, on_grid
from tests.support.parallel_runs import runtime_of
from tests.support.stages import connected_task, own_stage

PIPELINE = "parallel.pipeline."
INTERLEAVED = PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2"
NO_LATENCY = "cluster.levels=[{group_gb_s: 1, latency_us: 0}]"


def retained_by_a_step(config):
    """On a rank: the sends of a step, and how many sent tensors and batches a starting forward finds at most."""
    plan, stage = own_stage(config, world_size=2)
    task = connected_task(config, plan, stage)
    sent, batches, retained, create = [], [], [], ReshardingInFlight.__init__

    def record_send(transfer, resharding, local, name):
        create(transfer, resharding, local, name)
        if not resharding.program.receives:
            sent.append((transfer.task, weakref.ref(local)))

    def yield_batches():
        for batch in task.batches(0):
            batches.append(weakref.ref(batch.sample_ids))
            yield batch
            del batch

    def compute(*arguments):
        completed = sum(task.done() and tensor() is not None for task, tensor in sent)
        retained.append((completed, sum(batch() is not None for batch in batches)))
        return task.compute(*arguments)

    runtime = runtime_of(stage, compute)
    with patch.object(ReshardingInFlight, "__init__", record_send):
        runtime.forward_backward(yield_batches(), plan.microbatches, 1.0)
    stage.exchange.close()
    return len(sent), *map(max, zip(*retained, strict=True))


def test_a_step_retains_neither_what_it_has_sent_nor_used_batches(ranks):
    config = configure(PIPELINE + "stages=2", PIPELINE + "schedule=1f1b", PIPELINE + "microbatches=8")
    assert ranks.run(2, retained_by_a_step, config) == [(8, 0, 1)] * 2


def configure_graph(*settings: str) -> Config:
    return configure("model.skips=true", "model.blocks=4", *settings)


@pytest.mark.parametrize(
    ("grids", "settings"),
    [
        ("2x2x2x1", RECOMPUTED),
        ("1x2x1x1,2x1x2x1", (PIPELINE + "schedule=eager_1f1b_w", RECOMPUTED[0])),
        ("1x1x1x2,1x2x1x1,1x1x2x1", ()),
        ("1x1x1x1,1x1x1x1", (PIPELINE + "schedule=gpipe",)),
        ("1x1x1x2,1x1x2x2", INTERLEAVED),
        full("2x2x2x1", ()),
        full("2x1x1x2,1x1x2x1", (RECOMPUTED[0],)),
        full("2x1x1x2,1x1x2x1", (PIPELINE + "schedule=gpipe",)),
        full("1x1x1x1,1x1x2x1,1x2x1x1,1x1x1x2", (PIPELINE + "schedule=zb_h1", PIPELINE + "microbatches=8")),
        full("2x1x2x1,2x1x2x1", (PIPELINE + "schedule=1f1b",)),
        full("1x2x1x1,1x2x1x1", (PIPELINE + "schedule=eager_1f1b", "parallel.chunks=2", PIPELINE + "microbatches=4")),
    ],
    ids=str,
)
def test_a_step_of_a_graph_over_stages_or_a_grid_equals_plain_torch(ranks, grids, settings):
    sizes = [GridSizes(*map(int, grid.split("x"))) for grid in grids.split(",")]
    stages = (PIPELINE + f"stages={len(sizes)}", PIPELINE + f"stage_grids=[{grids}]")
    config = configure_graph(*(stages if len(sizes) > 1 else on_grid(sizes[0])), *settings)
    check_against(ranks, PlainToy(config), sum(grid.devices for grid in sizes))


@pytest.mark.parametrize("configure_model", [configure, configure_graph])
def test_a_planned_microbatch_reads_and_writes_as_many_bytes_as_torch(configure_model):
    sizes = "model.features=64", "model.hidden=256", "model.wide=512", "model.narrow=128", "model.outputs=32"
    config, device = configure_model(*sizes), CountingDevice()
    device.compiled = False
    description = registry.describe(config.model)
    stage = build_stage(one_stage(config), Grid.single_device(), torch.device("cpu"))
    shapes, (part,), spec = ((32, 16, 64), (32, 16, 32)), stage.parts.values(), description.spec
    planned, batch = [SymbolicTensor(device, shape, "float32") for shape in shapes], [*map(torch.randn, shapes)]
    context = Context(SymbolicGrid(device, GridSizes()), "float32")
    layer = SymbolicLayer(spec, SymbolicWeights(context, spec.all_parameters, gradient_bytes=1 << 20))
    loss = spec.compute(layer, part, {}, *planned)["loss"]
    backward([(loss, loss.like())])
    with CountedOperations() as counter:
        stage.module.loss_sum(*batch).backward()
    assert device.moved == pytest.approx(counter.moved, rel=0.002)


def plan_of(*settings: str, stages: int = 4) -> ParallelPlan:
    return validate(configure_graph(PIPELINE + f"stages={stages}", *settings), 4)


def test_a_tensor_crosses_from_its_producer_straight_to_each_later_stage_that_uses_it():
    assert plan_of().crossing == {
        (0, 1): ("stream", "embedded", "classes"),
        (0, 2): ("mask",),
        (0, 3): ("embedded", "classes"),
        (1, 2): ("stream",),
        (1, 3): ("halves",),
        (2, 3): ("stream",),
    }
    later = {2: ("stream", "embedded", "halves", "classes", "mask"), 3: ("stream", "embedded", "halves", "classes")}
    for cut, names in later.items():
        assert plan_of(PIPELINE + f"cuts=[{cut}]", stages=2).crossing == {(0, 1): names}


def test_activations_cross_in_the_compute_dtype_integers_as_int64_and_masks_as_bool():
    plan = plan_of()
    found = edges(registry.describe(plan.config.model), plan.crossing, 4, 3, torch.bfloat16, plain)
    assert {(edge.name, edge.dtype, edge.has_gradient, edge.shape) for edge in found} == {
        *((name, torch.bfloat16, True, (12, 24)) for name in ("stream", "embedded", "halves")),
        ("classes", torch.int64, False, (12,)),
        ("mask", torch.bool, False, (12,)),
    }


def test_costs_count_every_tensor_and_no_gradient_of_integers_and_masks():
    costs = plan_of(NO_LATENCY).costs
    hop = costs.transfers[1, 2]
    stream, integer = 24 * 4, 8  # bytes per row
    assert costs.transfers[0, 1] == pytest.approx((2 + integer / stream) * hop)
    assert costs.transfers[0, 2] == pytest.approx(1 / stream * hop)
    assert costs.gradients == pytest.approx(
        {edge: hop * n for edge, n in {(0, 1): 2, (0, 3): 1, (1, 2): 1, (1, 3): 1, (2, 3): 1}.items()}
    )
