"""Ring attention (``parallel.context_exchange=ring``) equals attention of one rank and with all-gathered keys."""

import itertools
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.cpu import shared_memory
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone, run_blocks
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.context_attention import Block, block_attention, block_gradients
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.sequence import TokenIndex, own_segments, tokens_of
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.symbolic import tape
from gpt4d.parallel.symbolic.stage import SymbolicAxis
from gpt4d.parallel.symbolic.tensor import SymbolicTensor
from tests.parallel.counting_device import CountingDevice
from tests.support.grids import full
from tests.support.parallel_runs import grid_on_hosts, in_order

SEQUENCES, LENGTH, HEADS, SIZE = 4, 24, 4, 8


class Case(NamedTuple):
    """Attention of sequences that ``ranks`` ranks share. ``groups``: heads of keys. ``packed``: with documents."""

    ranks: int
    groups: int = HEADS
    chunks: int = 1
    recompute: bool = False
    window: int | None = None
    packed: bool = False


def by_ranks(case: Case, ring: bool):
    """On a rank: the output and the gradient of its segments, and the bytes that it sends."""
    grid = Grid(GridSizes(data=case.ranks), context=case.ranks)
    context = Context(grid, torch.float64, recompute=case.recompute, num_chunks=case.chunks, context_ring=ring)
    layer = Layer(AttentionSpec(HEADS, window=case.window), weights := ShardedWeights(context, torch.float64))
    generator, widths = torch.Generator().manual_seed(3), (HEADS, case.groups, case.groups)
    x, d_out = (torch.randn(SEQUENCES, LENGTH, n, SIZE, generator=generator).double() for n in (sum(widths), HEADS))
    ends = torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.15
    x, d_out = (own_segments(part, case.ranks, grid.context.index).contiguous() for part in (2 * x, d_out))
    documents, x = Documents.ending_with(1, ends.long()) if case.packed else None, x.requires_grad_()
    tokens = tokens_of(weights, torch.arange(SEQUENCES), x.shape[1], documents, complete=False)

    async def block(x, tokens):
        return await layer(*x.split(widths, 2), tokens)

    out = run_blocks(weights, [block], x.view_as(x), tokens).view_as(d_out)
    out.backward(d_out)
    return out.detach(), x.grad, grid.context.traffic.read()["bytes"]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, groups=2, chunks=2),
        Case(3, groups=1, recompute=True),
        full(Case(4)),
        full(Case(2, recompute=True, window=5)),
        Case(3, groups=2, window=7, packed=True),
        Case(4, chunks=2, recompute=True, packed=True),
        full(Case(4, groups=2, chunks=4, recompute=True)),
        full(Case(6, window=1)),
    ],
    ids=str,
)
def test_outputs_and_gradients_equal_those_of_one_rank_and_bytes_are_counted(ranks, case):
    rings, gathers = (ranks.run(case.ranks, by_ranks, case, ring) for ring in (True, False))
    ((*expected, _),) = ranks.run(1, by_ranks, case._replace(ranks=1), False)
    for each, (place, whole) in itertools.product((rings, gathers), enumerate(expected)):
        found = in_order([result[place] for result in each])
        assert (found - whole).norm() <= 1e-12 * whole.norm()
    # The forward and the backward exchange keys, and the backward their gradients. A recomputation saves gathered keys
    # for the backward, and the keys of the only other rank.
    keys = 2 * SEQUENCES * (LENGTH // case.ranks) * case.groups * SIZE * 8
    for found, rounds in ((rings, 4 if case.recompute and case.ranks > 2 else 3), (gathers, 3)):
        assert {sent for *_, sent in found} == {rounds * (case.ranks - 1) * keys}


def planned(size: int, ring: bool, calls: int = 1) -> tuple[list, list, int]:
    """Return the events of a forward and of a backward on symbolic tensors, and the peak memory of both."""
    device, context = CountingDevice(), Context(Grid.single_device(), torch.float64, context_ring=ring)
    layer = Layer(AttentionSpec(HEADS), ShardedWeights(context, torch.float64))
    shapes = [(SEQUENCES, LENGTH, heads, SIZE) for heads in (HEADS, 2, 2)]
    leaves = [tape.leaf(device, shape, "float64", lambda gradient: None) for shape in shapes]
    ids, axis = SymbolicTensor(device, (SEQUENCES,), "int64"), Grid.single_device().axis(None)
    tokens = TokenIndex(ids, LENGTH, axis, context=SymbolicAxis(device, "context", size))
    out, *keys = leaves
    for _ in range(calls):  # the output of each call is the queries of the next one
        out = run_alone(layer(out, *keys, tokens)).view(shapes[0])
    forward, device.events = device.events, []
    tape.backward([(out, out.like().new())])
    del out
    assert device.held == 0
    return forward, device.events, device.peak


def test_planned_shifts_start_before_the_attention_to_the_keys_that_a_rank_has():
    forward, backward, _ = planned(3, ring=True)
    shift = "shift", "context", 2 * SEQUENCES * LENGTH * 2 * SIZE * 8
    work = 4 * SEQUENCES * HEADS * SIZE * LENGTH**2 / 2  # of two segments, with half of the keys
    assert forward == [shift, work, "wait", shift, work, "wait", work]
    work *= 2.5
    # The gradients of the keys of a step leave after the products, and the gradients of own keys return at the end.
    assert backward == [shift, work, "wait", shift, work, shift, "wait", work, "wait", shift, "wait"]


@pytest.mark.parametrize("ring", [False, True])
def test_keys_are_in_flight_when_the_backward_of_an_attention_begins(ring):
    """The keys overlap with the layers in between, and the gradients of keys with the products with own keys."""
    _, events, _ = planned(2, ring, calls=3)
    kinds = [event if event == "wait" else event[0] if isinstance(event, tuple) else "work" for event in events]
    keys, gradients = ("shift", "shift") if ring else ("all_gather", "reduce_scatter")
    first, further = ["work", "wait", "work", gradients, "wait"], ["wait", "work", gradients, "work", "wait"]
    assert kinds == [keys, *first, keys, *further, keys, *further]


def test_a_ring_takes_less_memory_than_the_all_gather():
    (*_, ring), (*_, larger_ring), (*_, gather) = planned(4, True), planned(16, True), planned(4, False)
    assert ring == larger_ring < gather


def shifts(nbytes: int, across_hosts: bool, slot_bytes: int):
    """On a rank: whether each transport returns the tensor of the previous rank, names of the shifts, and bytes."""
    axis = grid_on_hosts(GridSizes(data=4), [0, 0, 1, 1] if across_hosts else [0] * 4).data
    tensors = [torch.arange(nbytes).view(2, -1) % 100 + index for index in range(4)]
    right, names = [], []
    with patch.object(shared_memory, "SLOT_BYTES", slot_bytes):
        for transport in (axis.transport, axis.transport.gloo):
            axis.transport = transport
            pending = axis.start_shift(tensors[axis.index].byte())
            names.append(pending.run.collective.name)
            right.append(torch.equal(pending.wait(), tensors[axis.index - 1].byte()))
    return right, names, axis.traffic.read()["bytes"]


@pytest.mark.parametrize("across_hosts", [False, True])
@pytest.mark.parametrize(("nbytes", "slot_bytes"), [(4, 64), (1 << 19, 64), (1 << 19, 1 << 20)])
def test_a_shift_returns_the_tensor_of_the_previous_rank(ranks, nbytes, across_hosts, slot_bytes):
    for found in ranks.run(4, shifts, nbytes, across_hosts, slot_bytes):
        assert found == ([True] * 2, ["shift data"] * 2, 2 * nbytes)


class OnGPU(torch.Tensor):
    """A tensor of this host for which kernels choose the code for a GPU."""

    is_cpu = False


@pytest.mark.parametrize("place", [torch.Tensor, OnGPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_queries_without_a_key_have_no_output_and_no_gradient(place, dtype):
    generator = torch.Generator().manual_seed(2)
    q, k, v, d_out = (
        torch.randn(2, n, heads, SIZE, generator=generator).to(dtype).as_subclass(place)
        for n, heads in ((6, 4), (5, 2), (5, 2), (6, 4))
    )
    mask = torch.zeros(2, 1, 6, 5, dtype=dtype)
    mask[0, :, 1:3] = mask[1, :, 4] = mask[1, :, 2, 1:] = -torch.inf
    alone = (mask == -torch.inf).all(-1)[:, 0]
    block = Block(0, 6, 0, 5)
    out, statistics = block_attention(q, k, v, mask, block, None)
    assert (out[alone] == 0).all() and (statistics.transpose(1, 2)[alone] == -torch.inf).all()
    assert out.isfinite().all() and statistics.transpose(1, 2)[~alone].isfinite().all()
    combined = statistics.clamp(min=0) + 1  # such queries have keys in other blocks
    d_q, d_k, d_v = block_gradients(d_out, q, k, v, out, combined, mask, block, None)
    assert (d_q[alone] == 0).all() and all(part.isfinite().all() for part in (d_q, d_k, d_v))
