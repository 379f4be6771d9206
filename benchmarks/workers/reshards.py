"""Reshardings on an emulated cluster: the cases of the paper's Table 2 and Fig. 5, every strategy."""

import sys
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from benchmarks.interleave import redirect_stdout_for_answers, serve
from gpt4d.parallel.resharding.mesh import Mesh, Tile, parse
from gpt4d.parallel.resharding.planning import Plan, plan
from gpt4d.parallel.resharding.transfer import Link
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch

HOSTS, RANKS = 5, 4
SHAPE = (128, 256, 128)  # the paper's (1024, 1024, 512), an element of ours for 128 of theirs
DTYPE = torch.float32

# The paper's Table 2: specs and (hosts, devices of each); the sixth case's tensor is padded to divide by three.
TABLE_2 = {
    "case 1": ("S0RR", (2, 4), "S0RR", (2, 4)),
    "case 2": ("RRR", (2, 4), "S0RR", (2, 4)),
    "case 3": ("RS0R", (2, 4), "S0RR", (2, 4)),
    "case 4": ("RS01R", (2, 4), "S01RR", (2, 4)),
    "case 5": ("S1RR", (2, 4), "S0RR", (2, 4)),
    "case 6": ("S0RR", (2, 4), "S0RR", (3, 4)),
    "case 7": ("S1RR", (1, 4), "RRR", (2, 4)),
    "case 8": ("RRR", (2, 3), "RRR", (3, 2)),
    "case 9": ("RS0R", (2, 4), "RRS0", (2, 4)),
}
# Fig. 5: from one device to 1–4 on one host, and to two on each of 1–4 hosts.
FIGURE_5 = {f"1x{devices}": ("RRR", (1, 1), "RRR", (1, devices)) for devices in (1, 2, 3, 4)}
FIGURE_5 |= {f"{hosts}x2": ("RRR", (1, 1), "RRR", (hosts, 2)) for hosts in (2, 3, 4)}
STRATEGIES = ("broadcast", "send_recv", "local_allgather", "global_allgather", "signal")
ORDERS = ("naive", "load_balance")  # of Table 2's cases, by broadcast, beside the default


def plans() -> dict[str, Plan]:
    """``case/strategy`` and, for what is not in the default order, ``case/broadcast/order``."""
    found = {}
    for case, ends in (TABLE_2 | FIGURE_5).items():
        for strategy in STRATEGIES:
            found[f"{case}/{strategy}"] = planned(case, ends, strategy=strategy)
    for case, ends in TABLE_2.items():
        for order in ORDERS:
            found[f"{case}/broadcast/{order}"] = planned(case, ends, order=order)
    return found


def planned(case: str, ends: tuple, **how) -> Plan:
    source, source_shape, destination, destination_shape = ends
    shape = (384, 256, 42) if case == "case 6" else SHAPE
    first, second = mesh(source_shape, 0), mesh(destination_shape, source_shape[0])
    return plan(shape, parse("src", source), first, parse("dst", destination), second, **how)


def mesh(shape: tuple[int, int], first_host: int) -> Mesh:
    places = [(first_host + host, device) for host in range(shape[0]) for device in range(shape[1])]
    axes = (("0", shape[0]), ("1", shape[1]))
    return Mesh(axes, tuple(RANKS * host + device for host, device in places), tuple(host for host, _ in places))


class Contender:
    """One plan. A step is one transfer, of which each rank has waited for its part."""

    def __init__(self, link: Link, found: Plan):
        self.plan = found
        ranks = (*found.source_mesh.devices, *found.destination_mesh.devices)
        self.move = link.prepare(found, DTYPE) if dist.get_rank() in ranks else None
        self.local = self.out = None

    def step(self) -> Callable[[], dict]:
        if self.move is not None:
            if self.local is None and self.out is None:  # in the first step, which does not count
                self._make_tensors()
            self.move.start(self.local, self.out).wait()
        return self.told

    def _make_tensors(self) -> None:
        found, receives = self.plan, self.move.program.receives
        mesh, layout = (found.destination_mesh, found.destination) if receives else (found.source_mesh, found.source)
        tile = mesh.tiles(found.shape, layout)[dist.get_rank()]
        if receives:
            self.expected = whole(found.shape)[tuple(slice(*r) for r in tile)]
            self.out = room(tuple(self.expected.shape))
        else:
            self.local = given(found.shape, tile)

    def told(self) -> dict:
        """Every rank looks at what it received: a transfer that is fast but wrong ends the run."""
        if self.out is not None and self.plan.strategy != "signal":
            assert torch.equal(self.out, self.expected)
            self.out.zero_()
        return {}


# Contenders take turns, so they share their tensors.
@cache
def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=DTYPE).view(shape)


@cache
def given(shape: tuple[int, ...], tile: Tile) -> torch.Tensor:
    return whole(shape)[tuple(slice(*r) for r in tile)].contiguous()


@cache
def room(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=DTYPE)


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    wanted = sys.argv[1:]
    with process_group(Launch.from_environment(), torch.device("cpu")):
        link = Link("reshard", dist.new_group(), torch.device("cpu"))
        contenders = {name: Contender(link, p) for name, p in plans().items() if not wanted or name in wanted}
        serve({name: contender.step for name, contender in contenders.items()}, answers)
