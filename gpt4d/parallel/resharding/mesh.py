"""Device meshes with hosts, and the resharding paper's notation for layouts on them (arXiv 2211.05322, §2.2)."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel.layout import CHUNK, Layout

Tile = tuple[tuple[int, int], ...]  # (start, stop) along each dim of the global tensor


@dataclass(frozen=True)
class StageMesh:
    """The mesh of one stage: its axes, outermost first, and the rank and host of each device in row-major order.

    Any device may be on any host, which describes every placement of a 4-D grid. Where a layout names ``CHUNK``, a
    device has a tile of each of ``chunks`` chunks, one after another.
    """

    axes: tuple[tuple[str, int], ...]  # name and size
    devices: tuple[int, ...]  # ranks
    hosts: tuple[int, ...]
    chunks: int = 1

    def __post_init__(self):
        count = math.prod(size for _, size in self.axes)
        assert len(self.devices) == len(set(self.devices)) == count, f"{self.axes} needs {count} distinct devices"
        assert len(self.hosts) == count, f"{self.axes} needs the host of each of its {count} devices"

    @classmethod
    def of_shape(
        cls, shape: tuple[int, ...], first_device: int = 0, first_host: int = 0, hosts: tuple[int, ...] | None = None
    ) -> "StageMesh":
        """Return a mesh with the axes ``"0"``, ``"1"`` …, as in the paper: (hosts, devices per host).

        The first axis enumerates the hosts, however many axes there are, unless ``hosts`` gives the host of each
        device.
        """
        count = math.prod(shape)
        if hosts is None:
            hosts = tuple(first_host + device // (count // shape[0]) for device in range(count))
        axes = tuple((str(axis), size) for axis, size in enumerate(shape))
        return cls(axes, tuple(range(first_device, first_device + count)), hosts)

    @classmethod
    def of_grid(cls, ranks: Sequence[int], sizes: GridSizes, ranks_per_host: int = 1, chunks: int = 1) -> "StageMesh":
        """Return the mesh (data, z, y, x) of a stage's ``Grid`` on ``ranks``, the stage's ranks in the job, in order.

        Rank r is on host ``r // ranks_per_host``.
        """
        axes = tuple(reversed(sizes._asdict().items()))  # GridSizes names the innermost axis first
        return cls(axes, tuple(ranks), tuple(rank // ranks_per_host for rank in ranks), chunks)

    def chunks_of(self, layout: Layout) -> range:
        """Return the indices of the chunks of each of which a device holds a tile under ``layout``."""
        return range(self.chunks if CHUNK in layout.axes else 1)

    def tiles(self, shape: tuple[int, ...], layout: Layout, chunk: int = 0) -> dict[int, Tile]:
        """Return, by device, the tile of a tensor of ``shape``, or of a chunk, that it holds under ``layout``."""
        sizes = dict(self.axes)
        extents = {CHUNK: self.chunks, **sizes}
        indices = itertools.product(*(range(size) for size in sizes.values()))
        return {
            device: layout.tile(shape, extents, {CHUNK: chunk, **dict(zip(sizes, index, strict=True))})
            for device, index in zip(self.devices, indices, strict=True)
        }


def parse(key: str, spec: str) -> Layout:
    """Return the layout for a spec such as ``S01RR``: R replicates a dim, S splits it by axes, outermost first.

    Raises ConfigError, with ``key`` in its message, if the spec is not valid.
    """
    letters = re.findall(r"R|S\d+", spec)
    if not letters or "".join(letters) != spec.replace(" ", ""):
        raise ConfigError(f'{key}={spec}: not a layout; use R or S with mesh axes per dim, such as "S01RR" or "RS0R"')
    axes = [axis for letter in letters for axis in letter[1:]]
    if len(axes) != len(set(axes)):
        raise ConfigError(f"{key}={spec}: a mesh axis occurs twice; use each axis at most once")
    return Layout(*(tuple(letter[1:]) for letter in letters))


def notation(layout: Layout) -> str:
    """Return the spec (``S01RR``) of a layout whose axes have one-letter names."""
    return "".join("S" + "".join(axes) if axes else "R" for axes in layout.dims)
