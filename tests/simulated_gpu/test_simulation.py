"""The simulated GPU reports each kind of mistake, and accepts the same code without the mistake."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.comm.transport import all_gather
from tests.simulated_gpu.job import GPU, simulated_job
from tests.simulated_gpu.programs import Programs, ones

PROGRAMS = Programs()
reports = PROGRAMS.reports
correct = reports("")
READS, COPIES = (f"the host waits for the GPU: it {verb}" for verb in ("reads a value", "copies"))
NOT_SELECTED = "but has not selected the rank's GPU"


def on_a_stream_that_waits(function: Callable[[], object]) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    return stream


def allowed() -> None:
    torch.cuda.current_stream().record_event().synchronize()


def allowed_before_the_steps() -> None:
    torch.tensor([1, 2], device=GPU)


def in_a_thread(*functions: Callable[[], object]) -> None:
    thread = threading.Thread(target=lambda: [function() for function in functions], name="watchdog")
    thread.start()
    thread.join()


PROGRAMS |= {
    "element": (READS, lambda job: ones().sum().item()),
    "branch": (READS, lambda job: bool(ones().isfinite().all())),
    "numbers": (READS, lambda job: ones().tolist()),
    "copy_to_the_host": (COPIES, lambda job: ones().cpu()),
    "numbers_of_python": (COPIES, lambda job: torch.tensor([1, 2], device=GPU)),
    "index_of_numbers": (COPIES, lambda job: ones()[[1, 2]]),
    "copy_of_memory_that_is_not_pinned": (COPIES, lambda job: torch.ones(8).to(GPU, non_blocking=True)),
    "collective_of_wrong_sizes": ("all_gather has tensors of [8] and [8]", lambda job: all_gather(ones(), ones())),
    "event_in_a_thread": (f"queries an event, {NOT_SELECTED}", lambda job: in_a_thread(torch.cuda.Event().query)),
    "memory_in_a_thread": (f"pins memory, {NOT_SELECTED}", lambda job: in_a_thread(torch.ones(8).pin_memory)),
    "thread_that_selects_the_gpu": (
        "",
        lambda job: in_a_thread(lambda: torch.cuda.set_device(GPU), torch.cuda.Event().query, torch.ones(8).pin_memory),
    ),
}


class Streams:
    @reports("aten.add.Tensor on the stream of")
    def read_without_a_wait(job):
        tensor = ones()
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            tensor + 1

    @reports("does not wait for aten.add_.Tensor on the default stream")
    def read_after_an_event_that_is_too_early(job):
        tensor = ones()
        event = torch.cuda.current_stream().record_event()
        tensor.add_(1)
        stream = torch.cuda.Stream(GPU)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            tensor.clone()

    @reports("aten.zero_ on the default stream writes to memory and does not wait for aten.clone")
    def write_during_a_read(job):
        tensor = ones()
        on_a_stream_that_waits(tensor.clone)
        tensor.zero_()

    @reports("aten.zero_ on the stream of")
    def use_of_memory_before_its_allocation(job):
        tensor = torch.empty(8, device=GPU)
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            tensor.zero_()

    @correct
    def streams_that_wait_for_each_other(job):
        tensor = ones()
        stream = on_a_stream_that_waits(lambda: tensor.add_(1))
        torch.cuda.current_stream().wait_event(stream.record_event())
        tensor.zero_()


class Memory:
    @reports("the default stream reuses the memory of a tensor of aten.ones")
    def reuse_of_a_tensor_that_another_stream_reads(job):
        tensor = ones()
        on_a_stream_that_waits(tensor.clone)
        del tensor
        ones()

    @correct
    def reuse_after_record_stream(job):
        tensor = ones()
        tensor.record_stream(on_a_stream_that_waits(tensor.clone))
        del tensor
        ones()

    @correct
    def reuse_after_a_wait(job):
        tensor = ones()
        stream = on_a_stream_that_waits(tensor.clone)
        del tensor
        torch.cuda.current_stream().wait_stream(stream)
        ones()


class Collectives:
    @reports("aten.clone on the default stream reads memory and does not wait for all_reduce")
    def read_during_a_collective(job):
        tensor = ones()
        work = dist.all_reduce(tensor, async_op=True)
        tensor.clone()
        work.wait()

    @reports("was freed before all_reduce on the stream of the communicator")
    def reuse_during_a_collective(job):
        work = dist.all_reduce(ones(), async_op=True)
        on_a_stream_that_waits(work.wait)  # the collective drops its references, as NCCL does
        ones()

    @correct
    def collective_that_is_waited_for(job):
        work = dist.all_reduce(ones(), async_op=True)
        ones()
        work.wait()
        ones()


class Host:
    @reports("has a mask, whose size the host waits for")
    def write_to_a_mask(job):
        tensor = ones()
        tensor[tensor > 0] = tensor[:1]  # torch 2.15 fills a mask with a number without a wait

    @reports("the size of aten.nonzero.default depends on values")
    def size_that_depends_on_values(job):
        with pytest.raises(Exception, match="nonzero"):
            ones().nonzero()

    @reports(COPIES)
    def wait_that_is_repeated_in_later_steps(job):
        job.problems.steady = True
        allowed_before_the_steps()

    @reports("the time of an event that the host has not waited for")
    def time_of_an_event(job):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        ones()
        stop.record()
        start.elapsed_time(stop)

    @correct
    def waits_where_they_are_allowed(job):
        allowed_before_the_steps()
        job.problems.steady = True
        allowed()


class PinnedMemory:
    @reports("the host reads pinned memory before copy on the default stream")
    def pinned_memory_that_is_read_too_early(job):
        copy = torch.empty(8, pin_memory=True)
        copy.copy_(ones(), non_blocking=True)
        copy.tolist()

    @reports("the host writes to pinned memory before aten._to_copy on the default stream")
    def pinned_memory_that_is_overwritten(job):
        source = torch.ones(8).pin_memory()
        source.to(GPU, non_blocking=True)
        source.zero_()

    @correct
    def pinned_memory_after_an_event(job):
        source = torch.ones(8).pin_memory()
        copy = torch.empty(8, pin_memory=True).copy_(source.to(GPU, non_blocking=True), non_blocking=True)
        allowed()
        source.zero_()
        copy.tolist()


class Operands:
    @reports("aten.mul.Tensor has an operand in host memory")
    def operand_of_the_host(job):
        with pytest.raises(RuntimeError, match="same device"):
            ones() * torch.ones(8)

    @reports("aten.mm.default has operands of")
    def product_in_another_dtype(job):
        job.compute_dtype = torch.bfloat16
        torch.ones(2, 2, device=GPU) @ torch.ones(2, 2, device=GPU)

    @correct
    def operations_on_the_gpu(job):
        matrix = torch.ones(2, 2, device=GPU, requires_grad=True)
        (matrix @ matrix * torch.tensor(2.0)).sum().backward()
        assert matrix.grad is not None


def problems_of(name: str) -> list[str]:
    waits = (("tests/simulated_gpu/test_simulation.py", name.__name__) for name in (allowed, allowed_before_the_steps))
    with simulated_job(2, 1, *([wait] for wait in waits)) as job:
        PROGRAMS[name][1](job)
    return list(job.problems)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_reported_once_and_with_its_line_and_correct_code_is_accepted(simulate, name):
    message, problems = PROGRAMS[name][0], simulate(problems_of, name)
    assert len(problems) == bool(message)
    assert all(message in text and text.startswith("tests/simulated_gpu/test_simulation.py:") for text in problems)
