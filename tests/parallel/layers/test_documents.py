"""Documents that share a sequence, against loops over their tokens."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import attention
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.sequence import Documents, TokenIndex
from gpt4d.parallel.sharded_weights import ShardedWeights
from tests.parallel.layers.oracle import normal

END = 0
ROWS = "03300440", "11111110", "11111111", "10110111"  # also documents of one token, and no end of a document
IDS = torch.tensor([[*map(int, row)] for row in ROWS])
SEQUENCES, LENGTH = IDS.shape
HEADS, SIZE = 4, 8


def spans() -> list[tuple[int, int]]:
    """Return the first token of each document of all sequences, and the token after its last one."""
    flat = IDS.flatten().tolist()
    stops = [i + 1 for i, token in enumerate(flat) if token == END or (i + 1) % LENGTH == 0]
    return list(zip([0, *stops[:-1]], stops, strict=True))


@pytest.mark.parametrize("on_host", [None, IDS.to(torch.uint16)], ids=["ids", "ids on the host"])
def test_starts_positions_and_mask_are_those_of_each_document(on_host):
    documents = Documents.ending_with(END, IDS, on_host)
    padding = 16 - len(spans())  # at least one element, the total length
    assert documents.starts.tolist() == [start for start, _ in spans()] + [IDS.numel()] * padding
    assert documents.starts.dtype == torch.int32
    assert documents.positions.flatten().tolist() == [i for start, stop in spans() for i in range(stop - start)]
    mask = torch.zeros(IDS.numel(), IDS.numel(), dtype=torch.bool)
    for start, stop in spans():
        mask[start:stop, start:stop] = True
    inside = torch.stack([mask[i : i + LENGTH, i : i + LENGTH] for i in range(0, IDS.numel(), LENGTH)])
    assert torch.equal(documents.mask[:, 0], inside.tril())


def test_parts_of_the_sequences_have_their_own_documents():
    parts = Documents.ending_with(END, IDS).chunk(2)
    for part, ids in zip(parts, IDS.chunk(2), strict=True):
        alone = Documents.ending_with(END, ids)
        assert list(part.counts) == alone.counts and torch.equal(part.starts, alone.starts)


@pytest.mark.parametrize("ends", [[], [3], [1, 3, 4], [0, 1, 2, 3, 4, 5, 6]], ids=len)
def test_the_number_of_starts_is_a_power_of_two(ends):
    """So microbatches with different numbers of documents have few shapes."""
    ids = torch.ones(2, LENGTH, dtype=torch.int64)
    ids[:, ends] = END
    starts = Documents.ending_with(END, ids).starts
    assert len(starts) == {0: 4, 1: 8, 3: 16, 7: 32}[len(ends)]
    assert starts[2 * len(ends) + 2 :].tolist() == [ids.numel()] * (len(starts) - 2 * len(ends) - 2)


def kernel(q, k, v, *arguments, enable_gqa, **options):
    """Attention as torch.nn.attention.varlen describes it, whose keys and values may have fewer heads."""
    assert enable_gqa
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return kernel_of_torch_2_11(q, k, v, *arguments, **options)


def kernel_of_torch_2_11(q, k, v, q_starts, k_starts, longest_q, longest_k, scale, window_size):
    """Attention as torch.nn.attention.varlen describes it: here each token attends to itself and those before it."""
    (before, behind), edges = window_size, q_starts.tolist()
    assert q.shape == k.shape == v.shape and behind == 0 and longest_q == longest_k == LENGTH
    assert edges == k_starts.tolist() and edges[-1] == len(q)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = mask if before == -1 else mask.triu(-before)
    rows = []
    for start, stop in itertools.pairwise(edges):
        heads, own = (x[start:stop].transpose(0, 1) for x in (q, k, v)), mask[: stop - start, : stop - start]
        rows.append(F.scaled_dot_product_attention(*heads, attn_mask=own, scale=scale).transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("options", [{}, {"window": 2, "scale": 0.3}], ids=["whole", "window"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2], ids=["as many", "fewer"])
@pytest.mark.parametrize("stand_in", [kernel, kernel_of_torch_2_11])
def test_attention_by_lengths_is_attention_by_mask(kv_heads, options, stand_in):
    """A GPU's kernel takes the lengths of documents. On a CPU, a loop over them stands in for it."""
    grid, documents = Grid.single_device(), Documents.ending_with(END, IDS)
    core = Layer(AttentionSpec(HEADS, **options), ShardedWeights(Context(grid, torch.float32)))
    inputs = [normal(SEQUENCES, LENGTH, heads, SIZE, seed=i) for i, heads in enumerate((HEADS, kv_heads, kv_heads))]
    results = []
    on_gpu = patch("gpt4d.parallel.layers.attention.groups_heads", lambda q, mask: mask is None)
    with patch("torch.nn.attention.varlen.varlen_attn", stand_in), on_gpu:
        for by_lengths in (False, True):
            leaves = [x.clone().requires_grad_() for x in inputs]
            tokens = TokenIndex(torch.arange(SEQUENCES), LENGTH, grid.axis(None), documents)
            with patch.object(attention, "takes_documents", lambda q, by_lengths=by_lengths: by_lengths):
                out = run_alone(core(*leaves, tokens))
            out.backward(normal(*out.shape, seed=9))
            results.append([out, *(leaf.grad for leaf in leaves)])
    for by_mask, by_lengths in zip(*results, strict=True):
        torch.testing.assert_close(by_lengths, by_mask, rtol=1e-12, atol=1e-12)


def test_a_cpu_uses_the_mask():
    assert not attention.takes_documents(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16))
