"""The planned memory of a step is the memory that its tensors take."""

import random
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from benchmarks.laboratory.memory import allocated_peak
from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.comm.cpu.comm_thread import CommFuture
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import routing
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.workload import training_state
from gpt4d.step import TrainStep, build_stage
from gpt4d.validation import validate
from tests.support.grids import full, token_loss
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage

SIZES = "model.layers=6 model.hidden=64 model.heads=4 model.vocab_size=256 model.max_positions=32 train.batch_size=8"
GROUPED = f"{SIZES} model.key_value_heads=2 model.head_size=16 model.inner=176"
FAMILIES = {
    "gpt": f"model=gpt_tiny {SIZES}",
    "llama": f"model=llama_tiny {GROUPED}",
    "gemma3": f"model=gemma3_tiny {GROUPED} model.window=8 model.global_every=3",
    "unet": "model=unet_tiny model.image_size=16 model.multipliers=[1,2] model.blocks_per_level=1 "
    "model.attention_at=[8] model.head_size=16 model.groups=8 train.batch_size=16",
    "moe": "model=moe_tiny model.hidden=64 model.head_size=8 model.inner=96 model.vocab_size=320 train.batch_size=8 "
    "model.vocab_multiple=16 model.max_positions=64 train.seq_len=64 train.precision=fp32",
}
STAGES = "model.layers=8 model.vocab_size=258 model.vocab_multiple=16 train.batch_size=16 train.seq_len=32"
PIPELINE = "parallel.pipeline."
OF_8 = "train.batch_size=8"


def overrides_of(family: str, *overrides: str) -> list[str]:
    words = " ".join([FAMILIES[family], "optim.algorithm=adamw", *overrides])
    return [*words.split(), "cluster.reserved_gib=0"]


class MeasuredTraining:
    """The trainer's step without its reports."""

    def __init__(self, config: Config, sizes: GridSizes):
        context = config.parallel.context
        grid = Grid(sizes, context=context)
        self.stage = build_stage(one_stage(config, sizes), grid, torch.device("cpu"))
        share = config.train.batch_size // sizes.sample_shards(context)
        size, model = config.train.micro_batch_size or share, config.model
        if isinstance(model, UNetConfig):
            pictures = torch.randn(share, model.image_size, model.image_size, model.image_channels)
            self.batches = [(part, torch.arange(len(part)), part) for part in pictures.split(size)]
        else:
            # Seeded, because the memory of experts depends on their tokens.
            generator = torch.Generator().manual_seed(grid.sample_shard)
            ids = torch.randint(model.vocab_size, (share, config.train.seq_len // context), generator=generator)
            self.batches = [(part, part, torch.arange(len(part))) for part in ids.split(size)]
        loss = picture_loss if isinstance(model, UNetConfig) else token_loss
        self.step = TrainStep(self.stage, whole_model(loss), config.optim, config.parallel.overlap.data)

    def run(self) -> None:
        self.step(self.batches, len(self.batches), 1, 1e-3)
        self.step.reducer.wait_params()


def picture_loss(module: torch.nn.Module, batch: tuple) -> torch.Tensor:
    noisy, ids, targets = batch
    return (module(noisy, ids, ids) - targets).square().sum()


def state_taken(config: Config, sizes: GridSizes) -> dict[str, int]:
    training = MeasuredTraining(config, sizes)
    for batch in training.batches:
        token_loss(training.stage.module, batch).backward()
    training.stage.weights.schedule.finish()
    parameters, states = list(training.stage.module.parameters()), training.step.optimizer.state.values()
    return {
        "weights": sum(p.untyped_storage().nbytes() for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters),
        "optimizer": sum(s[k].untyped_storage().nbytes() for s in states for k in ("exp_avg", "exp_avg_sq")),
    }


def memory_peak(run_step: Callable[[], None]) -> int:
    """Return the peak of torch's allocator in the third step, minus the memory in use before."""
    for _ in range(2):
        run_step()
    return allocated_peak(run_step)


@pytest.mark.parametrize(("sizes", "shard"), [(GridSizes(2, 1, 2), False), (GridSizes(1, 2, 1, 4), True)], ids=str)
def test_weights_gradients_and_states_take_what_the_layouts_say(ranks, sizes, shard):
    # The full gradients, before their reduction over data: no bucket is reduced during the backward.
    config = configured(overrides_of("gpt", f"optim.shard_states={shard} parallel.overlap.data=false"))
    for taken in ranks.run(sizes.devices, state_taken, config, sizes):
        assert taken == training_state(registry.describe(config.model), sizes, config.optim)


def peak_taken(config: Config, sizes: GridSizes, experts: int | None = None) -> int:
    """On a rank: the peak of a step, in which all tokens use the first ``experts`` experts if it is given."""
    choose = routing.chosen_experts

    def chosen(logits, bias, scoring):
        logits = logits.clone()
        logits[:, experts:] = -torch.inf
        return choose(logits, bias, scoring)

    training = MeasuredTraining(config, sizes)
    with patch.object(routing, "chosen_experts", chosen if experts else choose):
        return memory_peak(training.run)


def check_peak(ranks, sizes: GridSizes, overrides: list[str], experts: int | None = None) -> float:
    """Compare the planned peak with the peak of torch's allocator, and return it."""
    config = configured(overrides)
    state = training_state(registry.describe_run(config), sizes, config.optim)
    taken = max(ranks.run(sizes.devices, peak_taken, config, sizes, experts)) + state["weights"] + state["optimizer"]
    estimate = Estimate(config, sizes)
    planned = estimate.memory_gib(config.train.micro_batch_size or estimate.share) * GIB
    assert planned == pytest.approx(taken, rel=0.1)
    return planned


RECOMPUTE, SELECTIVE = "train.activation_checkpointing=full", "train.activation_checkpointing=selective"
BF16, FP8 = "train.precision=bf16", "train.precision=fp8"
MICRO_1, MICRO_2, MICRO_4 = (f"train.micro_batch_size={size}" for size in (1, 2, 4))
MUON, WIDE, SHARD = "optim.algorithm=muon", "model.hidden=256", "optim.shard_states=true"
CACHE, PER_STEP = "parallel.cache_layers=all", "parallel.cache_layers=all parallel.cache_scope=step"
CHUNKS_2, CHUNKS_4, TOKENS = "parallel.chunks=2", "parallel.chunks=4", "parallel.sequence_parallel=true"
RING = "parallel.context_exchange=ring"


def context(size: int) -> str:
    return f"parallel.context={size} train.seq_len=128 model.max_positions=128"


@pytest.mark.parametrize(
    ("family", "sizes", "overrides"),
    [
        ("gpt", (2, 1, 2, 1), [MUON, WIDE, MICRO_1, "model.layers=2"]),
        ("gpt", (1, 1, 1, 4), [SHARD, RECOMPUTE]),
        ("gpt", (1, 1, 2, 1), [FP8, CACHE]),
        ("gpt", (2, 1, 2, 1), ["lora.rank=8", BF16]),
        ("gpt", (1, 1, 2, 1), [PER_STEP, MICRO_1]),
        ("gpt", (1, 2, 2, 1), ["parallel.replicated_layers=2", BF16, MICRO_2]),
        ("gpt", (2, 2, 1, 1), [CHUNKS_2, TOKENS]),
        ("gpt", (1, 1, 1, 1), [SELECTIVE, "train.loss_chunks=4"]),
        ("llama", (1, 1, 1, 1), []),
        ("llama", (2, 2, 1, 1), [BF16, "model.qk_norm=true"]),
        ("llama", (2, 1, 2, 1), ["parallel.scatter_heads=false", "model.qkv_bias=true"]),
        full("llama", (1, 1, 2, 2), [context(4)]),
        ("llama", (1, 1, 2, 1), [RING, context(2)]),
        full("gemma3", (2, 1, 2, 1), [CHUNKS_2, SELECTIVE]),
        ("gemma3", (1, 1, 2, 1), [RECOMPUTE, context(2)]),
        ("unet", (2, 1, 1, 1), [RECOMPUTE, CHUNKS_2]),
        full("moe", (1, 1, 4, 1), [RECOMPUTE]),
        ("moe", (2, 1, 2, 1), [BF16, MICRO_2]),
        full("gpt", (2, 1, 2, 1), []),
        full("gpt", (1, 2, 1, 2), [MUON, MICRO_2]),
        full("gpt", (1, 2, 2, 1), [CHUNKS_4, RECOMPUTE, BF16]),
        full("gpt", (2, 1, 2, 1), [RECOMPUTE, BF16, context(2)]),
        full("gpt", (1, 1, 2, 2), [MUON, SHARD]),
        full("gpt", (1, 1, 4, 1), [RECOMPUTE, "parallel.cache_layers=2"]),
        full("gpt", (1, 2, 1, 2), ["lora.rank=8", RECOMPUTE]),
        full("gpt", (1, 1, 1, 1), [FP8, PER_STEP]),
        full("gpt", (2, 1, 2, 1), [FP8, RECOMPUTE]),
        full("gpt", (1, 1, 2, 2), ["parallel.replicated_layers=3", SHARD]),
        full("gpt", (4, 1, 1, 1), [TOKENS, RECOMPUTE]),
        full("gpt", (2, 2, 1, 1), ["train.loss_chunks=2", TOKENS]),
        full("gpt", (1, 4, 1, 1), ["parallel.scatter_heads=false", CHUNKS_2]),
        full("gpt", (1, 1, 1, 4), [MICRO_2, context(4)]),
        full("gpt", (1, 1, 1, 2), ["model.attention_dropout=0.1", context(2)]),
        full("llama", (1, 2, 2, 1), [CHUNKS_2, "model.tied=false"]),
        full("llama", (1, 1, 2, 1), [RING, RECOMPUTE, context(2)]),
        full("llama", (1, 1, 1, 3), [RING, BF16, context(3), "train.batch_size=3 train.seq_len=126"]),
        full("llama", (2, 2, 2, 1), [BF16, TOKENS, context(2)]),
        full("llama", (1, 2, 2, 1), [CHUNKS_2, SELECTIVE, context(2)]),
        full("gemma3", (1, 2, 1, 1), [RECOMPUTE]),
        full("unet", (2, 2, 1, 1), [MICRO_4, SELECTIVE]),
        full("unet", (1, 2, 1, 2), [BF16]),
        full("moe", (1, 2, 2, 1), [SELECTIVE, CHUNKS_2]),
        full("moe", (1, 1, 2, 2), [SHARD, CACHE]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_predicted_within_10_percent(ranks, family, sizes, overrides):
    check_peak(ranks, GridSizes(*sizes), overrides_of(family, *overrides))


def random_plan(draw: random.Random) -> list[str]:
    """Return the overrides of a random small model with random settings that change memory."""
    family, heads = draw.choice(("gpt_tiny", "llama_tiny")), draw.choice((2, 4, 8))
    batch, length = draw.choice((4, 8, 16)), draw.choice((64, 128, 256))
    settings = {
        "model": family,
        "model.layers": draw.randint(1, 8),
        "model.hidden": heads * draw.choice((16, 32, 48)),
        "model.heads": heads,
        "model.vocab_size": draw.choice((512, 2048, 8192)),
        "model.max_positions": length,
        "train.batch_size": batch,
        "train.micro_batch_size": draw.choice([size for size in (1, 2, 4, 8, 16) if size <= batch]),
        "train.activation_checkpointing": draw.choice(("none", "selective", "full")),
        "train.loss_chunks": draw.choice((1, 1, 4, 8)),
        "train.precision": draw.choice(("fp32", "fp32", "bf16")),
        "parallel.cache_layers": draw.choice((0, "all")),
        "cluster.reserved_gib": 0,
    }
    if family == "llama_tiny":
        own = {"key_value_heads": heads // 2, "head_size": 16, "inner": draw.choice((128, 320))}
        settings |= {f"model.{key}": value for key, value in own.items()}
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_the_peak_of_a_step_of_a_random_plan_is_predicted_within_10_percent(ranks, seed):
    check_peak(ranks, GridSizes(), random_plan(random.Random(seed)))


def test_the_busiest_device_needs_the_memory_of_its_imbalance(ranks):
    words = overrides_of("moe", "train.batch_size=16 model.layers=2")
    planned = check_peak(ranks, GridSizes(1, 1, 4, 1), [*words, "model.imbalance=4"], experts=2)
    balanced = Estimate(configured(words), GridSizes(1, 1, 4, 1))
    assert planned > 1.5 * balanced.memory_gib(balanced.share) * GIB


# --------------------------------------------------------------------------------------------------------- stages


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


def check_peaks_of_stages(ranks, config: Config, world_size: int) -> list[int]:
    """Compare the planned peak of each stage with the largest peak of its ranks, and return the latter."""
    planned = validate(config, world_size).stage_gib
    answers = ranks.run(world_size, peak_of_stage, config, world_size)
    taken = [max(nbytes for index, nbytes in answers if index == stage) for stage in range(len(planned))]
    assert [gib * GIB for gib in planned] == pytest.approx(taken, rel=0.1)
    return taken


@pytest.mark.parametrize(
    ("world_size", "pipeline", "overrides"),
    [
        (4, "stages=2 schedule=gpipe stage_grids=[1x1x2x1,2x1x1x1]", []),
        (2, "stages=2 schedule=interleaved_1f1b chunks_per_stage=2", []),
        (2, "stages=2 schedule=eager_1f1b_w", ["model.layers=16", SELECTIVE]),
        (3, "stages=3 schedule=zb_h1 microbatches=8", ["model.layers=12", RECOMPUTE]),
        (2, "stages=2 schedule=1f1b", ["model.layers=12", MUON]),
        full(4, "stages=2 schedule=1f1b", ["parallel.gz=2", context(2), OF_8]),
        full(2, "stages=2 schedule=1f1b", []),
        full(4, "stages=4", []),
        full(2, "stages=2 schedule=zb_h1 microbatches=4", []),
        full(2, "stages=2 schedule=zb_h1 microbatches=4", ["model.layers=16", RECOMPUTE]),
        full(4, "stages=2", ["parallel.gdata=2", RECOMPUTE, context(2), OF_8]),
        full(8, "stages=2 microbatches=4", ["parallel.gx=2 parallel.gz=2", TOKENS, context(2), OF_8]),
        full(8, "stages=2 schedule=1f1b microbatches=8", ["parallel.gz=2 parallel.gdata=2", context(4), OF_8]),
    ],
    ids=str,
)
def test_the_peak_of_each_stage_is_predicted_within_10_percent(ranks, world_size, pipeline, overrides):
    pipeline = " ".join(PIPELINE + setting for setting in pipeline.split())
    check_peaks_of_stages(ranks, configured(overrides_of("gpt", STAGES, pipeline, *overrides)), world_size)


def test_the_memory_of_a_1f1b_pipeline_does_not_depend_on_the_number_of_microbatches(ranks):
    """Sent tensors are freed. All tensors of 32 microbatches take 1 MB in one direction, the peak of a stage 3 MB."""
    words = f"model.layers=4 model.hidden=32 model.max_positions=256 train.seq_len=256 {PIPELINE}schedule=1f1b"
    taken = []
    for count in (4, 32):
        sizes = f"train.batch_size={count} {PIPELINE}microbatches={count} {PIPELINE}stages=2"
        taken.append(check_peaks_of_stages(ranks, configured(overrides_of("gpt", STAGES, words, sizes)), 2))
    assert taken[1] == pytest.approx(taken[0], rel=0.02)


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
    words = overrides_of("llama", STAGES, f"{PIPELINE}stages={stages} train.batch_size=12", *settings)
    config = configured([*words, "cluster=local"])
    plan = validate(config, stages)
    estimate = plan.with_config(replace(plan.config, cluster=replace(plan.config.cluster, communicator_gib=0.5)))
    expected = [0.5 * (count + (stages > 1)) for count in links]  # and the group of all ranks
    assert estimate.reserved_gib == expected
    added = [one - other for one, other in zip(estimate.stage_gib, plan.stage_gib, strict=True)]
    assert added == pytest.approx(expected)
    assert estimate.memory["reserved"] in expected
    assert estimate.memory_gib == pytest.approx(max(estimate.stage_gib))


@pytest.mark.parametrize(("stages", "tied", "buffers"), [(1, False, [0]), (3, False, [1, 1, 1]), (2, True, [1, 1])])
def test_buffers_of_cuda_graphs_take_memory_in_pipelines(stages, tied, buffers):
    words = f"model.tied={tied} {PIPELINE}stages={stages} train.batch_size=12 train.cuda_graphs=true"
    words += f" {PIPELINE}microbatches=6" if stages > 1 else ""
    config = configured([*overrides_of("llama", STAGES, words), "cluster=local", "cluster.device=cuda"])
    plan = validate(config, stages)
    train = plan.config.train
    without = plan.with_config(replace(plan.config, train=replace(train, cuda_graphs=False)))
    crossing = 2 * 2 * train.seq_len * 64 * 2  # a tensor of two sequences in bf16, and its copy
    table = 4 * plan.description.parameters["tokens.weight"].local_elements(GridSizes()) if tied else 0
    added = [(a - b) * GIB for a, b in zip(plan.stage_gib, without.stage_gib, strict=True)]
    assert added == pytest.approx([count * (crossing + table) for count in buffers])
