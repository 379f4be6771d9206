"""What all ranks compare before they train together: a node with other code, another disk or a slow link is named."""

import hashlib
import math
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from gpt4d.config import Config, ConfigError
from gpt4d.runtime.consensus import all_gather_object, run_on_rank0

_MARK = ".these-ranks-meet-here"
_PATIENCE_S = 30.0  # for a file to be seen from another node
_REPEATS = 3
_ROUNDS = 3  # at most: what is slow now and then is a busy machine, not a slow one
_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}  # squared in a computation, about
_SLOWER = 3.0  # times the median: worth a word


@dataclass(frozen=True)
class Node:
    """What a rank runs on, and with."""

    host: str
    code: str
    config: str
    torch: str
    python: str
    device: str
    run_dir: str  # what it finds there

    FIXES = {  # noqa: RUF012
        "code": "gpt4d's code: bring it up to date there",
        "config": "the configuration: give all ranks the same, and the same environment",
        "torch": "torch: install one version everywhere",
        "python": "Python: install one version everywhere",
        "run_dir": "run.dir: choose one on a file system that all nodes share",
    }

    @classmethod
    def here(cls, config: Config, device: torch.device, mark: str) -> "Node":
        name = "cpu"
        if device.type == "cuda":
            name = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_properties(device).uuid}"
        values = hashlib.sha256(repr(asdict(config)).encode()).hexdigest()
        found = _seen(Path(config.run.dir) / _MARK, mark)
        return cls(socket.gethostname(), _code(), values, torch.__version__, platform.python_version(), name, found)


def compare(
    config: Config, device: torch.device, exchanges: Mapping[str, Callable[[], None]]
) -> tuple[list[str], list[str]]:
    """Each rank's host, and words about what is slow. All ranks call it.

    ConfigError, on all alike, naming the first rank that has other code, settings or versions than rank 0, does not see
    its ``run.dir``, or shares a GPU with another.
    """
    path = Path(config.run.dir) / _MARK
    mark = run_on_rank0(lambda: _marked(path))
    nodes = all_gather_object(Node.here(config, device, mark))
    run_on_rank0(lambda: path.unlink(missing_ok=True))
    problem = difference(nodes)
    if problem:
        raise ConfigError(problem)
    hosts = [node.host for node in nodes]
    return hosts, _slow_again_and_again(dict(exchanges) | {"computation": partial(_compute, device)}, hosts)


def difference(nodes: list[Node]) -> str | None:
    """In what a rank differs from the first, and how to mend it; None if in nothing."""
    for rank, node in enumerate(nodes):
        for what, mend in Node.FIXES.items():
            if getattr(node, what) != getattr(nodes[0], what):
                return f"rank {rank} on {node.host} differs from rank 0 on {nodes[0].host} in {mend}"
    taken: dict[tuple[str, str], int] = {}
    for rank, node in enumerate(nodes):
        other = taken.setdefault((node.host, node.device), rank)
        if other != rank and node.device != "cpu":
            return (
                f"ranks {other} and {rank} on {node.host} have one GPU between them: start one task a GPU (torchrun "
                "--nproc-per-node, or Slurm's --ntasks-per-node)"
            )
    return None


def slow(seconds: list[dict[str, float]], hosts: list[str]) -> list[str]:
    """Of each rank's seconds for an exchange on each axis and for a computation: which are far above the median."""
    words = []
    for what in seconds[0]:
        usual = statistics.median(rank[what] for rank in seconds)
        late = [rank for rank, times in enumerate(seconds) if times[what] > _SLOWER * usual]
        if late:
            worst = max(late, key=lambda rank: seconds[rank][what])
            where = ", ".join(sorted({hosts[rank] for rank in late})[:5])
            kind = what if what == "computation" else f"the axis {what}"
            words.append(
                f"{kind} is slow on {len(late)} rank(s) ({where}): {seconds[worst][what] * 1e3:.1f} ms on rank "
                f"{worst}, {usual * 1e3:.1f} elsewhere"
            )
    return words


def _slow_again_and_again(work: dict[str, Callable[[], None]], hosts: list[str]) -> list[str]:
    seconds = dict.fromkeys(work, math.inf)
    words = []
    for _ in range(_ROUNDS):
        seconds = {what: min(seconds[what], _best(of)) for what, of in work.items()}
        words = slow(all_gather_object(seconds), hosts)
        if not words:
            break
    return words


def _marked(path: Path) -> str:
    mark = f"{socket.gethostname()} {time.time_ns()}"
    path.write_text(mark)
    return mark


def _seen(path: Path, mark: str) -> str:
    """What stands in a file that another node has written: the mark, if it is the same file."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = path.read_text() if path.exists() else ""
        if found == mark or time.monotonic() > deadline:
            return found
        time.sleep(0.5)  # some network file systems show a new file late


def _code() -> str:
    house = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(house.rglob("*.py")))).hexdigest()


def _best(work: Callable[[], None]) -> float:
    return min(_timed(work))


def _timed(work: Callable[[], None]) -> Iterator[float]:
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        yield time.perf_counter() - started


def _compute(device: torch.device) -> None:
    side = math.isqrt(_ELEMENTS[device.type])
    square = torch.ones(side, side, device=device)
    (square @ square)[0, 0].item()
