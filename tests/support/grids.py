"""Grids the tests run on, and helpers that build a model or train on one inside a rank of the pool."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import Config, GridSizes, ModelConfig, OverlapConfig, ParallelConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.module import Model, initialize
from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.stage import Stage
from gpt4d.plan import one_stage
from gpt4d.planner.estimate import Estimate
from gpt4d.step import build_stage
from gpt4d.validation import validate

# Every grid with axes of 1 and 2: 1 to 16 devices.
BINARY_GRIDS = [GridSizes(*sizes) for sizes in itertools.product((1, 2), repeat=4)]
# A minimal sample in which each pair of axes has each pair of sizes.
PAIRWISE_GRIDS = [GridSizes(*sizes) for sizes in ((1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1))]


def full(*values, id: str | None = None):
    """Return a set of parameters that only ``make test-full`` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.full)


def sampled(grids: list[GridSizes], chosen: list[GridSizes] = PAIRWISE_GRIDS) -> list:
    """Return the grids as parameters of a test. ``make test`` runs only the ``chosen`` grids."""
    return [pytest.param(grid, id=str(grid)) if grid in chosen else full(grid, id=str(grid)) for grid in grids]


TINY_MODEL = GPT2Config(layers=2, hidden=24, heads=4, vocab_size=50, vocab_multiple=16, max_positions=16)


def build_model(
    config: GPT2Config,
    sizes: GridSizes,
    dtype: torch.dtype = torch.float64,
    checkpointing: str = "none",
    compute_dtype: torch.dtype | None = None,
    seed: int = 1,
    loss_chunks: int = 1,
) -> Model:
    training = Pass(recompute=checkpointing == "full", recompute_inputs=checkpointing == "selective")
    context = Context(Grid(sizes), compute_dtype or dtype, training=training, loss_chunks=loss_chunks)
    weights = ShardedWeights(context, dtype)
    model = registry.build(config.on_grids([sizes]), weights)
    initialize(model, seed, weights.context.grid)
    return model


def build_tiny_stage(
    grid: Grid,
    overlap: OverlapConfig | None = None,
    cache_layers: int = 0,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
    precision: str = "fp32",
    **parallel,
) -> Stage:
    """Build a stage of TINY_MODEL, initialized with seed 1. ``parallel`` are more settings of ParallelConfig."""
    checkpointing = "full" if recompute else "none"
    config = Config(
        model=TINY_MODEL,
        parallel=ParallelConfig(overlap=overlap or OverlapConfig(), cache_layers=cache_layers, **parallel),
        train=TrainConfig(seq_len=12, seed=1, precision=precision, activation_checkpointing=checkpointing),
    )
    return build_stage(one_stage(config, grid.sizes), grid, torch.device("cpu"), dtype)


def tiny_batch(grid: Grid, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, targets and sample ids of this rank's part of a microbatch of four sequences."""
    generator = torch.Generator().manual_seed(microbatch)
    ids = torch.randint(0, TINY_MODEL.vocab_size, (4, 12), generator=generator)
    return batch_part(ids, grid), batch_part(ids.roll(-1, 1), grid), batch_part(torch.arange(4), grid)


def token_loss(module: torch.nn.Module, batch: tuple) -> torch.Tensor:
    return module.loss_sum(*batch)


def global_tensor(local: torch.Tensor, spec: ParameterSpec, grid: Grid) -> torch.Tensor:
    """Return the global tensor without padding of which ``local`` is this rank's part. All ranks call it."""
    parts = [None] * grid.world.size
    shard = LocalShard(local.detach(), spec)
    dist.all_gather_object(parts, (shard.slices(grid), shard.stored(grid)))
    whole = torch.full(spec.stored_shape, torch.nan, dtype=local.dtype)
    for place, part in parts:
        whole[place] = part
    return whole


def unpadded(local: torch.Tensor, spec: ParameterSpec, grid: Grid) -> torch.Tensor:
    """Return this rank's part of a parameter without padding."""
    return LocalShard(local.detach(), spec).stored(grid)


def to_hf(tensors: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Global tensors of our parameters under the names and in the shapes of the family's Hugging Face library."""
    adapter = registry.of(config).hugging_face()
    theirs = [zip(adapter.names(n, config), adapter.to_hf(n, t, config), strict=True) for n, t in tensors.items()]
    return {name: tensor for pairs in theirs for name, tensor in pairs}


def hf_model(model: Model) -> torch.nn.Module:
    """Return transformers' model with the weights of a serial model of text."""
    from transformers import AutoModelForCausalLM

    grid, config = model.context.grid, model.spec.config
    adapter = registry.of(config).hugging_face()
    state = to_hf({n: unpadded(p, p.spec, grid) for n, p in model.named_parameters()}, config)
    theirs = AutoModelForCausalLM.from_config(adapter.hf_config(config))
    theirs.load_state_dict(state | {copy: state[name] for copy, name in adapter.copies(config).items()})
    return theirs


def fill_from_hf(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy this rank's part of every weight of a state dict of the family's Hugging Face model into ``model``.

    ``state`` may contain further parameters under our own names.
    """
    grid, adapter = model.context.grid, registry.of(model.spec.config).hugging_face()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = [state[key] for key in adapter.names(name, model.spec.config)]
            shard = LocalShard(parameter, parameter.spec)
            whole = state.get(name)
            if whole is None:
                whole = adapter.from_hf(name, theirs, parameter.spec.stored_shape, model.spec.config)
            parameter.zero_()
            shard.stored(grid).copy_(whole[shard.slices(grid)])


def batch_part(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return this rank's share of a batch."""
    return tensor.chunk(grid.sizes.batch_shards)[grid.batch_shard]


def train_in_rank(config: Config) -> None:
    """Run a complete training run, as train.py does, in the process group of the pool."""
    import torch.distributed as dist

    from gpt4d.training.trainer import Trainer

    Trainer(validate(config, dist.get_world_size()), torch.device("cpu")).run()


def on_grid(sizes: GridSizes) -> list[str]:
    return [f"parallel.gx={sizes.x}", f"parallel.gy={sizes.y}", f"parallel.gz={sizes.z}"]


def metric_lines(run_dir: str | Path) -> list[dict]:
    """Return the logged steps of a run, without events."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def bytes_sent(run_dir: str | Path) -> dict[str, float]:
    """Along each axis, by rank 0, in the last step that was logged."""
    return {axis: used["bytes"] for axis, used in metric_lines(run_dir)[-1]["comm"].items()}


def bytes_planned(config: Config, sizes: GridSizes) -> object:
    """Return the planned bytes along each axis, compared with a tolerance because they are floating-point sums."""
    estimate = Estimate(config, sizes)
    step = estimate.step(config.train.micro_batch_size or estimate.share)
    return pytest.approx({axis: used["bytes"] for axis, used in step.comm.items()}, rel=1e-9)


def grid_name(sizes: GridSizes) -> str:
    return str(sizes)
