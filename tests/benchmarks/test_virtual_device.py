import mmap
import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.laboratory.virtual_streams import Stream, intra_host_bytes
from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.cpu import shared_memory
from gpt4d.parallel.comm.cpu.comm_thread import CommThread
from gpt4d.parallel.comm.cpu.shared_memory import SLOT_BYTES, SharedMemory
from gpt4d.parallel.grid import Grid
from tests.support.fake_time import FakeTime

FLOPS, MEMORY_GB_S, LAUNCH_US = 1e6, 1e-3, 100.0
LARGE = 128, 128


class StartTimes(TorchDispatchMode):
    """The time at which each operation that a virtual device passes on begins."""

    def __init__(self, source: FakeTime):
        super().__init__()
        self.source, self.times = source, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times[func.overloadpacket.__name__] = self.source.now
        return func(*args, **(kwargs or {}))


def virtual_device(**options) -> VirtualDevice:
    return VirtualDevice(FLOPS, MEMORY_GB_S, LAUNCH_US, source=FakeTime(), **options)


def seconds(flops: float, *moved: int) -> float:
    """Return the time of an operation that reads and writes float32 tensors with these numbers of elements."""
    return max(flops / FLOPS, 4 * sum(moved) / MEMORY_GB_S / 1e9) + LAUNCH_US / 1e6


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_busy_time_is_the_sum_of_the_costs_of_all_operations():
    x, first, second = torch.randn(256, 128), nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)
    with virtual_device() as device:
        second(first(x).relu()).sum().backward()
        device.synchronize()
    batch, inner, product = 256 * 128, 256 * 512, 2 * 256 * 128 * 512
    weight = 128 * 512
    forward = [
        seconds(product, batch, weight, inner),
        seconds(0, inner, inner),  # ReLU
        seconds(product, inner, weight, batch),
        seconds(0, batch, 1),  # the sum, whose gradient is one expanded element
    ]
    backward = [
        seconds(product, 1, inner, weight),  # the second weight's gradient
        seconds(product, 1, weight, inner),  # its input's
        seconds(0, inner, inner, inner),  # ReLU
        seconds(product, inner, batch, weight),  # the first weight's gradient
    ]
    report = device.report()
    assert report["busy_s"] == pytest.approx(sum(forward + backward))
    assert report["seconds"] == pytest.approx(report["busy_s"])  # a rank alone takes its busy time
    assert report["host_late_s"] == 0


@pytest.mark.parametrize("causal", [False, True])
def test_causal_attention_takes_half_of_the_time(causal):
    inputs = [torch.randn(1, 2, 256, 64).requires_grad_() for _ in range(3)]
    with virtual_device(skips_masked_products=True) as device:
        total = nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal).sum()
        torch.autograd.grad(total, inputs)
    product = 2 * 2 * 256 * 256 * 64 / (2 if causal else 1)
    others = seconds(0, inputs[0].numel(), 1)  # the sum
    assert device.report()["busy_s"] == pytest.approx(seconds(2 * product) + seconds(5 * product) + others)


def test_large_tensors_are_not_computed_and_small_ones_are():
    large, small, mask = torch.ones(LARGE), torch.ones(8), torch.ones(8, dtype=torch.bool)
    with virtual_device() as device:
        large.add_(1)
        product = large @ large
        product[0].add_(1)
        small.mul_(3)
        assert small[mask].sum().item() == 24
        assert torch.zeros(1 << 32, dtype=torch.int8).numel() == 1 << 32  # takes no memory
        product = product + product
    assert large.eq(1).all() and product.shape == LARGE and product.eq(0).all()
    assert device.source.now < device.stream.clock  # the host waits only if it reads a value, and read small ones


def test_large_results_serve_as_parameters():
    parameter = nn.Parameter(torch.empty(LARGE))
    with virtual_device() as device:
        parameter.data = torch.ones(LARGE)
        parameter.data.copy_(torch.ones(LARGE))
        torch.index_select(torch.ones(4), 0, torch.zeros(1 << 14, dtype=torch.int64), out=parameter.data.view(-1))
        (parameter @ parameter).sum().backward()
    assert device.operations.in_zeros(parameter) and parameter.grad.eq(0).all()


def test_reading_a_value_waits_for_the_device():
    with virtual_device() as device:
        (torch.ones(LARGE) @ torch.ones(LARGE)).sum().item()
        assert device.source.now == device.stream.clock > 0


@pytest.mark.parametrize("late_share, cpu_bound", [(0.04, False), (0.06, True)])
def test_report_names_the_time_for_which_the_host_was_late(late_share, cpu_bound):
    weight = torch.ones(LARGE)
    with virtual_device() as device:
        weight @ weight
        device.synchronize()
        busy_s = device.stream.busy_s
        device.source.sleep(late_s := 2 * busy_s * late_share / (1 - late_share))
        weight @ weight
        device.synchronize()
    report = device.report()
    assert report["busy_s"] == pytest.approx(2 * busy_s)
    assert report["host_late_s"] == pytest.approx(late_s)
    assert report["cpu_bound"] is cpu_bound
    assert report["host_cpu_s"] == pytest.approx(report["seconds"] / 4)


@pytest.mark.parametrize("operation", ["allreduce_", "all_reduce"])
def test_collective_starts_when_the_device_has_computed(process_group, operation):
    weight, device = torch.ones(LARGE), virtual_device()
    with StartTimes(device.source) as started, device:
        out = weight @ weight
        clock = device.stream.clock
        if operation == "allreduce_":
            dist.all_reduce(out)
        else:
            functional.wait_tensor(functional.all_reduce(out, "sum", dist.group.WORLD))
    assert started.times[operation] == clock > 0


class LatePeer:
    """The peer in shared memory, which is late for every collective."""

    def __init__(self, source: FakeTime, late_s: float):
        self.source, self.late_s = source, late_s

    def send(self, notification: bytes) -> None: ...

    def recv(self, size: int) -> bytes:
        self.source.sleep(self.late_s)
        return b"\0"

    def memory(self) -> SharedMemory:
        return SharedMemory(0, mmap.mmap(-1, 8 * SLOT_BYTES), {1: self})


def test_shared_memory_is_written_when_the_device_has_computed():
    weight, device = torch.ones(LARGE), virtual_device()
    memory = LatePeer(device.source, 0).memory()
    with StartTimes(device.source) as started, device:
        weight @ weight
        clock = device.stream.clock
        memory.post(torch.ones(8), lambda slots: slots[0])
        assert started.times["copy_"] == clock > 0
        memory.post(weight, lambda slots: slots[0] + slots[1]).wait()
    assert device.stream.busy_s == clock  # copies and sums take no time of the device


def test_a_worker_starts_a_task_when_the_device_has_computed_its_input():
    weight, device, worker = torch.ones(LARGE), virtual_device(), CommThread("communication")
    with device:
        weight @ weight
        clock = device.stream.clock
        started = worker.submit(device.source.perf_counter)
        weight @ weight
        assert started.wait() == clock > 0


def test_a_worker_computes_beside_the_device():
    weight, device, worker = torch.ones(LARGE), virtual_device(), CommThread("communication")
    launched = threading.Event()

    def work() -> torch.Tensor:
        launched.wait()  # the threads share a clock that a sleep of either one moves
        return (weight @ weight).sum()

    with device:
        weight @ weight
        busy_s = device.stream.busy_s
        task = worker.submit(work)
        weight @ weight
        assert device.stream.clock == device.stream.busy_s == 2 * busy_s
        launched.set()
        task.wait()
        complete = device.stream.clock
    assert complete == device.source.now > 2 * busy_s  # and work after the wait starts when the task is complete


def test_a_collective_posted_outside_of_the_device_takes_no_time_of_its_links():
    device = virtual_device(intra_host_mb_s=1)
    memory = LatePeer(device.source, 0).memory()
    posted = memory.post(torch.ones(LARGE), lambda slots: slots[0])
    with device:
        posted.wait()
        assert device.source.now == 0
        memory.post(torch.ones(LARGE), lambda slots: slots[0]).wait()
        assert device.source.now > 0


def test_work_after_a_wait_starts_when_the_wait_returns():
    weight, device = torch.ones(LARGE), virtual_device()
    memory = LatePeer(device.source, late_s=5).memory()
    with device:
        memory.post(torch.ones(8), lambda slots: slots[0]).wait()
        weight @ weight
    assert device.stream.clock == 5 + device.stream.busy_s
    assert device.report()["host_late_s"] == 0


def test_an_operation_launched_by_a_wait_is_not_late():
    stream = Stream(FakeTime(), clock=0)
    with stream.waiting():
        stream.source.sleep(5)
        stream.launch(1)
    assert (stream.clock, stream.late_s) == (6, 0)


HOST, HOSTS = range(4), range(8)  # ranks on one host and on two
SENT = [  # operation, ranks, this rank, and the bytes that it sends to ranks of its host, per byte of its tensor
    ("allreduce_", HOST, 0, 1.5), ("allreduce_", HOSTS, 0, 1.75), ("allreduce_", (0, 4), 0, 0),
    ("_allgather_base_", HOST, 0, 0.75), ("reduce_scatter_tensor", HOSTS, 0, 0.875), ("broadcast_", HOST, 0, 1),
    ("alltoall_base_", HOSTS, 0, 0.375), ("send", (0, 3), 0, 1), ("send", (0, 4), 0, 0), ("recv_", (0, 3), 0, 0),
    *(("a shift", HOSTS, rank, sent) for rank, sent in ((0, 1), (3, 0), (4, 1), (7, 0))),  # to the next rank
]  # fmt: skip


@pytest.mark.parametrize(("operation", "ranks", "rank", "sent"), SENT)
def test_bytes_sent_inside_a_host_of_four_ranks(operation, ranks, rank, sent):
    counts = None
    if operation == "a shift":
        operation, counts = "alltoall_base_", [5 * (other == (rank + 1) % 8) for other in HOSTS]
    assert intra_host_bytes(operation, 1, ranks, rank, ranks_per_host=4, counts=counts) == sent


def shift_in_host(slot_bytes: int) -> float:
    """Return the seconds of a shift of 1 MB in a host of three ranks, at 1 MB/s."""
    axis, tensor = Grid(GridSizes(x=3)).x, torch.zeros(250_000)
    device = virtual_device(intra_host_mb_s=1, ranks_per_host=3)
    with patch.object(shared_memory, "SLOT_BYTES", slot_bytes), device:
        axis.start_shift(tensor).wait()
        return device.source.now


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, 1], ids=["shared memory", "gloo"])
def test_a_shift_takes_the_time_of_its_tensor(ranks, slot_bytes):
    assert ranks.run(3, shift_in_host, slot_bytes) == [pytest.approx(1, rel=1e-3)] * 3


def all_reduce_without_a_visible_wait(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    return tensor


ALL_REDUCES = (
    lambda tensor, axis: dist.all_reduce(tensor) or tensor,
    lambda tensor, axis: axis.all_reduce(tensor),
    lambda tensor, axis: functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD)),
    all_reduce_without_a_visible_wait,
)


def all_reduce_in_host(variant: int) -> tuple[float, bool]:
    """Return the seconds from the computation of a tensor until its sum is available, and whether it was received."""
    weight, tensor = torch.ones(LARGE), torch.ones(LARGE)
    axis = Grid(GridSizes(x=2)).x
    with virtual_device(intra_host_mb_s=1, ranks_per_host=2) as device:
        weight @ weight
        computed = device.stream.clock
        total = ALL_REDUCES[variant](tensor, axis)
        busy_s = device.stream.busy_s
        torch.neg(total)  # starts when the sum is available
        return device.stream.clock - (device.stream.busy_s - busy_s) - computed, bool(total.eq(2).all())


@pytest.mark.parametrize("variant", range(len(ALL_REDUCES)))
def test_all_ways_to_exchange_data_in_a_host_take_the_same_time(ranks, variant):
    nbytes = 4 * LARGE[0] * LARGE[1]  # each of two ranks sends 2·(G-1)/G = 1 times this size
    for waited, _ in ranks.run(2, all_reduce_in_host, variant):
        assert waited == pytest.approx(nbytes / 1e6)


def all_reduce_between_hosts() -> bool:
    tensor = torch.ones(LARGE)
    with virtual_device(intra_host_mb_s=1) as device:
        dist.all_reduce(tensor)
    return device.source.now == 0 and bool(tensor.eq(2).all())


def test_collective_moves_its_bytes_and_takes_their_real_time_between_hosts(ranks):
    assert all(ranks.run(2, all_reduce_between_hosts))


def transfer_behind_computation() -> float:
    """Return the time for which a step of two collectives exposes the second, which began before a computation."""
    grid, weight = Grid(GridSizes(x=2)), torch.ones(LARGE)
    with virtual_device(intra_host_mb_s=1, ranks_per_host=2) as device:
        pending = grid.x.start_all_reduce(torch.ones(LARGE))
        weight @ weight
        clock = device.stream.clock
        pending.wait()
        assert device.stream.clock == clock
    return grid.x.traffic.read()["exposed_s"]


def test_a_collective_behind_a_longer_computation_is_hidden(ranks):
    assert ranks.run(2, transfer_behind_computation) == [0, 0]
