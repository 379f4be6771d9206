"""Rotary positions beyond the original length equal transformers' own code, run in float64."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, modeling_rope_utils

from gpt4d.config import ConfigError, GridSizes
from gpt4d.model import registry
from gpt4d.model.gemma3 import Gemma3Config
from gpt4d.model.llama import ADAPTER as hf
from gpt4d.model.llama import LlamaConfig as Settings
from gpt4d.model.llama import frequencies, scale
from gpt4d.model.olmo2 import Olmo2Config
from tests.support.grids import build_model, fill_from_hf, full
from tests.support.model_oracles import relative, with_random_weights

LENGTH, ORIGINAL = 96, 16
SIZES = {
    "layers": 2, "hidden": 24, "heads": 4, "key_value_heads": 2, "head_size": 16, "inner": 32, "vocab_size": 300,
    "vocab_multiple": 4, "max_positions": LENGTH,
}  # fmt: skip
LINEAR = {"rope_scaling": "linear", "rope_factor": 6.0}
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 6.0, "rope_original_positions": ORIGINAL, "rope_theta": 50.0}
YARN = {"rope_scaling": "yarn", "rope_factor": 6.0, "rope_original_positions": ORIGINAL, "rope_beta_fast": 2.0}
SHAPED = YARN | {"rope_beta_slow": 0.2, "rope_truncate": False, "rope_attention_factor": 1.5}
MODELS = {
    "llama, linear": Settings(**SIZES, **LINEAR),
    "llama, llama3": Settings(**SIZES, **LLAMA3),
    "llama, yarn": Settings(**SIZES, **YARN),
    "qwen2, yarn": Settings(**SIZES, **SHAPED, qkv_bias=True),
    "qwen3, yarn": Settings(**SIZES, **YARN, qk_norm=True, tied=False),
    "olmo2, linear": Olmo2Config(**SIZES, **LINEAR),
    "olmo2, llama3": Olmo2Config(**SIZES, **LLAMA3),
    "olmo2, yarn": Olmo2Config(**SIZES, **SHAPED),
    "gemma3, linear": Gemma3Config(**SIZES, window=20, global_every=2, rope_linear_factor=6.0),
}


class Float64Torch:
    """torch for a module of transformers, whose casts to float32 then are casts to float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def float64(monkeypatch):
    """Return a function that lets the module of a class of transformers compute in float64."""
    monkeypatch.setattr(modeling_rope_utils, "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return lambda kind: monkeypatch.setattr(sys.modules[kind.__module__], "torch", Float64Torch())


def library_model(config, float64):
    """Return transformers' model in float64 with weights large enough to matter."""
    settings = registry.of(config).hugging_face().hf_config(config)
    settings._attn_implementation = "sdpa"
    float64(AutoModelForCausalLM._model_mapping[type(settings)])
    model = AutoModelForCausalLM.from_config(settings).double().eval()
    return with_random_weights(model, config)


@pytest.mark.parametrize("name", MODELS)
def test_logits_beyond_the_original_length_equal_transformers(float64, name):
    config = MODELS[name]
    theirs, ours = library_model(config, float64), build_model(config, GridSizes())
    fill_from_hf(ours, theirs.state_dict())
    ids = torch.randint(0, 300, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(ids, torch.arange(2))[..., :300]
        assert relative(logits[:, ORIGINAL:], theirs(ids).logits[:, ORIGINAL:]) <= 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_settings_of_scaled_positions_are_read_and_written(name):
    config, adapter = MODELS[name], registry.of(MODELS[name]).hugging_face()
    written = adapter.documents(config, {})["config.json"]
    assert replace(adapter.config_from_hf("source", written), name=config.name, vocab_multiple=4) == config
    values = dict(written)
    del values["rope_parameters"]  # only transformers 5 writes it
    assert replace(adapter.config_from_hf("source", values), name=config.name, vocab_multiple=4) == config


YARN_QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # Qwen2.5
LLAMA_3_1 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
FILES = [
    {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 1e5},
    {"rope_scaling": LLAMA_3_1, "rope_theta": 5e5, "max_position_embeddings": 131072},
    {"rope_scaling": LLAMA_3_1 | {"factor": 32.0}, "rope_theta": 5e5, "head_dim": 64},
    {"rope_scaling": YARN_QWEN, "rope_theta": 1e6, "max_position_embeddings": 32768},
    {"rope_scaling": {"rope_type": "yarn", "factor": None}, "original_max_position_embeddings": 512},
    {"rope_scaling": YARN_QWEN | {"attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_scaling": YARN_QWEN | {"factor": 40.0, "original_max_position_embeddings": 64}, "rope_theta": 1e4},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FILES)))
def test_frequencies_of_published_files_equal_transformers(float64, number):
    values = hf.hf_config(Settings(vocab_size=300, head_size=128)).to_dict() | {"max_position_embeddings": 4096}
    del values["rope_parameters"]
    values |= FILES[number]
    ours, theirs = hf.config_from_hf("source", values), LlamaConfig(**values)
    kind = theirs.rope_parameters["rope_type"]
    expected, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(torch.tensor(frequencies(ours), dtype=torch.float64), expected, rtol=1e-12, atol=0)
    assert scale(ours) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "none"])
@pytest.mark.parametrize("name", ["llama, yarn", "olmo2, yarn", "gemma3, linear"])
def test_other_kinds_of_scaling_are_rejected(name, kind):
    adapter = registry.of(MODELS[name]).hugging_face()
    values = {**adapter.documents(MODELS[name], {})["config.json"], "rope_scaling": None}
    scaled = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}
    layers = values.get("layer_types")
    values["rope_parameters"] = {"full_attention": scaled} if layers and "gemma" in name else scaled
    with pytest.raises(ConfigError, match=f"rope_type='{kind}' in config.json is not supported; use a model with"):
        adapter.config_from_hf("source", values)


EXTENDED = {
    "llama, linear": {"rope_factor": 12.0},
    "qwen2, yarn": {"rope_factor": 12.0, "rope_attention_factor": 0.0},
    "olmo2, llama3": YARN | {"rope_factor": 12.0},
    "gemma3, linear": {"rope_linear_factor": 12.0},
}


@pytest.mark.parametrize("older", [False, full(True)])
@pytest.mark.parametrize("name", EXTENDED)
def test_the_file_of_an_extended_import_has_the_new_positions_and_all_further_settings(name, older):
    before, adapter = MODELS[name], registry.of(MODELS[name]).hugging_face()
    source = adapter.documents(before, {})["config.json"] | {"initializer_range": 0.5, "dtype": "bfloat16"}
    if older:
        del source["rope_parameters"]
    after = replace(before, max_positions=2 * LENGTH, **EXTENDED[name])
    written = json.loads(json.dumps(adapter.documents(after, source)["config.json"]))
    loaded = AutoConfig.for_model(**written)
    assert loaded.max_position_embeddings == 2 * LENGTH
    assert loaded.rope_parameters == adapter.hf_config(after).rope_parameters
    positions = {"max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"}
    kept, given = ({k: v for k, v in values.items() if k not in positions} for values in (written, source))
    assert kept == given
    assert adapter.documents(before, source)["config.json"] == source
