"""A mesh of devices with their hosts, and the resharding paper's notation of layouts on it (arXiv 2211.05322, §2.2)."""

import itertools
import math
import re
from dataclasses import dataclass

from gpt4d.config import ConfigError
from gpt4d.parallel.layout import Layout

Tile = tuple[tuple[int, int], ...]  # (start, stop) along each dim of the global tensor


@dataclass(frozen=True)
class Mesh:
    """The axes of a mesh, outermost first, and for each device, in row-major order, its rank and its host.

    Any device may sit on any host: that is how the placement of a 4-D grid is said.
    """

    axes: tuple[tuple[str, int], ...]  # name and size
    devices: tuple[int, ...]  # ranks
    hosts: tuple[int, ...]

    def __post_init__(self):
        count = math.prod(size for _, size in self.axes)
        assert len(self.devices) == len(set(self.devices)) == count, f"{self.axes} has {count} different devices"
        assert len(self.hosts) == count, f"{self.axes} says the host of each of its {count} devices"

    @classmethod
    def of_shape(
        cls, shape: tuple[int, ...], first_device: int = 0, first_host: int = 0, hosts: tuple[int, ...] | None = None
    ) -> "Mesh":
        """A mesh with the axes ``"0"``, ``"1"`` …, as the paper has them: (hosts, devices of a host).

        The first axis is the hosts' in any number of axes, unless ``hosts`` says for each device where it is.
        """
        count = math.prod(shape)
        if hosts is None:
            hosts = tuple(first_host + device // (count // shape[0]) for device in range(count))
        axes = tuple((str(axis), size) for axis, size in enumerate(shape))
        return cls(axes, tuple(range(first_device, first_device + count)), hosts)

    def host_of(self, device: int) -> int:
        return self.hosts[self.devices.index(device)]

    def tiles(self, shape: tuple[int, ...], layout: Layout) -> dict[int, Tile]:
        """The part of a tensor of ``shape`` that each device has under ``layout``."""
        sizes = dict(self.axes)
        indices = itertools.product(*(range(size) for size in sizes.values()))
        return {
            device: layout.tile(shape, sizes, dict(zip(sizes, at, strict=True)))
            for device, at in zip(self.devices, indices, strict=True)
        }


def parse(key: str, spec: str) -> Layout:
    """The layout that ``S01RR`` denotes: R replicates a dim, S cuts it by the axes named, outermost first.

    ConfigError, naming ``key``, if it denotes none.
    """
    letters = re.findall(r"R|S\d+", spec)
    if not letters or "".join(letters) != spec.replace(" ", ""):
        raise ConfigError(f'{key}={spec}: use R or S with axes of the mesh for each dim, such as "S01RR" or "RS0R"')
    axes = [axis for letter in letters for axis in letter[1:]]
    if len(axes) != len(set(axes)):
        raise ConfigError(f"{key}={spec}: an axis of the mesh splits one dim at the most; name each once")
    return Layout(*(tuple(letter[1:]) for letter in letters))


def notation(layout: Layout) -> str:
    """``S01RR`` of a layout on axes that have one letter."""
    return "".join("S" + "".join(axes) if axes else "R" for axes in layout.dims)
