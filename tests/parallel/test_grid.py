"""The process groups of a grid's axes and of the links between stages: few, and only with the device's own backend."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpt4d import step
from gpt4d.config import ClusterConfig, Config, GridSizes, OptimConfig, ParallelConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline import stage_links
from gpt4d.parallel.pipeline.stage_links import Copy, Edge, Exchange
from gpt4d.parallel.stage_plan import consecutive_stages
from gpt4d.planner.topology import reserved_gib
from gpt4d.validation import validate
from tests.support.settings import configured

HOUR = timedelta(hours=1)
BACKENDS = [("cuda", "nccl"), ("cpu", "gloo")]


@pytest.fixture
def job(monkeypatch):
    """Return a function that makes this process one rank of a job, and returns the list of groups that it creates."""
    monkeypatch.setattr("gpt4d.parallel.comm.cpu.hosts.connect", lambda group, yielding: None)

    def start(world_size: int, rank: int) -> list[tuple]:
        groups: list[tuple] = []

        def new_group(ranks, timeout=None, backend=None, use_local_synchronization=False):
            groups.append((ranks, timeout, backend))
            return SimpleNamespace(size=lambda: len(ranks))

        world = SimpleNamespace(size=lambda: world_size)
        values = {"is_initialized": True, "get_world_size": world_size, "get_rank": rank}
        values["get_backend_config"] = "cpu:gloo,cuda:nccl"
        for name, value in values.items():
            monkeypatch.setattr(dist, name, lambda value=value: value)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
        monkeypatch.setattr(dist, "new_group", new_group)
        return groups

    return start


@pytest.mark.parametrize(("device_type", "backend"), BACKENDS)
def test_an_axis_has_the_backend_of_its_device_alone(job, device_type, backend):
    """A gloo group connects each rank with all others, which takes long for hundreds of ranks."""
    groups = job(4, rank=3)
    Grid(GridSizes(2, 1, 2, 1), device_type, timeout=HOUR)
    assert groups == [([2, 3], HOUR, backend), ([1, 3], HOUR, backend)]


def test_on_a_gpu_an_axis_of_all_ranks_uses_the_group_of_the_job(job):
    groups = job(4, rank=3)
    grid = Grid(GridSizes(1, 4, 1, 1), "cuda")
    assert groups == [] and grid.y.group is grid.world.group is dist.group.WORLD
    assert (grid.y.size, grid.y.index) == (4, 3) and grid.y.traffic is not grid.world.traffic
    Grid(GridSizes(1, 4, 1, 1), "cpu")  # threads of its transport communicate concurrently with the job's group
    assert [ranks for ranks, *_ in groups] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("expert_data", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("sizes", ["1x1x1x1", "1x1x1x8", "2x1x1x4", "2x2x2x1", "2x2x1x1", "1x1x1x4", "2x1x2x2"])
def test_the_planner_counts_the_groups_of_a_grid(job, sizes, joined, expert_data):
    """In a job of eight ranks, or on a grid of four ranks, one of two stages."""
    sizes = GridSizes(*map(int, sizes.split("x")))
    world = 1 if sizes.devices == 1 else 8
    groups = job(world, rank=0)
    grid = Grid(sizes, "cuda", range(sizes.devices), expert_data=expert_data)
    if joined:
        grid.join()
    config = Config(
        cluster=ClusterConfig(reserved_gib=0.5, communicator_gib=1.0),
        parallel=ParallelConfig(expert_data=expert_data),
        optim=OptimConfig(algorithm="muon" if joined else "adamw"),
    )
    planned = reserved_gib(config, sizes, world)
    assert planned == 0.5 + len(groups) + (world > 1)


@pytest.mark.parametrize(("device_type", "backend"), BACKENDS)
def test_a_link_has_the_backend_of_its_device_alone(job, monkeypatch, device_type, backend):
    groups, links = job(2, rank=0), []
    monkeypatch.setattr(step, "Exchange", lambda *arguments: links.append(arguments))
    plan = validate(configured(["cluster=local", "parallel.pipeline.stages=2", "train.batch_size=8"]), 2)
    monkeypatch.setattr(step, "gather_in_group", lambda created: [created])  # all ranks have as many groups
    context = SimpleNamespace(compute_dtype=torch.bfloat16, grid=SimpleNamespace(num_groups=0))
    weights = SimpleNamespace(device=torch.device(device_type), dtype=torch.float32, context=context)
    step.connect_stages(plan, SimpleNamespace(weights=weights), 2, HOUR)
    ((*_, new_group, _),) = links
    new_group([0, 1])
    assert groups == [([0, 1], HOUR, backend)]


def test_a_link_exists_only_in_a_direction_in_which_tensors_or_gradients_cross(job, monkeypatch):
    """Stage 0 sends ids to stage 1, which sends activations to stage 2; stage 2 has a copy of a weight of stage 0."""
    groups, whole = job(3, rank=1), Layout(())
    monkeypatch.setattr(stage_links, "Link", lambda name, group, device: SimpleNamespace(prepare=lambda *plan: plan))
    stages = consecutive_stages([GridSizes()] * 3, [((0, 1),)] * 3, None)
    edges = [Edge("ids", 0, 1, whole, (4,), torch.int64), Edge("x", 1, 2, whole, (4,), torch.float32)]
    copies = [Copy("weight", 0, 2, whole, (4,), torch.float32)]
    exchange = Exchange(stages, edges, copies, "broadcast", 3, torch.device("cpu"), lambda ranks: groups.append(ranks))
    assert list(exchange.links) == [(0, 1), (1, 2), (2, 1)]  # rank 1 takes part in these
    assert groups == [[0, 1], [0, 2], [1, 2], [0, 2], [1, 2]]  # 0 to 1, 0 to 2, 1 to 2, 2 to 0, 2 to 1
