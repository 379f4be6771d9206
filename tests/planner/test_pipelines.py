"""The planner's pipelines: time and memory of a step on stages, and the choice of stages."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpt4d.config import (
    Config,
    ConfigError,
    GridSizes,
    divisors,
    grid_problem,
    possible_microbatches,
    with_stages,
)
from gpt4d.model import registry
from gpt4d.parallel.comm.cpu.comm_thread import CommFuture
from gpt4d.parallel.stage_plan import StagePlan, consecutive_stages
from gpt4d.planner.estimate import GIB
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PipelineEstimate, stage_parts, transfer_seconds
from gpt4d.planner.topology import for_devices, usable_gib
from gpt4d.planner.workload import grids, training_state
from gpt4d.step import TrainStep
from gpt4d.validation import validate
from tests.planner.test_memory import memory_peak
from tests.support.grids import full
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage

PIPELINE = "parallel.pipeline."
MODEL = (
    "model=gpt_tiny", "model.layers=8", "model.hidden=64", "model.heads=4", "model.vocab_size=258",
    "model.vocab_multiple=16", "model.max_positions=32", "data.path=null", "train.batch_size=16",
    "cluster.reserved_gib=0", "optim.algorithm=adamw",
)  # fmt: skip
# Two nodes of two devices each, with a slow link between the nodes.
SLOW = (
    *MODEL,
    "cluster=local",
    "cluster.device=cuda",
    "cluster.hidden=1",
    "cluster.matmul_tflops=0.1",
    "cluster.levels=[{ranks: 2, group_gb_s: 0.002, latency_us: 0}, {ranks: 2, group_gb_s: 10, latency_us: 0}]",
)


def execute(task: Callable[[], object]) -> CommFuture:
    """Execute a task of a communication thread on the calling thread."""
    future = CommFuture()
    with torch.no_grad():
        future.set_result(task())
    return future


def peak_of_stage(config: Config, world_size: int) -> tuple[int, int]:
    """On a rank: its stage, and the peak memory of a step in bytes, with weights and states."""
    plan, stage = own_stage(config, world_size, torch.float32, ranks_per_host=world_size)
    for link in stage.exchange.links.values():
        link.worker.submit = execute  # torch counts the memory that is allocated and freed on one thread
    data = RandomTokens(config, plan, stage)
    step, batches = TrainStep(stage, data.compute, config.optim), list(data.batches(0))

    def run() -> None:
        step(batches, plan.microbatches, 1, 1e-3)
        step.reducer.wait_params()

    peak = memory_peak(run)
    stage.exchange.close()
    description = plan.description.stage(plan.stages[stage.index].parts)
    state = training_state(description, stage.grid.sizes, config.optim)
    return stage.index, peak + state["weights"] + state["optimizer"]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (4, ["stages=2", "schedule=gpipe", "stage_grids=[1x1x2x1,2x1x1x1]"]),
        (2, ["stages=2", "schedule=interleaved_1f1b", "chunks_per_stage=2"]),
        (2, ["stages=2", "schedule=eager_1f1b_w", "layers=16", "activation_checkpointing=selective"]),
        (3, ["stages=3", "schedule=zb_h1", "microbatches=8", "layers=12", "activation_checkpointing=full"]),
        (2, ["stages=2", "schedule=1f1b", "layers=12", "algorithm=muon"]),
        full(2, ["stages=2", "schedule=1f1b"]),
        full(4, ["stages=4"]),
        full(2, ["stages=2", "schedule=zb_h1", "microbatches=4"]),
        full(2, ["stages=2", "schedule=zb_h1", "microbatches=4", "layers=16", "activation_checkpointing=full"]),
    ],
    ids=str,
)
def test_the_peak_of_each_stage_is_predicted_within_10_percent(ranks, world_size, settings):
    group = {"layers": "model.", "activation_checkpointing": "train.", "algorithm": "optim."}
    settings = [group.get(setting.partition("=")[0], PIPELINE) + setting for setting in settings]
    config = configured([*MODEL, *settings, "train.seq_len=32"])
    planned = PipelineEstimate.of(validate(config, world_size)).memory_gib
    taken: dict[int, int] = {}
    for index, nbytes in ranks.run(world_size, peak_of_stage, config, world_size):
        taken[index] = max(taken.get(index, 0), nbytes)
    assert {index: gib * GIB for index, gib in enumerate(planned)} == {
        index: pytest.approx(nbytes, rel=0.1) for index, nbytes in taken.items()
    }


def test_the_memory_of_a_1f1b_pipeline_does_not_depend_on_the_number_of_microbatches(ranks):
    """Sent tensors are freed. All tensors of 64 microbatches take 2 MB in one direction, the peak of a stage 3 MB."""
    words = "model.layers=4", "model.hidden=32", "model.max_positions=256", "parallel.pipeline.schedule=1f1b"
    taken, planned = {}, {}
    for count in (8, 64):
        sizes = [f"train.batch_size={count}", f"{PIPELINE}microbatches={count}", f"{PIPELINE}stages=2"]
        config = configured([*MODEL, *words, *sizes, "train.seq_len=256"])
        planned[count] = [gib * GIB for gib in PipelineEstimate.of(validate(config, 2)).memory_gib]
        taken[count] = [nbytes for _, nbytes in sorted(ranks.run(2, peak_of_stage, config, 2))]
    assert planned[64] == pytest.approx(planned[8]) and taken[64] == pytest.approx(taken[8], rel=0.02)
    assert planned[64] == pytest.approx(taken[64], rel=0.1)


@pytest.mark.parametrize(
    ("stages", "settings", "links"),
    [
        (1, [], [0]),
        (3, ["model.tied=false"], [2, 4, 2]),
        (3, [], [4, 4, 4]),  # the last stage has a copy of the embedding
        (3, ["model.tied=false", f"{PIPELINE}schedule=interleaved_1f1b", f"{PIPELINE}chunks_per_stage=2"], [4, 4, 4]),
    ],
    ids=["one stage", "neighbors", "tied embedding", "interleaved"],
)
def test_links_between_stages_take_memory(stages, settings, links):
    config = configured([*MODEL, "model=llama_tiny", *settings, f"{PIPELINE}stages={stages}", "train.batch_size=12"])
    plan = validate(config, stages)
    without = PipelineEstimate.of(plan)
    estimate = PipelineEstimate.of(plan, replace(config, cluster=replace(config.cluster, communicator_gib=0.5)))
    expected = [0.5 * (count + (stages > 1)) for count in links]  # and the group of all ranks
    assert estimate.reserved_gib == expected
    assert [one - other for one, other in zip(estimate.memory_gib, without.memory_gib, strict=True)] == [
        pytest.approx(gib) for gib in expected
    ]
    assert estimate.plan().memory["reserved"] in expected
    assert estimate.plan().memory_gib == pytest.approx(max(estimate.memory_gib))


def bytes_of_a_step(config: Config, world_size: int) -> dict[str, float]:
    """On a rank: the bytes of its links and of x, y and data in the second of two steps."""
    plan, stage = own_stage(config, world_size, torch.float32, ranks_per_host=2)
    data = RandomTokens(config, plan, stage)
    step = TrainStep(stage, data.compute, config.optim)
    for number in range(2):
        for axis in stage.axes.values():
            axis.traffic.read()
        step(data.batches(number), plan.microbatches, 1, 1e-3)
    if stage.exchange:
        stage.exchange.wait_for_held()
        stage.exchange.close()
    found = {name: axis.traffic.read()["bytes"] for name, axis in stage.axes.items()}
    step.reducer.wait_params()  # other ranks may still gather rows from this one
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (6, [PIPELINE + "stage_grids=[2x1x1x2,1x2x1x1]", PIPELINE + "strategy=local_allgather"]),
        (3, ["model.layers=6", PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2"]),
        full(8, ["parallel.gx=2", "parallel.sequence_parallel=true", "parallel.chunks=2", PIPELINE + "schedule=zb_h1"]),
        full(4, ["model=llama_tiny", "model.tied=false", "model.layers=4", "parallel.gy=2", "train.precision=bf16"]),
    ],
    ids=str,
)
def test_links_between_stages_and_axes_send_the_planned_bytes(ranks, world_size, settings):
    stages = 3 if world_size == 3 else 2
    config = configured([*MODEL, *settings, PIPELINE + f"stages={stages}", "train.batch_size=24", "train.seq_len=32"])
    plan = validate(config, world_size)
    estimate = PipelineEstimate.of(plan)
    links = estimate.link_bytes
    answers = ranks.run(world_size, bytes_of_a_step, config, world_size)
    assert {name for counted in answers for name in counted if name.startswith("stage ")} == links.keys()
    for index, stage in enumerate(plan.stages):
        axes = estimate.of_stage(index).comm
        for counted in (answers[member] for member in stage.ranks):
            planned = {name: links[name] if name in links else axes[name]["bytes"] for name in counted}
            assert counted == pytest.approx(planned, rel=1e-9)


@pytest.mark.parametrize("grid", ["1x1x1x2", "2x1x1x1"])
def test_weight_gradients_computed_by_themselves_hide_no_sums_of_outputs(grid):
    """All-reduces of the inputs' gradients overlap with the weights' products, unless the backward is split."""
    slow_links = "cluster.levels=[{ranks: null, group_gb_s: 0.001, latency_us: 0}]"
    settings = [
        *SLOW[:-1],
        slow_links,
        "train.seq_len=32",
        PIPELINE + "stages=2",
        PIPELINE + f"stage_grids=[{grid},{grid}]",
    ]
    whole, split = (
        PipelineEstimate.of(validate(configured([*settings, PIPELINE + f"schedule={name}"]), 4)).costs
        for name in ("1f1b", "zb_h1")
    )
    for stage in range(2):
        backward, inputs, weights = (
            whole.input_gradient[stage],
            split.input_gradient[stage],
            split.weight_gradient[stage],
        )
        assert split.forward[stage] == pytest.approx(whole.forward[stage])
        assert whole.weight_gradient[stage] == 0 < weights
        # The sums take longer than half a backward, so all of the weights' half has hidden them.
        assert inputs + weights == pytest.approx(backward) if grid == "1x1x1x2" else inputs > 0.95 * backward


def brute_force(config: Config, devices: int) -> float:
    """Return the seconds of the fastest pipeline with equal grids and the default schedule that fits."""
    description, best = registry.describe_run(config), float("inf")
    limit = usable_gib(for_devices(config.cluster, devices))
    for stages in divisors(devices)[1:]:
        staged = with_stages(config, stages)
        parts = stage_parts(staged, description)
        for sizes in grids(devices // stages):
            if grid_problem(description.rules, config.train, staged.parallel, sizes):
                continue
            for number in possible_microbatches(config.train, staged.parallel, (sizes,) * stages):
                plan = PipelineEstimate(staged, description, consecutive_stages([sizes] * stages, parts), number).plan()
                if plan.memory_gib <= limit:
                    best = min(best, plan.step_time_s)
    return best


@pytest.mark.parametrize("extra", [[], ["cluster.operation_us=200"], ["cluster.memory_gib=0.005"]], ids=str)
def test_the_search_is_as_good_as_trying_everything(extra):
    config = configured([*SLOW, *extra, PIPELINE + "schedule=eager_1f1b"])
    found = min(plan.step_time_s for plan in rank(config, 4).plans if plan.pipeline)
    assert found <= 1.02 * brute_force(config, 4)


def test_stages_are_chosen_where_the_links_between_nodes_are_slow():
    ranking = rank(configured(SLOW), 4)
    best = ranking.plans[0]
    assert best.pipeline and best.pipeline.stages == len(best.stages) > 1
    chosen = validate(configured([*SLOW, *best.overrides]), 4)
    assert [stage.sizes for stage in chosen.stages] == [*best.stages]
    assert chosen.microbatches == best.pipeline.microbatches
    automatic = validate(configured([*SLOW, "parallel.mode=auto"]), 4)
    assert automatic.stages == chosen.stages and automatic.candidates[0].startswith(best.grid)


def test_what_the_configuration_sets_stays():
    settings = [PIPELINE + "stages=2", PIPELINE + "schedule=gpipe", PIPELINE + "microbatches=4"]
    for plan in rank(configured([*SLOW, *settings]), 4).plans:
        assert len(plan.stages) == 2 and plan.pipeline.schedule == "gpipe" and plan.pipeline.microbatches == 4
    assert not any(plan.pipeline for plan in rank(configured([*SLOW, PIPELINE + "stages=1"]), 4).plans)
    assert not any(plan.pipeline for plan in rank(configured([*SLOW, "train.micro_batch_size=4"]), 4).plans)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["stages=3"], r"no grid of 4 .*parallel.pipeline.stages=3: does not divide 4 device\(s\); use one of 1, 2, 4"),
        (["stages=2", "stage_grids=[1x1x1x2,2x1x1x1]"], "stage_grids=.*the planner chooses the grids; leave it out"),
        (["stages=2", "microbatches=5"], "no grid of 4 .*microbatches=5: does not cut train.batch_size=16"),
    ],
)
def test_settings_that_the_planner_cannot_follow_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        validate(configured([*SLOW, "parallel.mode=auto", *(PIPELINE + setting for setting in settings)]), 4)


def test_a_step_is_what_its_stages_take_and_what_they_wait():
    config = configured([*SLOW, PIPELINE + "stages=2", PIPELINE + "schedule=1f1b", PIPELINE + "microbatches=16"])
    for plan in rank(config, 4).plans:
        exposed = sum(axis["exposed_s"] for axis in plan.comm.values())
        assert plan.compute_s + exposed + plan.idle_s == pytest.approx(plan.step_time_s)
        assert 0 < plan.idle_s < plan.step_time_s


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        # Two nodes send half of 8 MB each, and the two nodes of the target receive half each.
        ((0, (1, 1, 2, 2)), (4, (1, 1, 2, 2)), 4.0),
        # All devices hold the full tensor: the link of one node of the target must carry all of it.
        ((0, (2, 2, 1, 1)), (4, (2, 2, 1, 1)), 8.0),
        # Each node of the target needs half, but one node has it all to send.
        ((0, (2, 1, 1, 1)), (2, (1, 1, 1, 4)), 8.0),
        # Inside a node, by its own links.
        ((0, (1, 1, 1, 1)), (1, (1, 1, 1, 1)), 0.8),
    ],
)
def test_a_transfer_takes_what_the_busiest_link_carries(source, target, seconds):
    levels = "[{ranks: 4, group_gb_s: 1e-3, latency_us: 0}, {ranks: 2, group_gb_s: 1e-2, latency_us: 0}]"
    cluster = configured([f"cluster.levels={levels}"]).cluster
    first, second = (StagePlan(0, rank, GridSizes(*sizes), ()) for rank, sizes in (source, target))
    assert transfer_seconds(cluster, first, second, 8_000_000) == pytest.approx(seconds)


@pytest.mark.parametrize(("stages", "tied", "buffers"), [(1, False, [0]), (3, False, [1, 1, 1]), (2, True, [1, 1])])
def test_buffers_of_cuda_graphs_take_memory_in_pipelines(stages, tied, buffers):
    words = [*SLOW, f"model.tied={tied}", f"{PIPELINE}stages={stages}", "train.batch_size=12", "train.cuda_graphs=true"]
    if stages > 1:
        words.append(f"{PIPELINE}microbatches=6")
    plan = validate(configured([*words, "model=llama_tiny"]), stages)
    estimate, train = PipelineEstimate.of(plan), plan.config.train
    without = PipelineEstimate.of(plan, replace(plan.config, train=replace(train, cuda_graphs=False)))
    crossing = 2 * 2 * train.seq_len * 64 * 2  # a tensor of two sequences in bf16, and its copy
    table = 4 * plan.description.parameters["tokens.weight"].local_elements(GridSizes()) if tied else 0
    added = [(a - b) * GIB for a, b in zip(estimate.memory_gib, without.memory_gib, strict=True)]
    assert added == pytest.approx([count * (crossing + table) for count in buffers])
