"""Reports of a run to all of its trackers."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gpt4d import activity
from gpt4d.config import flattened
from gpt4d.trackers.tracker import Tracker
from gpt4d.writing import warn

_NOT_IN_TAGS = re.compile(r"[^-/\w.]")  # characters that TensorBoard replaces, and MLflow partly rejects
_SEPARATOR = re.compile(r"\.*/[./]*")  # MLflow rejects a//b and a/../b


class RunTrackers:
    """Sends the lines of metrics.jsonl to trackers.

    A thread calls the trackers, so a slow tracker delays no step. A tracker that fails gets no further lines, and the
    training continues. A restart repeats steps if its checkpoint is older than the last line. Repeated steps are not
    sent again, so each tracker has one curve.

    Args:
        trackers: the started trackers by name.
        earlier: the lines of earlier starts of the run.
    """

    def __init__(self, trackers: Mapping[str, Tracker], earlier: Sequence[dict]):
        self._trackers = dict(trackers)
        self._last_step = max((line.get("step", 0) for line in earlier), default=0)
        self._events = {line.get("event") for line in earlier if line.get("step", 0) == self._last_step}
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if trackers:
            self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
            self._thread.start()

    def log(self, values: Mapping[str, Any]) -> None:
        """Send the numbers of a line, and text and image of a sample."""
        step, event = values.get("step", 0), values.get("event")
        if not self._thread or step < self._last_step or (step == self._last_step and event in self._events):
            return
        scalars = {
            tag(key, event): float(value)
            for key, value in flattened(values, "/").items()
            if isinstance(value, int | float) and key != "step"
        }
        if scalars:
            self._calls.put(lambda tracker: tracker.scalars(scalars, step))
        if event == "sample":
            if text := values.get("text"):
                self._calls.put(lambda tracker: tracker.text("sample/text", text, step))
            if (image := values.get("image")) and Path(image).is_file():
                self._calls.put(lambda tracker: tracker.image("sample/image", Path(image), step))

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            self._call_all(call)

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                problem = " ".join(f"{type(error).__name__}: {error}".split())
                warn(f"{name}: {problem}; nothing more is logged to it, and metrics.jsonl has all values")
                del self._trackers[name]

    def close(self) -> None:
        """Wait until everything is sent and written. A second call does nothing."""
        if self._thread:
            with activity.unlimited():
                self._calls.put(None)
                self._thread.join()
                self._call_all(lambda tracker: tracker.close())
            self._thread = None


def tag(key: str, event: str | None = None) -> str:
    """Return the tag of a number, which is the same in every tracker: ``comm/x/bytes``, ``validation/loss``."""
    return _SEPARATOR.sub("/", _NOT_IN_TAGS.sub("_", f"{event}/{key}" if event else key))
