"""Settings that the benchmarks on an emulated cluster share with their workers, and the devices of the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from benchmarks.cluster import EmulatedClusterConfig
from gpt4d.config import ConfigError, GridSizes, OverlapConfig, from_arguments
from gpt4d.testing.virtual_device import VirtualDevice

# Steps on virtual devices take about ten seconds, and differ little from each other.
_VIRTUAL_DEFAULTS = ("mbit=200", "repeats=3", "warm_up=1")


@dataclass
class DeviceConfig(EmulatedClusterConfig):
    """Emulated cluster, and the devices on which its ranks compute: this machine's cores, or virtual devices.

    On a virtual device (``gpt4d.testing``) only products, attention and launches take time by default. Its memory is
    too fast to matter, because the trainers are compared in their communication, not in their elementwise kernels.
    """

    repeats: int = 5  # measured turns of each contender
    warm_up: int = 2  # turns of each contender before those that are measured
    # Of our turns, of a step and of the model. The defaults are three steps of 8 sequences on cores, two of 16 on
    # virtual devices, and 4 layers.
    steps: int | None = None
    sequences: int | None = None
    layers: int | None = None
    virtual: bool = False  # ranks compute on virtual devices, and the workload is larger
    flops: float = 2e10  # FLOP/s of a virtual device
    memory_gb_s: float = 1000.0  # of a virtual device
    launch_us: float = 20.0  # least time of an operation on a virtual device
    # Rate at which a rank sends inside its host, relative to its share of the uplink; 0: no limit. The default is that
    # of Perlmutter: 300 GB/s of NVLink and 25 GB/s of network per GPU.
    intra_host_ratio: float = 12.0

    @property
    def intra_host_mb_s(self) -> float | None:
        return self.intra_host_ratio * self.mbit / 8 / self.ranks or None

    def virtual_device(self) -> VirtualDevice | None:
        """Return the device of this rank; None if it computes on this machine's cores."""
        if not self.virtual:
            return None
        return VirtualDevice(self.flops, self.memory_gb_s, self.launch_us, self.intra_host_mb_s, self.ranks)

    def description(self) -> dict:
        """Return what the results say about network and devices."""
        device = {"flops": self.flops, "memory_gb_s": self.memory_gb_s, "launch_us": self.launch_us}
        device |= {"intra_host_mb_s": self.intra_host_mb_s}
        return {"uplink_mbit_per_s": self.mbit} | ({"virtual_device": device} if self.virtual else {})

    def worker_arguments(self, grids: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the command-line arguments from which a worker reads its ``WorkerConfig``."""
        return arguments_of(self, DeviceConfig, grids=",".join(grids))


def arguments_of(config: DeviceConfig, schema: type[DeviceConfig], **changes: str) -> tuple[str, ...]:
    """Return the arguments from which a worker reads the settings that ``schema`` has, with ``changes``."""
    values = {field.name: getattr(config, field.name) for field in fields(schema)} | changes
    return tuple(f"{name}={value}" for name, value in values.items() if value is not None)


@dataclass
class WorkerConfig(DeviceConfig):
    grids: str = ""  # that the worker runs, separated by commas


def read_arguments(schema: type[DeviceConfig], arguments: list[str]) -> Any:
    """Return an instance of ``schema`` from ``key=value`` arguments; ``virtual=true`` has other defaults."""
    config = from_arguments(schema, arguments)
    if not config.virtual:
        return config
    return from_arguments(schema, [*_VIRTUAL_DEFAULTS, f"out={schema.out}_virtual", *arguments])


class GridCase(NamedTuple):
    """A grid and settings with which a worker trains on it."""

    sizes: GridSizes
    parallel: dict[str, Any]  # fields of ParallelConfig
    sharded: bool  # optimizer states


# What a setting in the name of a grid means.
_SETTINGS = {
    "whole=": "whole_layers",
    "chunks=": "chunks",
    "tokens": ("sequence_parallel", True),
    "y-innermost": ("innermost", "y"),
    "repeated-heads": ("scatter_heads", False),
    "waiting-sums": ("overlap", OverlapConfig(all_reduce=False)),
}


def parse_grid(name: str) -> GridCase:
    """Return the grid and the settings of a name such as ``4x1x2x1/whole=1`` or ``2x4x1x1/chunks=4/y-innermost``.

    Raises ValueError for another name.
    """
    grid, *settings = name.split("/")
    parallel: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if setting == "sharded":
            continue
        elif equals:
            parallel[_SETTINGS[key + equals]] = int(value)
        else:
            field, fixed = _SETTINGS[setting]
            parallel[field] = fixed
    return GridCase(parse_sizes(grid), parallel, "sharded" in settings)


def grid_name(sizes: GridSizes, parallel: Mapping[str, Any]) -> str:
    """Return the name of a grid with settings: the inverse of ``parse_grid``."""
    name = str(sizes)
    for setting, meaning in _SETTINGS.items():
        if isinstance(meaning, str) and parallel.get(meaning):
            name += f"/{setting}{parallel[meaning]}"
        elif not isinstance(meaning, str) and parallel.get(meaning[0]) == meaning[1]:
            name += f"/{setting}"
    return name


def parse_grids(text: str, devices: int) -> tuple[str, ...]:
    """Split a list of grids such as ``4x1x1x2,2x2x1x2``. Raises ConfigError if one does not use all devices."""
    grids = tuple(text.split(","))
    for grid in grids:
        try:
            fits = parse_grid(grid).sizes.devices == devices
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise ConfigError(
                f"grids={grid}: not a grid gx·gy·gz·gdata of {devices} ranks; "
                "use grids such as 2x2x1x2, 4x1x1x2/sharded or 4x1x2x1/whole=1"
            )
    return grids


def parse_sizes(grid: str) -> GridSizes:
    """Return the sizes of a grid such as ``2x2x1x2``. Raises ValueError for another name."""
    x, y, z, data = map(int, grid.split("x"))
    return GridSizes(x, y, z, data)
