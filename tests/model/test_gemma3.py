"""Invariant 1 at one step: logits and gradients on every grid equal the values of transformers' Gemma 3. Settings."""

import functools
from dataclasses import replace

import pytest
import torch

from gpt4d.config import ConfigError, GridSizes, ParallelConfig, PipelineConfig
from gpt4d.model import registry
from gpt4d.model.gemma3 import hugging_face as hf
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.gemma3.model import rotary_frequencies
from tests.model.test_llama import check_on_grid, check_step, results_of
from tests.support.grids import BINARY_GRIDS, sampled
from tests.support.settings import configured

# Four ranks have three of the twelve columns of keys each: parts of heads.
GEMMA3 = Gemma3Config(
    layers=2, hidden=24, heads=12, key_value_heads=3, head_size=4, inner=48, vocab_size=300, vocab_multiple=48,
    max_positions=16, window=5, global_every=2, query_pre_attn_scalar=6, rope_linear_factor=8.0,
)  # fmt: skip


def exact_norm(module, x):
    """RMSNorm without transformers' cast to float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * (1 + module.weight)


def exact_rotation(module, x, position_ids, layer_type):
    """Return the angles of transformers' formulas, computed in float64."""
    frequencies = torch.tensor(rotary_frequencies(GEMMA3)[layer_type == "full_attention"], dtype=torch.float64)
    torch.testing.assert_close(getattr(module, f"{layer_type}_inv_freq").double(), frequencies, rtol=1e-6, atol=0)
    angles = (position_ids[..., None].double() * frequencies).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


@functools.cache
def oracle():
    """Return the library's state dict, logits and gradients, in float64 without its casts to float32."""
    from transformers import AutoModelForCausalLM

    settings = hf.hf_config(GEMMA3)
    settings._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(settings).double().eval()
    forwards = {"Gemma3RMSNorm": exact_norm, "Gemma3RotaryEmbedding": exact_rotation}
    for module in model.modules():
        if forward := forwards.get(type(module).__name__):
            module.forward = forward.__get__(module)
    model.model.embed_tokens.embed_scale = torch.tensor(GEMMA3.hidden**0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return results_of(model)


WITH_THREE = [GridSizes(3, 2), GridSizes(1, 3, 1, 2), GridSizes(3, 1, 2)]
SAMPLED = [GridSizes(), GridSizes(2, 2, 2), WITH_THREE[0]]


@pytest.mark.parametrize("sizes", sampled([*BINARY_GRIDS, *WITH_THREE, GridSizes(4, 1, 2)], SAMPLED))
def test_logits_and_gradients_equal_transformers(ranks, sizes):
    check_on_grid(ranks, GEMMA3, sizes, *oracle())


STAGES = ParallelConfig(pipeline=PipelineConfig(stages=2))
STAGE_GRIDS = ParallelConfig(pipeline=PipelineConfig(stages=2, stage_grids=["2x1x1x2", "1x2x1x1"]))
ATP = ParallelConfig(mode="atp", d1=2, d2=2, chunks=2)


@pytest.mark.parametrize(
    ("devices", "parallel", "checkpointing"),
    [
        (2, STAGES, "none"),
        (4, ATP, "selective"),
        pytest.param(6, STAGE_GRIDS, "full", marks=pytest.mark.full),
        pytest.param(4, ATP, "full", marks=pytest.mark.full),
    ],
    ids=["stages", "atp", "stages of grids", "atp, recomputed"],
)
def test_gradients_of_a_plan_equal_transformers(ranks, devices, parallel, checkpointing):
    check_step(ranks, GEMMA3, devices, parallel, checkpointing, *oracle())


@pytest.mark.parametrize(("size", "millions"), [("270m", 268), ("1b", 1000), ("4b", 3880)])
def test_shipped_sizes_have_the_published_numbers_of_parameters(size, millions):
    model = configured([f"model=gemma3_{size}"]).model
    description = registry.describe(model)
    assert round(description.num_parameters / 1e6) == millions
    kinds = [unit.kind for unit in description.blocks]
    assert kinds == [(index + 1) % 6 == 0 for index in range(model.layers)]
    # Keys outside the window count neither in the forward nor in the backward.
    lengths = 4096, 4096 - model.window
    (longer, shorter), per_key = (description.training_flops(1, n) / n for n in lengths), model.heads * model.head_size
    assert longer - shorter == pytest.approx(12 * per_key * kinds.count(True) * model.window)


def test_settings_of_older_files_are_read():
    values = hf.hf_config(GEMMA3).to_dict()
    rope, expected = values.pop("rope_parameters"), replace(GEMMA3, name="source", vocab_multiple=128)
    assert hf.config_from_hf("source", values | {"rope_parameters": rope}) == expected
    values |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert hf.config_from_hf("source", values) == expected
    del values["layer_types"]
    assert hf.config_from_hf("source", values | {"sliding_window_pattern": 2}) == expected
    assert hf.config_from_hf("source", values) == replace(expected, global_every=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' in config.json is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "rope_type='yarn'"),
        ({"sliding_window": None}, "sliding_window=None in config.json is not a size"),
    ],
)
def test_what_would_be_computed_differently_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        hf.config_from_hf("source", hf.hf_config(GEMMA3).to_dict() | changes)
