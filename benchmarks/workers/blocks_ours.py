"""Our blocks on a grid of x, y and z, with one more overlap in each setting (4D paper, Fig. 3)."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import WorkerConfig, parse_sizes
from benchmarks.workers import blocks
from benchmarks.workers.training import Workload
from gpt4d.config import Config, OverlapConfig, ParallelConfig, TrainConfig, from_arguments
from gpt4d.model import registry
from gpt4d.parallel.engine.interleave import run_blocks
from gpt4d.parallel.engine.prefetch import weight_order
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage

# name: (all-reduce, reduce-scatter, all-gather, cached blocks)
SETTINGS = {
    "none": (False, False, False, 0),
    "+OAR": (True, False, False, 0),
    "+ORS": (True, True, False, 0),
    "+OAG": (True, True, True, 0),
    "+cache": (True, True, True, "all"),
}


class Gpt4dBlocks:
    """Transformer blocks with some overlaps on. ``cached``: how many blocks keep their gathered weights, or all."""

    def __init__(
        self,
        grid: Grid,
        work: Workload,
        all_reduce: bool,
        reduce_scatter: bool,
        all_gather: bool,
        cached: int | str,
    ):
        config = Config(
            model=work.model,
            train=TrainConfig(activation_checkpointing="full"),
            parallel=ParallelConfig(overlap=OverlapConfig(all_reduce, reduce_scatter, all_gather), cache_layers=cached),
        )
        stage = build_stage(config, grid, torch.device("cpu"))
        self.weights, self.blocks, self.cached = stage.weights, stage.module.blocks, stage.cached
        # Embedding and head are not run, so the order of uses has the weights of the blocks only.
        model = registry.describe(work.model)
        layer_weights = replace(model, parts=(model.blocks,)).layer_weights(recompute=True)
        self.order = weight_order(single_stage(microbatches=1), {0: layer_weights})
        self.inputs, self.upstream = blocks.inputs_and_upstream(work, grid.sizes, grid.z.index, grid.y.index)
        self.tokens = TokenIndex(torch.arange(len(self.inputs)), work.model.max_positions, grid.axis(None))

    def step(self) -> Callable[[], dict]:
        self.weights.begin(self.order, self.cached)
        x = run_blocks(self.weights, [*self.blocks.values()], self.inputs.flatten(0, 1), self.tokens)
        x.backward(self.upstream.flatten(0, 1))
        self.weights.finish()
        return self.collect_results

    def collect_results(self) -> dict:
        grid = self.weights.context.grid
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in (grid.x, grid.y, grid.z)}
        matrices = [p for p in self.blocks.parameters() if p.spec.decay]
        norms = blocks.take_gradient_norms(self.inputs, matrices, grid.sizes)
        self.blocks.zero_grad(set_to_none=True)
        return {"exposed_s": exposed, **norms}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(WorkerConfig, sys.argv[1:])
    device, work = config.virtual_device(), blocks.workload(config.virtual)
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        grid = Grid(parse_sizes(config.grids))
        with device or nullcontext():
            contenders = {name: Gpt4dBlocks(grid, work, *setting).step for name, setting in SETTINGS.items()}
        serve(contenders, answers, device)
