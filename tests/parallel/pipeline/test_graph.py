"""Edges form a graph: tensors that skip stages, several on one boundary, integers and masks without gradients."""

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.model.edges import edges, plain
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.simulation import Costs, simulate
from gpt4d.parallel.pipeline.stage_program import orders_of
from gpt4d.parallel.symbolic import tape
from gpt4d.parallel.symbolic.tensor import SymbolicTensor
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.parallel.pipeline.graph import joined, of_rows  # registers the family
from tests.parallel.pipeline.test_runtime import check_step
from tests.parallel.test_eager_costs import Counter
from tests.parallel.test_symbolic_layers import CommunicatingDevice, symbolic_layer
from tests.seams.test_toy import PlainToy, squared_error
from tests.support.grids import full
from tests.support.settings import configured

PIPELINE = "parallel.pipeline."


def configure(*settings: str) -> Config:
    return configured(["model=graph", "optim=adamw", "train.seq_len=3", "train.batch_size=16", *settings])


class PlainGraph(PlainToy):
    """The model in plain torch."""

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        x_TF = x_BSF.flatten(0, 1)
        x_TH = self.input(x_TF)
        classes_T, mask_T = of_rows(x_TF)
        tensors = {"embedded": x_TH, "classes": classes_T, "mask": mask_T}
        for block, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            x_TH = joined(block, x_TH, tensors)
            x_TH = x_TH + down(F.silu(gate(x_TH)) * up(x_TH))
            if block == 1:
                tensors["scales"] = x_TH.tanh()
        return self.output(x_TH).unflatten(0, x_BSF.shape[:2])


def plain_graph(config: Config) -> PlainGraph:
    module = build_stage(config, Grid.single_device(), torch.device("cpu"), torch.float64).module
    return PlainGraph(config.model, {name: p.detach() for name, p in module.named_parameters()})


INTERLEAVED = (PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2")


@pytest.mark.parametrize(
    ("grids", "settings"),
    [
        ("1x2x1x1,2x1x2x1", (PIPELINE + "schedule=eager_1f1b_w", "train.activation_checkpointing=full")),
        ("1x1x1x2,1x2x1x1,1x1x2x1", ()),
        ("1x1x1x2,1x1x2x2", INTERLEAVED),
        full("2x1x1x2,1x1x2x1", (PIPELINE + "schedule=gpipe",)),
        full("1x1x1x1,1x1x2x1,1x2x1x1,1x1x1x2", (PIPELINE + "schedule=zb_h1", PIPELINE + "microbatches=8")),
    ],
    ids=str,
)
def test_a_step_of_a_graph_over_stages_equals_plain_torch(ranks, grids, settings):
    sizes = [GridSizes(*map(int, grid.split("x"))) for grid in grids.split(",")]
    config = configure(PIPELINE + f"stages={len(sizes)}", PIPELINE + f"stage_grids=[{grids}]", *settings)
    model = plain_graph(config)
    error = squared_error(model, config, range(16), torch.float64)
    error.backward()
    check_step(ranks, config, sum(grid.devices for grid in sizes), error.item(), model.gradients())


@pytest.mark.parametrize("family", ["toy", "graph"])
def test_a_planned_microbatch_reads_and_writes_as_many_bytes_as_torch(family):
    sizes = "model.features=64", "model.hidden=256", "model.wide=512", "model.narrow=128", "model.outputs=32"
    config, device = configure(f"model={family}", *sizes), CommunicatingDevice()
    device.compiled = False
    description, stage = registry.describe(config.model), build_stage(config, Grid.single_device(), torch.device("cpu"))
    shapes, (part,) = ((32, 16, 64), (32, 16, 32)), stage.parts.values()
    planned, batch = [SymbolicTensor(device, shape, "float32") for shape in shapes], [*map(torch.randn, shapes)]
    loss = description.spec.compute(symbolic_layer(description.spec, device), part, {}, *planned)["loss"]
    tape.backward([(loss, loss.like())])
    with Counter() as counter:
        stage.module.loss_sum(*batch).backward()
    assert device.moved == pytest.approx(counter.moved, rel=0.002)


def crossing_of(*settings: str):
    return validate(configure(*settings), 4).crossing


def test_a_tensor_crosses_from_its_producer_straight_to_each_later_stage_that_uses_it():
    assert crossing_of(PIPELINE + "stages=4") == {
        (0, 1): ("stream", "embedded", "classes"),
        (0, 2): ("mask",),
        (0, 3): ("embedded", "classes"),
        (1, 2): ("stream",),
        (1, 3): ("scales",),
        (2, 3): ("stream",),
    }
    assert crossing_of(PIPELINE + "stages=2", PIPELINE + "cuts=[2]") == {
        (0, 1): ("stream", "embedded", "scales", "classes", "mask")
    }
    assert crossing_of(PIPELINE + "stages=2", PIPELINE + "cuts=[3]") == {
        (0, 1): ("stream", "embedded", "scales", "classes")
    }


def test_activations_cross_in_the_compute_dtype_integers_as_int64_and_masks_as_bool():
    config = configure(PIPELINE + "stages=4")
    description, crossing = registry.describe(config.model), validate(config, 4).crossing
    found = edges(description, crossing, 4, 3, torch.bfloat16, plain)
    assert {(edge.name, edge.dtype, edge.has_gradient, edge.shape) for edge in found} == {
        *((name, torch.bfloat16, True, (12, 24)) for name in ("stream", "embedded", "scales")),
        ("classes", torch.int64, False, (12,)),
        ("mask", torch.bool, False, (12,)),
    }


NO_LATENCY = "cluster.levels=[{group_gb_s: 1, latency_us: 0}]"


def test_costs_count_every_tensor_and_no_gradient_of_integers_and_masks():
    costs = validate(configure(PIPELINE + "stages=4", NO_LATENCY), 4).costs
    hop = costs.transfers[1, 2]
    stream, integer = 24 * 4, 8  # bytes per row
    assert costs.transfers[0, 1] == pytest.approx((2 + integer / stream) * hop)
    assert costs.transfers[0, 2] == pytest.approx(1 / stream * hop)
    assert costs.gradients == pytest.approx(
        {edge: hop * n for edge, n in {(0, 1): 2, (0, 3): 1, (1, 2): 1, (1, 3): 1, (2, 3): 1}.items()}
    )


def test_skips_wait_in_the_memory_of_the_last_stage():
    """Eager 1F1B runs far ahead on the first stage, whose skips reach the last one long before it uses them.

    Tensors that wait before 1F1B's second forward on stage 3: two from stage 0 of each of microbatches 1 to 3, one from
    stage 1 of each of 1 and 2, and the stream of 1. With eager 1F1B: two of each of 1 to 5, one of each of 1 to 4, and
    the streams of 1 and 2.
    """
    plan = validate(configure(PIPELINE + "stages=4", PIPELINE + "microbatches=8", NO_LATENCY), 4)
    stream_s = plan.costs.transfers[1, 2]
    transfers = {edge: 0.1 * seconds / stream_s for edge, seconds in plan.costs.transfers.items()}
    costs = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, transfers)
    tensors = {edge: len(names) for edge, names in plan.crossing.items()}
    streams = {edge: names.count("stream") for edge, names in plan.crossing.items()}
    for name, all_waiting, streams_waiting in (("1f1b", 9, 1), ("eager_1f1b", 16, 2)):
        timeline = simulate(orders_of(name, 4, 8, costs), costs)
        assert timeline.peak_waiting(3, tensors) == all_waiting
        assert timeline.peak_waiting(3, streams) == streams_waiting
