"""The collectives that a step starts, and those that are planned for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from gpt4d.parallel.comm import collectives
from gpt4d.planner.device import KINDS, Device, sent_bytes
from gpt4d.planner.topology import ALL_TO_ALL


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

    start_exchange = collectives.start_all_to_all

    def exchange(sent, sent_rows, received_rows, axis, *rest):
        if axis.size > 1:
            others = len(sent) - sent_rows[axis.index]
            started.append((ALL_TO_ALL, axis.name, sent[:1].nbytes * others))
        return start_exchange(sent, sent_rows, received_rows, axis, *rest)

    class RecordingDevice(Device):
        def start(self, kind, axis, nbytes, *received):
            if self.links.sizes[axis] > 1:
                planned.append((kind, axis, sent_bytes(kind, self.links.sizes[axis], nbytes)))
            return super().start(kind, axis, nbytes, *received)

    patches = {f"start_{kind}": recorded(kind, getattr(collectives, f"start_{kind}")) for kind in KINDS}
    patches["start_all_to_all"] = exchange
    with patch.multiple(collectives, **patches), patch("gpt4d.planner.step.Device", RecordingDevice):
        yield started, planned
