"""Schedules: the order in which a stage computes the forwards and backwards of its microbatches. No torch here."""

from typing import NamedTuple


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of one microbatch, counted from 0."""

    kind: str
    microbatch: int


def single_stage(microbatches: int) -> list[Action]:
    """Return the schedule of a stage that has no neighbors: F0 B0 F1 B1 …, one microbatch in flight."""
    return [Action(kind, microbatch) for microbatch in range(microbatches) for kind in "FB"]


def forward_only(microbatches: int) -> list[Action]:
    """Return the schedule of an evaluation: F0 F1 …"""
    return [Action("F", microbatch) for microbatch in range(microbatches)]
