"""Our training step of the U-Net of ``benchmarks.unet`` on the grids of ``WorkerConfig``."""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.settings import WorkerConfig, parse_grid
from benchmarks.workers.training import OPTIM, repeat_step, run_worker
from benchmarks.workers.unets import BATCH, MODEL, STEPS, pictures
from gpt4d.config import Config, ParallelConfig, TrainConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.stage_plan import ranks_in_grid_order
from gpt4d.step import TrainStep, build_stage


def squared_error(module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean squared error of each picture, summed over the pictures."""
    *inputs, targets = batch
    return (module(*inputs) - targets).square().mean((1, 2, 3)).sum()


class UNetTraining:
    """The trainer's optimizer step on a grid such as ``2x4x1x1/chunks=4``, with a rank's share of the batch at once."""

    def __init__(self, name: str):
        sizes, parallel, sharded = parse_grid(name)
        self.grid = Grid(sizes, ranks=ranks_in_grid_order(sizes, parallel.get("rank_order")))
        settings = ParallelConfig(cache_layers="all", **parallel)  # gathered weights stay, as in the other workers
        config = Config(model=MODEL, train=TrainConfig(seq_len=1), parallel=settings)
        stage = build_stage(config, self.grid, torch.device("cpu"))
        self.train_step = TrainStep(stage, whole_model(squared_error), replace(OPTIM, shard_states=sharded))
        self.batch = pictures(self.grid.batch_shard, sizes.batch_shards)

    def step(self) -> Callable[[], dict]:
        self.loss = self.train_step([self.batch], 1, BATCH, OPTIM.lr).loss
        return self.collect_results

    def collect_results(self) -> dict:
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in self.grid if axis.size > 1}
        return {"loss": self.loss.item(), "exposed_s": exposed}


def build_contenders(config: WorkerConfig) -> dict[str, Callable]:
    trainings = {name: UNetTraining(name) for name in config.grids.split(",")}
    return {name: repeat_step(training.step, STEPS) for name, training in trainings.items()}


if __name__ == "__main__":
    run_worker(build_contenders)
