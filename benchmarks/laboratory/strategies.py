"""The strategies and orders of resharding with which gpt4d's plan is compared (arXiv 2211.05322, §3.1 and §3.2).

Times for A receiving hosts with B devices each. t is the time of the task's elements over one host's link.

- ``broadcast``, gpt4d's: in K chunks, pipelined along a chain of the receivers, in time t + A·t/K.
- ``send_recv``: separately to each receiver, in time A·B·t.
- ``local_allgather``: once to each host, in B shards that its devices all-gather, in time A·t.
- ``global_allgather``: once, in A·B shards that all receivers all-gather, in time 2·t, or t to a single host.
- ``signal``: a single element, to measure the time without communication, in time 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple
from unittest.mock import patch

import torch

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline import stage_links
from gpt4d.parallel.resharding import jobs, transfer
from gpt4d.parallel.resharding import plan as plans
from gpt4d.parallel.resharding.jobs import Receivers, send_jobs
from gpt4d.parallel.resharding.mesh import StageMesh, unit_tasks
from gpt4d.parallel.resharding.plan import (
    PeerMessage,
    ReshardingPlan,
    Round,
    Search,
    Send,
    chain,
    gradient_ends,
    schedule,
    split,
)


def _by_device(receivers: Receivers) -> list[Receivers]:
    return [{host: [device]} for host, devices in receivers.items() for device in devices]


def all_gather(send: Send, rank: int, elements: int, _: int) -> tuple[Round, ...]:
    """Return the rounds of a scatter of shards to the receivers and of a ring all-gather among them."""
    ring, parts = send.receivers, split(elements, len(send.receivers))

    def message(*exchanges: tuple[int, int]) -> tuple[PeerMessage, ...]:  # (peer, index of the part)
        return tuple(PeerMessage(peer, *parts[i]) for peer, i in exchanges if parts[i][0] < parts[i][1])

    if rank == send.sender:
        return (Round(message(*((device, i) for i, device in enumerate(ring))), ()),)
    place, size = ring.index(rank), len(ring)
    rounds = [Round((), message((send.sender, place)))]
    for time_step in range(size - 1):
        next_rank, previous_rank = ring[(place + 1) % size], ring[place - 1]
        outgoing, incoming = (place - time_step) % size, (place - time_step - 1) % size
        rounds.append(Round(message((next_rank, outgoing)), message((previous_rank, incoming))))
    return tuple(rounds)


def _signal(send: Send, rank: int, elements: int, _: int) -> tuple[Round, ...]:
    return chain(send, rank, 1, 1)


class Strategy(NamedTuple):
    """How a strategy splits a task's receivers, how often a tile passes the links of a job, and its rounds."""

    split: Callable[[Receivers], list[Receivers]]
    passes: Callable[[int], int] = lambda hosts: 1
    rounds: Callable[[Send, int, int, int], tuple[Round, ...]] = chain


STRATEGIES = {
    "broadcast": Strategy(jobs.together),
    "send_recv": Strategy(_by_device),
    "local_allgather": Strategy(jobs.by_host, rounds=all_gather),
    "global_allgather": Strategy(jobs.together, lambda hosts: min(hosts, 2), all_gather),
    "signal": Strategy(jobs.together, lambda hosts: 0, _signal),
}
ORDERS: dict[str, Search] = {
    "ensemble": jobs.ensemble,
    "naive": lambda found: (jobs.naive(found), False),
    "load_balance": lambda found: (jobs.load_balance(found), False),
    "dfs": jobs.dfs,
    "greedy": lambda found: (jobs.greedy(found), False),
}


@dataclass(frozen=True)
class ComparedPlan(ReshardingPlan):
    """A plan with its strategy and order. With the strategy ``signal`` the received values are meaningless."""

    strategy: str
    order: str

    @property
    def sent_elements(self) -> int:
        if self.strategy == "signal":
            return sum(len(send.receivers) for send in self.sends)
        return super().sent_elements


@lru_cache(maxsize=128)
def plan(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: StageMesh,
    destination: Layout,
    destination_mesh: StageMesh,
    num_summed: int = 0,
    strategy: str = "broadcast",
    order: str = "ensemble",
) -> ComparedPlan:
    """Return the plan of a strategy and an order, as ``gpt4d.parallel.resharding.plan.plan`` returns its own."""
    ends = shape, source, source_mesh, destination, destination_mesh
    tasks, method = unit_tasks(*ends), STRATEGIES[strategy]
    alternatives = [send_jobs(tasks, source_mesh, destination_mesh, method.split)]
    if (strategy, order) == ("broadcast", "ensemble"):
        alternatives.append(send_jobs(tasks, source_mesh, destination_mesh, jobs.by_host))
    timed = [
        [replace(job, duration=job.duration * method.passes(len(job.receiver_hosts))) for job in found]
        for found in alternatives
    ]
    scheduled = schedule(ends, num_summed, tasks, timed, ORDERS[order])
    return ComparedPlan(*ends, num_summed, tuple(tasks), *scheduled, strategy, order)


def gradient_plan(forward: ComparedPlan, partial: tuple[str, ...] = ()) -> ComparedPlan:
    """Return the plan of the gradient, as ``gpt4d.parallel.resharding.plan.gradient_plan``."""
    return plan(*gradient_ends(forward, partial), len(partial), forward.strategy, forward.order)


def rank_program(plan: ComparedPlan, rank: int, element_bytes: int, device_type: str = "cpu") -> plans.RankProgram:
    """Return the program of a rank, as ``gpt4d.parallel.resharding.plan.rank_program``."""
    with patch.object(plans, "chain", STRATEGIES[plan.strategy].rounds):
        return plans.rank_program(plan, rank, element_bytes, device_type)


class ComparedResharding(transfer.Resharding):
    """A compared plan on its link."""

    plan: ComparedPlan

    def __init__(self, link: transfer.Link, plan: ComparedPlan, dtype: torch.dtype):
        with patch.object(transfer, "rank_program", rank_program):
            super().__init__(link, plan, dtype)

    def start(
        self, local: torch.Tensor | None = None, out: torch.Tensor | None = None, name: str | None = None
    ) -> transfer.ReshardingInFlight:
        if self.plan.strategy == "signal" and self.program.receives and out is None:
            # Most elements are not received: zeros keep them finite.
            out = torch.zeros(self.program.shape[self.plan.num_summed :], dtype=self.dtype, device=self.link.device)
        return super().start(local, out, name)


@contextmanager
def between_stages(strategy: str) -> Iterator[None]:
    """Let stages that are connected in this context exchange their tensors by a strategy."""
    with (
        patch.object(stage_links, "plan", partial(plan, strategy=strategy)),
        patch.object(stage_links, "gradient_plan", gradient_plan),
        patch.object(transfer, "Resharding", ComparedResharding),
    ):
        yield
