"""Lower bound of the makespan of any order of jobs, from the load of single links (arXiv 2211.05322, Eq. 4)."""

from collections.abc import Iterable

from gpt4d.parallel.resharding.strategies import SendJob

_MAX_SENDER_SETS = 200  # leaving sets out weakens the bound but keeps it valid


def lower_bound(jobs: list[SendJob]) -> int:
    """Return a lower bound of the makespan of ``jobs``, in elements.

    A host receives one job at a time. The jobs that only the hosts of some set can send are at best spread evenly over
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
    """Return the sets of hosts to bound: the jobs' choices of sender hosts first, then unions of them."""
    distinct = sorted({tuple(sorted(choice)) for choice in choices})
    sets = dict.fromkeys(map(frozenset, distinct))
    for choice in distinct:
        for other in list(sets):
            if len(sets) >= _MAX_SENDER_SETS:
                return list(sets)
            if other & set(choice):  # the union of disjoint sets gives no better bound than the sets
                sets[other | set(choice)] = None
    return list(sets)
