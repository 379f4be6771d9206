"""Our training step on the grids of ``WorkerConfig``.

``4x1x1x2`` is gx·gy·gz·gdata; ``4x1x1x2/sharded`` also shards the optimizer states, ``4x1x2x1/replicated=1`` stores the
weights of one block whole along z, and so on (``benchmarks.settings.parse_grid``).
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import WorkerConfig, parse_grid
from benchmarks.workers.training import OPTIM, our_stage, our_workload, repeat_step, sequences
from gpt4d.config import from_arguments
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.stage_plan import ranks_in_grid_order
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import TrainStep


class Gpt4dTraining:
    """The trainer's optimizer step on a grid such as ``4x1x2x1/replicated=1``, for a rank's share of the batch."""

    def __init__(self, name: str, model: GPT2Config, batch: int):
        sizes, parallel, self.sharded = parse_grid(name)
        ranks = ranks_in_grid_order(sizes, parallel.get("rank_order"))
        self.grid, self.tokens = Grid(sizes, ranks=ranks), batch * model.max_positions
        self.train_step = TrainStep(
            our_stage(self.grid, model, **parallel),
            whole_model(lambda module, batch: module.loss_sum(*batch)),
            replace(OPTIM, shard_states=self.sharded),
        )
        ids, targets = sequences(self.grid.batch_shard, sizes.batch_shards, model, batch)
        self.microbatch = ids, targets, torch.arange(len(ids))

    def step(self) -> Callable[[], dict]:
        self.loss = self.train_step([self.microbatch], 1, self.tokens, OPTIM.lr).loss
        return self.collect_results

    def collect_results(self) -> dict:
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in self.grid}
        exposed = {axis: exposed[axis] for axis, size in self.grid.sizes._asdict().items() if size > 1}
        return {"loss": self.loss.item(), "exposed_s": exposed}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(WorkerConfig, sys.argv[1:])
    device, (model, batch, steps) = config.virtual_device(), our_workload(config)
    contenders, trainings = {}, {}
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        with device or nullcontext():
            for name in config.grids.split(","):
                training = trainings[name] = Gpt4dTraining(name, model, batch)
                finish = training.train_step.reducer.wait_params
                contenders[name] = repeat_step(training.step, steps, *([] if device else [finish]))
        # With sharded states, a step leaves gathers of updated weights to the next one. On virtual devices the first
        # measured step has them from the lead-in, and the last one leaves them to the next turn.
        lead_ins = {name: training.step for name, training in trainings.items() if training.sharded}
        serve(contenders, answers, device, lead_ins)
