"""Reports of a run to all of its trackers."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gpt4d.config import flattened
from gpt4d.runtime import activity
from gpt4d.runtime.writing import warn
from gpt4d.trackers.tracker import Tracker

_NOT_IN_TAGS = re.compile(r"[^-/\w.]")  # characters that TensorBoard replaces, and MLflow partly rejects
_SEPARATOR = re.compile(r"\.*/[./]*")  # MLflow rejects a//b and a/../b


END_S, STOP_S = 45.0, 8.0  # timeouts for trackers to write everything: after the last step, after a signal
_WAITING = 10_000  # maximum number of lines that wait for a tracker
_KEPT = "metrics.jsonl has all values"


class RunTrackers:
    """Sends the lines of metrics.jsonl to trackers.

    Each tracker has a thread, so a slow tracker delays neither a step nor another tracker. A tracker that fails gets no
    other lines, and the training continues. A restart repeats steps if its checkpoint is older than the last line.
    Repeated steps are not sent again, so each tracker has one curve.

    Args:
        trackers: the started trackers by name.
        earlier: the lines of earlier starts of the run.

    Attributes:
        hang: whether a tracker has not ended in time. Its package may also block the end of Python.
    """

    def __init__(self, trackers: Mapping[str, Tracker], earlier: Sequence[dict]):
        self._last_step = max((line.get("step", 0) for line in earlier), default=0)
        self._events = {line.get("event") for line in earlier if line.get("step", 0) == self._last_step}
        self._senders = [_Sender(name, tracker) for name, tracker in trackers.items()]
        self.hang = False

    def log(self, values: Mapping[str, Any]) -> None:
        """Send the numbers of a line, and text and image of a sample."""
        step, event = values.get("step", 0), values.get("event")
        if not self._senders or step < self._last_step or (step == self._last_step and event in self._events):
            return
        scalars = {
            tag(key, event): float(value)
            for key, value in flattened(values, "/").items()
            if isinstance(value, int | float) and key != "step"
        }
        if scalars:
            self._send(lambda tracker: tracker.scalars(scalars, step))
        if event == "sample":
            if text := values.get("text"):
                self._send(lambda tracker: tracker.text("sample/text", text, step))
            if (image := values.get("image")) and Path(image).is_file():
                self._send(lambda tracker: tracker.image("sample/image", Path(image), step))

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for sender in self._senders:
            sender.send(call)

    def close(self, briefly: bool = False) -> None:
        """Wait until everything is sent and written, at most for ``END_S``. A second call does nothing.

        ``briefly``: after a signal or an error, at most for ``STOP_S``.
        """
        deadline = time.monotonic() + (STOP_S if briefly else END_S)
        for sender in self._senders:
            sender.finish()
        with activity.unlimited():
            for sender in self._senders:
                self.hang |= not sender.ended(max(0.0, deadline - time.monotonic()))
        self._senders = []


class _Sender:
    """Calls one tracker on a thread. Whatever the tracker does costs a warning."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self._tracker = name, tracker
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()  # None: the last call
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        if self._calls.qsize() < _WAITING:
            self._calls.put(call)
            return
        if not self._dropped:
            warn(f"{self.name}: it is slow or does not answer; lines are dropped while {_WAITING:,} wait, and {_KEPT}")
        self._dropped += 1

    def finish(self) -> None:
        self._calls.put(None)

    def ended(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the tracker to end, and return whether it has."""
        self._thread.join(timeout_s)
        hangs = self._thread.is_alive()
        if hangs:
            waiting = self._dropped + self._calls.qsize()
            warn(f"{self.name}: does not answer; about {waiting:,} line(s) are not sent, and {_KEPT}")
        elif self._dropped:
            warn(f"{self.name}: {self._dropped:,} line(s) were dropped; {_KEPT}")
        return not hangs

    def _work(self) -> None:
        try:
            for call in iter(self._calls.get, None):
                call(self._tracker)
            self._tracker.close()
        except BaseException as error:  # also SystemExit, which ends a thread without a message
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            warn(f"{self.name}: {problem}; nothing more is logged to it, and {_KEPT}")


def tag(key: str, event: str | None = None) -> str:
    """Return the tag of a number, which is the same in every tracker: ``comm/x/bytes``, ``validation/loss``."""
    return _SEPARATOR.sub("/", _NOT_IN_TAGS.sub("_", f"{event}/{key}" if event else key))
