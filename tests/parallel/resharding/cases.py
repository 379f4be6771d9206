"""Cases shared by the resharding tests: the paper's Table 2, and random layouts on random meshes."""

import math

from hypothesis import strategies as st

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh, parse
from gpt4d.parallel.resharding.plan import plan

# The paper's Table 2: layouts and meshes, then the number of unit tasks and the makespans of the naive and of the best
# order, which follow from the paper's text.
TABLE_2 = {
    1: ("S0RR", (2, 4), "S0RR", (2, 4), 2, 1 / 2, 1 / 2),
    2: ("RRR", (2, 4), "S0RR", (2, 4), 2, 1, 1 / 2),
    3: ("RS0R", (2, 4), "S0RR", (2, 4), 4, 3 / 4, 1 / 2),
    4: ("RS01R", (2, 4), "S01RR", (2, 4), 64, 15 / 16, 1 / 2),
    5: ("S1RR", (2, 4), "S0RR", (2, 4), 4, 1, 1 / 2),
    6: ("S0RR", (2, 4), "S0RR", (3, 4), 4, 1, 1 / 2),
    7: ("S1RR", (1, 4), "RRR", (2, 4), 4, 1, 1),
    8: ("RRR", (2, 3), "RRR", (3, 2), 1, 1, 1),
    9: ("RS0R", (2, 4), "RRS0", (2, 4), 4, 3 / 4, 1 / 2),
}


def plan_table_2(case: int, **options):
    source, source_shape, destination, destination_shape, *_ = TABLE_2[case]
    shape = (3072, 1024, 170) if case == 6 else (1024, 1024, 512)
    return plan_between(shape, source, source_shape, destination, destination_shape, **options)


def plan_between(shape, source: str, source_shape, destination: str, destination_shape, **options):
    """Return a plan between meshes that share no host; the first axis of a mesh enumerates its hosts."""
    first = StageMesh.of_shape(source_shape)
    second = StageMesh.of_shape(destination_shape, len(first.devices), source_shape[0])
    return plan(shape, parse("src", source), first, parse("dst", destination), second, **options)


def host_by_device(*meshes: StageMesh) -> dict[int, int]:
    return {device: host for mesh in meshes for device, host in zip(mesh.devices, mesh.hosts, strict=True)}


@st.composite
def reshardings(draw, max_devices: int = 16, max_dims: int = 3):
    """Arguments of ``plan``: uneven and empty tiles, replicas, devices on any host, hosts shared by both meshes."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=max_dims)))
    meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= max_devices)
    sizes = draw(meshes), draw(meshes)
    first = draw(placed_meshes(sizes[0], 0))
    second = draw(placed_meshes(sizes[1], len(first.devices)))
    return shape, draw(layouts(first, len(shape))), first, draw(layouts(second, len(shape))), second


@st.composite
def placed_meshes(draw, shape: list[int], first_device: int):
    count = math.prod(shape)
    hosts = draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count).map(tuple))
    return StageMesh.of_shape(tuple(shape), first_device, first_device, hosts)


@st.composite
def layouts(draw, mesh: StageMesh, dims: int):
    axes_by_dim = [[] for _ in range(dims)]
    for axis, _ in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            axes_by_dim[dim].append(axis)
    return Layout(*map(tuple, axes_by_dim))
