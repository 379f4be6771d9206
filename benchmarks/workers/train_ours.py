"""Our training step on the grids of the command line: ``4x1x1x2`` is gx·gy·gz·gdata; ``/sharded`` shards the states."""

import sys
from collections.abc import Callable

import torch

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_groups
from benchmarks.workers.training import BATCH, MODEL, OPTIM, in_a_row, our_model, sequences
from gpt4d import optim
from gpt4d.config import GridSizes, ModelConfig
from gpt4d.parallel import collectives, gradients
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


class Training:
    """What ``gpt4d.trainer`` does in a step. Weights gathered over z stay for the backward: other teams' stay too."""

    def __init__(self, sizes: GridSizes, config: ModelConfig = MODEL, batch: int = BATCH, shard: bool = False):
        self.grid, self.step_tokens = Grid(sizes), batch * config.max_positions
        self.model = our_model(WeightStream(self.grid), config, cache_layers=config.layers)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        self.gradient_sum = gradients.GradientReducer(self.model.weights, parameters, shard=shard)
        self.owned = self.gradient_sum.owned
        self.optimizer = optim.build_optimizer(zip(names, self.owned, strict=True), OPTIM)
        self.ids, self.targets = sequences(self.grid.batch_shard, sizes.batch_shards, config, batch)
        self.numbers = torch.arange(len(self.ids))

    def step(self) -> Callable[[], dict]:
        grid = self.grid
        loss = self.model.loss_sum(self.ids, self.targets, self.numbers) / self.step_tokens
        loss.backward()
        self.gradient_sum.finish()
        counts = grid.x.index == grid.y.index == 0  # ranks along x and y have the same loss
        loss = loss.detach().double() if counts else torch.zeros((), dtype=torch.float64)
        squared_norm = gradients.squared_norm(self.owned, grid, torch.device("cpu"))
        self.loss, squared_norm = collectives.all_reduce(torch.stack((loss, squared_norm)), grid.world)
        optim.clip(self.owned, squared_norm.sqrt(), OPTIM.clip_norm)
        self.optimizer.step()
        self.gradient_sum.spread()
        self.optimizer.zero_grad(set_to_none=True)
        return self.told

    def told(self) -> dict:
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in self.grid}
        exposed = {axis: exposed[axis] for axis, size in self.grid.sizes._asdict().items() if size > 1}
        return {"loss": self.loss.item(), "exposed_s": exposed}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_groups()
        contenders = {}
        for name in sys.argv[1:]:
            grid, _, sharded = name.partition("/")
            contenders[name] = Training(GridSizes(*map(int, grid.split("x"))), shard=bool(sharded))
        serve({name: in_a_row(one.step, one.gradient_sum.arrive) for name, one in contenders.items()}, answers)
