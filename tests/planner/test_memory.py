"""The planned memory of a step is the memory that its tensors take."""

import random
from collections.abc import Callable

import pytest
import torch

from benchmarks.laboratory.memory import allocated_peak
from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.workload import training_state
from gpt4d.step import TrainStep, build_stage
from tests.support.grids import full, grid_name, token_loss
from tests.support.settings import configured

U_NET = (
    "model=unet_tiny",
    "model.image_size=16",
    "model.multipliers=[1,2]",
    "model.blocks_per_level=1",
    "model.attention_at=[8]",
    "model.head_size=16",
    "model.groups=8",
)
MODEL = ("model=gpt_tiny", "model.layers=6", "model.hidden=64", "model.heads=4", "model.vocab_size=256",
         "model.max_positions=32", "optim.algorithm=adamw")  # fmt: skip

LLAMA = (*MODEL, "model=llama_tiny", "model.key_value_heads=2", "model.head_size=16", "model.inner=176")


GEMMA3 = (*LLAMA, "model=gemma3_tiny", "model.window=8", "model.global_every=3")


class MeasuredTraining:
    """The trainer's step without its reports."""

    def __init__(self, config: Config, sizes: GridSizes):
        context = config.parallel.context
        self.stage = build_stage(config, Grid(sizes, context=context), torch.device("cpu"))
        share = config.train.batch_size // sizes.sample_shards(context)
        size, model = config.train.micro_batch_size or share, config.model
        if isinstance(model, UNetConfig):
            loss = picture_loss
            pictures = torch.randn(share, model.image_size, model.image_size, model.image_channels)
            self.batches = [(part, torch.arange(len(part)), part) for part in pictures.split(size)]
        else:
            loss = token_loss
            ids = torch.randint(model.vocab_size, (share, config.train.seq_len // context))
            self.batches = [(part, part, torch.arange(len(part))) for part in ids.split(size)]
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
    training.stage.weights.finish()
    parameters, states = list(training.stage.module.parameters()), training.step.optimizer.state.values()
    return {
        "weights": sum(p.untyped_storage().nbytes() for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters),
        "optimizer": sum(s[k].untyped_storage().nbytes() for s in states for k in ("exp_avg", "exp_avg_sq")),
    }


def peak_taken(config: Config, sizes: GridSizes) -> int:
    return memory_peak(MeasuredTraining(config, sizes).run)


def memory_peak(run_step: Callable[[], None]) -> int:
    """Return the peak of torch's allocator in the third step, minus the memory in use before."""
    for _ in range(2):
        run_step()
    return allocated_peak(run_step)


@pytest.mark.parametrize("sizes", [GridSizes(2, 1, 2, 1), GridSizes(1, 2, 1, 4)], ids=grid_name)
@pytest.mark.parametrize("shard", [False, True])
def test_weights_gradients_and_states_take_what_the_layouts_say(ranks, sizes, shard):
    # The full gradients, before their reduction over data: no bucket is reduced during the backward.
    config = configured([*MODEL, f"optim.shard_states={shard}", "train.batch_size=8", "parallel.overlap.data=false"])
    for taken in ranks.run(sizes.devices, state_taken, config, sizes):
        assert taken == training_state(registry.describe(config.model), sizes, config.optim)


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (GridSizes(), []),
        (GridSizes(1, 2, 1, 2), ["optim.algorithm=muon", "train.micro_batch_size=2"]),
        full(GridSizes(1, 1, 2, 2), ["optim.algorithm=muon", "optim.shard_states=true"]),
        (GridSizes(2, 1, 2, 1), ["optim.algorithm=muon", "model.hidden=256", "train.micro_batch_size=1"]),
        full(GridSizes(), ["optim.algorithm=muon", "model.hidden=256", "train.micro_batch_size=1"]),
        full(GridSizes(1, 1, 1, 2), ["optim.algorithm=muon", "model.hidden=256", "model.layers=12"]),
        full(GridSizes(1, 2, 1, 1), []),
        full(GridSizes(2, 1, 2, 1), []),
        (GridSizes(1, 1, 2, 2), ["train.micro_batch_size=2"]),
        (GridSizes(1, 1, 1, 4), ["optim.shard_states=true", "train.activation_checkpointing=full"]),
        full(GridSizes(2, 2, 1, 1), ["train.activation_checkpointing=full"]),
        full(GridSizes(1, 1, 4, 1), ["train.activation_checkpointing=full", "parallel.cache_layers=2"]),
        full(GridSizes(2, 1, 2, 1), ["train.precision=bf16", "train.activation_checkpointing=full"]),
        full(GridSizes(2, 2, 1, 1), ["train.precision=bf16", "train.micro_batch_size=2"]),
        (GridSizes(1, 1, 4, 1), ["train.precision=fp8", "parallel.cache_layers=all"]),
        (GridSizes(2, 1, 2, 1), ["lora.rank=8", "train.precision=bf16"]),
        full(GridSizes(1, 2, 1, 2), ["lora.rank=8", "train.activation_checkpointing=full"]),
        full(GridSizes(), ["train.precision=fp8", "parallel.cache_layers=all", "parallel.cache_scope=step"]),
        full(GridSizes(2, 1, 2, 1), ["train.precision=fp8", "train.activation_checkpointing=full"]),
        (
            GridSizes(1, 1, 4, 1),
            ["parallel.cache_layers=all", "parallel.cache_scope=step", "train.micro_batch_size=1"],
        ),
        (GridSizes(1, 2, 2, 1), ["parallel.replicated_layers=2", "train.precision=bf16", "train.micro_batch_size=2"]),
        full(GridSizes(1, 1, 2, 2), ["parallel.replicated_layers=3", "optim.shard_states=true"]),
        (GridSizes(2, 2, 1, 1), ["parallel.chunks=2", "parallel.sequence_parallel=true"]),
        full(GridSizes(4, 1, 1, 1), ["parallel.sequence_parallel=true", "train.activation_checkpointing=full"]),
        (GridSizes(), ["train.activation_checkpointing=selective", "train.loss_chunks=4"]),
        full(GridSizes(2, 2, 1, 1), ["train.loss_chunks=2", "parallel.sequence_parallel=true"]),
        full(GridSizes(2, 2, 1, 1), ["train.activation_checkpointing=selective", "parallel.chunks=2"]),
        (GridSizes(1, 2, 2, 1), ["parallel.chunks=4", "train.activation_checkpointing=full", "train.precision=bf16"]),
        full(GridSizes(1, 4, 1, 1), ["parallel.scatter_heads=false", "parallel.chunks=2"]),
        full(GridSizes(1, 4, 1, 1), ["parallel.chunks=4", "train.activation_checkpointing=full"]),
        full(GridSizes(2, 2, 1, 1), ["parallel.chunks=4", "train.activation_checkpointing=full"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_predicted_within_10_percent(ranks, sizes, overrides):
    check_peak(ranks, sizes, [*MODEL, "train.batch_size=8", *overrides])


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (GridSizes(), []),
        (GridSizes(2, 2, 1, 1), ["train.precision=bf16", "model.qk_norm=true"]),
        full(GridSizes(), ["train.activation_checkpointing=full", "train.precision=bf16"]),
        full(GridSizes(2, 1, 1, 1), ["train.activation_checkpointing=selective"]),
        full(GridSizes(4, 1, 1, 1), ["parallel.sequence_parallel=true", "train.activation_checkpointing=full"]),
        full(GridSizes(1, 2, 2, 1), ["parallel.chunks=2", "model.tied=false"]),
        (GridSizes(2, 1, 2, 1), ["parallel.scatter_heads=false", "model.qkv_bias=true"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_of_a_llama_is_predicted_within_10_percent(ranks, sizes, overrides):
    check_peak(ranks, sizes, [*LLAMA, "train.batch_size=8", *overrides])


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        full(GridSizes(1, 2, 1, 1), ["train.activation_checkpointing=full"]),
        (GridSizes(2, 1, 2, 1), ["parallel.chunks=2", "train.activation_checkpointing=selective"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_with_masks_of_a_window_is_predicted_within_10_percent(ranks, sizes, overrides):
    check_peak(ranks, sizes, [*GEMMA3, "train.batch_size=8", *overrides])


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (GridSizes(), []),
        (GridSizes(2, 1, 2, 1), ["train.activation_checkpointing=full", "parallel.chunks=2"]),
        full(GridSizes(), ["train.activation_checkpointing=full"]),
        full(GridSizes(2, 2, 1, 1), ["train.micro_batch_size=4", "train.activation_checkpointing=selective"]),
        full(GridSizes(1, 2, 1, 2), ["train.precision=bf16"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_of_a_unet_is_predicted_within_10_percent(ranks, sizes, overrides):
    check_peak(ranks, sizes, [*U_NET, "train.batch_size=16", *overrides])


def random_plan(draw: random.Random) -> list[str]:
    """Return the overrides of a random small model with random settings that change memory."""
    family, heads = draw.choice(("gpt_tiny", "llama_tiny")), draw.choice((2, 4, 8))
    batch, length = draw.choice((4, 8, 16)), draw.choice((64, 128, 256))
    overrides = [
        f"model={family}",
        f"model.layers={draw.randint(1, 8)}",
        f"model.hidden={heads * draw.choice((16, 32, 48))}",
        f"model.heads={heads}",
        f"model.vocab_size={draw.choice((512, 2048, 8192))}",
        f"model.max_positions={length}",
        f"train.batch_size={batch}",
        f"train.micro_batch_size={draw.choice([size for size in (1, 2, 4, 8, 16) if size <= batch])}",
        f"train.activation_checkpointing={draw.choice(('none', 'selective', 'full'))}",
        f"train.loss_chunks={draw.choice((1, 1, 4, 8))}",
        f"train.precision={draw.choice(('fp32', 'fp32', 'bf16'))}",
        f"parallel.cache_layers={draw.choice((0, 'all'))}",
    ]
    if family == "llama_tiny":
        inner = draw.choice((128, 320))
        overrides += [f"model.key_value_heads={heads // 2}", "model.head_size=16", f"model.inner={inner}"]
    return overrides


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_the_peak_of_a_step_of_a_random_plan_is_predicted_within_10_percent(ranks, seed):
    check_peak(ranks, GridSizes(), random_plan(random.Random(seed)))


def check_peak(ranks, sizes, overrides):
    config = configured([*overrides, "cluster.reserved_gib=0"])
    state = training_state(registry.describe_run(config), sizes, config.optim)
    taken = max(ranks.run(sizes.devices, peak_taken, config, sizes)) + state["weights"] + state["optimizer"]
    estimate = Estimate(config, sizes)
    assert estimate.memory_gib(config.train.micro_batch_size or estimate.share) * GIB == pytest.approx(taken, rel=0.1)
