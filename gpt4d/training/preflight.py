"""Checks before training: all ranks compare code, settings, versions, run directory and the speed of their links."""

import hashlib
import math
import platform
import socket
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from gpt4d.config import Config, ConfigError
from gpt4d.runtime.consensus import all_gather_json, run_on_rank0
from gpt4d.runtime.files import required_file
from gpt4d.runtime.hangs import MIN_LIMIT_S

_MARKER_NAME = ".these-ranks-meet-here"
MARKER_TIMEOUT_S = 30.0  # for a file written on one node to appear on another
_REPEATS = 3
_ROUNDS = 3  # maximum; a node that is slow only in some rounds is busy, not slow
ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}  # approximate size of the square matrix of the test computation
_SLOW_FACTOR = 3.0  # times the median


@dataclass(frozen=True)
class NodeFacts:
    """The environment of one rank: its host and device, and facts that must be equal on all ranks."""

    host: str
    code: str
    cluster: str
    config: str
    torch: str
    python: str
    device: str
    run_dir: str  # content of the marker file that this rank sees there

    FIXES = {  # noqa: RUF012
        "code": "gpt4d's code; install the same version on all nodes",
        "cluster": "the machine that is planned for; set cluster=NAME, or cluster.memory_gib, equally on all ranks",
        "config": "the configuration; pass the same overrides and environment to all ranks",
        "torch": "torch; install the same version on all nodes",
        "python": "Python; install the same version on all nodes",
        "run_dir": "run.dir; choose a directory on a file system that all nodes share",
    }


def _describe_node(config: Config, device: torch.device, marker: str) -> NodeFacts:
    name = "cpu"
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_properties(device).uuid}"
    settings = hashlib.sha256(repr(asdict(config)).encode()).hexdigest()
    # Stop before waiting ranks report this rank as hung.
    timeout_s = min(MARKER_TIMEOUT_S, max(config.parallel.timeout_s, MIN_LIMIT_S) / 2)
    seen = read_marker(Path(config.run.dir) / _MARKER_NAME, marker, timeout_s)
    host, python = socket.gethostname(), platform.python_version()
    return NodeFacts(host, code_hash(), repr(config.cluster), settings, torch.__version__, python, name, seen)


def compare(
    config: Config, device: torch.device, exchanges: Mapping[str, Callable[[], None]]
) -> tuple[list[str], list[str]]:
    """Compare all ranks. Return each rank's host, and a message for each slow measurement. All ranks must call this.

    ``exchanges`` contains a function for each axis name that exchanges data along that axis; its duration is compared.

    Raises ConfigError on all ranks if a rank differs from rank 0 in code, settings or versions. It also raises if a
    rank does not see rank 0's ``run.dir``, or shares a GPU with another rank. The message names the first such rank.
    """
    path = Path(config.run.dir) / _MARKER_NAME
    marker = run_on_rank0(lambda: _write_marker(path), "writing a file for all ranks to run.dir")
    own = asdict(_describe_node(config, device, marker))
    nodes = [NodeFacts(**node) for node in all_gather_json(own, "comparing the environments of the ranks")]
    run_on_rank0(lambda: _remove_marker(path), "removing a file from run.dir")
    problem = find_difference(nodes)
    if problem:
        raise ConfigError(problem)
    hosts = [node.host for node in nodes]
    return hosts, find_persistently_slow(dict(exchanges) | {"computation": partial(compute, device)}, hosts)


def find_difference(nodes: list[NodeFacts]) -> str | None:
    """Return a message about the first rank that differs from rank 0 or shares its GPU, or None."""
    for rank, node in enumerate(nodes):
        for field, fix in NodeFacts.FIXES.items():
            if getattr(node, field) != getattr(nodes[0], field):
                return f"rank {rank} on {node.host} differs from rank 0 on {nodes[0].host} in {fix}"
    owners: dict[tuple[str, str], int] = {}
    for rank, node in enumerate(nodes):
        owner = owners.setdefault((node.host, node.device), rank)
        if owner != rank and node.device != "cpu":
            return (
                f"ranks {owner} and {rank} on {node.host} share one GPU; start one task per GPU (torchrun "
                "--nproc-per-node, or Slurm's --ntasks-per-node)"
            )
    return None


def find_slow(seconds: list[dict[str, float]], hosts: list[str]) -> list[str]:
    """Return a message for each measurement that takes some ranks much longer than the median.

    ``seconds`` contains, for each rank, the durations of the exchanges by axis name and of the ``computation``. Axes
    may differ between pipeline stages.
    """
    messages = []
    for name in dict.fromkeys(name for durations in seconds for name in durations):
        measured = {rank: durations[name] for rank, durations in enumerate(seconds) if name in durations}
        median = statistics.median(measured.values())
        slow_ranks = [rank for rank, duration in measured.items() if duration > _SLOW_FACTOR * median]
        if slow_ranks:
            slowest = max(slow_ranks, key=lambda rank: seconds[rank][name])
            slow_hosts = ", ".join(sorted({hosts[rank] for rank in slow_ranks})[:5])
            subject = name if name == "computation" else f"axis {name}"
            messages.append(
                f"{subject} is slow on {len(slow_ranks)} rank(s) ({slow_hosts}): {seconds[slowest][name] * 1e3:.1f} ms "
                f"on rank {slowest}, median {median * 1e3:.1f} ms"
            )
    return messages


def find_persistently_slow(workloads: dict[str, Callable[[], None]], hosts: list[str]) -> list[str]:
    """Return a message for each workload that one rank computes slowly even in its best round."""
    seconds = dict.fromkeys(workloads, math.inf)
    messages = []
    for _ in range(_ROUNDS):
        seconds = {name: min(seconds[name], best_time(work)) for name, work in workloads.items()}
        messages = find_slow(all_gather_json(seconds, "comparing the speeds of the ranks"), hosts)
        if not messages:
            break
    return messages


def _write_marker(path: Path) -> str:
    marker = f"{socket.gethostname()} {time.time_ns()}"
    with required_file(path):
        path.write_text(marker)
    return marker


def _remove_marker(path: Path) -> None:
    with required_file(path):
        path.unlink(missing_ok=True)


def read_marker(path: Path, marker: str, timeout_s: float) -> str:
    """Return the file's content, which is ``marker`` if this node sees the file that rank 0 has written."""
    deadline = time.monotonic() + timeout_s
    while True:
        content = path.read_text() if path.exists() else ""
        if content == marker or time.monotonic() > deadline:
            return content
        time.sleep(0.5)  # some network file systems show a new file late


def code_hash() -> str:
    """Return a hash of gpt4d's source files, which all ranks must agree on."""
    package = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))).hexdigest()


def best_time(work: Callable[[], None]) -> float:
    """Return the shortest of several times of ``work``, in seconds."""
    return min(timeit.repeat(work, repeat=_REPEATS, number=1))


def compute(device: torch.device) -> None:
    """Run the test computation, and wait for its end."""
    side = math.isqrt(ELEMENTS[device.type])
    square = torch.ones(side, side, device=device)
    (square @ square)[0, 0].item()
