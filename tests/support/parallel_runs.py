"""Steps of a stage, segments of shared sequences, and ranks on imagined hosts, for tests of the engine."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.cpu import hosts as cpu_hosts
from gpt4d.parallel.comm.cpu.two_level import TwoLevelTransport
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import segments_of
from gpt4d.parallel.pipeline.runtime import StageRuntime, whole_model
from gpt4d.parallel.stage import Stage
from tests.support.grids import token_loss


def runtime_of(stage: Stage, compute=None, **options) -> StageRuntime:
    """Return the runtime of a stage with a reducer. ``compute``: None for the loss of all tokens."""
    reducer = GradientReducer(stage.weights, dict(stage.module.named_parameters()), **options)
    return StageRuntime(stage, reducer, compute or whole_model(token_loss))


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return complete sequences [samples, length, …] from the segments of all ranks that share them."""
    segments = {}
    for index, part in enumerate(parts):
        segments |= dict(zip(segments_of(len(parts), index), part.chunk(2, 1), strict=True))
    return torch.cat([segments[place] for place in range(2 * len(parts))], 1)


def grid_on_hosts(sizes: GridSizes, hosts: list[int]) -> Grid:
    """Return a grid as if each rank were on the host that the list names."""
    listen = cpu_hosts.listen

    def listen_on_fake_host(backlog):
        listener, (host, address) = listen(backlog)
        return listener, [f"{host} {hosts[dist.get_rank()]}", address]

    with patch.object(cpu_hosts, "listen", listen_on_fake_host):
        return Grid(sizes)


def axis_across_hosts(hosts: list[int]) -> Axis:
    """Return the axis of all ranks as if each rank were on the host that the list names."""
    axis = grid_on_hosts(GridSizes(data=len(hosts)), hosts).data
    assert isinstance(axis.transport, TwoLevelTransport) and axis.transport.size == len(set(hosts))
    return axis
