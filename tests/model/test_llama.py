"""Invariant 1 at one step: logits and gradients on every grid equal transformers' Llama, Qwen2 and Qwen3."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import (
    Config,
    ConfigError,
    DataConfig,
    GridSizes,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from gpt4d.model.llama import hugging_face as hf
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.llama.frequencies import frequencies, scale
from gpt4d.parallel import gradient_reducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.documents import Documents
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.support.grids import (
    BINARY_GRIDS,
    PAIRWISE_GRIDS,
    batch_part,
    build_model,
    fill_from_hf,
    global_tensor,
    to_hf,
)
from tests.support.settings import configured
from tests.support.stages import check_float64_step, float64_step

BATCH, LENGTH = 16, 12
LLAMA = LlamaConfig(
    layers=2,
    hidden=24,
    heads=4,
    key_value_heads=2,
    head_size=16,
    inner=32,
    vocab_size=300,
    vocab_multiple=16,
    max_positions=16,
)
MODELS = {
    "llama, tied, one head of keys": replace(LLAMA, key_value_heads=1),
    "llama3 positions": replace(
        LLAMA,
        tied=False,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_positions=8,
        rope_low_frequency=0.05,
        rope_high_frequency=0.5,
    ),
    "qwen2, yarn": replace(
        LLAMA, qkv_bias=True, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=8, rope_beta_fast=4.0
    ),
    "qwen3": replace(LLAMA, key_value_heads=4, tied=False, qk_norm=True),
    "qwen3, one head of keys": replace(LLAMA, key_value_heads=1, qk_norm=True),
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (BATCH, LENGTH), generator=generator)
    return ids, ids.roll(-1, 1), torch.arange(BATCH)


def exact_norm(module, x):
    """RMSNorm without transformers' cast to float32."""
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def exact_rotation(config):
    """Return the angles of transformers' formulas, computed in float64."""

    def rotation(module, x, position_ids):
        angles = position_ids[..., None].double() * torch.tensor(frequencies(config), dtype=torch.float64)
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * scale(config), angles.sin() * scale(config)

    return rotation


def library_model(config, settings=None):
    """Return transformers' model in float64, with its casts to float32 replaced and weights large enough to matter.

    ``settings``: transformers' configuration of another family's model with these rotary positions.
    """
    from transformers import AutoModelForCausalLM

    settings = settings or hf.hf_config(config)
    settings._attn_implementation, settings._experts_implementation = "sdpa", "eager"
    model = AutoModelForCausalLM.from_config(settings).double().eval()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = exact_norm.__get__(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            expected = module.inv_freq.double()
            assert torch.allclose(torch.tensor(frequencies(config), dtype=torch.float64), expected, rtol=1e-6)
            assert module.attention_scaling == pytest.approx(scale(config))
            module.forward = exact_rotation(config).__get__(module)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(values + 1 if "norm" in name else values)
    return model


@functools.cache
def oracle(name):
    """Return the library's state dict, logits and gradients for one of MODELS."""
    return results_of(library_model(MODELS[name]))


def results_of(model):
    """Return the state dict, logits and gradients of a model of the library."""
    ids, targets, _ = inputs()
    logits = model(ids).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return model.state_dict(), logits.detach(), grads


GRIDS = [*BINARY_GRIDS, GridSizes(4, 1, 2), GridSizes(1, 4)]


def paired(choices, sampled):
    """Return every model with each of ``choices``. ``make test`` runs each of ``sampled`` with one model."""
    chosen = {(name, str(choice)) for name, choice in zip(itertools.cycle(MODELS), sampled, strict=False)}
    chosen |= {(name, str(choice)) for name, choice in zip(MODELS, itertools.cycle(sampled), strict=False)}
    return [
        pytest.param(
            name, choice, id=f"{name}-{choice}", marks=[] if (name, str(choice)) in chosen else pytest.mark.full
        )
        for name in MODELS
        for choice in choices
    ]


def forward_and_backward(config, sizes, state, checkpointing, parallel):
    """On a rank: its place and logits, on rank 0 the global gradients by transformers' names, its share of the norm."""
    chunks = 2 if checkpointing == "selective" else 1
    train = TrainConfig(seq_len=LENGTH, activation_checkpointing=checkpointing, loss_chunks=chunks)
    settings = Config(model=config, train=train, parallel=ParallelConfig(**parallel))
    stage = build_stage(settings, Grid(sizes), torch.device("cpu"), torch.float64)
    model, grid = stage.module, stage.grid
    trained = {name: p for name, p in model.named_parameters() if not p.spec.frozen}
    total = gradient_reducer.GradientReducer(model.weights, trained)
    model.weights.loss_divisor = BATCH * LENGTH
    fill_from_hf(model, state)
    ids, targets, samples = (batch_part(t, grid) for t in inputs())
    model.eval()
    with torch.no_grad():
        logits = model(ids, samples)
    model.train()
    (model.loss_sum(ids, targets, samples) / (BATCH * LENGTH)).backward()
    total.finish()
    counted = [p for p in trained.values() if gradient_reducer.counted_once(p, grid)]
    norm = gradient_reducer.squared_norm(counted, torch.device("cpu"))
    grads = to_hf({n: global_tensor(p.grad, p.spec, grid) for n, p in trained.items()}, config)
    return (grid.batch_shard, grid.x.index, logits), (grads if grid.world.index == 0 else None), norm


def variants(config, sizes, state):
    """Both kinds of checkpointing; chunks, split tokens and unsplit heads where the grid has room; loss in parts."""
    room = BATCH // sizes.batch_shards >= 2
    options = [{"chunks": 2} if room else {}, {"sequence_parallel": True, "scatter_heads": False}]
    return [
        forward_and_backward(config, sizes, state, r, o) for r, o in zip(("selective", "full"), options, strict=True)
    ]


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(("name", "sizes"), paired(GRIDS, [*PAIRWISE_GRIDS[1:], *GRIDS[-2:]]))
def test_logits_and_gradients_equal_transformers(ranks, name, sizes):
    check_on_grid(ranks, MODELS[name], sizes, *oracle(name))


def check_on_grid(ranks, config, sizes, state, logits, grads):
    """Compare logits, gradients and their norm on a grid with the values of the library."""
    true_norm = sum(g.square().sum() for g in grads.values())
    for answers in zip(*ranks.run(sizes.devices, variants, config, sizes, state), strict=True):
        own, global_grads, norms = zip(*answers, strict=True)
        shards = {(shard, x): part for shard, x, part in own}
        rows = [torch.cat([shards[s, x] for x in range(sizes.x)], -1) for s in range(sizes.batch_shards)]
        assert relative(torch.cat(rows)[..., : config.vocab_size], logits) <= 1e-12
        assert global_grads[0].keys() == grads.keys()
        for name, grad in grads.items():
            assert relative(global_grads[0][name], grad) <= 1e-12, name
        assert sum(norms).item() == pytest.approx(true_norm.item(), rel=1e-12)


def step(config, world_size, state):
    """On a rank: the losses and gradients of ``float64_step``."""
    ids, targets, samples = inputs()
    return float64_step(config, world_size, state, [ids, targets, samples], token_loss, BATCH * LENGTH)


def token_loss(module, part, batch, received):
    return module.compute(part, received, *batch)


STAGES = [
    (6, {"stages": 2, "stage_grids": ["2x1x1x2", "1x2x1x1"]}),
    (8, {"stages": 2, "schedule": "zb_h1", "stage_grids": ["4x1x1x1", "2x2x1x1"]}),
    (2, {"stages": 2}),
]


@pytest.mark.parametrize(("name", "pipeline"), paired(STAGES, STAGES))
def test_gradients_over_stages_equal_transformers(ranks, name, pipeline):
    devices, changes = pipeline
    parallel = ParallelConfig(pipeline=PipelineConfig(**changes))
    check_step(ranks, MODELS[name], devices, parallel, "full" if devices == 6 else "none", *oracle(name))


def check_step(ranks, model, devices, parallel, checkpointing, state, logits, grads):
    """Compare losses and gradients of a step of a plan with the values of the library."""
    _, targets, _ = inputs()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    train = TrainConfig(seq_len=LENGTH, batch_size=BATCH, activation_checkpointing=checkpointing)
    config = Config(model=model, data=DataConfig(tokenizer_vocab=300), train=train, parallel=parallel)
    check_float64_step(ranks.run(devices, step, config, devices, state), config, loss, grads)


def logits_of_packed(config, sizes, state, ids):
    """On a rank: its logits of sequences in which a 0 ends a document, its shard and its place on x."""
    model = build_model(config, sizes)
    fill_from_hf(model, state)
    grid, ids = model.context.grid, batch_part(ids, model.context.grid)
    with torch.no_grad():
        return grid.batch_shard, grid.x.index, model(ids, torch.arange(len(ids)), Documents.ending_with(0, ids))


def test_documents_of_a_sequence_do_not_see_each_other(ranks):
    config = MODELS["llama3 positions"]
    theirs, ids = library_model(config), torch.randint(1, 300, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    ids[0, [3, 4, 9]] = ids[1, 11] = ids[2, 0] = 0
    expected = torch.empty(4, LENGTH, config.vocab_size, dtype=torch.float64)
    for row, sequence in enumerate(ids.tolist()):
        stops = [i + 1 for i, token in enumerate(sequence) if token == 0 and i + 1 < LENGTH] + [LENGTH]
        for start, stop in zip([0, *stops], stops, strict=False):
            with torch.no_grad():
                expected[row, start:stop] = theirs(ids[row : row + 1, start:stop]).logits
    sizes = GridSizes(4, 1, 2)
    answers = ranks.run(sizes.devices, logits_of_packed, config, sizes, theirs.state_dict(), ids)
    by_place = {(shard, x): logits for shard, x, logits in answers}
    rows = [torch.cat([by_place[shard, x] for x in range(sizes.x)], -1) for shard in range(sizes.batch_shards)]
    assert relative(torch.cat(rows)[..., : config.vocab_size], expected) <= 1e-12


@pytest.mark.parametrize(
    ("model", "gx"),
    [
        (("model.heads=7", "model.key_value_heads=7", "model.head_size=10", "model.inner=77"), 7),
        (("model=llama3_8b",), 32),
        (("model=qwen2_0b5",), 2),
    ],
    ids=str,
)
def test_gx_is_any_divisor_of_the_heads_and_of_the_columns_of_keys(model, gx):
    assert (
        validate(configured(["model=llama_tiny", *model, f"parallel.gx={gx}", "cluster.memory_gib=1000"]), gx).sizes.x
        == gx
    )


def test_gx_that_does_not_divide_the_columns_of_keys_is_rejected():
    with pytest.raises(ConfigError, match=r"gx=7: does not divide model.key_value_heads·head_size=128; use one of"):
        validate(configured(["model=qwen2_0b5", "parallel.gx=7"]), 7)
