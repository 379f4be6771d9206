"""Shipped sizes have the published numbers of parameters, and settings in files are read as by transformers."""

from dataclasses import replace

import pytest

from gpt4d.config import ConfigError
from gpt4d.model import registry
from tests.support.model_oracles import MODELS
from tests.support.settings import configured

OLMO2, GEMMA3 = MODELS["olmo2"], MODELS["gemma3"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *[("gemma3_270m", 0.268), ("gemma3_1b", 1.000), ("gemma3_4b", 3.880)],
        *[("olmo2_1b", 1.48), ("olmo2_7b", 7.30), ("olmo2_13b", 13.72), ("olmo2_32b", 32.23)],
        *[("olmoe_7b", (6.92, 1.28)), ("qwen3_moe_30b", (30.53, 3.35)), ("mixtral_8x7b", (46.70, 12.88))],
    ],
)
def test_shipped_sizes_have_the_published_numbers_of_parameters(name, billions):
    """A mixture of experts has two numbers: all parameters, and those that a token uses."""
    description = registry.describe(configured([f"model={name}"]).model)
    found, digits = [description.num_parameters, description.active_parameters], 3 if "gemma" in name else 2
    expected = billions if isinstance(billions, tuple) else (billions, billions)
    assert [round(count / 1e9, digits) for count in found] == [*expected]
    if "olmo2" in name:
        assert {spec.std for spec in description.parameters.values()} == {0.0, 0.02}


def test_flops_count_the_parameters_of_shared_experts():
    """Transformers' models of this family have none: six per token and parameter of a product."""
    one, other = (registry.describe(replace(MODELS["mixtral"], shared_inner=inner)) for inner in (0, 96))
    more = other.num_parameters - one.num_parameters
    assert other.training_flops(3, 16) - one.training_flops(3, 16) == 3 * 16 * 6 * more


@pytest.mark.parametrize("size", ["270m", "1b", "4b"])
def test_every_sixth_block_of_gemma_attends_to_all_tokens(size):
    model = configured([f"model=gemma3_{size}"]).model
    kinds = [unit.kind for unit in registry.describe(model).blocks]
    assert kinds == [(index + 1) % 6 == 0 for index in range(model.layers)]


def read(config, values):
    return registry.of(config).hugging_face().config_from_hf("source", values)


def settings_of(config):
    return registry.of(config).hugging_face().hf_config(config).to_dict()


def test_settings_of_older_gemmas_are_read():
    values, expected = settings_of(GEMMA3), replace(GEMMA3, name="source", vocab_multiple=128)
    rope = values.pop("rope_parameters")
    assert read(GEMMA3, values | {"rope_parameters": rope}) == expected
    values |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read(GEMMA3, values) == expected
    del values["layer_types"]
    assert read(GEMMA3, values | {"sliding_window_pattern": 2}) == expected
    assert read(GEMMA3, values) == replace(expected, global_every=3), "no global block"


def test_settings_that_a_file_of_olmo2_omits_are_those_of_transformers():
    omitted = "rms_norm_eps", "head_dim", "num_key_value_heads", "tie_word_embeddings"
    values = {key: value for key, value in settings_of(OLMO2).items() if key not in omitted}
    expected = replace(OLMO2, name="source", vocab_multiple=128, norm_epsilon=1e-5, head_size=2, key_value_heads=12)
    assert read(OLMO2, values) == expected


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (OLMO2, {"tie_word_embeddings": True}, "tie_word_embeddings=True in config.json is not supported"),
        (OLMO2, {"attention_bias": True}, "attention_bias=True"),
        (OLMO2, DYNAMIC, "rope_type='dynamic'.*rope_type=default, linear"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation='gelu' in config.json is not supported"),
        (GEMMA3, {"attention_bias": True}, "attention_bias=True"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (GEMMA3, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": None}, "rope_type='yarn'"),
        (GEMMA3, {"sliding_window": None}, "sliding_window=None in config.json is not a size"),
    ],
)
def test_what_would_be_computed_differently_is_rejected(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(model, settings_of(model) | changes)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (replace(MODELS["qwen3"], qkv_bias=True), "qk_norm=True"),
        (replace(MODELS["mixtral"], normalized_weights=False), "normalized_weights=False"),
        (replace(MODELS["olmoe"], shared_inner=96), "shared_inner=96"),
        (replace(MODELS["qwen3_moe"], balance="bias"), "balance=bias"),
    ],
)
def test_models_that_transformers_does_not_have_are_rejected(config, key):
    with pytest.raises(ConfigError, match=f"model.{key}: transformers has no such model"):
        settings_of(config)
