"""A store that does not answer, or whose server ends, is lost; a suspended process does not take its own for lost."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from gpt4d.runtime import rendezvous
from gpt4d.runtime.rendezvous import DeadlineStore, StoreLost

_SERVER = """
import signal, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


@pytest.fixture
def server():
    """Return a process that holds a store, and its port."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def connect(port: int, deadline_s: float) -> DeadlineStore:
    return DeadlineStore(dist.TCPStore("localhost", port, wait_for_workers=False), deadline_s)


def test_a_frozen_server_is_lost_after_the_deadline_and_is_not_asked_again(server):
    process, port = server
    store = connect(port, 0.5)
    assert store.add("count", 2) == 2 and store.get("nothing") is None
    assert [store.set_first("first", value) for value in ("a", "b")] == ["a", "a"] == [store.get("first")] * 2
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # on a busy machine it may answer once more before it stops
    with pytest.raises(StoreLost, match="does not answer"):
        store.add("count", 1)
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(StoreLost, match="does not answer"):
        store.set("key", "value")


def test_a_server_that_ends_is_lost_at_once(server):
    process, port = server
    store = connect(port, 100.0)
    store.set("key", "value")
    process.kill()
    with pytest.raises(StoreLost, match="has ended"):
        store.get("key")


class SlowStore:
    """A store whose first call does not return before ``answer`` is set."""

    def __init__(self):
        self.answer = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.answer.wait()
        return amount


def test_time_in_which_the_process_was_suspended_does_not_count(monkeypatch):
    store, suspended = SlowStore(), []

    class Suspended(rendezvous.Future):
        """A wait in which the process is suspended for longer than the deadline, and the answer arrives after that."""

        def result(self, timeout=None):
            if not suspended:
                suspended.append(time.sleep(0.6))
                store.answer.set()
                raise TimeoutError
            return super().result(timeout)

    monkeypatch.setattr(rendezvous, "Future", Suspended)
    monkeypatch.setattr(rendezvous, "SLICE_S", 0.1)
    assert DeadlineStore(store, 0.5).add("count", 3) == 3
