"""A small run state, equal on every grid, which tests save and read."""

from dataclasses import replace
from pathlib import Path

import torch

from gpt4d.checkpoint import checkpoint_dir, storage
from gpt4d.checkpoint.saving import Saver
from gpt4d.config import CheckpointConfig, GridSizes, OptimConfig
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel.gradient_reducer import GradientReducer
from tests.support.grids import TINY_MODEL, build_model

MODEL = replace(TINY_MODEL, layers=1, heads=12, vocab_size=37, vocab_multiple=1)
STATES = {"exp_avg": 2.0, "exp_avg_sq": 3.0}  # factors that give each state distinct values
DOCUMENTS = {"tokenizer.json": b"{}"}


def meta(step, model=MODEL):
    progress, identity = checkpoint_dir.Progress(step, 10 * step, 100 * step), {"tokenizer": "abc", "data": "books"}
    return checkpoint_dir.Meta(progress, model, [{"x": 1}], "language_modeling", identity)


def build(sizes, shard=False, seed=7):
    """Build the model and its optimizer on a rank."""
    model = build_model(MODEL, sizes, torch.float32, seed=seed)
    parameters = dict(model.named_parameters())
    shards = GradientReducer(model.weights, parameters, shard=shard).optimizer_shards
    optimizer = Optimizer(zip(parameters, shards, strict=True), OptimConfig())
    for parameter in shards:
        for k, factor in STATES.items():
            optimizer.state[parameter][k].copy_(parameter.detach() * factor + 1)
    return model, optimizer


def save_state(sizes, shard, run_dir: Path, steps=(3,), **config):
    """Save the same state at each of ``steps`` on a rank. Returns the last ``Saved``."""
    model, optimizer = build(sizes, shard)
    saver = Saver(CheckpointConfig(**config), run_dir, model.context.grid)
    try:
        for step in steps:
            saver.start(meta(step), storage.parts(model, optimizer), DOCUMENTS)
            saved = saver.finished(wait=True)
    finally:
        saver.close()
    return saved


def save_steps(ranks, run_dir: Path, steps, keep=2, keep_every=None):
    """Save the same state at each of ``steps``. Returns the names in the directory of checkpoints."""
    ranks.run(1, save_with, run_dir, steps, {"keep": keep, "keep_every": keep_every})
    return names(run_dir)


def save_with(run_dir, steps, config):
    for step in steps:
        save_state(GridSizes(), False, run_dir, (step,), **config)


def names(run_dir: Path) -> list[str]:
    """Return the names in the directory of checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def tensors_of(run_dir: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the global tensors of the newest checkpoint whose names have a prefix, by the rest of the name."""
    files = checkpoint_dir.Checkpoint.open(Path(run_dir)).files
    return {name.removeprefix(prefix): files.global_tensor(name) for name in files.tensors if name.startswith(prefix)}


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(map(torch.equal, left.values(), (right[name] for name in left)))
