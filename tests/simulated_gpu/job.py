"""A job on simulated GPUs, of which this process is one rank.

set_up()  # once, in a process of its own
with simulated_job(world_size=8, rank=7) as job:
    ...  # torch.device(DEVICE, 0) is the rank's GPU
job.problems.check()
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from gpt4d.parallel.comm import collectives
from gpt4d.parallel.layers import attention_backends
from gpt4d.parallel.resharding.plan import MIN_CHUNK_BYTES
from gpt4d.runtime.job import initialize
from gpt4d.runtime.launch import Launch
from gpt4d.runtime.watchdog import Watchdog
from gpt4d.training import preflight
from tests.simulated_gpu.graphs import Graph, Graphs
from tests.simulated_gpu.memory import Memory
from tests.simulated_gpu.operations import DEVICE, HostReads, Operations
from tests.simulated_gpu.problems import Problems, call_site
from tests.simulated_gpu.process_group import SimulatedGroup
from tests.simulated_gpu.streams import Clock, Event, Stream, ThreadState, is_of_autograd, merge, observed_threads

GPU = torch.device("privateuseone", 0)  # torch's name of DEVICE before set_up; 0 is the only index it supports


class _DeviceModule(_DummyBackendModule):
    def is_available(self) -> bool:  # otherwise the copy in torch.tensor(…, device=…) is not observed
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # activation checkpointing asks for it
        return [torch.bfloat16]


def set_up() -> None:
    """Register the device. This changes the process permanently."""
    _setup_privateuseone_for_python_backend(DEVICE, _DeviceModule())
    for sizes in (MIN_CHUNK_BYTES, collectives.PROBE_ELEMENTS, preflight.ELEMENTS):
        sizes[DEVICE] = 4096  # small, so that a small tensor is sent in several messages


class Job:
    """The state of the rank's GPU."""

    def __init__(self, problems: Problems):
        self.problems = problems  # found so far
        self.streams: list[Stream] = []  # by number; the first one is the default stream
        self.compute_dtype: torch.dtype | None = None  # of products; None for any
        self.overlaps = Counter[str]()  # by name: collectives that the computation waits for after other operations
        self._threads = threading.local()
        self._main = ThreadState(Stream(self, "default stream"))
        self._threads.state = self._main
        self.memory, self.graphs = Memory(self), Graphs(self)

    # --------------------------------------------------------------------------------------------- threads

    @property
    def thread(self) -> ThreadState:
        """The state of the calling thread. Threads of autograd, which torch prepares, have the main thread's."""
        if not hasattr(self._threads, "state"):
            state = ThreadState(self.streams[0])
            self._threads.state = self._main if is_of_autograd() else state
        return self._threads.state

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the operations of the calling thread."""
        _ = self.thread
        with HostReads(self), Operations(self):
            yield

    def check_thread(self, action: str) -> None:
        if self.thread.gpu != GPU.index:
            name = threading.current_thread().name
            self.problems.report("device", f"the thread {name} {action}, but has not selected the rank's GPU")
            self.thread.gpu = GPU.index  # report the thread once

    def host_waits(self, reason: str, clock: Clock) -> None:
        """Note that the calling thread waits for the operations of ``clock``."""
        self.graphs.check_host("waits")
        self.check_thread("waits for the GPU")
        self.problems.report_wait(reason)
        merge(self.thread.clock, clock)

    # ----------------------------------------------------------------------------------- parts of torch.cuda

    def current_stream(self, device=None) -> Stream:
        return self.thread.stream

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the calling thread's current stream."""
        if stream is None:
            yield
            return
        self.check_thread("selects a stream")
        thread = self.thread
        before, thread.stream = thread.stream, stream
        try:
            yield
        finally:
            thread.stream = before

    def new_stream(self, device=None, priority: int = 0) -> Stream:
        self.check_thread("creates a stream")
        return Stream(self, f"stream of {call_site()}")

    def set_device(self, device) -> None:
        self.thread.gpu = device if isinstance(device, int) else torch.device(device).index

    def current_device(self) -> int:
        return self.thread.gpu


@contextmanager
def simulated_job(
    world_size: int = 1,
    rank: int = 0,
    host_waits: Collection[tuple[str, str]] = (),
    first_waits: Collection[tuple[str, str]] = (),
    watchdog: Watchdog | None = None,
) -> Iterator[Job]:
    """Make this process a rank of a job, which ``watchdog`` watches. Waits: as for ``Problems``."""
    job = Job(Problems(host_waits, first_waits))
    new_group = dist.new_group

    def new_simulated_group(ranks=None, timeout=None, backend=None, **others):
        return new_group(ranks, timeout, **others)

    replaced = {
        "Stream": job.new_stream,
        "Event": partial(Event, job),
        "current_stream": job.current_stream,
        "stream": job.stream,
        "set_device": job.set_device,
        "current_device": job.current_device,
        "CUDAGraph": lambda: Graph(job.graphs),
        "graph_pool_handle": object,
        "empty_cache": lambda: None,
        "cudart": lambda: job.memory,
        "check_error": lambda code: None,
    }
    dist.Backend.register_backend(
        "simulated", lambda options, _: SimulatedGroup(job, options), extended_api=True, devices=["cpu", DEVICE]
    )
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **replaced))
        stack.enter_context(observed_threads(job))
        stack.enter_context(patch.object(dist, "new_group", new_simulated_group))
        stack.enter_context(patch.object(attention_backends, "has_variable_length_attention", lambda device: True))
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)  # after an error
        launch, backend = Launch(rank, world_size), f"cpu:simulated,{DEVICE}:simulated"
        stack.enter_context(initialize(launch, dist.HashStore(), GPU, 120.0, watchdog, backend))
        stack.enter_context(job.observed())
        yield job
