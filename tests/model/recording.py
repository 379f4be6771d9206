"""The collectives that a step starts, and those that are planned for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from gpt4d.parallel.comm import collectives
from gpt4d.planner.device import KINDS, Device, sent_bytes


@contextmanager
def recorded_collectives() -> Iterator[tuple[list, list]]:
    """Record (kind, axis, bytes) of each collective that is started, and of each that is planned, in their order."""
    started, planned = [], []

    def recorded(kind, start):
        def record(tensor, axis, *rest, **options):
            if axis.size > 1:
                started.append((kind, axis.name, sent_bytes(kind, axis.size, tensor.nbytes)))
            return start(tensor, axis, *rest, **options)

        return record

    class RecordingDevice(Device):
        def start(self, kind, axis, nbytes):
            if self.links.sizes[axis] > 1:
                planned.append((kind, axis, sent_bytes(kind, self.links.sizes[axis], nbytes)))
            return super().start(kind, axis, nbytes)

    patches = {f"start_{kind}": recorded(kind, getattr(collectives, f"start_{kind}")) for kind in KINDS}
    with patch.multiple(collectives, **patches), patch("gpt4d.planner.step.Device", RecordingDevice):
        yield started, planned
