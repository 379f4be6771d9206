"""Measurement of the machine, written as a cluster configuration for the planner.

    torchrun --nproc-per-node 4 -m gpt4d.planner.calibrate out=configs/cluster/mine.yaml

``cluster=mine`` then selects it. On a cluster, start it like train.py on at least two nodes; the speed between more
nodes is extrapolated. All ranks measure simultaneously, since they share links, memory and, on a CPU, cores.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import MISSING, OmegaConf

from gpt4d.config import (
    ClusterConfig,
    Config,
    ConfigError,
    GridSizes,
    LevelConfig,
    MeasuredConfig,
    TrainConfig,
    asks_for_help,
    divisors,
    from_arguments,
)
from gpt4d.config.commands import one_line_errors
from gpt4d.config.machine import COMMUNICATOR_GIB, peak_flops
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.parallel.comm import collectives
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import attention_backends, float8
from gpt4d.parallel.layers.attention import AttentionFunction
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.sharded_weights import compute_dtype
from gpt4d.plan import one_stage
from gpt4d.planner.device import KINDS, sent_bytes
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.topology import ALL_TO_ALL, RankSpan, place
from gpt4d.runtime import gpu
from gpt4d.runtime.consensus import all_gather_json, run_on_rank0
from gpt4d.runtime.files import required_file
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.runtime.watchdog import Watchdog
from gpt4d.step import TrainStep, build_stage

MIN_MEASURED_S = 0.2  # duration of a measurement: longer than a time slice of the operating system
ROUNDS = 3  # number of measurements per median
MAX_MESSAGE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # full tensor of the largest collective, approximately
MATRIX_SIZE = {"cpu": 512, "cuda": 8192}  # rows and columns of a large square product
COPIED_BYTES = 2 << 30
ATTENTION_SHAPE = {"cpu": (2, 256, 8, 64), "cuda": (8, 2048, 16, 128)}  # sequences, positions, heads, features
COMPARISONS = 9  # number of comparisons of a computation with and without a concurrent collective
_REPEATS = 5  # calls per comparison, because a single call is too short to be timed
_LONG_MESSAGE_S = 0.2  # measurements end with the first message that takes this long
_COVER = 2.0  # duration of the computation that hides a collective, in durations of the collective
_SMALL_MODEL = GPT2Config("small", layers=2, hidden=64, heads=4, vocab_size=128, max_positions=16)
LARGE_MODEL = GPT2Config("large", layers=2, hidden=512, heads=8, vocab_size=512, max_positions=128)


@dataclass
class CalibrateConfig:
    """Arguments of the command."""

    out: str = MISSING  # the YAML file to write; cluster=… selects one in configs/cluster by its name
    name: str | None = None  # null: the file's name


def measure(launch: Launch, device: torch.device, name: str, watchdog: Watchdog | None = None) -> ClusterConfig:
    """Measure the machine with ``device`` of every rank. All ranks of the process group must call this.

    ``watchdog`` ends the job if a link hangs.
    """
    limit = watchdog.limit if watchdog else nullcontext
    rates = f"measured by gpt4d.planner.calibrate on {launch.world_size} device(s)"
    cluster = replace(_read_system(launch, device), name=name, rates=rates)
    cluster.matmul_tflops = _matmul_flops(device) / 1e12
    cluster.attention_tflops = _attention_flops(device) / 1e12
    if float8.supports(device):
        cluster.fp8_tflops = _float8_flops(device) / 1e12
    cluster.operation_us, cluster.memory_gb_s = _measure_operations(cluster, device)
    if launch.world_size > 1:
        cluster.measured = _measure_links(cluster, launch.world_size, device, limit)
        cluster.levels = _derive_levels(cluster, launch.local_world_size)
        with limit("measuring delays"):
            cluster.skew_us = _measure_skew(launch, device) * 1e6
    return cluster


def _read_system(launch: Launch, device: torch.device) -> ClusterConfig:
    """Return the devices and their memory, which need no measurement."""
    node = LevelConfig(ranks=launch.local_world_size)
    outside = [] if launch.local_world_size == launch.world_size else [LevelConfig()]
    cluster = ClusterConfig(device=device.type, levels=[*outside, node])
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak = peak_flops(device)
        return replace(
            cluster,
            memory_gib=total / 2**30,
            reserved_gib=(total - free) / 2**30,
            communicator_gib=communicator_gib(launch, device),
            peak_tflops=peak and peak / 1e12,
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    reserved = gpu.peak_memory_gib(device)
    return replace(cluster, memory_gib=total / 2**30 / launch.local_world_size, reserved_gib=reserved)


def communicator_gib(launch: Launch, device: torch.device) -> float:
    """Return the memory that a GPU's library of collectives takes for its first group, which has all ranks."""
    if launch.world_size == 1:
        return COMMUNICATOR_GIB
    world = Grid(GridSizes(data=launch.world_size), device.type).world
    before, _ = torch.cuda.mem_get_info(device)
    world.all_reduce(torch.ones(1, device=device)).item()
    return max(0, before - torch.cuda.mem_get_info(device)[0]) / 2**30


def measured_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call of ``work`` on the slowest rank, when all ranks repeat it."""
    work()
    times, measured = 1, list[float]()
    while len(measured) < ROUNDS:
        seconds = _time(work, device, times)
        if seconds < MIN_MEASURED_S:
            times = max(2 * times, int(1.2 * times * MIN_MEASURED_S / max(seconds, 1e-6)))
        else:
            measured.append(seconds / times)
    return statistics.median(measured)


def _time(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the seconds of ``times`` consecutive calls of ``work`` on the slowest rank; all ranks start together."""
    all_gather_json(None, "starting a measurement together")
    started = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(all_gather_json(time.perf_counter() - started, "comparing a measurement"))


def _matmul_flops(device: torch.device) -> float:
    square = square_matrix(device)
    return 2 * len(square) ** 3 / measured_seconds(lambda: square @ square, device)


def _float8_flops(device: torch.device) -> float:
    """Return the rate of float8 products of a forward, whose factors are converted before."""
    values, one = square_matrix(device).to(torch.float8_e4m3fn), torch.ones((), device=device)

    def work() -> None:
        float8.float8_product(values, values, one, one, None, torch.bfloat16, True)

    return 2 * len(values) ** 3 / measured_seconds(work, device)


def _attention_flops(device: torch.device) -> float:
    """Return the rate of causal attention, forward and backward, without masked products."""
    attention_backends.use_installed_kernels(device)
    sequences, length, heads, size = shape = ATTENTION_SHAPE[device.type]
    q, k, v, d_out = torch.randn(4, *shape, dtype=compute_dtype("auto", device), device=device)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def work() -> None:
        out = AttentionFunction.in_torch(*inputs, None, None, causal=True)
        torch.autograd.grad(out, inputs, d_out.view_as(out))

    # Two products in the forward and five in the backward, each of half of the keys.
    return 7 * sequences * heads * length**2 * size / measured_seconds(work, device)


def square_matrix(device: torch.device) -> torch.Tensor:
    """Return a matrix of random numbers. GPUs are faster on constant numbers, which take less power."""
    size = MATRIX_SIZE[device.type]
    return torch.randn(size, size, dtype=compute_dtype("auto", device), device=device)


# ---------------------------------------------------------------------------- operations other than products


def _measure_operations(cluster: ClusterConfig, device: torch.device) -> tuple[float, float]:
    """Return microseconds per operation and GB/s of memory with which the planner predicts measured step times.

    A GPU computes while the host starts more operations, so the time of a step does not contain the host's. On a GPU
    the results are the time in which the host launches a tiny operation, and the rate of a large copy. The device may
    take less time for an operation.
    """
    return time_kernels(device) if device.type == "cuda" else _fit_step_times(cluster, device)


def time_kernels(device: torch.device) -> tuple[float, float]:
    """Return microseconds of an operation on a few numbers, and GB/s that a copy reads and writes."""
    few = torch.ones(8, device=device)
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    operation_s = measured_seconds(lambda: few.add_(1), device)
    return operation_s * 1e6, 2e-9 * source.nbytes / measured_seconds(lambda: target.copy_(source), device)


def _fit_step_times(cluster: ClusterConfig, device: torch.device) -> tuple[float, float]:
    """Return the results of ``_measure_operations`` that solve two equations, one per model.

    The number of operations dominates the time of the small model. In the large model, the bytes that they move also
    count.
    """
    rows, times = [], []
    for model, sequences in ((_SMALL_MODEL, 1), (LARGE_MODEL, 4)):
        config = Config(model=model, train=TrainConfig(seq_len=model.max_positions, batch_size=sequences))
        step_s = measured_seconds(_training_step(config, device), device)
        rates = {"matmul_tflops": cluster.matmul_tflops, "attention_tflops": cluster.attention_tflops}
        products_s = _step_s(config, cluster, **rates)
        # Products read and write while they multiply, so only the bytes of elementwise operations count.
        units = {"matmul_tflops": 1e-12, "attention_tflops": 1e-12}
        moved = _step_s(config, cluster, **units, memory_gb_s=1e-9) - _step_s(config, cluster, **units)
        rows.append((_step_s(config, cluster, operation_us=1e6), moved))
        times.append(max(step_s - products_s, 0.05 * step_s))
    (a, b), (c, d) = rows
    determinant = a * d - b * c
    operation_s = (times[0] * d - b * times[1]) / determinant
    s_per_byte = (a * times[1] - c * times[0]) / determinant
    # Both may be zero or negative if the measured rate of products is slightly too low.
    s_per_byte = max(s_per_byte, 1e-13)
    return max(operation_s, 1e-7) * 1e6, 1e-9 / s_per_byte


def _step_s(config: Config, cluster: ClusterConfig, **rates: Any) -> float:
    """Return the seconds of a step on one device with these rates. Work without a rate takes no time.

    At rates of one per second, the result is a number of operations, of bytes moved or of FLOPs. A product takes the
    maximum of the times of its bytes and of its FLOPs.
    """
    free = dict.fromkeys(("memory_gb_s", "matmul_tflops", "attention_tflops"), float("inf")) | {"operation_us": 0.0}
    estimate = Estimate(replace(config, cluster=replace(cluster, **(free | rates))), GridSizes())
    return estimate.walk(config.train.batch_size, estimate.description.blocks).run(1).compute_s


def _training_step(config: Config, device: torch.device) -> Callable[[], object]:
    """Return a function that trains a GPT-2 for one step on a grid of this device alone."""
    assert isinstance(config.model, GPT2Config)
    stage = build_stage(one_stage(config), Grid.single_device(), device)
    ids = torch.randint(config.model.padded_vocab_size, (config.train.batch_size, config.train.seq_len), device=device)
    sample_ids = torch.arange(len(ids), device=device)
    step = TrainStep(stage, whole_model(lambda module, batch: cast(Any, module).loss_sum(*batch)), config.optim)
    return lambda: step([(ids, ids, sample_ids)], 1, ids.numel(), config.optim.lr)


# ------------------------------------------------------------------------------------------------------ links


def _measure_links(
    cluster: ClusterConfig, world: int, device: torch.device, limit: Callable[[str], AbstractContextManager]
) -> list[MeasuredConfig]:
    """Measure each kind of collective in each kind of group that an axis of a grid on this machine can have."""
    measured: dict[tuple, MeasuredConfig] = {}
    for stride in divisors(world):
        for size in divisors(world // stride)[1:]:
            group = place(cluster, RankSpan(stride, size))
            key = group.local, group.nodes, group.sharing
            if (*key, KINDS[0]) not in measured:
                with limit(f"connecting groups of {size} ranks"):
                    axis = Grid(GridSizes(stride, size, 1, world // stride // size), device.type).y
                axis.traffic.timed = False  # recorded intervals accumulate until they are read
                for kind in (*KINDS, ALL_TO_ALL):
                    with limit(f"measuring {kind} over {size} ranks"):
                        measured[(*key, kind)] = _measure_collective(replace(group, kind=kind), axis, device)
    return list(measured.values())


def _measure_collective(group: MeasuredConfig, axis: Axis, device: torch.device) -> MeasuredConfig:
    """Return ``group`` with latency, rate and hidden share of its kind of collective along ``axis``."""
    exchanges = group.kind == ALL_TO_ALL  # each rank sends as many bytes to other ranks as in a reduce-scatter

    def message(nbytes: int) -> torch.Tensor:
        elements = max(axis.size, nbytes // 4 // axis.size * axis.size)
        return torch.randn(elements // axis.size if group.kind == "all_gather" else elements, device=device)

    def start(tensor: torch.Tensor) -> collectives.Pending:
        rows = [len(tensor) // axis.size] * axis.size
        return getattr(axis, f"start_{group.kind}")(tensor, *([rows, rows] if exchanges else []))

    def measure_seconds(tensor: torch.Tensor) -> float:
        return measured_seconds(lambda: start(tensor).wait(), device)

    sent, seconds = [], []
    for halvings in (11, 6, 3, 2, 0):
        tensor = message(MAX_MESSAGE_BYTES[device.type] >> halvings)
        sent.append(sent_bytes("reduce_scatter" if exchanges else group.kind, axis.size, tensor.nbytes))
        seconds.append(measure_seconds(tensor))
        if seconds[-1] > _LONG_MESSAGE_S and len(seconds) > 1:
            break
    latency, s_per_byte = fit_line(sent, seconds)
    hidden = _measure_hidden_share(lambda: start(tensor), seconds[-1], device)
    return replace(group, latency_us=latency * 1e6, gb_s=1e-9 / s_per_byte, hidden=hidden)


def fit_line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Return offset (at least 0) and slope (above 0) of a least-squares line that minimizes relative errors."""
    weights = [1 / value**2 for value in y]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    spread = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True)) / spread
    slope = max(slope, y[-1] / x[-1] / 4)
    return max(mean_y - slope * mean_x, 0.0), slope


def _measure_skew(launch: Launch, device: torch.device) -> float:
    """Return the delay in seconds with which the last rank of a node enters an all-reduce after a computation."""
    node, world = launch.local_world_size, launch.world_size
    axis = Grid(GridSizes(node, 1, 1, world // node) if node > 1 else GridSizes(world), device.type).x
    axis.traffic.timed = False
    square = square_matrix(device)
    small = torch.randn(axis.size, device=device)
    reduce, compute = partial(axis.all_reduce, small), partial(torch.matmul, square, square)

    def both() -> None:
        compute()
        reduce()

    rounds = [[_time(work, device, _REPEATS) for work in (both, compute, reduce)] for _ in range(COMPARISONS)]
    return max(0.0, statistics.median(a - b - c for a, b, c in rounds) / _REPEATS)


def _measure_hidden_share(start: Callable[[], collectives.Pending], alone_s: float, device: torch.device) -> float:
    """Return the share of a collective's ``alone_s`` seconds that overlaps a computation without slowing it."""
    square = square_matrix(device)
    product_s = measured_seconds(lambda: square @ square, device)
    times = max(1, round(_COVER * alone_s / product_s))  # the collective ends before the computation

    def compute() -> None:
        for _ in range(times):
            square @ square

    def both() -> None:
        pending = start()
        compute()
        pending.wait()

    # Measurements alternate, since the speed of the machine may drift.
    pairs = [(_time(both, device), _time(compute, device)) for _ in range(COMPARISONS)]
    slowdown_s = statistics.median(with_collective - without for with_collective, without in pairs)
    return min(1.0, max(0.0, 1 - slowdown_s / alone_s))


def _derive_levels(cluster: ClusterConfig, node: int) -> list[LevelConfig]:
    """Return the links of a device and of a node from measured all-gathers, for groups without a measurement."""
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
    """Measure the machine with all ranks of the job, and write ``out`` on rank 0."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    config = from_arguments(CalibrateConfig, arguments)
    out, launch = Path(config.out), Launch.from_environment()
    if out.suffix != ".yaml":
        raise ConfigError(f"out={config.out}: not a .yaml file; use, for example, configs/cluster/mine.yaml")
    with process_group(launch) as job:
        run_on_rank0(lambda: _check_writable(out), "checking out")
        watchdog = job.ranks.watchdog if job.ranks else None
        cluster = measure(launch, job.device, config.name or out.stem, watchdog)
        run_on_rank0(lambda: write_cluster(cluster, out), "writing out")


def _check_writable(out: Path) -> None:
    """Raise ConfigError if the file cannot be written, before minutes of measurement."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written ({error.strerror}); use another path") from None


def write_cluster(cluster: ClusterConfig, out: Path) -> None:
    """Write a cluster file that Hydra can select. Raises ConfigError if it cannot be written."""
    header = "# Measured by python -m gpt4d.planner.calibrate. Keys: ClusterConfig in gpt4d/config/schema.py.\n"
    with required_file(out):
        out.write_text(header + OmegaConf.to_yaml(OmegaConf.structured(cluster)))
    print(f"{out}: matrix products reach {cluster.matmul_tflops:.3g} TFLOP/s, memory {cluster.memory_gb_s:.3g} GB/s")
    if cluster.fp8_tflops:
        print(f"float8 products reach {cluster.fp8_tflops:.3g} TFLOP/s")
    if cluster.attention_tflops:
        print(f"causal attention reaches {cluster.attention_tflops:.3g} TFLOP/s without masked products")
    print(f"an operation takes at least {cluster.operation_us:.0f} us, the last rank is {cluster.skew_us:.0f} us late")
    for entry in cluster.measured:
        print(
            f"{entry.kind:15} {entry.local} rank(s) on each of {entry.nodes} node(s), {entry.sharing} group(s) a link: "
            f"{entry.latency_us:.0f} us + bytes / {entry.gb_s:.3g} GB/s, {entry.hidden:.0%} can hide"
        )


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
