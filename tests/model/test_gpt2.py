"""Invariant 1 at one step: logits and gradients on every grid equal the values of transformers' GPT-2."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes
from gpt4d.model.gpt2 import hugging_face as hf
from gpt4d.parallel import gradient_reducer
from gpt4d.parallel.layers.documents import Documents
from tests.support.grids import (
    BINARY_GRIDS,
    PAIRWISE_GRIDS,
    TINY_MODEL,
    batch_part,
    build_model,
    fill_from_hf,
    global_tensor,
    grid_name,
    sampled,
    to_hf,
    unpadded,
)

BATCH, LENGTH = 16, 12


def inputs():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TINY_MODEL.vocab_size, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(0, TINY_MODEL.vocab_size, (BATCH, LENGTH), generator=generator)
    return ids, targets, torch.arange(BATCH)


@pytest.fixture(scope="module")
def oracle():
    """GPT2LMHeadModel in float64 with weights large enough to matter: its state dict, logits and gradients."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(hf.hf_config(TINY_MODEL)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    ids, targets, _ = inputs()
    logits = model(ids).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return model.state_dict(), logits.detach(), grads


def forward_and_backward(sizes, state, checkpointing, microbatches, config=TINY_MODEL):
    """On a rank: (batch shard, index on x, own logits), and on rank 0 the global gradients by transformers' names."""
    model = build_model(config, sizes, checkpointing=checkpointing, loss_chunks=3 if checkpointing == "full" else 1)
    grid = model.context.grid
    total = gradient_reducer.GradientReducer(model.weights, dict(model.named_parameters()))
    if state is not None:
        fill_from_hf(model, state)
    parts = [batch_part(t, grid).chunk(microbatches) for t in inputs()]
    logits = [model(ids, numbers).detach() for ids, _, numbers in zip(*parts, strict=True)]
    for ids, targets, numbers in zip(*parts, strict=True):
        (model.loss_sum(ids, targets, numbers) / (BATCH * LENGTH)).backward()
    total.finish()
    counted = [p for p in model.parameters() if gradient_reducer.counted_once(p, grid)]
    norm = gradient_reducer.squared_norm(counted, torch.device("cpu"))
    grads = to_hf({n: global_tensor(p.grad, p.spec, grid) for n, p in model.named_parameters()}, config)
    own = (grid.batch_shard, grid.x.index, torch.cat(logits))
    return own, (grads if grid.world.index == 0 else None), norm


def variants(sizes, state):
    """Every kind of checkpointing, with and without accumulation, in one call of the pool."""
    microbatches = 2 if BATCH // sizes.batch_shards > 1 else 1
    choices = ("none", 1), ("full", microbatches), ("selective", microbatches)
    return [forward_and_backward(sizes, state, *choice) for choice in choices]


def assembled_logits(answers, sizes):
    shards = {(shard, x): logits for shard, x, logits in answers}
    rows = [torch.cat([shards[s, x] for x in range(sizes.x)], -1) for s in range(sizes.batch_shards)]
    return torch.cat(rows)[..., : TINY_MODEL.vocab_size]


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS, PAIRWISE_GRIDS[::2]))
def test_logits_and_gradients_equal_transformers_gpt2(ranks, oracle, sizes):
    state, logits, grads = oracle
    true_norm = sum(g.square().sum() for g in grads.values())
    for answers in zip(*ranks.run(sizes.devices, variants, sizes, state), strict=True):
        own, global_grads, norms = zip(*answers, strict=True)
        assert relative(assembled_logits(own, sizes), logits) <= 1e-12
        assert global_grads[0].keys() == grads.keys()
        for name, grad in grads.items():
            assert relative(global_grads[0][name], grad) <= 1e-12, name
        assert sum(norms).item() == pytest.approx(true_norm.item(), rel=1e-12)


def with_dropout(sizes, kinds):
    """On a rank: the global gradients with dropout under each kind of checkpointing; None on other ranks than 0."""
    config = replace(TINY_MODEL, dropout=0.2, attention_dropout=0.3)
    return [forward_and_backward(sizes, None, kind, 1, config)[1] for kind in kinds]


@pytest.fixture(scope="module")
def serial_dropout(ranks):
    """Return the gradients of one device with dropout."""
    (((serial,), (_, plain, _)),) = ranks.run(1, with_and_without_dropout)
    assert any(relative(serial[name], plain[name]) > 0.1 for name in plain), "dropout did nothing"
    return serial


def with_and_without_dropout():
    return with_dropout(GridSizes(), ["none"]), forward_and_backward(GridSizes(), None, "none", 1)


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS[1:], PAIRWISE_GRIDS[3:4]))
def test_dropout_masks_are_equal_on_every_grid_and_in_recomputation(ranks, serial_dropout, sizes):
    for grads in ranks.run(sizes.devices, with_dropout, sizes, ["none", "selective", "full"])[0]:
        for name, grad in serial_dropout.items():
            assert relative(grads[name], grad) <= 1e-12, name


def gradients_in_bf16(sizes):
    """On a rank: the global gradients of fp32 master weights under bf16 compute."""
    model = build_model(TINY_MODEL, sizes, torch.float32, compute_dtype=torch.bfloat16)
    grid = model.context.grid
    total = gradient_reducer.GradientReducer(model.weights, dict(model.named_parameters()))
    ids, targets, numbers = (batch_part(t, grid) for t in inputs())
    logits = model(ids, numbers)
    assert logits.dtype == torch.bfloat16
    (model.loss_sum(ids, targets, numbers) / (BATCH * LENGTH)).backward()
    total.finish()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return {n: global_tensor(p.grad, p.spec, grid) for n, p in model.named_parameters()}


def gradients_in_fp32():
    model = build_model(TINY_MODEL, BINARY_GRIDS[0], torch.float32)
    (model.loss_sum(*inputs()) / (BATCH * LENGTH)).backward()
    return {n: unpadded(p.grad, p.spec, model.context.grid) for n, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [BINARY_GRIDS[0], BINARY_GRIDS[14]], ids=grid_name)
def test_bf16_compute_gives_fp32_gradients_near_those_of_fp32(ranks, sizes):
    (exact,) = ranks.run(1, gradients_in_fp32)
    near = ranks.run(sizes.devices, gradients_in_bf16, sizes)[0]
    for name, grad in exact.items():
        assert relative(near[name], grad) < 0.05, name


def logits_of_packed(sizes, state, ids, checkpointing):
    """On a rank: its logits of sequences in which a 0 ends a document, its shard and its place on x."""
    model = build_model(TINY_MODEL, sizes, checkpointing=checkpointing)
    fill_from_hf(model, state)
    grid = model.context.grid
    ids = batch_part(ids, grid)
    return grid.batch_shard, grid.x.index, model(ids, torch.arange(len(ids)), Documents.ending_with(0, ids)).detach()


@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(2, 2, 2)], ids=grid_name)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_documents_of_a_sequence_do_not_see_each_other(ranks, sizes, checkpointing):
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(hf.hf_config(TINY_MODEL)).double().eval()
    ids = torch.randint(1, TINY_MODEL.vocab_size, (4, 12))
    ids[0, [3, 4, 9]] = ids[1, 11] = ids[2, 0] = 0
    expected = torch.empty(4, 12, TINY_MODEL.vocab_size, dtype=torch.float64)
    for row, sequence in enumerate(ids.tolist()):
        start = 0
        for stop in [i + 1 for i, token in enumerate(sequence) if token == 0] + [12]:
            if start < stop:
                with torch.no_grad():
                    expected[row, start:stop] = theirs(ids[row : row + 1, start:stop]).logits
            start = stop
    answers = ranks.run(sizes.devices, logits_of_packed, sizes, theirs.state_dict(), ids, checkpointing)
    by_place = {(shard, x): logits for shard, x, logits in answers}
    rows = [torch.cat([by_place[shard, x] for x in range(sizes.x)], -1) for shard in range(sizes.batch_shards)]
    found = torch.cat(rows)[..., : TINY_MODEL.vocab_size]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
