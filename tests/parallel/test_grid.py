"""The process groups of a grid's axes."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid


@pytest.mark.parametrize(("device_type", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_an_axis_has_the_backend_of_its_device_alone(monkeypatch, device_type, backend):
    """A gloo group connects each rank with all others, which takes long for hundreds of ranks."""
    groups = []

    def new_group(ranks, timeout, backend, use_local_synchronization):
        groups.append((ranks, timeout, backend))

    job = {"is_initialized": True, "get_world_size": 4, "get_rank": 3, "get_backend_config": "cpu:gloo,cuda:nccl"}
    for name, value in job.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr("gpt4d.parallel.comm.cpu.hosts.connect", lambda group, yielding: None)
    Grid(GridSizes(2, 1, 2, 1), device_type, timeout=timedelta(hours=1))
    assert groups == [([2, 3], timedelta(hours=1), backend), ([1, 3], timedelta(hours=1), backend)]
