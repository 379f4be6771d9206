"""The life of a job: its ranks meet, have a process group, watch over each other, and end together."""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gpt4d.config import ConfigError, NodeError
from gpt4d.runtime.launch import Launch, device_of, tell_error
from gpt4d.runtime.watchdog import Failure, Watchdog

_MEETING_S = 300.0  # for all ranks to come
_LEAVING_S = 60.0  # for all ranks to end
_TELLING_S = 3.0  # for the others to hear why the job ends
_ORDERLY = ConfigError, SystemExit  # are raised on all ranks alike


@dataclass
class Job:
    """This rank's part of it: its device and, where there are others, the watch over them."""

    device: torch.device
    watch: Watchdog | None = None


@contextmanager
def process_group(launch: Launch, device: torch.device | None = None) -> Iterator[Job]:
    """The process group of the whole job: NCCL for tensors on GPUs, gloo for those of the host.

    What is raised inside, but for a ConfigError, which all ranks raise alike, ends the job on every rank, with one
    line that names the rank, its host and the cause.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        # macOS does not tell which cores a process may use.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // launch.local_world_size))
    if launch.master is None:
        with _initialized(launch, dist.HashStore(), device or device_of(launch)) as device:
            yield Job(device)
        return
    meeting = _Meeting(launch)
    try:
        device = device or device_of(launch)
        meeting.all_here()
        with _initialized(launch, meeting.store, device):
            yield Job(device, meeting.watch)
    except NodeError as error:  # the others wait for this rank
        meeting.watch.fail(str(error), of_another=False)
        meeting.leave(_TELLING_S)
        raise
    except _ORDERLY as error:
        meeting.leave(_LEAVING_S if isinstance(error, SystemExit) else _TELLING_S)
        raise
    except BaseException as error:
        meeting.fail(error)
    else:
        meeting.leave(_LEAVING_S)


@contextmanager
def _initialized(launch: Launch, store: dist.Store, device: torch.device) -> Iterator[torch.device]:
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, store=store)
    try:
        yield device
    except BaseException as error:
        if isinstance(error, _ORDERLY):
            dist.destroy_process_group()  # after another error it would wait for ranks that are gone
        raise
    dist.destroy_process_group()


class _Meeting:
    """The store that all ranks know, from the first to the last of them, and the watch that goes through it."""

    def __init__(self, launch: Launch):
        self.launch = launch
        self.store, for_watch = self._connected(server=launch.rank == 0), self._connected(server=False)
        self.store.set(f"host/{launch.rank}", socket.gethostname())
        self._ending = threading.Lock()
        first_host = launch.master.rsplit(":", 1)[0]
        self.watch = Watchdog(for_watch, launch.rank, launch.world_size, first_host, self._end)
        self.watch.start()

    def _connected(self, server: bool) -> dist.Store:
        host, port = self.launch.master.rsplit(":", 1)
        # torchrun has a server already, for all attempts; otherwise rank 0 is one.
        server = server and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience = timedelta(seconds=_MEETING_S)
        try:
            store = dist.TCPStore(host, int(port), is_master=server, timeout=patience, wait_for_workers=False)
        except RuntimeError as error:
            words = f"rank {self.launch.rank} on {socket.gethostname()} does not reach rank 0 at {self.launch.master}"
            raise ConfigError(f"{words} ({str(error).splitlines()[0]})") from None
        return dist.PrefixStore(f"gpt4d/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def all_here(self) -> None:
        """Returns when all ranks have come. ConfigError, naming some of them, if they do not."""
        if not self._together("here", _MEETING_S):
            size = self.launch.world_size
            missing = [rank for rank in range(size) if not self.store.check([f"host/{rank}"])]
            raise ConfigError(
                f"{len(missing)} of {size} ranks did not come within {_MEETING_S:.0f} s, the first of them rank "
                f"{missing[0]}; look for what it said, or for a node that does not start"
            )

    def leave(self, patience_s: float) -> None:
        """Waits until all ranks are through: srun ends those that are later than the first."""
        self._together("left", patience_s)
        self.watch.stop()
        self._last_word()

    def _last_word(self) -> None:
        """The store goes with rank 0: it stays a moment longer than those who may read there still."""
        deadline = time.monotonic() + _TELLING_S
        with suppress(RuntimeError):
            store = self.watch.store  # the main thread may be waiting on the other
            count = store.add("last word", 1)
            while self.launch.rank == 0 and count < self.launch.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                count = store.add("last word", 0)

    def _together(self, what: str, patience_s: float) -> bool:
        """Returns when all ranks have called this, or after a while; whether they have."""
        if self.store.add(what, 1) == self.launch.world_size:
            self.store.set(f"all {what}", "")
        try:
            self.store.wait([f"all {what}"], timedelta(seconds=patience_s))
        except RuntimeError:
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Ends this rank, and by telling them all others."""
        first = self._ending.acquire(blocking=False)
        # Many an error of a collective's comes of a rank that has ended: that one is to be named.
        of_another = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        try:
            failure = self.watch.fail(f"{type(error).__name__}: {error}", of_another)
        except RuntimeError:
            failure = self.watch.store_lost()
        if failure.rank == self.launch.rank:
            traceback.print_exception(error)
        self._say_and_exit(failure, first)

    def _end(self, failure: Failure) -> None:
        """Called by the watch, while the main thread may wait for ever."""
        self._say_and_exit(failure, self._ending.acquire(blocking=False))

    def _say_and_exit(self, failure: Failure, first: bool) -> None:
        if not first:
            threading.Event().wait(_LEAVING_S)  # another thread is at it
        rank, local_rank = self.launch.rank, self.launch.local_rank
        # The first rank of each node; or the second, where the first is what failed.
        if local_rank == 0 or (local_rank == 1 and failure.rank == rank - 1):
            tell_error(" ".join(str(failure).split()))
        sys.stdout.flush()
        self._last_word()
        os._exit(1)
