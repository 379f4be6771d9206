"""Ranks that share sequences (``parallel.context``): losses and gradients equal the values of one rank."""

import functools
from itertools import chain, pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import Config, ConfigError, DataConfig, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.layers import context_attention_kernels
from gpt4d.parallel.layers.context_attention import GatheredKeys, RingKeys, block_attention, block_gradients
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.sequence import segments_of
from gpt4d.parallel.pipeline.runtime import StageRuntime
from gpt4d.step import mask_replicas
from gpt4d.validation import validate
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.settings import configured
from tests.support.stages import own_stage, own_tokens

aten = torch.ops.aten
BATCH, LENGTH, VOCABULARY = 4, 48, 288
SIZES = {"layers": 2, "hidden": 24, "heads": 4, "vocab_size": VOCABULARY, "vocab_multiple": 96, "max_positions": 48}
GROUPED = {**SIZES, "key_value_heads": 2, "head_size": 8, "inner": 32}
MODELS = {
    "gpt2": GPT2Config(**SIZES),
    "gpt2, dropout": GPT2Config(**SIZES, dropout=0.1, attention_dropout=0.1),
    "llama": LlamaConfig(**GROUPED),
    "olmo2": Olmo2Config(**GROUPED),
    "gemma3": Gemma3Config(**GROUPED, window=7, global_every=2, query_pre_attn_scalar=8),
}


def settings(name: str, train: dict, parallel: dict) -> Config:
    parallel = {key: PipelineConfig(**value) if key == "pipeline" else value for key, value in parallel.items()}
    return Config(
        model=MODELS[name],
        data=DataConfig(tokenizer_vocab=VOCABULARY),
        train=TrainConfig(seq_len=LENGTH, batch_size=BATCH, seed=3, **train),
        parallel=ParallelConfig(**parallel),
    )


def step(config: Config, world_size: int, packed: bool):
    """On a rank: the losses of an evaluation and of a step, its token losses, and its parts of the gradients."""
    plan, stage = own_stage(config, world_size, ranks_per_host=world_size)
    with torch.no_grad():
        for parameter in stage.module.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)  # attention that differs between keys
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    ends = torch.rand(BATCH, LENGTH, generator=generator) < 0.12
    grid, size, kept = stage.grid, plan.micro_batch_size(plan.stages[stage.index]), []

    def batches():
        for part in torch.arange(BATCH).chunk(plan.microbatches):
            samples = part.split(size)[grid.sample_shard]
            documents = Documents.ending_with(1, ends[samples].long()) if packed else None
            yield own_tokens(ids[samples, :-1], grid), own_tokens(ids[samples, 1:], grid), samples, documents

    def compute(module, part, batch, received):
        produced = module.compute(part, received, *batch, False, True)
        if (losses := produced.pop("token_losses", None)) is not None:
            kept.append((batch[2].tolist(), grid.context.index, grid.context.size, losses))
        return produced

    own = {name: p for name, p in stage.module.named_parameters() if name not in stage.copies}
    reducer = GradientReducer(stage.weights, own)
    runtime, units = StageRuntime(stage, reducer, compute), BATCH * LENGTH
    stage.module.eval()
    losses = [runtime.evaluate(batches(), plan.microbatches) / units]
    kept.clear()
    stage.module.train()
    losses.append(runtime.forward_backward(batches(), plan.microbatches, units))
    losses = [grid.world.all_reduce(mask_replicas(loss, grid)).item() for loss in losses]
    if stage.exchange:
        stage.exchange.close()
    parts = {name: (p.spec.stored_shape, LocalShard(p.grad, p.spec)) for name, p in own.items()}
    return losses, kept, {n: (shape, shard.slices(grid), shard.stored(grid)) for n, (shape, shard) in parts.items()}


def results(ranks, config: Config, devices: int, packed: bool) -> tuple[list[float], torch.Tensor, dict]:
    """Return losses, token losses [BATCH, LENGTH] and global gradients of a step."""
    by_token, gradients = torch.full((BATCH, LENGTH), torch.nan, dtype=torch.float64), {}
    answers = ranks.run(devices, step, config, devices, packed)
    for _, kept, parts in answers:
        for samples, index, size, found in kept:
            segments = by_token[samples].chunk(2 * size, 1)
            for segment, part in zip(segments_of(size, index), found.chunk(2, 1), strict=True):
                segments[segment].copy_(part)
            by_token[samples] = torch.cat(segments, 1)
        for name, (shape, place, part) in parts.items():
            gradients.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))[place] = part
    return answers[0][0], by_token, gradients


@pytest.fixture(scope="module")
def serial(ranks):
    """Return the results of one rank for a model, with or without documents."""
    return functools.cache(lambda name, packed: results(ranks, settings(name, {}, {}), 1, packed))


FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective", "loss_chunks": 2}
STAGES = {"pipeline": {"stages": 2, "schedule": "1f1b"}}
ATP = {"mode": "atp", "d1": 2, "d2": 1, "chunks": 2}


@pytest.mark.parametrize(
    ("name", "packed", "devices", "train", "parallel"),
    [
        ("gpt2", False, 2, {}, {"context": 2, "chunks": 2}),
        ("gpt2, dropout", False, 2, FULL, {"context": 2, "gz": 2}),
        ("llama", False, 4, SELECTIVE, {"context": 4, "gz": 2}),
        ("llama", True, 4, FULL, {"context": 2, "gx": 2, "sequence_parallel": True}),
        ("gemma3", False, 3, {}, {"context": 3}),
        ("llama", False, 4, {"micro_batch_size": None}, {"context": 2, **STAGES}),
        full("gpt2", True, 8, {}, {"context": 8, "gz": 4}),
        full("gpt2, dropout", True, 4, {}, {"context": 2, "gy": 2, "chunks": 2}),
        full("llama", False, 8, FULL, {"context": 8, "gz": 8}),
        full("llama", False, 8, {}, {"context": 2, "gz": 2, "gx": 2, "gy": 2}),
        full("llama", False, 4, {}, {"context": 2, **ATP}),
        full("llama", True, 8, FULL, {"context": 4, **ATP}),
        full("olmo2", True, 6, SELECTIVE, {"context": 3, "gx": 2}),
        full("gemma3", True, 4, FULL, {"context": 4, "gz": 2, "chunks": 4}),
        full("gemma3", False, 8, {}, {"context": 2, "gz": 2, "gx": 2, **STAGES}),
        full("gpt2", False, 8, FULL, {"context": 2, "pipeline": {"stages": 2, "schedule": "zb_h1"}}),
    ],
)  # fmt: skip
def test_losses_and_gradients_equal_those_of_one_rank(ranks, serial, name, packed, devices, train, parallel):
    losses, by_token, gradients = results(ranks, settings(name, train, parallel), devices, packed)
    expected_losses, expected_by_token, expected = serial(name, packed)
    assert losses == [pytest.approx(loss, rel=1e-12) for loss in expected_losses]
    torch.testing.assert_close(by_token, expected_by_token, rtol=1e-11, atol=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-12 * max(gradient.norm(), 1e-3), name


def test_all_ranks_have_equal_work():
    pairs = {
        sum(1 + 2 * segment for segment in segments_of(ranks, index)) / ranks for ranks in (2, 3, 8, 64)
        for index in range(ranks)
    }  # fmt: skip
    assert pairs == {4.0}


RESUMED = [
    (4, ["parallel.context=4", "parallel.gz=2"]),
    (1, []),
    (4, ["parallel.context=2", "parallel.gx=2"]),
]


def test_a_run_continues_with_other_numbers_of_ranks_per_sequence(ranks, tiny):
    common = "optim.schedule_steps=6", "logging.every=1", "data.reset_attention=true"
    straight = tiny("train.steps=6", *common)
    ranks.run(1, train_in_rank, straight)
    for place, (devices, words) in enumerate(RESUMED):
        config = tiny(f"train.steps={2 * place + 2}", *words, *common, f"run.dir={straight.run.dir}-resumed")
        ranks.run(devices, train_in_rank, config)
    ours, expected = ([line["loss"] for line in metric_lines(config.run.dir)] for config in (config, straight))
    assert ours == pytest.approx(expected, rel=1e-5) and len(ours) == 6


@pytest.mark.parametrize(
    ("devices", "words", "message"),
    [
        (2, ["parallel.context=3"], "parallel.context=3: does not divide parallel.gdata·gz=2; use one of 1, 2"),
        (4, ["parallel.context=4", "train.seq_len=36"], "cuts each sequence into 8 segments"),
        (2, ["parallel.context=2", "model=unet_tiny"], "parallel.context=2: an image has no tokens"),
        (
            6,
            ["parallel.context=2", "parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[1x1x1x2,1x1x1x4]"],
            "parallel.context=2: the stages have different gdata·gz (2, 4)",
        ),
        (
            2,
            ["parallel.context=2", "train.seq_len=32", "train.loss_chunks=32"],
            "train.loss_chunks=32: does not divide train.seq_len/parallel.context=16; use one of 1, 2, 4, 8, 16",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(devices, words, message):
    with pytest.raises(ConfigError) as error:
        validate(configured(["model=gpt_tiny", "train.batch_size=8", *words]), devices)
    assert message in str(error.value) and "\n" not in str(error.value)


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
        hidden = torch.zeros(len(rows), len(keys), dtype=torch.bool)
        if causal:
            hidden |= keys > rows
        if limit >= 0:
            hidden |= keys < rows - limit
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
            patch.object(context_attention_kernels, "_aten", stand_in if by_lengths else aten),
        ):
            found = []
            for index in range(3):
                axis = SimpleNamespace(size=3, index=index)
                for block, mask in chain.from_iterable(exchange(axis).masked_steps(q, documents, window)):
                    out, statistics = block_attention(q, k, v, mask, block, None)
                    whole, totals = torch.zeros_like(q), q.new_zeros(2, 4, 8)
                    whole[:, block.first : block.stop], totals[..., block.first : block.stop] = out, statistics
                    # All queries have a key in some block.
                    totals = totals.masked_fill(totals == -torch.inf, 0)
                    found += [out, statistics, *block_gradients(q, q, k, v, whole, totals, mask, block, None)]
            results.append(found)
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
