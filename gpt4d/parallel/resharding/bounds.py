"""No order of jobs can be over before this: what the links alone tell (arXiv 2211.05322, Eq. 4)."""

from collections.abc import Iterable

from gpt4d.parallel.resharding.strategies import Job

_FAMILY = 200  # sets of sender hosts that are looked at; leaving some out keeps the bound a bound


def lower_bound(jobs: list[Job]) -> int:
    """A bound of the makespan of ``jobs``, in elements.

    A host receives one job at a time. And jobs that only the hosts of a set can send are at best spread evenly over
    these hosts.
    """
    receiving: dict[int, int] = {}
    for job in jobs:
        for host in job.receiver_hosts:
            receiving[host] = receiving.get(host, 0) + job.duration
    sending = [
        -(-sum(job.duration for job in jobs if hosts.issuperset(job.sender_hosts)) // len(hosts))
        for hosts in sender_sets(job.sender_hosts for job in jobs)
    ]
    return max([0, *receiving.values(), *sending])


def sender_sets(choices: Iterable[tuple[int, ...]]) -> list[frozenset[int]]:
    """Unions of the jobs' choices of a sender host, the choices themselves first: those that a bound may come from."""
    distinct = sorted({tuple(sorted(choice)) for choice in choices})
    sets = dict.fromkeys(map(frozenset, distinct))
    for choice in distinct:
        for other in list(sets):
            if len(sets) >= _FAMILY:
                return list(sets)
            if other & set(choice):  # the bound of disjoint sets' union is no better than theirs
                sets[other | set(choice)] = None
    return list(sets)
