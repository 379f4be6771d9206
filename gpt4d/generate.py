"""Generate text or images with a trained model.

python -m gpt4d.generate checkpoint=runs/NAME prompt="…"
python -m gpt4d.generate checkpoint=runs/NAME prompts=FILE tokens=100
python -m gpt4d.generate checkpoint=runs/NAME out=images.png
torchrun --nproc-per-node 4 -m gpt4d.generate checkpoint=runs/NAME prompt="…" gx=4
"""

import sys
from pathlib import Path

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint, Meta
from gpt4d.config import (
    Config,
    ConfigError,
    GridSizes,
    ParallelConfig,
    TrainConfig,
    asks_for_help,
    from_arguments,
    grid_problem,
)
from gpt4d.data import tokenizers
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task import registry as tasks
from gpt4d.task.task import GenerateConfig


def main(arguments: list[str]) -> None:
    """Generate with the checkpoint that ``arguments`` name, and print the result on rank 0."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    config, launch = from_arguments(GenerateConfig, arguments), Launch.from_environment()
    for key, least in (("tokens", 0), ("temperature", 0), ("top_k", 0), ("images", 1), ("steps", 1)):
        if getattr(config, key) < least:
            raise ConfigError(f"{key}={getattr(config, key)}: use a value of at least {least}")
    checkpoint = Checkpoint.open(Path(config.checkpoint))
    meta = checkpoint.meta
    generate = tasks.get(meta.task).generate
    if generate is None:
        raise ConfigError(
            f"checkpoint={checkpoint.path}: its task {meta.task} has nothing to generate; use another one"
        )
    sizes = _grid(config, launch, meta)
    with process_group(launch) as job:
        grid = Grid(sizes, job.device.type)
        stage = build_stage(Config(model=meta.model.on_grids([sizes])), grid, job.device, initialized=False)
        storage.load(checkpoint, stage.module, None, stage.grid)
        storage.load_averages(checkpoint, stage.module, stage.grid)
        files = checkpoint.documents((tokenizers.FILE, *tokenizers.COMPANIONS))
        message = generate(config, files, stage)
        if launch.rank == 0:
            print(message)


def _grid(config: GenerateConfig, launch: Launch, meta: Meta) -> GridSizes:
    """Return the grid of all processes. Raises ConfigError if its size is wrong, or it cannot split the model."""
    sizes = GridSizes(config.gx, config.gy, config.gz, 1)
    if min(sizes) < 1 or sizes.devices != launch.world_size:
        raise ConfigError(
            f"gx·gy·gz={config.gx}·{config.gy}·{config.gz}: not a grid of {launch.world_size} process(es); choose "
            "sizes with that product, or start as many with torchrun --nproc-per-node"
        )
    rules = registry.describe(meta.model).rules
    problem = grid_problem(rules, TrainConfig(seq_len=1, batch_size=sizes.batch_shards), ParallelConfig(), sizes)
    if problem:
        raise ConfigError(problem.replace("parallel.", ""))
    return sizes


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
