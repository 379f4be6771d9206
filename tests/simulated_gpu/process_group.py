"""Process groups of a simulated job: the process is one rank, and the remaining ranks do not exist.

As with NCCL, a collective runs on the stream of its group after the current stream's operations. ``Work.wait`` makes
the current stream wait for it, and drops the references to its tensors. Collectives of host memory return
immediately, as if all ranks had this rank's tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.simulated_gpu.streams import Event, Stream

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job


class Work:
    """A collective in flight, which has the references to its tensors until a stream waits for it."""

    def __init__(self, job: Job, name: str, end: Event, tensors: tuple[torch.Tensor, ...]):
        self.job, self.name, self.end, self._tensors = job, name, end, tensors
        self._computed: int | None = job.streams[0].length

    def wait(self, timeout=None) -> bool:
        stream = self.job.current_stream()
        if stream is self.job.streams[0] and self._computed is not None:
            self.job.overlaps[self.name] += stream.length > self._computed
            self._computed = None
        stream.wait_event(self.end)
        self._tensors = ()
        return True


class _Finished:
    """A collective that has ended."""

    def wait(self, timeout=None) -> bool:
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A process group for tensors of the simulated GPU and of the host."""

    def __init__(self, job: Job, options):
        super().__init__(options.group_rank, options.group_size)
        self.job, self._stream = job, None
        self._name = f"stream of the communicator of ranks {options.global_ranks_in_group or 'of the job'}"

    def getBackendName(self) -> str:
        return "simulated"

    def _get_backend(self, device):
        return self  # torch 2.15 asks it whether it joins messages; it does not

    def _start(
        self, name: str, sent: list[torch.Tensor], received: list[torch.Tensor], ratio: float | None = 1
    ) -> Work | _Finished:
        job, tensors = self.job, (*sent, *received)
        if tensors[0].is_cpu:
            return _Finished()
        job.check_thread(f"starts {name}")
        _check(job, name, tensors[0], tensors[-1], ratio)
        if self._stream is None:
            self._stream = Stream(job, self._name)
        self._stream.wait_stream(job.current_stream())
        job.memory.use(name, self._stream, job.memory.blocks(sent, name), job.memory.blocks(received, name))
        return Work(job, name, self._stream.record_event(), tensors)

    def allreduce(self, tensors, options=None):
        return self._start("all_reduce", tensors, tensors)

    def broadcast(self, tensors, options):
        assert not tensors[0].is_cpu or options.rootRank == self.rank(), "the root of a broadcast does not exist"
        return self._start("broadcast", tensors, tensors)

    def all_gather_single(self, output, input, options=None):
        if output.is_cpu:
            output.view(self.size(), -1).copy_(input.reshape(1, -1))
        return self._start("all_gather", [input], [output], self.size())

    def reduce_scatter_single(self, output, input, options=None):
        return self._start("reduce_scatter", [input], [output], 1 / self.size())

    def all_to_all_single(self, output, input, output_counts, input_counts, options=None):
        assert (sum(output_counts), sum(input_counts)) == (len(output), len(input))
        return self._start("all_to_all", [input], [output], ratio=None)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # their names in torch 2.11
    alltoall_base = all_to_all_single

    def allgather(self, outputs, inputs, options=None):
        for output in outputs[0]:
            assert output.is_cpu, "gpt4d gathers tensors of a GPU into one tensor"
            output.copy_(inputs[0])
        return _Finished()

    def gather(self, outputs, inputs, options=None):
        return self.allgather(outputs, inputs) if outputs else _Finished()

    def scatter(self, outputs, inputs, options=None):
        assert outputs[0].is_cpu, "gpt4d scatters nothing from a GPU"
        outputs[0].copy_(inputs[0][self.rank()])
        return _Finished()

    def send(self, tensors, peer: int, tag: int = 0):
        self._check_peer(peer)
        return self._start("send", tensors, [])

    def recv(self, tensors, peer: int, tag: int = 0):
        self._check_peer(peer)
        return self._start("receive", [], tensors)

    def _check_peer(self, peer: int) -> None:
        assert peer != self.rank() and 0 <= peer < self.size(), f"a message to or from rank {peer} of the group"

    def barrier(self, options=None):
        return _Finished()


def _check(job: Job, name: str, sent: torch.Tensor, received: torch.Tensor, ratio: float | None) -> None:
    """Report a collective that NCCL rejects. ``ratio``: number of received elements per sent one; None for any."""
    report = job.problems.report
    if not (sent.is_contiguous() and received.is_contiguous()):
        report("collective", f"{name} has a tensor that is not contiguous")
    if sent.dtype != received.dtype:
        report("collective", f"{name} has tensors of {sent.dtype} and {received.dtype}")
    if ratio is not None and received.numel() != sent.numel() * ratio:
        report("collective", f"{name} has tensors of {list(sent.shape)} and {list(received.shape)}")
