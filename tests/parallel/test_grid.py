"""Grids: where each element of a tensor lives, exactly once for each copy; the process groups of axes and links."""

import itertools
import math
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

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
AXES = ("x", "y", "z", "data")


@pytest.fixture
def job(monkeypatch):
    """Return a function that makes this process one rank of a job, and returns the list of groups that it creates."""
    monkeypatch.setattr("gpt4d.parallel.comm.cpu.hosts.connect", lambda group, yielding: None)

    def start(world_size: int, rank: int) -> list[tuple]:
        groups: list[tuple] = []

        def new_group(ranks, timeout=None, backend=None, use_local_synchronization=False, pg_options=None):
            groups.append((ranks, timeout, backend, *([] if pg_options is None else [pg_options.config.max_ctas])))
            return SimpleNamespace(size=lambda: len(ranks))

        world = SimpleNamespace(size=lambda: world_size)
        values = {"is_initialized": True, "get_world_size": world_size, "get_rank": rank}
        values["get_backend_config"] = "cpu:gloo,cuda:nccl"
        for name, value in values.items():
            monkeypatch.setattr(dist, name, lambda value=value: value)
        options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
        monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)  # torch for CPUs lacks it
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


@pytest.mark.parametrize(("device_type", "backend", "channels"), [("cuda", "nccl", [4]), ("cpu", "gloo", [])])
def test_a_link_has_the_backend_of_its_device_alone_and_few_channels(job, monkeypatch, device_type, backend, channels):
    """Only a link: the axes of a grid exchange experts, keys and matrices on all channels (the tests above)."""
    groups, links = job(2, rank=0), []
    monkeypatch.setattr(step, "Exchange", lambda *arguments: links.append(arguments))
    plan = validate(configured(["cluster=local", "parallel.pipeline.stages=2", "train.batch_size=8"]), 2)
    monkeypatch.setattr(step, "gather_in_group", lambda created: [created])  # all ranks have as many groups
    context = SimpleNamespace(compute_dtype=torch.bfloat16, grid=SimpleNamespace(num_groups=0))
    weights = SimpleNamespace(device=torch.device(device_type), dtype=torch.float32, context=context)
    step.connect_stages(plan, SimpleNamespace(weights=weights), 2, HOUR)
    ((*_, new_group, _),) = links
    new_group([0, 1])
    assert groups == [([0, 1], HOUR, backend, *channels)]


def test_a_link_exists_only_in_a_direction_in_which_tensors_or_gradients_cross(job, monkeypatch):
    """Stage 0 sends ids to stage 1, which sends activations to stage 2; stage 2 has a copy of a weight of stage 0."""
    groups, whole = job(3, rank=1), Layout(())
    monkeypatch.setattr(stage_links, "Link", lambda name, group, device: SimpleNamespace(prepare=lambda *plan: plan))
    stages = consecutive_stages([GridSizes()] * 3, [((0, 1),)] * 3, None)
    edges = [Edge("ids", 0, 1, whole, (4,), torch.int64), Edge("x", 1, 2, whole, (4,), torch.float32)]
    copies = [Copy("weight", 0, 2, whole, (4,), torch.float32)]
    exchange = Exchange(stages, edges, copies, 3, torch.device("cpu"), lambda ranks: groups.append(ranks))
    assert list(exchange.links) == [(0, 1), (1, 2), (2, 1)]  # rank 1 takes part in these
    assert groups == [[0, 1], [0, 2], [1, 2], [0, 2], [1, 2]]  # 0 to 1, 0 to 2, 1 to 2, 2 to 0, 2 to 1


def test_rank_order_has_x_innermost():
    """The 4D paper's example, §V-B: on 2×2×2(×2) the x groups are (0,1), (2,3) …, the y groups (0,2), (1,3) …."""
    coordinates = [Grid.coordinates(rank, GridSizes(2, 2, 2, 2)) for rank in range(16)]
    expected = [dict(zip(AXES, indices[::-1], strict=True)) for indices in itertools.product((0, 1), repeat=4)]
    assert coordinates == expected


def test_outer_axes_cut_first_and_of_uneven_parts_the_longer_ones_are_first():
    layout = Layout(("y", "z"), ("x",))
    sizes = {"x": 2, "y": 2, "z": 2, "data": 1}
    tile = layout.tile((8, 6), sizes, {"x": 1, "y": 1, "z": 0, "data": 0})
    assert tile == ((4, 6), (3, 6))
    parts = [Layout(("x",)).tile((10,), {"x": 3}, {"x": i})[0] for i in range(3)]
    assert parts == [(0, 4), (4, 7), (7, 10)]


def test_an_axis_splits_one_dim_only():
    with pytest.raises(AssertionError):
        Layout(("x",), ("x", "y"))


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = [[] for _ in shape]
    for axis in draw(st.permutations(AXES)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            dims[dim].append(axis)
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    return shape, Layout(*map(tuple, dims)), sizes


@given(layouts())
def test_tiles_cover_every_element_once_for_each_copy(case):
    shape, layout, sizes = case
    counted = np.zeros(shape, int)
    for indices in itertools.product(*(range(sizes[axis]) for axis in AXES)):
        tile = layout.tile(shape, sizes, dict(zip(AXES, indices, strict=True)))
        counted[tuple(slice(*r) for r in tile)] += 1
    copies = math.prod(sizes[axis] for axis in AXES if axis not in layout.axes)
    assert (counted == copies).all()
