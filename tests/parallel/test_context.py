"""Ranks that share sequences (``parallel.context``): losses and gradients equal the values of one rank."""

from itertools import chain, pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.layers import context_attention_kernels
from gpt4d.parallel.layers.context_attention import GatheredKeys, RingKeys, block_attention, block_gradients
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.sequence import segments_of
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import metric_lines, train_in_rank
from tests.support.parallel_runs import in_order, runtime_of
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage

aten = torch.ops.aten


def token_losses(config):
    """On a rank: the losses of its tokens of a batch, as for the losses of sources."""
    plan, stage = own_stage(config, dist.get_world_size())
    kept = []

    def compute(module, part, batch, received):
        produced = module.compute(part, received, *batch, None, False, True)
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


RESUMED = [(4, ["parallel.context=4", "parallel.gz=2"]), (2, ["parallel.context=2"])]


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
    # Windows with the ring need a mask, which the functions for a CPU take.
    on_cpu = {name: getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}") for name in ("", "_backward")}
    stand_in = SimpleNamespace(
        _flash_attention_forward=attention_by_documents,
        _flash_attention_backward=gradients_by_documents,
        **{f"_scaled_dot_product_flash_attention_for_cpu{name}": function for name, function in on_cpu.items()},
    )
    results = []
    for by_lengths in (False, True):
        with (
            patch.object(context_attention_kernels, "takes_documents", lambda q, by_lengths=by_lengths: by_lengths),
            patch.object(context_attention_kernels, "aten", stand_in if by_lengths else aten),
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
