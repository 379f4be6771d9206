"""Settings that the benchmarks on an emulated cluster share with their workers, and the devices of the ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from benchmarks.cluster import EmulatedClusterConfig
from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import (
    ClusterConfig,
    ConfigError,
    GridSizes,
    LevelConfig,
    MeasuredConfig,
    OverlapConfig,
    divisors,
    from_arguments,
)
from gpt4d.planner.device import KINDS

# Steps on virtual devices take about ten seconds, and differ little from each other.
_VIRTUAL_DEFAULTS = ("mbit=200", "repeats=3", "warm_up=1")


@dataclass
class WorkerSettings:
    """Settings of a worker, by default on this machine's cores."""

    device = "cpu"  # type of torch's device

    def virtual_device(self) -> VirtualDevice | None:
        return None


@dataclass
class DeviceConfig(EmulatedClusterConfig, WorkerSettings):
    """Emulated cluster, and the devices on which its ranks compute: this machine's cores, or virtual devices.

    On a virtual device (``benchmarks.laboratory``) only products, attention and launches take time by default. Its
    memory is too fast to matter, because the trainers are compared in their communication, not in elementwise kernels.
    """

    repeats: int = 5  # measured runs of each contender
    warm_up: int = 2  # unmeasured runs of each contender before the measured runs
    # Steps of a run, sequences of a step and layers of the model. The defaults are three steps of 8 sequences on cores,
    # two steps of 16 on virtual devices, and 4 layers.
    steps: int | None = None
    sequences: int | None = None
    layers: int | None = None
    virtual: bool = False  # ranks compute on virtual devices, and the workload is larger
    flops: float = 2e10  # FLOP/s of a virtual device
    memory_gb_s: float = 1000.0  # memory bandwidth of a virtual device
    launch_us: float = 20.0  # minimum time of an operation on a virtual device
    # Rate at which a rank sends inside its host, relative to its share of the uplink; 0: no limit. The default is the
    # ratio of Perlmutter: 300 GB/s of NVLink and 25 GB/s of network per GPU.
    intra_host_ratio: float = 12.0
    skips_masked_products = False  # as for VirtualDevice

    @property
    def intra_host_mb_s(self) -> float | None:
        return self.intra_host_ratio * self.mbit / 8 / self.ranks or None

    def virtual_device(self) -> VirtualDevice | None:
        """Return the device of this rank; None if it computes on this machine's cores."""
        if not self.virtual:
            return None
        rates = self.flops, self.memory_gb_s, self.launch_us, self.intra_host_mb_s
        return VirtualDevice(*rates, self.ranks, skips_masked_products=self.skips_masked_products)

    def description(self) -> dict:
        """Return network and devices for the results."""
        device = {"flops": self.flops, "memory_gb_s": self.memory_gb_s, "launch_us": self.launch_us}
        device |= {"intra_host_mb_s": self.intra_host_mb_s}
        return {"uplink_mbit_per_s": self.mbit} | ({"virtual_device": device} if self.virtual else {})

    def worker_arguments(self, grids: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the command-line arguments from which a worker reads its ``WorkerConfig``."""
        return arguments_of(self, DeviceConfig, grids=",".join(grids))


def arguments_of(settings: Any, schema: type, **changes: object) -> tuple[str, ...]:
    """Return the arguments from which a worker reads the settings that ``schema`` has, with ``changes``."""
    values = {field.name: getattr(settings, field.name) for field in fields(schema)} | changes
    return tuple(f"{name}={value}" for name, value in values.items() if value is not None)


@dataclass
class WorkerConfig(DeviceConfig):
    grids: str = ""  # grids that the worker runs, separated by commas


def read_settings(schema: type, arguments: list[str]) -> Any:
    """Return an instance of ``schema`` from ``key=value`` arguments. With ``virtual=true``, defaults differ."""
    settings = from_arguments(schema, arguments)
    if getattr(schema, "virtual", True) or not settings.virtual:
        return settings
    return from_arguments(schema, [*_VIRTUAL_DEFAULTS, f"out={schema.out}_virtual", *arguments])


def plain_rates(config: DeviceConfig) -> ClusterConfig:
    """Return the emulated cluster with virtual devices as the planner's machine, with the rates that it receives."""
    intra_host_gb_s = config.intra_host_mb_s / 1000 if config.intra_host_mb_s else math.inf
    # On this machine's cores, ranks of a host copy and add up themselves; virtual devices have links that do it.
    inside = [
        MeasuredConfig(kind, local, nodes=1, sharing=1, latency_us=0.0, gb_s=intra_host_gb_s)
        for kind in KINDS
        for local in divisors(config.ranks)[1:]
    ]
    return ClusterConfig(
        name="virtual",
        matmul_tflops=config.flops / 1e12,
        attention_tflops=config.flops / 1e12 if config.skips_masked_products else None,
        memory_gb_s=config.memory_gb_s,
        operation_us=config.launch_us,
        hidden=1.0,
        levels=[LevelConfig(config.hosts, config.mbit / 8000), LevelConfig(config.ranks, intra_host_gb_s)],
        measured=inside,
    )


class GridCase(NamedTuple):
    """A grid and settings with which a worker trains on it."""

    sizes: GridSizes
    parallel: dict[str, Any]  # fields of ParallelConfig
    sharded: bool  # optimizer states


# Meaning of each setting in the name of a grid.
_SETTINGS = {
    "replicated=": "replicated_layers",
    "chunks=": "chunks",
    "context=": "context",
    "tokens": ("sequence_parallel", True),
    "ring": ("context_exchange", "ring"),
    "yx": ("rank_order", "yx"),
    "repeated-heads": ("scatter_heads", False),
    "waiting-sums": ("overlap", OverlapConfig(all_reduce=False)),
}


def parse_grid(name: str) -> GridCase:
    """Return the grid and the settings of a name such as ``4x1x2x1/replicated=1`` or ``2x4x1x1/chunks=4/yx``.

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
                "use grids such as 2x2x1x2, 4x1x1x2/sharded or 4x1x2x1/replicated=1"
            )
    return grids


def parse_sizes(grid: str) -> GridSizes:
    """Return the sizes of a grid such as ``2x2x1x2``. Raises ValueError for another name."""
    x, y, z, data = map(int, grid.split("x"))
    return GridSizes(x, y, z, data)
