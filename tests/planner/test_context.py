"""The planner with sequences that several ranks share (``parallel.context``)."""

from dataclasses import replace

import pytest

from gpt4d.config import GridSizes
from gpt4d.planner.capacity import fewest_devices
from gpt4d.planner.device import Links
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PipelineEstimate
from gpt4d.planner.topology import usable_gib
from gpt4d.planner.workload import grids
from gpt4d.validation import validate
from tests.planner.test_memory import GEMMA3, LLAMA, MODEL, check_peak
from tests.planner.test_pipelines import peak_of_stage
from tests.planner.test_search import ask
from tests.planner.test_step import PRODUCTS, config
from tests.support.grids import bytes_planned, bytes_sent, full, train_in_rank
from tests.support.settings import configured

SHORT = "train.steps=2", "train.seq_len=16", "model.max_positions=16"
RING = "parallel.context_exchange=ring"
GROUPED = "model=llama_tiny", "model.heads=4", "model.key_value_heads=2", "model.head_size=8", "model.inner=40"
WINDOWS = "model=gemma3_tiny", *GROUPED[1:], "model.window=6", "model.global_every=2"


@pytest.mark.parametrize(
    ("sizes", "context", "overrides"),
    [
        (GridSizes(1, 1, 2, 2), 4, GROUPED),
        (GridSizes(2, 1, 2, 1), 2, ("train.activation_checkpointing=full", "train.micro_batch_size=2")),
        (GridSizes(1, 1, 4, 1), 4, (*GROUPED, RING)),
        full(GridSizes(1, 1, 4, 1), 2, GROUPED),
        full(GridSizes(1, 1, 2, 2), 2, (*GROUPED, RING, "parallel.chunks=2", "train.activation_checkpointing=full")),
        full(GridSizes(2, 1, 1, 3), 3, (*WINDOWS, RING, "train.activation_checkpointing=full", "train.seq_len=12")),
        full(GridSizes(1, 1, 1, 4), 4, ()),
        full(GridSizes(1, 2, 2, 2), 2, (*GROUPED, "parallel.chunks=2", "train.activation_checkpointing=full")),
        full(GridSizes(2, 1, 1, 4), 4, (*GROUPED, "parallel.sequence_parallel=true", "train.micro_batch_size=1")),
        full(GridSizes(1, 1, 2, 2), 2, ("model.attention_dropout=0.1",)),
        full(GridSizes(2, 1, 2, 2), 4, ("parallel.rank_order=yx", "train.activation_checkpointing=selective")),
        full(GridSizes(2, 1, 2, 1), 2, WINDOWS),
        full(GridSizes(1, 1, 2, 2), 4, (*WINDOWS, "train.activation_checkpointing=full")),
        full(GridSizes(1, 1, 4, 2), 4, ("optim.shard_states=true", "train.precision=bf16")),
    ],
    ids=str,
)
def test_a_step_sends_the_planned_bytes(ranks, tiny, sizes, context, overrides):
    grid = (f"parallel.g{axis}={size}" for axis, size in sizes._asdict().items())
    config = tiny(*grid, f"parallel.context={context}", *SHORT, *overrides)
    ranks.run(sizes.devices, train_in_rank, config)
    sent = bytes_sent(config.run.dir)
    assert "context" in sent and sent == bytes_planned(config, sizes)


@pytest.mark.parametrize(
    ("sizes", "context", "overrides"),
    [
        (GridSizes(1, 1, 2, 2), 4, LLAMA),
        (GridSizes(2, 1, 2, 1), 2, (*MODEL, "train.activation_checkpointing=full", "train.precision=bf16")),
        (GridSizes(1, 1, 2, 1), 2, (*GEMMA3, "train.activation_checkpointing=full")),
        (GridSizes(1, 1, 4, 1), 4, (*LLAMA, RING)),
        full(GridSizes(1, 1, 2, 1), 2, MODEL),
        full(GridSizes(1, 1, 2, 1), 2, (*LLAMA, RING, "train.activation_checkpointing=full")),
        full(
            GridSizes(1, 1, 1, 3), 3, (*LLAMA, RING, "train.precision=bf16", "train.batch_size=3", "train.seq_len=126")
        ),
        full(GridSizes(1, 1, 1, 4), 4, (*GEMMA3, RING, "train.activation_checkpointing=full")),
        full(GridSizes(1, 1, 1, 4), 4, (*MODEL, "train.micro_batch_size=2")),
        full(GridSizes(2, 2, 2, 1), 2, (*LLAMA, "train.precision=bf16", "parallel.sequence_parallel=true")),
        full(GridSizes(1, 1, 4, 1), 4, (*LLAMA, "train.activation_checkpointing=full", "train.precision=bf16")),
        full(GridSizes(1, 2, 2, 1), 2, (*LLAMA, "parallel.chunks=2", "train.activation_checkpointing=selective")),
        full(GridSizes(1, 1, 4, 1), 4, GEMMA3),
        full(GridSizes(1, 1, 1, 2), 2, (*MODEL, "model.attention_dropout=0.1")),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_predicted_within_10_percent(ranks, sizes, context, overrides):
    lengths = "train.seq_len=128", "model.max_positions=128", "train.batch_size=8"
    check_peak(ranks, sizes, [*overrides, *lengths, f"parallel.context={context}"])


@pytest.mark.parametrize(
    ("sizes", "context", "overrides"),
    [
        (GridSizes(1, 1, 2, 1), 2, ("parallel.pipeline.schedule=1f1b",)),
        full(GridSizes(1, 1, 1, 2), 2, (*LLAMA, "train.activation_checkpointing=full")),
        full(GridSizes(2, 1, 2, 1), 2, ("parallel.sequence_parallel=true", "parallel.pipeline.microbatches=4")),
        full(GridSizes(1, 1, 2, 2), 4, ("parallel.pipeline.schedule=1f1b", "parallel.pipeline.microbatches=8")),
    ],
    ids=str,
)
def test_two_stages_send_the_planned_bytes_and_take_the_planned_memory(ranks, tiny, sizes, context, overrides):
    grid = [f"parallel.g{axis}={size}" for axis, size in sizes._asdict().items()]
    words = *grid, "parallel.pipeline.stages=2", f"parallel.context={context}", *overrides
    lengths = "train.seq_len=128", "model.max_positions=128", "train.batch_size=8"
    words = *words, *lengths, "model.layers=8", "model.vocab_size=300", "cluster.reserved_gib=0", "train.steps=2"
    config = tiny(*MODEL, *words)
    world_size = 2 * sizes.devices
    planned = PipelineEstimate.of(validate(config, world_size))
    ranks.run(world_size, train_in_rank, config)
    sent, links = bytes_sent(config.run.dir), planned.link_bytes
    assert {name: sent[name] for name in links} == links
    stage = {axis: used["bytes"] for axis, used in planned.of_stage(0).comm.items()}
    assert sent["context"] == pytest.approx(stage["context"], rel=1e-9)
    taken: dict[int, int] = {}
    for index, nbytes in ranks.run(world_size, peak_of_stage, config, world_size):
        taken[index] = max(taken.get(index, 0), nbytes)
    assert taken == {index: pytest.approx(gib * GIB, rel=0.1) for index, gib in enumerate(planned.memory_gib)}


@pytest.mark.parametrize("attention_tflops", [None, 0.5])
@pytest.mark.parametrize("words", [(), GROUPED], ids=str)
def test_ranks_that_share_samples_share_the_products_equally(attention_tflops, words):
    cluster = replace(PRODUCTS, attention_tflops=attention_tflops)
    alone = Estimate(config(cluster, *words), GridSizes()).plan(16)
    for context in (2, 4):
        shared = Estimate(config(cluster, *words, f"parallel.context={context}"), GridSizes(1, 1, context)).plan(16)
        assert shared.compute_s == pytest.approx(alone.compute_s / context)
        flops = shared.step_time_s * shared.sizes.devices * (shared.mfu or 0)
        assert flops == pytest.approx(alone.step_time_s * (alone.mfu or 0))


@pytest.mark.parametrize("rank_order", ["xy", "yx"])
def test_a_group_spans_z_and_then_data(rank_order):
    """On nodes of four devices, two ranks of z share samples inside a node, and four ranks between two nodes."""
    machine, sizes = configured(["cluster=perlmutter"]).cluster, GridSizes(2, 1, 2, 4)
    inside, between = (Links(machine, sizes, rank_order, context=context) for context in (2, 4))
    assert not inside.speeds["all_gather", "context"].across and between.speeds["all_gather", "context"].across
    assert inside.speeds["all_gather", "context"] == inside.speeds["all_gather", "z"]


# Without recomputation, the activations of one sequence do not fit on a device.
LONG = (
    "cluster=perlmutter", "cluster.memory_gib=12", "model=llama_160m", "train.seq_len=65536",
    "model.max_positions=65536", "train.batch_size=8", "parallel.pipeline.stages=1",
)  # fmt: skip
FEW = (*MODEL, "model.vocab_size=300", "train.seq_len=32", "parallel.pipeline.stages=1")


def test_ranks_share_samples_if_there_are_fewer_samples_than_shards_of_the_batch():
    words = *FEW, "train.batch_size=2"
    plans = rank(configured([*words]), 8).plans
    assert {plan.sizes for plan in plans} == {sizes for sizes in grids(8) if sizes.x < 8}
    for plan in plans:
        assert plan.context == max(1, plan.sizes.batch_shards // 2)
        assert (f"parallel.context={plan.context}" in plan.overrides) == (plan.context > 1)
        assert validate(configured([*words, *plan.overrides]), 8).sizes == plan.sizes


def test_ranks_share_samples_if_a_step_does_not_fit_otherwise():
    config = configured(LONG)
    plan = next(plan for plan in rank(config, 8).plans if plan.sizes == GridSizes(z=8))
    assert plan.context > 1 and plan.memory_gib <= usable_gib(config.cluster)
    fewer = replace(config, parallel=replace(config.parallel, context=plan.context // 2))
    assert Estimate(fewer, plan.sizes).memory_gib(1) > usable_gib(config.cluster)
    fewest = fewest_devices(config, 8)
    assert fewest and rank(config, fewest).plans


def test_more_ranks_share_samples_if_that_saves_recomputation():
    key = "train.activation_checkpointing"
    plan = next(plan for plan in rank(configured(LONG), 8, keys=[key]).plans if plan.sizes == GridSizes(z=8))
    assert plan.context > 1 and key not in plan.options
    assert plan.step_time_s < Estimate(configured([*LONG, f"{key}=full"]), plan.sizes).plan(1).step_time_s


def test_two_stages_share_samples_if_there_are_too_few():
    words = *FEW[:-1], "train.batch_size=2", "parallel.pipeline.stages=2", "train.steps=1"
    plans = rank(configured([*words]), 8).plans
    assert any(plan.context > 1 for plan in plans)
    for plan in plans:
        checked = validate(configured([*words, *plan.overrides]), 8)
        assert tuple(stage.sizes for stage in checked.stages) == plan.stages
        assert checked.config.parallel.context == plan.context


def test_auto_and_the_command_choose_the_ranks_that_share_samples():
    plan = validate(configured([*FEW, "train.batch_size=1", "parallel.mode=auto"]), 4)
    assert plan.config.parallel.context == plan.sizes.batch_shards
    answer = ask(*FEW, "train.batch_size=1", "world_size=4")
    assert "1x1x4x1 with context 4" in answer and "parallel.context=4" in answer
    fixed = ask(*FEW, "train.batch_size=4", "parallel.context=2", "world_size=4")
    assert "1x1x4x1 with context 2" in fixed and "with context 4" not in fixed


def test_a_length_without_positions_names_the_setting():
    answer = ask("model=llama3_8b", "train.seq_len=131072", "world_size=64", "cluster=perlmutter")
    assert "longer than model.max_positions=8192" in answer and "model.max_positions=131072" in answer


def test_the_planner_chooses_the_faster_exchange():
    long = "model=llama_tiny", "model.max_positions=2048", "train.seq_len=2048", "train.batch_size=1", "cluster=local"
    config = configured([*long, "parallel.pipeline.stages=1", "cluster.levels=[{group_gb_s: 0.5}]"])
    (best,) = rank(config, 4, top=1).plans
    assert best.choice["context_exchange"] == "ring"
    gathered = Estimate(config, best.sizes, choice={**best.choice, "context_exchange": "all_gather"})
    assert gathered.plan(best.micro_batch).step_time_s > best.step_time_s
    fixed = replace(config, parallel=replace(config.parallel, context_exchange="all_gather"))
    assert all("context_exchange" not in plan.choice for plan in rank(fixed, 4, top=3).plans)
