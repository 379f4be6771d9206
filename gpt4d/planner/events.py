"""Requests of the layers of a microbatch to a device, without times (gpt4d.planner.recording)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DELAYED = "delayed"  # the phase of weight gradients that a backward leaves out


class Key(NamedTuple):
    """A collective or a gathered weight: the segment that starts it, and its number there.

    Attributes:
        phase: the segment's phase.
        offset: distance of the segment's block from the block that uses the key.
        number: counted from the segment's end, so that equal ends have equal numbers.
    """

    phase: str
    offset: int
    number: int


class Parameter(NamedTuple):
    """A parameter of the block at ``offset`` from the current block; ``offset`` None: of no block."""

    offset: int | None
    name: str


class Work(NamedTuple):
    """Computation without communication: its seconds, the bytes it leaves in use, and its peak above those before."""

    seconds: float
    held: int
    peak: float


class Start(NamedTuple):
    """The start of a collective; ``nbytes`` as for ``gpt4d.planner.device.Device.start``."""

    key: Key
    kind: str
    axis: str
    nbytes: float


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
        first: computes the gradient.
        further: computes it and adds it to an earlier one.
        shape: the gradient's shape.
        dtype: the gradient's dtype.
    """

    weight: Parameter
    first: Sequence[Event]
    further: Sequence[Event]
    shape: tuple[int, ...]
    dtype: str


class Term(NamedTuple):
    """The gradient of a parameter that is not gathered, in memory that the layers have taken for it."""

    parameter: Parameter
    shape: tuple[int, ...]
    dtype: str


Event = Work | Start | Wait | Gather | Drop | Scatter | Term
