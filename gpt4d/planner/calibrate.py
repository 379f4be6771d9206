"""Measures the machine it runs on, and writes it down as a cluster for the planner.

    torchrun --nproc-per-node 4 -m gpt4d.planner.calibrate out=configs/cluster/mine.yaml

Then ``cluster=mine``. On a cluster it is started as train.py is, on two nodes at the least: what goes between more of
them is drawn out from that. All ranks measure at once, since they share links, memory and, on a CPU, cores.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import MISSING, OmegaConf

from gpt4d import metrics
from gpt4d.config import (
    ClusterConfig,
    Config,
    ConfigError,
    GridSizes,
    LevelConfig,
    MeasuredConfig,
    TrainConfig,
    divisors,
    from_arguments,
)
from gpt4d.model import registry
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Axis, Grid
from gpt4d.parallel.weights import compute_dtype
from gpt4d.planner.device import KINDS, Links, sent_bytes
from gpt4d.planner.step import StepWalk
from gpt4d.planner.topology import RankSpan, place
from gpt4d.runtime.consensus import all_gather_object, run_on_rank0
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import TrainStep, build_stage

_LEAST_S = 0.2  # that a measurement lasts: longer than a turn of the operating system's
_ROUNDS = 3  # of which the median counts
_LARGEST = {"cpu": 8 << 20, "cuda": 256 << 20}  # bytes sent in the largest message, about
_SIDE = {"cpu": 512, "cuda": 8192}  # of a large square product
_TURNS = 9  # of a computation with and without a collective beside it
_AGAIN = 5  # in each of those turns, of what is too short by itself
_LONG_S = 0.2  # that a message takes: a larger one would tell nothing new
_COVER = 2.0  # times a collective's own length, of a computation that is to hide it
_SMALL = GPT2Config("small", layers=2, hidden=64, heads=4, vocab_size=128, max_positions=16)
_LARGE = {
    "cpu": GPT2Config("large", layers=2, hidden=512, heads=8, vocab_size=512, max_positions=128),
    "cuda": GPT2Config("large", layers=2, hidden=2048, heads=16, vocab_size=8192, max_positions=2048),
}


@dataclass
class CalibrateConfig:
    out: str = MISSING  # the YAML file to write; in configs/cluster its name is what cluster=… takes
    name: str | None = None  # null: the file's


def measured(launch: Launch, device: torch.device, name: str) -> ClusterConfig:
    """The machine as ``device`` of all ranks sees it. All ranks call it; they have a process group."""
    cluster = replace(_of_the_system(launch, device), name=name)
    cluster.matmul_tflops = _matmul_flops(device) / 1e12
    cluster.operation_us, cluster.memory_gb_s = _operations(cluster, device)
    if launch.world_size > 1:
        cluster.measured = _links(cluster, launch.world_size, device)
        cluster.levels = _levels(cluster, launch.local_world_size)
        cluster.skew_us = _skew(launch, device) * 1e6
    return cluster


def _of_the_system(launch: Launch, device: torch.device) -> ClusterConfig:
    node = LevelConfig(ranks=launch.local_world_size)
    outside = [] if launch.local_world_size == launch.world_size else [LevelConfig()]
    cluster = ClusterConfig(device=device.type, levels=[*outside, node])
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak = metrics.peak_flops(device)
        return replace(
            cluster,
            memory_gib=total / 2**30,
            reserved_gib=(total - free) / 2**30,
            peak_tflops=peak and peak / 1e12,
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    reserved = metrics.peak_memory_gib(device)
    return replace(cluster, memory_gib=total / 2**30 / launch.local_world_size, reserved_gib=reserved)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Of one ``work``, on the slowest rank, when all do it again and again."""
    work()
    times, found = 1, []
    while len(found) < _ROUNDS:
        seconds = _once(work, device, times)
        if seconds < _LEAST_S:
            times = max(2 * times, int(1.2 * times * _LEAST_S / max(seconds, 1e-6)))
        else:
            found.append(seconds / times)
    return statistics.median(found)


def _once(work: Callable[[], None], device: torch.device, times: int = 1) -> float:
    """Seconds of so many ``work`` in a row, on the slowest rank, when all begin together."""
    all_gather_object(None)
    started = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(all_gather_object(time.perf_counter() - started))


def _matmul_flops(device: torch.device) -> float:
    side, dtype = _SIDE[device.type], compute_dtype("auto", device)
    square = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(lambda: square @ square, device)


# ------------------------------------------------------------------------------------- everything but products


def _operations(cluster: ClusterConfig, device: torch.device) -> tuple[float, float]:
    """Microseconds of an operation and GB/s of memory with which the planner's step takes the time of a real one.

    Of two models: one so small that operations are all it does, one in which what they move counts.
    """
    rows, times = [], []
    for model, sequences in ((_SMALL, 1), (_LARGE[device.type], 4)):
        config = Config(model=model, train=TrainConfig(seq_len=model.max_positions, batch_size=sequences))
        taken = _seconds(_training_step(config, device), device)
        operations, moved = (_counted(config, cluster, each) for each in ("operation_us", "memory_gb_s"))
        products = _counted(config, cluster, "matmul_tflops") * 1e-12 / cluster.matmul_tflops
        rows.append((operations, moved))
        times.append(max(taken - products, 0.05 * taken))
    (a, b), (c, d) = rows
    determinant = a * d - b * c
    operation_s = (times[0] * d - b * times[1]) / determinant
    s_per_byte = (a * times[1] - c * times[0]) / determinant
    # The one or the other may come out as nothing where the products' rate was measured a little low.
    s_per_byte = max(s_per_byte, 1e-13)
    return max(operation_s, 1e-7) * 1e6, 1e-9 / s_per_byte


def _counted(config: Config, cluster: ClusterConfig, what: str) -> float:
    """Of one device's step alone: operations, bytes moved or FLOPs."""
    unit = {"operation_us": 1e6, "memory_gb_s": 1e-9, "matmul_tflops": 1e-12}
    nothing = {"operation_us": 0.0, "memory_gb_s": float("inf"), "matmul_tflops": float("inf")}
    config = replace(config, cluster=replace(cluster, **(nothing | {what: unit[what]})))
    sizes, train = GridSizes(), config.train
    description = registry.describe(config.model)
    return StepWalk(config, description, sizes, Links(config.cluster, sizes), train.batch_size).run(1).compute_s


def _training_step(config: Config, device: torch.device) -> Callable[[], None]:
    """Return a function that trains one step on a grid of this device alone."""
    stage = build_stage(config, Grid.single_device(), device)
    ids = torch.randint(config.model.vocab_size, (config.train.batch_size, config.train.seq_len), device=device)
    sample_ids = torch.arange(len(ids), device=device)
    step = TrainStep(stage, lambda module, batch: module.loss_sum(*batch), config.optim)
    return lambda: step([(ids, ids, sample_ids)], 1, ids.numel(), config.optim.lr)


# ------------------------------------------------------------------------------------------------------ links


def _links(cluster: ClusterConfig, world: int, device: torch.device) -> list[MeasuredConfig]:
    """Each kind of collective over each kind of group that an axis can have here."""
    found: dict[tuple, MeasuredConfig] = {}
    for stride in divisors(world):
        for size in divisors(world // stride)[1:]:
            where = place(cluster, RankSpan(stride, size))
            key = where.local, where.nodes, where.sharing
            if key not in found:
                axis = Grid(GridSizes(stride, size, 1, world // stride // size), device.type).y
                for kind in KINDS:
                    found[(*key, kind)] = _collective(replace(where, kind=kind), axis, device)
                found[key] = where
    return [entry for key, entry in found.items() if len(key) == 4]


def _collective(where: MeasuredConfig, axis: Axis, device: torch.device) -> MeasuredConfig:
    start = getattr(collectives, f"start_{where.kind}")

    def message(nbytes: int) -> torch.Tensor:
        elements = max(axis.size, nbytes // 4 // axis.size * axis.size)
        return torch.ones(elements // axis.size if where.kind == "all_gather" else elements, device=device)

    sent, taken = [], []
    for halvings in (11, 6, 3, 2, 0):
        tensor = message(_LARGEST[device.type] >> halvings)
        sent.append(sent_bytes(where.kind, axis.size, tensor.nbytes))
        taken.append(_seconds(lambda tensor=tensor: _wait(start(tensor, axis)), device))
        if taken[-1] > _LONG_S and len(taken) > 1:
            break
    latency, s_per_byte = _line(sent, taken)
    hidden = _hidden(lambda: start(tensor, axis), taken[-1], device)
    return replace(where, latency_us=latency * 1e6, gb_s=1e-9 / s_per_byte, hidden=hidden)


def _wait(pending: collectives.Pending) -> None:
    pending.wait()


def _line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Offset and slope, both above 0, that miss no point by much: least squares of the relative errors."""
    weights = [1 / value**2 for value in y]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    spread = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True)) / spread
    slope = max(slope, y[-1] / x[-1] / 4)
    return max(mean_y - slope * mean_x, 0.0), slope


def _skew(launch: Launch, device: torch.device) -> float:
    """Seconds that ranks of a node who compute, then meet, take longer than the one and the other."""
    node, world = launch.local_world_size, launch.world_size
    axis = Grid(GridSizes(node, 1, 1, world // node) if node > 1 else GridSizes(world), device.type).x
    side = _SIDE[device.type]
    square = torch.ones(side, side, dtype=compute_dtype("auto", device), device=device)
    small = torch.ones(axis.size, device=device)

    def meet() -> None:
        collectives.all_reduce(small, axis)

    def compute() -> None:
        square @ square

    def both() -> None:
        compute()
        meet()

    turns = [[_once(work, device, _AGAIN) for work in (both, compute, meet)] for _ in range(_TURNS)]
    return max(0.0, statistics.median(a - b - c for a, b, c in turns) / _AGAIN)


def _hidden(start: Callable[[], collectives.Pending], alone: float, device: torch.device) -> float:
    """Of the ``alone`` seconds of a collective, the share that costs a computation beside it nothing."""
    side = _SIDE[device.type]
    square = torch.ones(side, side, dtype=compute_dtype("auto", device), device=device)
    once = _seconds(lambda: square @ square, device)
    times = max(1, round(_COVER * alone / once))  # it is over before the computation is

    def compute() -> None:
        for _ in range(times):
            square @ square

    def both() -> None:
        pending = start()
        compute()
        pending.wait()

    # In turns: the machine may be faster now and slower then.
    pairs = [(_once(both, device), _once(compute, device)) for _ in range(_TURNS)]
    stolen = statistics.median(with_it - without for with_it, without in pairs)
    return min(1.0, max(0.0, 1 - stolen / alone))


def _levels(cluster: ClusterConfig, node: int) -> list[LevelConfig]:
    """For groups that were not measured: what a device, and a node, have to the outside, by all-gathers."""
    inside = [m for m in cluster.measured if m.kind == "all_gather" and m.nodes == 1]
    between = [m for m in cluster.measured if m.kind == "all_gather" and m.nodes > 1]
    levels = []
    if between:
        fastest = max(between, key=lambda m: m.gb_s * m.sharing)
        levels.append(LevelConfig(None, fastest.gb_s * fastest.sharing, None, min(m.latency_us for m in between)))
    if inside:
        levels.append(LevelConfig(node, max(m.gb_s for m in inside), None, min(m.latency_us for m in inside)))
    else:
        levels.append(LevelConfig(node))
    return levels


def main(arguments: list[str]) -> None:
    config = from_arguments(CalibrateConfig, arguments)
    out, launch = Path(config.out), Launch.from_environment()
    if out.suffix != ".yaml":
        raise ConfigError(f"out={config.out}: the name of a .yaml file, such as configs/cluster/mine.yaml")
    with process_group(launch) as job:
        run_on_rank0(lambda: _check_writable(out))
        cluster = measured(launch, job.device, config.name or out.stem)
        run_on_rank0(lambda: _write(cluster, out))


def _check_writable(out: Path) -> None:
    """ConfigError, before minutes of measuring, if the file cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"out={out}: {error.strerror}") from None


def _write(cluster: ClusterConfig, out: Path) -> None:
    words = "# Measured by python -m gpt4d.planner.calibrate; every key: gpt4d/config/schema.py, ClusterConfig.\n"
    out.write_text(words + OmegaConf.to_yaml(OmegaConf.structured(cluster)))
    print(f"{out}: a product reaches {cluster.matmul_tflops:.3g} TFLOP/s, memory {cluster.memory_gb_s:.3g} GB/s")
    print(f"an operation takes {cluster.operation_us:.0f} us, the last rank is late by {cluster.skew_us:.0f}")
    for entry in cluster.measured:
        print(
            f"{entry.kind:15} {entry.local} rank(s) on each of {entry.nodes} node(s), {entry.sharing} sharing a link: "
            f"{entry.latency_us:.0f} us + bytes / {entry.gb_s:.3g} GB/s, {entry.hidden:.0%} can hide"
        )


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
