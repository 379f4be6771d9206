"""Models of transformers in float64, and the comparison of our models on grids with them."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import Config, ParallelConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.gemma3 import Gemma3Config, rotary_frequencies
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.llama import LlamaConfig, frequencies, scale
from gpt4d.model.moe import ADAPTER as moe_adapter
from gpt4d.model.moe import MoeConfig
from gpt4d.model.olmo2 import Olmo2Config
from gpt4d.parallel import gradient_reducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.routing import Routers
from gpt4d.plan import one_stage
from gpt4d.step import build_stage
from tests.support.grids import batch_part, fill_from_hf, global_tensor, to_hf

BATCH, LENGTH = 16, 12
_SIZES = {"layers": 2, "hidden": 24, "vocab_size": 300, "vocab_multiple": 48, "max_positions": 16}
_LLAMA = LlamaConfig(**_SIZES, heads=4, key_value_heads=2, head_size=16, inner=32)
_PARTS = {"heads": 12, "key_value_heads": 3, "head_size": 4, "inner": 48}  # four ranks have parts of heads of keys
_MOE = MoeConfig(
    **_SIZES, heads=4, key_value_heads=2, head_size=6, inner=24, experts=12, experts_per_token=3, balance_rate=0.05,
    router_z_loss=0.02,
)  # fmt: skip
_ORIGINAL = {"rope_original_positions": 8}
_LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_low_frequency": 0.05, "rope_high_frequency": 0.5}
_YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_beta_fast": 4.0}
MODELS = {
    "gpt2": GPT2Config(**_SIZES, heads=4),
    "llama, tied, one head of keys": replace(_LLAMA, key_value_heads=1),
    "llama3 positions": replace(_LLAMA, tied=False, **_LLAMA3, **_ORIGINAL),
    "qwen2, yarn": replace(_LLAMA, qkv_bias=True, **_YARN, **_ORIGINAL),
    "qwen3": replace(_LLAMA, key_value_heads=4, tied=False, qk_norm=True),
    "qwen3, one head of keys": replace(_LLAMA, key_value_heads=1, qk_norm=True),
    "olmo2": Olmo2Config(**_SIZES, **_PARTS),
    "olmo2, equal heads": Olmo2Config(**_SIZES, **_PARTS | {"key_value_heads": 12}),
    "gemma3": Gemma3Config(
        **_SIZES, **_PARTS, window=5, global_every=2, query_pre_attn_scalar=6, rope_linear_factor=8.0
    ),
    "mixtral": _MOE,
    "olmoe": replace(_MOE, qk_norm="all", normalized_weights=False, key_value_heads=4),
    "qwen3_moe": replace(_MOE, qk_norm="heads", experts_per_token=1),
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (BATCH, LENGTH), generator=generator)
    return ids, ids.roll(-1, 1), torch.arange(BATCH)


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


# ------------------------------------------------------------------------- transformers without its casts to float32


def _exact_norm(module, x):
    if hasattr(module, "eps"):  # Gemma
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * (1 + module.weight)
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def _exact_rotation(config):
    """Return the angles of transformers' formulas, computed in float64."""

    def rotation(module, x, position_ids, layer_type=None):
        if layer_type:
            found, theirs = rotary_frequencies(config)[layer_type == "full_attention"], f"{layer_type}_inv_freq"
        else:
            found, theirs = frequencies(config), "inv_freq"
            assert module.attention_scaling == pytest.approx(scale(config))
        found = torch.tensor(found, dtype=torch.float64)
        torch.testing.assert_close(getattr(module, theirs).double(), found, rtol=1e-6, atol=0)
        angles = (position_ids[..., None].double() * found).repeat(1, 1, 2)
        factor = 1.0 if layer_type else module.attention_scaling
        return angles.cos() * factor, angles.sin() * factor

    return rotation


def _exact_router(module, x):
    logits = F.linear(x.reshape(-1, module.hidden_dim), module.weight)
    values, indices = logits.softmax(-1).topk(module.top_k, -1)
    if getattr(module, "norm_topk_prob", True):
        values = values / values.sum(-1, keepdim=True)
    return logits, values, indices


def library_model(config):
    """Return transformers' model in float64, without casts to float32, with weights large enough to matter."""
    from transformers import AutoModelForCausalLM

    settings = registry.of(config).hugging_face().hf_config(config)
    settings._attn_implementation, settings._experts_implementation = "sdpa", "eager"
    model = AutoModelForCausalLM.from_config(settings).double().eval()
    exact = {"RMSNorm": _exact_norm, "RotaryEmbedding": _exact_rotation(config), "TopKRouter": _exact_router}
    for module in model.modules():
        for ending, forward in exact.items():
            if type(module).__name__.endswith(ending):
                module.forward = forward.__get__(module)
    return with_random_weights(model, config)


def with_random_weights(model, config):
    """Return a model in float64 with weights large enough to matter."""
    gemma = isinstance(config, Gemma3Config)  # adds one to the weight of a norm
    if gemma:
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden**0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(values + 1 if "norm" in name and not gemma else values)
    return model


@functools.cache
def oracle(name):
    """Return the state dict, logits and gradients of transformers' model for one of MODELS."""
    config = MODELS[name]
    model, (ids, targets, _) = library_model(config), inputs()
    mixture = isinstance(config, MoeConfig)
    answers = model(ids, output_router_logits=True) if mixture else model(ids)
    state, of_routers = router_states_and_loss(config, answers.router_logits if mixture else ())
    (F.cross_entropy(answers.logits.flatten(0, 1), targets.flatten()) + of_routers).backward()
    grads, weights = {key: p.grad for key, p in model.named_parameters()}, model.state_dict()
    if mixture:
        grads, weights = in_files(grads, config), in_files(weights, config)
    return state | weights, answers.logits.detach(), grads


def router_states_and_loss(config, logits_of_routers):
    """Return the loads of experts by the names of our states, and the mean of the losses of all routers."""
    found = [_load_and_loss(config, logits) for logits in logits_of_routers]
    states = {f"blocks.{block}.mlp.router.state": load for block, (load, _) in enumerate(found)}
    return states, sum(loss for _, loss in found) / config.layers


def _load_and_loss(config, logits):
    """Return the load of each expert of a router, and the router's balance loss and z-loss."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    chosen = logits.softmax(-1).topk(config.experts_per_token, -1).indices
    load = F.one_hot(chosen, config.experts).double().sum((0, 1)) / len(logits)
    with pytest.MonkeyPatch.context() as patch:  # transformers casts to float32
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        balance = load_balancing_loss_func((logits,), config.experts, config.experts_per_token)
    return load, config.balance_rate * balance + config.router_z_loss * logits.logsumexp(-1).square().mean()


def in_files(tensors, config):
    """Return tensors of a mixture in memory under the names of transformers' files, one per matrix of an expert."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".experts.")
        if not prefix:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if config.qk_norm == "none" else name] = tensor
            continue
        ours = f"blocks.{prefix.split('.')[2]}.mlp.experts.{'up' if last == 'gate_up_proj' else 'down'}"
        parts = tensor.unflatten(1, (2, -1)).flatten(0, 1) if last == "gate_up_proj" else tensor
        found |= dict(zip(moe_adapter.names(ours, config), parts, strict=True))
    return found


# ----------------------------------------------------------------------------------------------- our models, compared


def _forward_and_backward(config, sizes, state, checkpointing, loss_chunks, microbatches, parallel):
    """On a rank: its place and logits, on rank 0 the global gradients by transformers' names, its share of the norm."""
    train = TrainConfig(seq_len=LENGTH, activation_checkpointing=checkpointing, loss_chunks=loss_chunks)
    settings = Config(model=config, train=train, parallel=ParallelConfig(**parallel))
    stage = build_stage(one_stage(settings, sizes), Grid(sizes), torch.device("cpu"), torch.float64)
    model, grid = stage.module, stage.grid
    trained = {name: p for name, p in model.named_parameters() if not p.spec.frozen}
    total = gradient_reducer.GradientReducer(model.weights, trained)
    Routers(model, stage.routers).begin(BATCH * LENGTH)
    fill_from_hf(model, state)
    ids, targets, samples = (batch_part(t, grid) for t in inputs())
    with torch.no_grad():
        logits = model(ids, samples)
    for batch in zip(*(t.chunk(microbatches) for t in (ids, targets, samples)), strict=True):
        (model.loss_sum(*batch) / (BATCH * LENGTH)).backward()
    total.finish()
    counted = [p for p in trained.values() if gradient_reducer.counted_once(p, grid)]
    norm = gradient_reducer.squared_norm(counted, torch.device("cpu"))
    grads = to_hf({n: global_tensor(p.grad, p.spec, grid) for n, p in trained.items()}, config)
    return (grid.batch_shard, grid.x.index, logits), (grads if grid.world.index == 0 else None), norm


def _variants(config, sizes, state):
    """Each kind of checkpointing; accumulation, chunks, split tokens and unsplit heads where the grid has room."""
    parts = min(2, BATCH // sizes.batch_shards)
    chunks, tokens = {"chunks": parts}, {"sequence_parallel": True, "scatter_heads": False}
    settings = ("none", 1, parts, {}), ("selective", 2, 1, chunks), ("full", 3, 1, tokens)
    return [_forward_and_backward(config, sizes, state, *each) for each in settings]


def global_logits(answers, sizes, config):
    """Return the logits of the global batch from (batch shard, index on x, logits) of each rank."""
    shards = {(shard, x): part for shard, x, part in answers}
    rows = [torch.cat([shards[s, x] for x in range(sizes.x)], -1) for s in range(sizes.batch_shards)]
    return torch.cat(rows)[..., : config.vocab_size]


def check_on_grid(ranks, name, sizes):
    """Compare logits, gradients and their norm on a grid with the values of transformers."""
    config, (state, logits, grads) = MODELS[name], oracle(name)
    true_norm = sum(g.square().sum() for g in grads.values())
    for answers in zip(*ranks.run(sizes.devices, _variants, config, sizes, state), strict=True):
        own, global_grads, norms = zip(*answers, strict=True)
        assert relative(global_logits(own, sizes, config), logits) <= 1e-12
        assert global_grads[0].keys() == grads.keys()
        for key, grad in grads.items():
            assert relative(global_grads[0][key], grad) <= 1e-12, key
        assert sum(norms).item() == pytest.approx(true_norm.item(), rel=1e-12)
