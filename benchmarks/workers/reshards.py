"""Worker of ``benchmarks.resharding``: the cases of the paper's Table 2 and Fig. 5 with every strategy.

Plans given by name as arguments run alone; without arguments all run.
"""

import sys
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from benchmarks.interleave import redirect_stdout_for_answers, serve
from gpt4d.parallel.resharding.mesh import StageMesh, Tile, parse
from gpt4d.parallel.resharding.plan import ReshardingPlan, plan
from gpt4d.parallel.resharding.transfer import Link
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch

HOSTS, RANKS = 5, 4
SHAPE = (128, 256, 128)  # 1/128 of the elements of the paper's (1024, 1024, 512)
DTYPE = torch.float32

# The paper's Table 2: specs and (hosts, devices per host). Case 6 has a shape that three divides.
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
ORDERS = ("naive", "load_balance")  # for the cases of Table 2 with broadcast, besides the default


def plans() -> dict[str, ReshardingPlan]:
    """Return the plans by name: ``case/strategy``, or ``case/broadcast/order`` for orders other than the default."""
    by_name = {}
    for case, ends in (TABLE_2 | FIGURE_5).items():
        for strategy in STRATEGIES:
            by_name[f"{case}/{strategy}"] = make_plan(case, ends, strategy=strategy)
    for case, ends in TABLE_2.items():
        for order in ORDERS:
            by_name[f"{case}/broadcast/{order}"] = make_plan(case, ends, order=order)
    return by_name


def make_plan(case: str, ends: tuple, **options) -> ReshardingPlan:
    source, source_shape, destination, destination_shape = ends
    shape = (384, 256, 42) if case == "case 6" else SHAPE
    first, second = make_mesh(source_shape, 0), make_mesh(destination_shape, source_shape[0])
    return plan(shape, parse("src", source), first, parse("dst", destination), second, **options)


def make_mesh(shape: tuple[int, int], first_host: int) -> StageMesh:
    places = [(first_host + host, device) for host in range(shape[0]) for device in range(shape[1])]
    axes = (("0", shape[0]), ("1", shape[1]))
    return StageMesh(axes, tuple(RANKS * host + device for host, device in places), tuple(host for host, _ in places))


class Contender:
    """A plan to execute. A step is one transfer, after which each receiver has its local tensor."""

    def __init__(self, link: Link, resharding_plan: ReshardingPlan):
        self.plan = resharding_plan
        ranks = (*self.plan.source_mesh.devices, *self.plan.destination_mesh.devices)
        self.resharding = link.prepare(self.plan, DTYPE) if dist.get_rank() in ranks else None
        self.local = self.out = None

    def step(self) -> Callable[[], dict]:
        if self.resharding is not None:
            if self.local is None and self.out is None:  # in the first step, which is a warm-up
                self._make_tensors()
            self.resharding.start(self.local, self.out).wait()
        return self.check

    def _make_tensors(self) -> None:
        plan, receives = self.plan, self.resharding.program.receives
        mesh, layout = (plan.destination_mesh, plan.destination) if receives else (plan.source_mesh, plan.source)
        tile = mesh.tiles(plan.shape, layout)[dist.get_rank()]
        if receives:
            self.expected = global_tensor(plan.shape)[tuple(slice(*r) for r in tile)]
            self.out = output_buffer(tuple(self.expected.shape))
        else:
            self.local = local_tensor(plan.shape, tile)

    def check(self) -> dict:
        """Compare the received values with the expected ones, so that a wrong transfer ends the run."""
        if self.out is not None and self.plan.strategy != "signal":
            assert torch.equal(self.out, self.expected)
            self.out.zero_()
        return {}


# Only one contender runs at a time, so they share their tensors.
@cache
def global_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=DTYPE).view(shape)


@cache
def local_tensor(shape: tuple[int, ...], tile: Tile) -> torch.Tensor:
    return global_tensor(shape)[tuple(slice(*r) for r in tile)].contiguous()


@cache
def output_buffer(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=DTYPE)


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    selected = sys.argv[1:]
    with process_group(Launch.from_environment(), torch.device("cpu")):
        link = Link("reshard", dist.new_group(), torch.device("cpu"))
        contenders = {name: Contender(link, p) for name, p in plans().items() if not selected or name in selected}
        serve({name: contender.step for name, contender in contenders.items()}, answers)
