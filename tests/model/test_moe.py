"""Invariant 1 at one step: logits and gradients on every grid equal transformers' OLMoE, Qwen3-MoE and Mixtral."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes, ParallelConfig, PipelineConfig
from gpt4d.model.moe import hugging_face as hf
from gpt4d.model.moe.config import MoeConfig
from tests.model.test_llama import check_on_grid, check_step, inputs, library_model
from tests.support.grids import BINARY_GRIDS, sampled

MOE = MoeConfig(
    layers=2,
    hidden=24,
    heads=4,
    key_value_heads=2,
    head_size=6,
    inner=24,
    experts=12,
    experts_per_token=3,
    vocab_size=300,
    vocab_multiple=48,
    max_positions=16,
    balance_rate=0.05,
    router_z_loss=0.02,
)
MODELS = {
    "mixtral": MOE,
    "olmoe": replace(MOE, qk_norm="all", normalized_weights=False, key_value_heads=4),
    "qwen3_moe": replace(MOE, qk_norm="heads", experts_per_token=1),
}


def in_files(tensors, config):
    """Return tensors of a model in memory under the names of transformers' files, one per matrix of an expert."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".experts.")
        if not prefix:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if config.qk_norm == "none" else name] = tensor
            continue
        block = prefix.split(".")[2]
        ours = f"blocks.{block}.mlp.experts.{'up' if last == 'gate_up_proj' else 'down'}"
        parts = tensor.unflatten(1, (2, -1)).flatten(0, 1) if last == "gate_up_proj" else tensor
        found |= dict(zip(hf.names(ours, config), parts, strict=True))
    return found


def exact_router(module, x):
    """Return the results of transformers' routers without their cast to float32."""
    logits = F.linear(x.reshape(-1, module.hidden_dim), module.weight)
    values, indices = logits.softmax(-1).topk(module.top_k, -1)
    if getattr(module, "norm_topk_prob", True):
        values = values / values.sum(-1, keepdim=True)
    return logits, values, indices


@functools.cache
def oracle(name):
    """Return the library's state dict with the load of each expert, logits, and the gradients of all losses."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = MODELS[name]
    model = library_model(config.llama, hf.hf_config(config))
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = exact_router.__get__(module)
    ids, targets, _ = inputs()
    answers = model(ids, output_router_logits=True)
    loss = F.cross_entropy(answers.logits.flatten(0, 1), targets.flatten())
    state = {}
    for block, logits in enumerate(answers.router_logits):
        chosen = logits.softmax(-1).topk(config.experts_per_token, -1).indices
        state[f"blocks.{block}.mlp.router.state"] = F.one_hot(chosen, config.experts).double().sum((0, 1)) / len(logits)
        with InFloat64():
            balance = load_balancing_loss_func((logits,), config.experts, config.experts_per_token)
        own = config.balance_rate * balance + config.router_z_loss * logits.logsumexp(-1).square().mean()
        loss = loss + own / config.layers
    loss.backward()
    grads = in_files({key: p.grad for key, p in model.named_parameters()}, config)
    return state | in_files(model.state_dict(), config), answers.logits.detach(), grads


class InFloat64:
    """Within it, ``float()`` of a tensor and float32 in transformers' losses keep float64."""

    def __enter__(self):
        self.float, self.float32 = torch.Tensor.float, torch.float32
        torch.Tensor.float, torch.float32 = torch.Tensor.double, torch.float64

    def __exit__(self, *error):
        torch.Tensor.float, torch.float32 = self.float, self.float32


WITH_THREE = [GridSizes(1, 1, 3), GridSizes(1, 2, 4), GridSizes(2, 1, 3)]


@pytest.mark.parametrize(
    "sizes", sampled([*BINARY_GRIDS, *WITH_THREE], [GridSizes(), GridSizes(2, 2, 2), WITH_THREE[0]])
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(ranks, name, sizes):
    check_on_grid(ranks, MODELS[name], sizes, *oracle(name))


PLANS = {
    "two stages": (2, ParallelConfig(pipeline=PipelineConfig(stages=2))),
    "stages with grids": (6, ParallelConfig(pipeline=PipelineConfig(stages=2, stage_grids=["1x1x4x1", "1x2x1x1"]))),
    "atp": (4, ParallelConfig(mode="atp", d1=2, d2=2, chunks=2)),
    "experts over data": (4, ParallelConfig(gz=2, gdata=2, expert_data=True, chunks=2)),
    "shared sequences": (4, ParallelConfig(gz=2, gdata=2, context=2)),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_plan_equal_transformers(ranks, name, plan):
    check_step(ranks, MODELS[name], *PLANS[plan], "full", *oracle(name))
