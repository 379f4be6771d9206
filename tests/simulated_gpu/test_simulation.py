"""The simulated GPU reports each kind of mistake, and accepts the same code without the mistake."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.comm.process_group import all_gather
from tests.simulated_gpu.job import GPU, Job, simulated_job

MISTAKES: dict[Callable[[Job], None], str] = {}  # with a part of the message
CORRECT: list[Callable[[Job], None]] = []


def mistake(message: str):
    def add(function):
        MISTAKES[function] = message
        return function

    return add


def correct(function):
    CORRECT.append(function)
    return function


def ones() -> torch.Tensor:
    return torch.ones(8, device=GPU)


def on_a_stream_that_waits(function: Callable[[], object]) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    return stream


# ------------------------------------------------------------------------------------------------- streams


@mistake("aten.add.Tensor on the stream of")
def read_without_a_wait(job):
    tensor = ones()
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        tensor + 1


@mistake("does not wait for aten.add_.Tensor on the default stream")
def read_after_an_event_that_is_too_early(job):
    tensor = ones()
    event = torch.cuda.current_stream().record_event()
    tensor.add_(1)
    stream = torch.cuda.Stream(GPU)
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        tensor.clone()


@mistake("aten.zero_ on the default stream writes to memory and does not wait for aten.clone")
def write_during_a_read(job):
    tensor = ones()
    on_a_stream_that_waits(tensor.clone)
    tensor.zero_()


@mistake("aten.zero_ on the stream of")
def use_of_memory_before_its_allocation(job):
    tensor = torch.empty(8, device=GPU)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        tensor.zero_()


@correct
def streams_that_wait_for_each_other(job):
    tensor = ones()
    stream = on_a_stream_that_waits(lambda: tensor.add_(1))
    event = stream.record_event()
    torch.cuda.current_stream().wait_event(event)
    tensor.zero_()


# -------------------------------------------------------------------------------------------------- memory


@mistake("the default stream reuses the memory of a tensor of aten.ones")
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


# --------------------------------------------------------------------------------------------- collectives


@mistake("aten.clone on the default stream reads memory and does not wait for all_reduce")
def read_during_a_collective(job):
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    tensor.clone()
    work.wait()


@mistake("was freed before all_reduce on the stream of the communicator")
def reuse_during_a_collective(job):
    work = dist.all_reduce(ones(), async_op=True)
    on_a_stream_that_waits(work.wait)  # the collective drops its references, as NCCL does
    ones()


@mistake("all_gather has tensors of [8] and [8]")
def collective_of_wrong_sizes(job):
    all_gather(ones(), ones())


@correct
def collective_that_is_waited_for(job):
    work = dist.all_reduce(ones(), async_op=True)
    ones()
    work.wait()
    ones()


# ---------------------------------------------------------------------------------------------------- host


@mistake("the host waits for the GPU: it reads a value")
def element(job):
    ones().sum().item()


@mistake("the host waits for the GPU: it reads a value")
def branch(job):
    assert ones().isfinite().all()


@mistake("the host waits for the GPU: it reads a value")
def numbers(job):
    ones().tolist()


@mistake("the host waits for the GPU: it copies")
def copy_to_the_host(job):
    ones().cpu()


@mistake("the host waits for the GPU: it copies")
def numbers_of_python(job):
    torch.tensor([1, 2], device=GPU)


@mistake("the host waits for the GPU: it copies")
def index_of_numbers(job):
    ones()[[1, 2]]


@mistake("has a mask, whose size the host waits for")
def write_to_a_mask(job):
    tensor = ones()
    tensor[tensor > 0] = 0


@mistake("the size of aten.nonzero.default depends on values")
def size_that_depends_on_values(job):
    with pytest.raises(Exception, match="nonzero"):
        ones().nonzero()


@mistake("the host waits for the GPU: it copies")
def copy_of_memory_that_is_not_pinned(job):
    torch.ones(8).to(GPU, non_blocking=True)


@mistake("the host waits for the GPU: it copies")
def wait_that_is_repeated_in_later_steps(job):
    job.problems.steady = True
    allowed_before_the_steps()


@mistake("the time of an event that the host has not waited for")
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


def allowed() -> None:
    event = torch.cuda.current_stream().record_event()
    event.synchronize()


def allowed_before_the_steps() -> None:
    torch.tensor([1, 2], device=GPU)


# ------------------------------------------------------------------------------------------- pinned memory


@mistake("the host reads pinned memory before copy on the default stream")
def pinned_memory_that_is_read_too_early(job):
    copy = torch.empty(8, pin_memory=True)
    copy.copy_(ones(), non_blocking=True)
    copy.tolist()


@mistake("the host writes to pinned memory before aten._to_copy on the default stream")
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


# ------------------------------------------------------------------------------------- threads and operands


def in_a_thread(*functions: Callable[[], object]) -> None:
    thread = threading.Thread(target=lambda: [function() for function in functions], name="watchdog")
    thread.start()
    thread.join()


@mistake("the thread watchdog queries an event, but has not selected the rank's GPU")
def event_in_a_thread(job):
    in_a_thread(torch.cuda.Event().query)


@mistake("the thread watchdog pins memory, but has not selected the rank's GPU")
def pinned_memory_in_a_thread(job):
    in_a_thread(torch.ones(8).pin_memory)


@correct
def thread_that_selects_the_gpu(job):
    in_a_thread(lambda: torch.cuda.set_device(GPU), torch.cuda.Event().query, torch.ones(8).pin_memory)


@mistake("aten.mul.Tensor has an operand in host memory")
def operand_of_the_host(job):
    with pytest.raises(RuntimeError, match="same device"):
        ones() * torch.ones(8)


@mistake("aten.mm.default has operands of")
def product_in_another_dtype(job):
    job.compute_dtype = torch.bfloat16
    torch.ones(2, 2, device=GPU) @ torch.ones(2, 2, device=GPU)


@correct
def operations_on_the_gpu(job):
    matrix = torch.ones(2, 2, device=GPU, requires_grad=True)
    (matrix @ matrix * torch.tensor(2.0)).sum().backward()
    assert matrix.grad is not None


def problems_of(function: Callable[[Job], None]) -> list[str]:
    waits = (("tests/simulated_gpu/test_simulation.py", name.__name__) for name in (allowed, allowed_before_the_steps))
    with simulated_job(2, 1, *([wait] for wait in waits)) as job:
        function(job)
    return list(job.problems)


def name(function: Callable[[Job], None]) -> str:
    return function.__name__


@pytest.mark.parametrize("function", MISTAKES, ids=name)
def test_a_mistake_is_reported_once_and_with_its_line(simulate, function):
    (problem,) = simulate(problems_of, function)
    assert MISTAKES[function] in problem and problem.startswith("tests/simulated_gpu/test_simulation.py:")


@pytest.mark.parametrize("function", CORRECT, ids=name)
def test_correct_code_is_accepted(simulate, function):
    assert simulate(problems_of, function) == []
