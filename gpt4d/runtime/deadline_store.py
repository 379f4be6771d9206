"""A store whose calls have a deadline. A store that has missed a deadline is lost, and is never called again."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch.distributed as dist

SLICE_S = 0.5  # a wait consists of short waits, so that time while the process is suspended does not count


class StoreLost(RuntimeError):
    """The store does not answer. ``ended``: its server has closed the connection."""

    def __init__(self, ended: bool):
        super().__init__("the store's server has ended" if ended else "the store does not answer")
        self.ended = ended


class DeadlineStore:
    """The calls of a store that the watchdog needs, each with a deadline. Any thread may call them.

    A client of torch's TCPStore waits forever for a frozen server. Here a separate thread calls the store, so that the
    caller can stop waiting. After the first failure, every call raises StoreLost immediately.

    Args:
        store: the store, which no other code may use.
        deadline_s: time in seconds after which a call has failed.
    """

    def __init__(self, store: dist.Store, deadline_s: float):
        self.deadline_s = deadline_s
        self._store, self._lost = store, dict[str, bool]()
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._answer, name="store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def check(self, key: str) -> bool:
        return self._call(lambda: self._store.check([key]))

    def get(self, key: str) -> str | None:
        """Return the value of ``key``, or None if the store does not have it."""
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: str) -> str:
        """Set ``key`` unless the store has it already. Return its value."""
        return self._call(lambda: self._store.compare_set(key, "", value).decode())

    def _call(self, function: Callable[[], Any]) -> Any:
        with self._lock:
            if self._lost:
                raise StoreLost(**self._lost)
            answer: Future = Future()
            self._calls.put((answer, function))
            for _ in range(max(1, round(self.deadline_s / SLICE_S))):
                try:
                    return answer.result(min(SLICE_S, self.deadline_s))
                except FutureTimeout:
                    continue
                except RuntimeError:
                    self._lost = {"ended": True}
                    raise StoreLost(ended=True) from None
            self._lost = {"ended": False}
            raise StoreLost(ended=False)

    def _answer(self) -> None:
        while True:
            answer, function = self._calls.get()
            try:
                answer.set_result(function())
            except BaseException as error:  # ``_call`` raises it
                answer.set_exception(error)
