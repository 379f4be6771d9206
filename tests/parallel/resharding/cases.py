"""What the tests of resharding share: the paper's nine cases, random layouts on random meshes."""

import math

from hypothesis import strategies as st

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import Mesh, parse
from gpt4d.parallel.resharding.planning import plan

# The paper's Table 2: layouts and meshes, then by hand the number of unit tasks, the makespans of the naive and of the
# best order.
NINE = {
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


def nine(case: int, **how):
    source, source_shape, destination, destination_shape, *_ = NINE[case]
    shape = (3072, 1024, 170) if case == 6 else (1024, 1024, 512)
    return plan_between(shape, source, source_shape, destination, destination_shape, **how)


def plan_between(shape, source: str, source_shape, destination: str, destination_shape, **how):
    """Between meshes that share no host: the first axis is the hosts'."""
    first = Mesh.of_shape(source_shape)
    second = Mesh.of_shape(destination_shape, len(first.devices), source_shape[0])
    return plan(shape, parse("src", source), first, parse("dst", destination), second, **how)


@st.composite
def reshardings(draw, most_devices: int = 16, most_dims: int = 3):
    """The arguments of ``plan``: uneven tiles, more tiles than elements, replicas, devices on any host, shared ones."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=most_dims)))
    meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= most_devices)
    sizes = draw(meshes), draw(meshes)
    first = draw(placed(sizes[0], 0))
    second = draw(placed(sizes[1], len(first.devices)))
    return shape, draw(layouts(first, len(shape))), first, draw(layouts(second, len(shape))), second


@st.composite
def placed(draw, shape: list[int], first_device: int):
    count = math.prod(shape)
    hosts = draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count).map(tuple))
    return Mesh.of_shape(tuple(shape), first_device, first_device, hosts)


@st.composite
def layouts(draw, mesh: Mesh, dims: int):
    cut = [[] for _ in range(dims)]
    for axis, _ in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            cut[dim].append(axis)
    return Layout(*map(tuple, cut))
