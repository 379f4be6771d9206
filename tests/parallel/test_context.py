"""Ranks that share sequences (``parallel.context``), with all-gathered keys or a ring, have the values of one rank."""

import itertools
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.cpu import shared_memory
from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.engine.interleave import Node, run_alone, run_graph
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import context_attention
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.context_attention import GatheredKeys, KeyBlock, RingKeys, block_attention, block_gradients
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.sequence import Documents, TokenIndex, own_segments, segments_of, tokens_of
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.symbolic.stage import SymbolicAxis
from gpt4d.parallel.symbolic.tensor import SymbolicTensor, backward, leaf
from gpt4d.validation import validate
from tests.parallel.counting_device import CountingDevice
from tests.support.commands import wrong_messages
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.parallel_runs import grid_on_hosts, in_order, runtime_of
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage

aten = torch.ops.aten
RESUMED = [(4, ["parallel.context=4", "parallel.gz=2"]), (2, ["parallel.context=2"])]
SEQUENCES, LENGTH, HEADS, SIZE = 4, 24, 4, 8


def token_losses(config):
    """On a rank: the losses of its tokens of a batch, as for the losses of sources."""
    plan, stage = own_stage(config, dist.get_world_size())
    kept = []

    def compute(module, part, batch, received):
        produced = module.spec.compute(module, part, received, *batch, None, False, True)
        kept.append(produced.pop("token_losses"))
        return produced

    runtime_of(stage, compute).evaluate(RandomTokens(config, plan, stage).batches(0), plan.microbatches)
    return torch.cat(kept).view(config.train.batch_size, -1)


def test_the_losses_of_tokens_are_those_of_one_rank(ranks, tiny):
    """tests/parallel/test_exact_plans.py compares losses and gradients."""
    (expected,) = ranks.run(1, token_losses, tiny())
    found = in_order(ranks.run(4, token_losses, tiny("parallel.context=4", "parallel.gz=2")))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_all_ranks_have_equal_work():
    pairs = [sum(1 + 2 * n for n in segments_of(count, i)) / count for count in (2, 3, 8, 64) for i in range(count)]
    assert set(pairs) == {4.0}


def test_a_run_continues_with_other_numbers_of_ranks_per_sequence(ranks, tiny):
    common = "optim.schedule_steps=4", "logging.every=1", "data.reset_attention=true"
    straight = tiny("train.steps=4", *common)
    ranks.run(1, train_in_rank, straight)
    for place, (devices, words) in enumerate(RESUMED):
        config = tiny(f"train.steps={2 * place + 2}", *words, *common, f"run.dir={straight.run.dir}-resumed")
        ranks.run(devices, train_in_rank, config)
    ours, expected = ([line["loss"] for line in metric_lines(config.run.dir)] for config in (config, straight))
    assert ours == pytest.approx(expected, rel=1e-5) and len(ours) == 4


MISTAKES = [
    (2, "parallel.context=3", "parallel.context=3: does not divide parallel.gdata·gz=2; use one of 1, 2"),
    (4, "parallel.context=4 train.seq_len=36", "cuts each sequence into 8 segments"),
    (2, "parallel.context=2 model=unet_tiny", "parallel.context=2: an image has no tokens"),
    (6, "parallel.context=2 parallel.pipeline.stages=2 parallel.pipeline.stage_grids=[1x1x1x2,1x1x1x4]",
     "parallel.context=2: the stages have different gdata·gz (2, 4)"),
    (2, "parallel.context=2 train.seq_len=32 train.loss_chunks=32",
     "train.loss_chunks=32: does not divide train.seq_len/parallel.context=16; use one of 1, 2, 4, 8, 16"),
    (2, "parallel.context=2 parallel.context_exchange=ring model.attention_dropout=0.1",
     "parallel.context_exchange=ring: model.attention_dropout=0.1 needs the keys of complete sequences; use "
     "parallel.context_exchange=all_gather, or model.attention_dropout=0"),
]  # fmt: skip


def test_mistakes_are_reported_in_one_line():
    def report(devices, words):
        validate(configured(["model=gpt_tiny", "train.batch_size=8", *words.split()]), devices)

    assert not wrong_messages(MISTAKES, report)


def attention_by_documents(q, k, v, starts, key_starts, max_q, max_k, dropout, causal, *_, scale, **window):
    """Stand in for a GPU's variable-length FlashAttention: output and log-sum-exp, document by document."""
    if starts is None:
        out, statistics = aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), statistics
    assert max(starts.diff()) <= max_q and max(key_starts.diff()) <= max_k
    out, statistics, limit = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q)), window["window_size_left"]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for (first, stop), (first_key, stop_key) in zip(pairwise(starts), pairwise(key_starts), strict=True):
        rows, keys = torch.arange(first, stop)[:, None] - stop, torch.arange(first_key, stop_key) - stop_key
        hidden = (keys > rows) & causal | (keys < rows - limit) & (limit >= 0)
        scores = torch.einsum("qhs,khs->hqk", q[first:stop], k[first_key:stop_key]) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(hidden, -torch.inf)
        out[first:stop] = torch.einsum("hqk,khs->qhs", scores.softmax(-1), v[first_key:stop_key])
        statistics[:, first:stop] = scores.logsumexp(-1) if len(keys) else torch.inf
    return out, statistics


def gradients_by_documents(d_out, q, k, v, out, statistics, *options, scale, **window):
    """Stand in for the backward of ``attention_by_documents``."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again, found = attention_by_documents(*leaves, *options, scale=scale, **window)
    found = found.detach().masked_fill(found == torch.inf, 0)
    torch.testing.assert_close((again.detach(), found), (out, statistics), rtol=1e-12, atol=1e-12)
    return torch.autograd.grad(again, leaves, d_out)


@pytest.mark.parametrize("exchange", [GatheredKeys, RingKeys])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packed", [True, False], ids=["documents", "one document"])
def test_attention_by_lengths_is_attention_by_mask(packed, window, exchange):
    """A GPU's kernel takes the lengths of documents. On a CPU, a loop over them stands in for it."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 24, 2, 8, generator=generator, dtype=torch.float64)
    ends = torch.rand(2, 24, generator=generator) < 0.2
    documents = Documents.ending_with(1, ends.long()) if packed else None
    results = []
    for by_lengths in (False, True):
        with (
            patch.object(context_attention, "takes_documents", lambda q, by_lengths=by_lengths: by_lengths),
            patch.object(aten, "_flash_attention_forward", attention_by_documents),
            patch.object(aten, "_flash_attention_backward", gradients_by_documents),
        ):
            found = []
            axes = [SimpleNamespace(size=3, index=index) for index in range(3)]
            steps = chain.from_iterable(exchange(axis).masked_steps(q, documents, window) for axis in axes)
            for block, mask in chain.from_iterable(steps):
                out, statistics = block_attention(q, k, v, mask, block, None)
                whole, totals = torch.zeros_like(q), q.new_zeros(2, 4, 8)
                whole[:, block.first : block.stop], totals[..., block.first : block.stop] = out, statistics
                # All queries have a key in some block.
                totals = totals.masked_fill(totals == -torch.inf, 0)
                found += [out, statistics, *block_gradients(q, q, k, v, whole, totals, mask, block, None)]
            results.append(found)
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


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
    training = Pass(recompute=case.recompute, num_chunks=case.chunks)
    context = Context(grid, torch.float64, training=training, context_ring=ring)
    layer = Layer(AttentionSpec(HEADS, window=case.window), ShardedWeights(context, torch.float64))
    generator, widths = torch.Generator().manual_seed(3), (HEADS, case.groups, case.groups)
    x, d_out = (torch.randn(SEQUENCES, LENGTH, n, SIZE, generator=generator).double() for n in (sum(widths), HEADS))
    ends = torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.15
    x, d_out = (own_segments(part, case.ranks, grid.context.index).contiguous() for part in (2 * x, d_out))
    documents, x = Documents.ending_with(1, ends.long()) if case.packed else None, x.requires_grad_()
    tokens = tokens_of(layer, torch.arange(SEQUENCES), x.shape[1], documents, complete=False)

    async def block(x, tokens):
        return await layer(*x.split(widths, 2), tokens)

    out = run_graph(layer, [Node(block, ("x",), "x")], {"x": x.view_as(x)}, "x", tokens)["x"].view_as(d_out)
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
    leaves = [leaf(device, shape, "float64", lambda gradient: None) for shape in shapes]
    ids, axis = SymbolicTensor(device, (SEQUENCES,), "int64"), Grid.single_device().axis(None)
    tokens = TokenIndex(ids, LENGTH, axis, context=SymbolicAxis(device, "context", size))
    out, *keys = leaves
    for _ in range(calls):  # the output of each call is the queries of the next one
        out = run_alone(layer(out, *keys, tokens)).view(shapes[0])
    forward, device.events = device.events, []
    backward([(out, out.like().new())])
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
    block = KeyBlock(0, 6, 0, 5)
    out, statistics = block_attention(q, k, v, mask, block, None)
    assert (out[alone] == 0).all() and (statistics.transpose(1, 2)[alone] == -torch.inf).all()
    assert out.isfinite().all() and statistics.transpose(1, 2)[~alone].isfinite().all()
    combined = statistics.clamp(min=0) + 1  # such queries have keys in other blocks
    d_q, d_k, d_v = block_gradients(d_out, q, k, v, out, combined, mask, block, None)
    assert (d_q[alone] == 0).all() and all(part.isfinite().all() for part in (d_q, d_k, d_v))
