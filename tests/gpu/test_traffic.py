"""Check 4: seconds of collectives that overlap with a long product are plausible, and the results are intact.

The collectives run in NCCL groups of one rank, whose axes claim two. The data of the second rank are left out.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.cpu.gloo import Works
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.comm.transport import ProcessGroupTransport, all_gather, reduce_scatter
from gpt4d.runtime import gpu
from tests.gpu.check import Check
from tests.gpu.usage import seconds_of, synchronize

_ELEMENTS = {"cuda": 1 << 29, "cpu": 1 << 16}  # elements of a shard, bf16
_FEW_ELEMENTS = 1 << 12
_MATRIX_SIZE = {"cuda": 8192, "cpu": 128}
_PRODUCTS = 10  # overlapped with each pair of collectives
_ROUNDS = 4
_CHURN = (3, 17, 64, 5)  # sizes of tensors that are allocated and released meanwhile, in 1/64 of a shard
Work = Callable[[], Any] | None


@pytest.mark.gpu(number=4, part=1, limit_s=25, work_s=20)
def test_collectives_overlapped_with_products_are_counted_plausibly(check: Check) -> None:
    device = check.device
    if device.type == "cuda":
        gpu.set_environment()
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = {name: dist.new_group([0]) for name in ("z", "data")}
    axes = [Axis(name, size=2, group=group, transport=OneRankForTwo(group)) for name, group in groups.items()]
    size = _MATRIX_SIZE[device.type]
    square = torch.randn(size, size, device=device).bfloat16()
    _run(axes, device, None)  # creates NCCL's communicators
    alone = _measure(axes, device, None)
    beside = _measure(axes, device, lambda: _multiply_and_churn(square))
    product_s = seconds_of(lambda: _multiply_and_churn(square), device, repeats=2, warm_up=1)
    short_s = _short_behind_long(axes, square)
    check.values = {"alone": alone, "beside_products": beside, "products_s": product_s, "short_s": short_s}
    for name, phase in (("alone", alone), ("beside products", beside)):
        check.require(phase["intact"], f"a result {name} is not what was sent")
        for axis, traffic in phase["axes"].items():
            total = traffic["exposed_s"] + traffic["hidden_s"]
            text = f"axis {axis} {name}: exposed {traffic['exposed_s']:.2g} s, hidden {traffic['hidden_s']:.2g} s"
            check.require(0 < total <= 1.05 * phase["seconds"], f"{text} in {phase['seconds']:.2g} s")
            more, less = ("exposed_s", "hidden_s") if name == "alone" else ("hidden_s", "exposed_s")
            check.require(check.rehearsal or traffic[more] > traffic[less], f"{text}; it should be {more[:-2]}")
    problem = f"a short collective took {short_s:.2g} s beside an axis that waited for {product_s:.2g} s"
    check.require(check.rehearsal or short_s < product_s / 2, problem)
    hidden = ", ".join(f"{axis} {traffic['hidden_s']:.2g} s" for axis, traffic in beside["axes"].items())
    check.figure = f"hidden beside {_ROUNDS * product_s:.2g} s of products: {hidden}"
    dist.destroy_process_group()


class OneRankForTwo(ProcessGroupTransport):
    """Collectives of an axis of two ranks in a group of one rank, which has the first half of the full tensor."""

    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        full = shard.new_empty((2 * len(shard), *shard.shape[1:]))
        work = all_gather(full[: len(shard)], shard, group=self.group, async_op=True)
        return Pending(full, work if shard.is_cuda else Works([work]), source=shard)

    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        shard = full.new_empty((len(full) // 2, *full.shape[1:]))
        if not full.is_cuda:  # gloo's reduce-scatter has no future
            work = dist.all_to_all_single(shard, full[: len(shard)], group=self.group, async_op=True)
            return Pending(shard, Works([work]), source=full)
        work = reduce_scatter(shard, full[: len(shard)], group=self.group, async_op=True)
        return Pending(shard, work, source=full)


def _pattern(device: torch.device, salt: int, elements: int | None = None) -> torch.Tensor:
    """Return integers that bf16 holds exactly, with no two equal neighbors."""
    elements = elements or _ELEMENTS[device.type]
    return ((torch.arange(elements, dtype=torch.int32, device=device) * 37 + salt) % 251).bfloat16()


def _run(axes: list[Axis], device: torch.device, work: Work, salt: int = 0) -> bool:
    """Gather on one axis and reduce-scatter on another during ``work``. Return whether both results are right."""
    elements = _ELEMENTS[device.type]
    # The second rank's part is zeros, which add nothing.
    full = torch.cat((_pattern(device, salt + 1), torch.zeros(elements, dtype=torch.bfloat16, device=device)))
    tensors = [_pattern(device, salt), full]
    del full
    pending = []
    for start, axis in zip((Axis.start_all_gather, Axis.start_reduce_scatter), axes, strict=True):
        pending.append(start(axis, tensors.pop(0)))  # From here on only the collective keeps the tensor.
        if work is None:
            pending[-1].wait()
    if work is not None:
        work()
    gathered, scattered = (collective.wait()[:elements] for collective in pending)
    return torch.equal(gathered, _pattern(device, salt)) and torch.equal(scattered, _pattern(device, salt + 1))


def _measure(axes: list[Axis], device: torch.device, work: Work) -> dict[str, Any]:
    """Return whether all rounds were intact, their seconds, and the statistics of each axis."""
    for axis in axes:
        axis.traffic.read()
    synchronize(device)
    started = time.perf_counter()
    intact = [_run(axes, device, work, salt) for salt in range(_ROUNDS)]
    synchronize(device)
    seconds = time.perf_counter() - started
    return {"intact": all(intact), "seconds": seconds, "axes": {axis.name: axis.traffic.read() for axis in axes}}


def _multiply_and_churn(square: torch.Tensor) -> None:
    """Multiply for long, and fill memory that the allocator may have taken from tensors in flight."""
    for number in range(_PRODUCTS):
        elements = _ELEMENTS[square.device.type] // 64 * _CHURN[number % len(_CHURN)]
        torch.full((elements,), torch.nan, dtype=torch.bfloat16, device=square.device)
        square @ square


def _short_behind_long(axes: list[Axis], square: torch.Tensor) -> float:
    """Return the seconds that an axis reports for a short collective while another axis waits for long products."""
    long_axis, short_axis = axes
    device = square.device
    little = torch.cat((_pattern(device, 0, _FEW_ELEMENTS), torch.zeros_like(_pattern(device, 0, _FEW_ELEMENTS))))
    for axis in axes:
        axis.traffic.read()
    synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        _multiply_and_churn(square)
        gathered = long_axis.start_all_gather(square[:8])
    scattered = short_axis.start_reduce_scatter(little)
    scattered.wait()
    gathered.wait()
    synchronize(device)
    traffic = short_axis.traffic.read()
    return traffic["exposed_s"] + traffic["hidden_s"]
