"""The memory of a simulated GPU: which operations use a storage, and when another tensor may reuse its memory.

As torch's caching allocator does, it gives the memory of a freed storage to the next storage on the stream on which it
was allocated, without waiting for other streams. ``record_stream`` makes it wait for a stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.simulated_gpu.problems import Site, call_site
from tests.simulated_gpu.streams import Clock, Stream, covers, merge

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job


class Use(NamedTuple):
    """An operation that reads or writes a storage."""

    stream: Stream
    number: int
    operation: str
    site: Site

    @property
    def clock(self) -> Clock:
        return {self.stream.number: self.number}

    def __str__(self) -> str:
        return f"{self.operation} on the {self.stream.name} at {self.site}"


class Block:
    """The memory of a storage on the GPU, or of a pinned storage on the host, and its uses by operations."""

    def __init__(self, allocated: Use | None, nbytes: int):
        self.allocated, self.nbytes = allocated, nbytes
        self.write = allocated  # the last write; on the GPU, the allocation counts as one
        self.reads: dict[int, Use] = {}  # the last read of each stream since the last write
        self.recorded = set[int]()  # streams of ``record_stream``
        self.ended: Clock = {}  # the operations that have ended before freed memory is reused

    def uses(self, writes: bool) -> list[Use]:
        """Return the earlier uses that must be complete before the memory is read, or before it is written."""
        return [*([self.write] if self.write else ()), *(self.reads.values() if writes else ())]

    def note(self, use: Use, writes: bool) -> None:
        if writes:
            self.write = use
            self.reads.clear()
        else:
            self.reads[use.stream.number] = use


class Memory:
    """All storages that operations of a job use."""

    def __init__(self, job: Job):
        self.job, self.nbytes, self.peak = job, 0, 0  # bytes of the storages on the GPU now, and their maximum
        self._blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, Block] = weakref.WeakKeyDictionary()
        self._registered: dict[int, Block] = {}  # pinned memory by its address
        self._freed: deque[Block] = deque()

    # ------------------------------------------------------------------------------------------- storages

    def add_new(self, tensor: torch.Tensor, operation: str) -> Block | None:
        """Allocate the storage of a tensor on the current stream and return its block; None if it is not new."""
        storage = tensor.untyped_storage()
        if storage in self._blocks:
            return None
        self._check_freed()
        stream = self.job.current_stream()
        block = Block(Use(stream, stream.start_operation(), operation, call_site()), storage.nbytes())
        self._blocks[storage] = block
        self.nbytes += block.nbytes
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._free, block).atexit = False
        self.job.graphs.note_new(block)
        return block

    def blocks(self, tensors: Iterable[torch.Tensor], operation: str) -> list[Block]:
        """Return the blocks of an operation's tensors, without tensors in pageable memory of the host."""
        found = []
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):  # new here: a tensor of an earlier job, which a cache keeps
                self.add_new(tensor, operation)
            if block := self._block(tensor):
                found.append(block)
        return found

    def _free(self, block: Block) -> None:  # in any thread, at any time
        self.nbytes -= block.nbytes
        for stream in block.recorded:  # the allocator records an event on each of them
            merge(block.ended, self.job.streams[stream].clock)
        self._freed.append(block)

    def _check_freed(self) -> None:
        """Report freed memory that the current stream may now reuse although other streams use it."""
        stream, others = self.job.current_stream(), []
        while self._freed:
            block = self._freed.popleft()
            if block.allocated.stream is not stream:
                others.append(block)
                continue
            merge(block.ended, stream.clock)
            for use in block.uses(writes=True):
                if not covers(block.ended, use.clock):
                    self.job.problems.report(
                        f"reuse after {use.site}",
                        f"the {stream.name} reuses the memory of a tensor of {block.allocated} that was freed before "
                        f"{use} has ended",
                    )
        self._freed.extend(others)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        self.blocks([tensor], "record_stream")[0].recorded.add(stream)

    # ----------------------------------------------------------------------------------------- host memory

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.job.check_thread("pins memory")
        self._blocks[tensor.untyped_storage()] = Block(None, 0)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._block(tensor) is not None

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.job.check_thread("pins memory")
        self._registered[pointer] = Block(None, nbytes)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self._check_block(self._registered.pop(pointer), writes=True, verb="unpins")
        return 0

    def check_host(self, tensor: torch.Tensor, writes: bool) -> None:
        """Report a use of pinned memory by the host while the GPU may still write to it or read it."""
        if block := self._block(tensor):
            self._check_block(block, writes, "writes to" if writes else "reads")

    def _check_block(self, block: Block, writes: bool, verb: str) -> None:
        for use in block.uses(writes):
            if not covers(self.job.thread.clock, use.clock):
                self.job.problems.report("pinned", f"the host {verb} pinned memory before {use} has ended")

    def _block(self, tensor: torch.Tensor) -> Block | None:
        """Return the block of a tensor on the GPU or in pinned memory."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage)
        return self._registered.get(storage.data_ptr()) if block is None and tensor.is_cpu else block

    # ------------------------------------------------------------------------------------------ operations

    def use(self, operation: str, stream: Stream, reads: list[Block], writes: list[Block]) -> None:
        """Queue an operation; report a problem if it may start before earlier operations on its memory have ended."""
        self.job.graphs.note_use(operation, stream, reads, writes)
        use = Use(stream, stream.start_operation(), operation, call_site())
        for blocks, writing in ((reads, False), (writes, True)):
            for block in blocks:
                for earlier in block.uses(writing):
                    if not covers(stream.clock, earlier.clock):
                        verb = "writes to" if writing else "reads"
                        self.job.problems.report(
                            f"order after {earlier.site}",
                            f"{operation} on the {stream.name} {verb} memory and does not wait for {earlier}",
                        )
                        merge(stream.clock, earlier.clock)  # report consequences of one problem once
        for block in reads:
            block.note(use, writes=False)
        for block in writes:
            block.note(use, writes=True)
