"""A virtual device: operations on large tensors take its time instead of the processor's, and collectives are real.

Many ranks that share a few cores cannot show what overlap gains: while one rank computes, others wait for its core.

    with VirtualDevice(flops=2e10, memory_gb_s=0.3, launch_us=20) as device:
        step()                  # of any program written in torch: gpt4d, DDP, FSDP2, megatron-core, AxoNN
        device.synchronize()
    device.report()

Values computed under the device are meaningless. Its model:

- A device executes operations sequentially. Each takes ``max(FLOPs / rate, bytes / bandwidth)`` plus the time of a
  launch. Its large results are views of one block of zeros, and an operation in place does not change large tensors.
- An operation whose tensors are all small (losses, counters, token ids) is computed by the processor and takes no time
  of the device. Views and uninitialized tensors take no time either. The host waits for the device where a value is
  read.
- A collective, or a message to another rank, starts when the device has finished all work before it. It moves its
  bytes concurrently with later work. Work after a wait starts when the wait has returned. A thread in which gpt4d
  communicates is a stream of its own. It starts a task when the device has executed all operations launched before it.
- With ``intra_host_mb_s``, a rank sends inside its host at this rate, through sockets or gpt4d's shared memory. A
  result is not available before the rank has sent its bytes (``virtual_streams.intra_host_bytes``) at this rate, and
  the transfers of a rank are sequential. They start when this rank does, so a rank waits for a peer that starts later,
  but not for the peer's transfer. Links between hosts have the rate of the network.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.laboratory.virtual_operations import Operations, has_kernel, host_reads, tensors_in
from benchmarks.laboratory.virtual_streams import HostLinks, Stream
from gpt4d.parallel.comm import stats
from gpt4d.parallel.comm.cpu.comm_thread import CommFuture, CommThread
from gpt4d.parallel.comm.cpu.shared_memory import Combine, SharedMemory, SharedMemoryCollective

_PLAIN = torch.Tensor, torch.nn.Parameter
_MAX_LATE_SHARE = 0.05  # maximum share of the elapsed time; beyond it the processor was the bottleneck


class VirtualDevice:
    """Context manager under which this process computes on a virtual device. It may be entered again.

    Args:
        flops: floating-point operations per second of matrix products, attention and convolutions.
        memory_gb_s: rate in GB/s at which operations read and write.
        launch_us: least time of an operation.
        intra_host_mb_s: MB/s that a rank sends to other ranks of its host; None: the rate of the transport.
        ranks_per_host: ranks of a host; hosts have consecutive ranks.
        small: largest number of elements of a small tensor.
        skips_masked_products: causal attention takes half of the time of attention to all keys.
        source: the functions of ``time`` that it uses: perf_counter, process_time and sleep.
    """

    def __init__(
        self,
        flops: float,
        memory_gb_s: float,
        launch_us: float,
        intra_host_mb_s: float | None = None,
        ranks_per_host: int = 1,
        small: int = 8192,
        skips_masked_products: bool = False,
        source: Any = time,
    ):
        self.operations = Operations(flops, memory_gb_s, launch_us, small, skips_masked_products)
        self.links = HostLinks(intra_host_mb_s, ranks_per_host)
        self.source = source
        self._thread = threading.local()  # a task may outlast the context that submitted it
        self._posted: WeakKeyDictionary[SharedMemoryCollective, float] = WeakKeyDictionary()  # times of their starts

    def __enter__(self) -> "VirtualDevice":
        self._entered, self._entered_cpu = self.source.perf_counter(), self.source.process_time()
        self.stream = Stream(self.source, self._entered)
        dispatch = self._thread.dispatch = Dispatch(self, self.stream)
        self._context = ExitStack()
        for place, name, replacement in (
            (dist.Work, "wait", self._wait(dist.Work.wait)),
            # gpt4d's clock, threads and shared memory on CPUs
            (stats, "time", SimpleNamespace(perf_counter=self._now, monotonic=time.monotonic)),
            (CommThread, "submit", self._submit(CommThread.submit)),
            (CommFuture, "wait", self._wait_for_task(CommFuture.wait)),
            (SharedMemory, "post", self._post(SharedMemory.post)),
            (SharedMemoryCollective, "receive", self._receive(SharedMemoryCollective.receive)),
        ):
            self._context.enter_context(patch.object(place, name, replacement))
        self._context.enter_context(dispatch)
        return self

    def __exit__(self, *error) -> None:
        self._context.__exit__(*error)
        self.links.clear()

    def synchronize(self) -> None:
        """Return when the device has executed all operations."""
        self.stream.synchronize()

    def report(self) -> dict[str, float | bool]:
        """Return what happened since the device was entered.

        ``seconds``: elapsed. ``busy_s``: the device executed operations. ``host_cpu_s``: processor time of this
        process, all threads. ``host_late_s``: the device was idle although no collective was waited for. ``cpu_bound``:
        ``host_late_s`` exceeds 5 % of the time, so the seconds do not count.
        """
        seconds = self.source.perf_counter() - self._entered
        return {
            "seconds": seconds,
            "busy_s": self.stream.busy_s,
            "host_cpu_s": self.source.process_time() - self._entered_cpu,
            "host_late_s": self.stream.late_s,
            "cpu_bound": self.stream.late_s > _MAX_LATE_SHARE * seconds,
        }

    @property
    def dispatch(self) -> "Dispatch":
        """The dispatch of this thread."""
        return self._thread.dispatch

    def _now(self) -> float:
        # A wait exposes the time from when the device reaches it, as with the events of a GPU's stream.
        return max(self.source.perf_counter(), self.dispatch.stream.clock)

    def _submit(self, original: Callable) -> Callable:
        """Return the method ``submit`` of a CommThread, whose task executes on a stream of its own."""

        def submit(worker: CommThread, function: Callable[[], Any]) -> CommFuture:
            stream = Stream(self.source, self.dispatch.stream.clock)

            def run() -> Any:
                stream.synchronize()
                with Dispatch(self, stream) as self._thread.dispatch:
                    result = function()
                    stream.synchronize()
                return result

            return original(worker, run)

        return submit

    def _wait_for_task(self, original: Callable) -> Callable:
        def wait(task: CommFuture) -> Any:
            with self.dispatch.stream.waiting():
                return original(task)

        return wait

    def _post(self, original: Callable) -> Callable:
        """Return the method ``post`` of a SharedMemory, which copies what the device has computed."""

        def post(memory: SharedMemory, tensor: torch.Tensor, combine: Combine) -> SharedMemoryCollective:
            self.dispatch.stream.synchronize()
            started = self.source.perf_counter()
            with self._copying():
                collective = original(memory, tensor, combine)
            self._posted[collective] = started
            return collective

        return post

    def _receive(self, original: Callable) -> Callable:
        """Return the method ``receive`` of a collective through shared memory, which takes the time of the links."""

        def receive(collective: SharedMemoryCollective) -> torch.Tensor:
            with self._copying():
                result, sent, size = original(collective), collective.like, collective.memory.size
                if collective not in self._posted:  # it was posted outside of this context
                    return result
                # An all-reduce goes round the ring twice, an all-gather or a reduce-scatter once, and a shift one step.
                if result is not sent and result.nbytes == sent.nbytes:
                    nbytes = float(sent.nbytes)
                else:
                    nbytes = (2 if result is sent else 1) * (size - 1) / size * max(sent.nbytes, result.nbytes)
                self.dispatch.stream.sleep_until(self.links.reserve(self._posted[collective], nbytes))
                return result

        return receive

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Wait for other ranks. Copies and sums of shared memory take no time of the device, as ``links`` counts it."""
        dispatch = self.dispatch
        outer, dispatch.free = dispatch.free, True
        with dispatch.stream.waiting():
            yield
        dispatch.free = outer

    def _wait(self, original: Callable) -> Callable:
        """Return the method ``wait`` of a torch.distributed.Work under the device."""

        def wait(work: dist.Work, *timeout) -> bool:
            if (in_flight := self.links.pop_work(work)) is None:
                return original(work, *timeout)
            with in_flight.stream.waiting():
                result = original(work, *timeout)
                in_flight.stream.sleep_until(in_flight.ready)
            return result

        return wait


class Dispatch(TorchDispatchMode):
    """Executes a thread's operations on a stream of a device. ``free``: they take no time."""

    def __init__(self, device: VirtualDevice, stream: Stream):
        super().__init__()
        self.operations, self.links, self.stream, self.free = device.operations, device.links, stream, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:  # DTensor's, which computes shapes with them
            return func(*args, **kwargs)
        if not all(kind in _PLAIN for kind in types):  # a DTensor issues operations on plain tensors
            return NotImplemented
        if "c10d" in func.namespace:
            return self._communicate(func, args, kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if not has_kernel(func, tensors, kwargs):
            return func(*args, **kwargs)
        if host_reads(func, tensors):
            self.stream.synchronize()
            return func(*args, **kwargs)
        cost = self.operations.cost(func, args, kwargs)
        # A small part of a large result, such as a row, is not written either: zeros serve all results.
        if not (cost.large or (func._schema.is_mutable and any(map(self.operations.in_zeros, tensors)))):
            return func(*args, **kwargs)
        self._wait_for_results(tensors)
        if not self.free:
            self.stream.launch(cost.seconds)
        return self.operations.result(cost, tensors)

    def _communicate(self, func, args: tuple, kwargs: dict):
        name = func._schema.name.split("::")[1]
        if name == "_wrap_tensor_autograd":
            return func(*args, **kwargs)
        if name == "wait_tensor":
            with self.stream.waiting():
                result = func(*args, **kwargs)
                if in_flight := self.links.pop_result(result):
                    self.stream.sleep_until(in_flight.ready)
            return result
        self.stream.synchronize()
        started = self.stream.source.perf_counter()
        result = func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        reusable = [tensor for tensor in tensors_in(result) if not self.operations.in_zeros(tensor)]
        self.links.track(self.stream, started, name, arguments, result, reusable)
        return result

    def _wait_for_results(self, tensors: list[torch.Tensor]) -> None:
        """Delay the stream until the collectives that compute ``tensors`` are complete.

        C++ code, such as DDP's, waits for them without a call that the device sees.
        """
        for tensor in tensors if self.links.has_results else ():
            if in_flight := self.links.pop_result(tensor):
                self.stream.advance_to(max(in_flight.ready, self.stream.source.perf_counter()))
