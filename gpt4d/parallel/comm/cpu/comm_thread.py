"""Threads that communicate concurrently with the computation."""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import torch


class CommFuture(Future):
    """A task of a worker. ``stopped``: time.perf_counter when it was complete."""

    stopped: float

    def wait(self) -> Any:
        """Wait until the task is complete; return its result or raise its error."""
        return self.result()

    def on_end(self, record: Callable[[float], None]) -> None:
        """Arrange for ``record`` to be called with ``stopped``, on the worker's thread."""
        self.add_done_callback(lambda task: record(cast(CommFuture, task).stopped))


class CommThread:
    """A thread that executes tasks in the order in which they were submitted, without recording for autograd.

    The thread ends with the process, whatever it waits for.

    Attributes:
        on_error: called on the thread with the error of a task, before ``CommFuture.wait`` raises it: the main thread
            may wait for the task much later. It is not called with an error of memory, which the main thread describes.
            None: nothing is called.
    """

    def __init__(self, name: str):
        self.on_error: Callable[[BaseException], None] | None = None
        self._tasks: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_execute, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._tasks.put, None)  # the thread has no reference to the worker

    def submit(self, function: Callable[[], Any]) -> CommFuture:
        task = CommFuture()
        self._tasks.put((task, function, self.on_error))
        return task

    def close(self) -> None:
        """End the thread after all submitted tasks."""
        self._stop()
        self._thread.join()


_Submitted = tuple[CommFuture, Callable[[], Any], Callable[[BaseException], None] | None]


def _execute(tasks: queue.SimpleQueue[_Submitted | None]) -> None:
    with torch.no_grad():
        while item := tasks.get():
            task, function, on_error = item
            try:
                result = function()
            except BaseException as error:  # ``CommFuture.wait`` raises it
                task.stopped = time.perf_counter()
                try:
                    if on_error and not isinstance(error, torch.OutOfMemoryError):
                        on_error(error)
                finally:
                    task.set_exception(error)
            else:
                task.stopped = time.perf_counter()
                task.set_result(result)
                del result
            del item, task, function, on_error  # else the tensors of the last task live until the next task
