"""Requests of the layers of a microbatch to a device, without times (gpt4d.planner.recording)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DELAYED = "delayed"  # the phase of weight gradients after a split backward


class Key(NamedTuple):
    """A collective or a gathered weight: the segment that starts it, and its number there.

    Attributes:
        phase: the segment's phase.
        offset: distance of the segment's block from the block that uses the key.
        number: number of the event, counted from the segment's end, so that equal ends have equal numbers.
    """

    phase: str
    offset: int
    number: int


class Parameter(NamedTuple):
    """A parameter of the block at ``offset`` from the current block; a parameter outside the blocks has none."""

    offset: int | None
    name: str


class Work(NamedTuple):
    """Computation without communication: its seconds, change of bytes in use, and peak above the previous bytes."""

    seconds: float
    held: int
    peak: float


class Start(NamedTuple):
    """The start of a collective; ``nbytes`` and ``received`` as for ``gpt4d.planner.device.Device.start``."""

    key: Key
    kind: str
    axis: str
    nbytes: float
    received: float


class Wait(NamedTuple):
    """The wait for a collective."""

    key: Key


class Gather(NamedTuple):
    """A use of a gathered weight, which lives until the layers ``Drop`` it."""

    key: Key
    weight: Parameter
    phase: str


class Drop(NamedTuple):
    """The end of a layer's use of a gathered weight."""

    key: Key


class Scatter(NamedTuple):
    """The gradient of a gathered weight.

    Attributes:
        weight: its parameter.
        first: the events that compute the gradient.
        further: the events that compute the gradient and add it to an earlier one.
        shape: the gradient's shape.
        dtype: the gradient's dtype.
    """

    weight: Parameter
    first: Sequence[Event]
    further: Sequence[Event]
    shape: tuple[int, ...]
    dtype: str


class Term(NamedTuple):
    """The gradient of a parameter that is not gathered, in memory that the layers have allocated."""

    parameter: Parameter
    shape: tuple[int, ...]
    dtype: str


Event = Work | Start | Wait | Gather | Drop | Scatter | Term
