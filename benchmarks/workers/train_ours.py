"""Our training step on the grids given as arguments.

``4x1x1x2`` is gx·gy·gz·gdata; ``4x1x1x2/sharded`` also shards the optimizer states.
"""

import sys
from collections.abc import Callable

import torch

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.workers.training import BATCH, MODEL, OPTIM, our_model, repeat_step, sequences
from gpt4d import optim
from gpt4d.config import GridSizes
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel import collectives, gradients
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


class Gpt4dTraining:
    """The training step of ``gpt4d.trainer``. As in the other workers, gathered weights stay until the backward."""

    def __init__(self, sizes: GridSizes, config: GPT2Config = MODEL, batch: int = BATCH, shard: bool = False):
        self.grid, self.step_tokens = Grid(sizes), batch * config.max_positions
        self.model = our_model(WeightStream(self.grid), config, cache_layers=config.layers)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        self.gradient_sum = gradients.GradientReducer(self.model.weights, parameters, shard=shard)
        self.owned = self.gradient_sum.owned
        self.optimizer = optim.build_optimizer(zip(names, self.owned, strict=True), OPTIM)
        self.ids, self.targets = sequences(self.grid.batch_shard, sizes.batch_shards, config, batch)
        self.sample_ids = torch.arange(len(self.ids))

    def step(self) -> Callable[[], dict]:
        grid = self.grid
        loss = self.model.loss_sum(self.ids, self.targets, self.sample_ids) / self.step_tokens
        loss.backward()
        self.gradient_sum.finish()
        is_counted = grid.x.index == grid.y.index == 0  # ranks along x and y have the same loss
        loss = loss.detach().double() if is_counted else torch.zeros((), dtype=torch.float64)
        squared_norm = gradients.squared_norm(self.owned, grid, torch.device("cpu"))
        self.loss, squared_norm = collectives.all_reduce(torch.stack((loss, squared_norm)), grid.world)
        optim.clip(self.owned, squared_norm.sqrt(), OPTIM.clip_norm)
        self.optimizer.step()
        self.gradient_sum.spread()
        self.optimizer.zero_grad(set_to_none=True)
        return self.collect_results

    def collect_results(self) -> dict:
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in self.grid}
        exposed = {axis: exposed[axis] for axis, size in self.grid.sizes._asdict().items() if size > 1}
        return {"loss": self.loss.item(), "exposed_s": exposed}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        contenders = {}
        for name in sys.argv[1:]:
            grid, _, sharded = name.partition("/")
            contenders[name] = Gpt4dTraining(GridSizes(*map(int, grid.split("x"))), shard=bool(sharded))
        steps = {name: repeat_step(c.step, c.gradient_sum.arrive) for name, c in contenders.items()}
        serve(steps, answers)
