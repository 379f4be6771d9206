"""Models of transformers' Llama, Qwen2, Qwen3, OLMo 2, Gemma 3 and mixtures in directories: import and export."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models

from gpt4d import generate
from gpt4d.checkpoint import checkpoint_dir, exporter, importer
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, tokenizer_file
from gpt4d.files import write_file
from gpt4d.model import registry
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.llama import hugging_face as hf
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.moe.config import MoeConfig
from gpt4d.model.olmo2.config import Olmo2Config
from tests.support.settings import configured

MODEL = LlamaConfig(
    name="source",
    layers=2,
    hidden=32,
    heads=4,
    key_value_heads=2,
    head_size=8,
    inner=48,
    vocab_size=50,
    max_positions=64,
    norm_epsilon=1e-6,
)
LLAMA3 = replace(MODEL, tied=False, rope_theta=5e5, rope_scaling="llama3", rope_factor=8.0, rope_original_positions=16)
YARN = replace(MODEL, qk_norm=True, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=16)
OLMO2 = Olmo2Config(
    layers=2, hidden=32, heads=4, key_value_heads=2, head_size=8, inner=48, vocab_size=50, max_positions=64,
    rope_scaling="yarn", rope_factor=4.0, rope_original_positions=16,
)  # fmt: skip
GEMMA3 = Gemma3Config(
    layers=3, hidden=32, heads=4, key_value_heads=2, head_size=8, inner=48, vocab_size=50, max_positions=64, window=7,
    global_every=2, query_pre_attn_scalar=9, rope_theta=1e5, rope_linear_factor=8.0, rope_local_theta=1e3,
)  # fmt: skip
MIXTRAL = MoeConfig(
    layers=2, hidden=32, heads=4, key_value_heads=2, head_size=8, inner=48, vocab_size=50, max_positions=64, experts=5,
    norm_epsilon=1e-5, balance_rate=0.02,
)  # fmt: skip
OLMOE = replace(MIXTRAL, qk_norm="all", normalized_weights=False, key_value_heads=4, experts_per_token=3)
QWEN3_MOE = replace(MIXTRAL, qk_norm="heads", experts_per_token=1, inner=16, tied=True)
TOKENIZER_FILES = {
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "w1"}',
    "special_tokens_map.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
}


def save(directory, config, max_shard_size="5GB", dtype=torch.float32):
    """Save a random model of transformers with a tokenizer as it comes from elsewhere."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = registry.of(config).hugging_face().hf_config(config)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    words = {f"w{index}": index for index in range(49)} | {"</s>": 49}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    for name, content in TOKENIZER_FILES.items():
        (directory / name).write_bytes(content)


def tensors(directory):
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 – not a dict
    return found


@pytest.mark.parametrize(
    "config",
    [
        MODEL,
        LLAMA3,
        replace(MODEL, qkv_bias=True, rope_scaling="linear", rope_factor=2.0),
        YARN,
        OLMO2,
        GEMMA3,
        MIXTRAL,
        OLMOE,
        QWEN3_MOE,
    ],
    ids=["llama", "llama3", "qwen2", "qwen3", "olmo2", "gemma3", "mixtral", "olmoe", "qwen3_moe"],
)
def test_an_import_exported_again_is_equal_tensor_by_tensor(tmp_path, config):
    from transformers import AutoModelForCausalLM

    source, run, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    save(source, config, "20KB")
    assert (source / "model.safetensors.index.json").exists()
    assert importer.import_model(str(source), run) == replace(config, name=str(source))
    exporter.export(Checkpoint.open(run), out)
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("tokenizer.json", "generation_config.json", *TOKENIZER_FILES):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    settings, exported = (json.loads((path / "config.json").read_text()) for path in (source, out))
    assert {key: exported[key] for key in exported if key in settings} == settings
    assert list(settings) == [key for key in exported if key in settings]
    older = {"rope_theta", "rope_local_base_freq", "rope_scaling"}
    assert exported.keys() - settings.keys() <= older, "the names in transformers 4"
    ids = torch.arange(24).view(2, 12)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits for path in (source, out))
    assert torch.equal(theirs, ours)


def test_files_that_transformers_5_has_written_are_exported_for_transformers_4(tmp_path):
    source, run, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    save(source, MODEL)
    settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["w2"], "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    importer.import_model(str(source), run)
    exporter.export(Checkpoint.open(run), out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["w2"], "eos_token": "</s>",
    }  # fmt: skip


def test_the_dtype_of_an_imported_model_is_kept(tmp_path):
    source, run, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    save(source, MODEL, dtype=torch.bfloat16)
    importer.import_model(str(source), run)
    assert exporter.export(Checkpoint.open(run), out) == "raw weights, bfloat16"
    before, after = tensors(source), tensors(out)
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)


def test_an_import_with_a_chat_template_prints_a_command_for_text_and_one_for_conversations(tmp_path, capsys):
    source, run = tmp_path / "source", tmp_path / "run"
    save(source, replace(MODEL, norm_epsilon=9.999999747378752e-06))
    main(["import", f"source={source}", f"out={run}"])
    text, chat = (line for line in capsys.readouterr().out.splitlines() if line.startswith("python"))
    words = [configured([w for w in command.split() if "=" in w and "data.path" not in w]) for command in (text, chat)]
    for config, kind, epochs in zip(words, ("text", "chat"), (None, 3), strict=True):
        assert (config.data.source, config.train.epochs, config.optim.lr) == (kind, epochs, 2e-5)
        assert config.model.norm_epsilon == 9.999999747378752e-06
        assert tokenizer_file(config.data.tokenizer) == Checkpoint.open(run).path / "tokenizer.json"
    (source / "chat_template.jinja").unlink()
    main(["import", f"source={source}", f"out={tmp_path / 'other'}"])
    assert "data=chat" not in capsys.readouterr().out


def test_an_import_with_all_default_sizes_of_its_family_prints_a_command_with_sizes(tmp_path, capsys):
    source = tmp_path / "source"
    save(source, LlamaConfig(vocab_size=4096))
    main(["import", f"source={source}", f"out={tmp_path / 'run'}", "tokenizer=none"])
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("python"))
    words = [word for word in command.split() if "=" in word and "data.path" not in word]
    assert replace(configured(words).model, name="") == LlamaConfig(name="", vocab_size=4096)


def test_a_tokenizer_is_optional_and_can_come_from_elsewhere(tmp_path):
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    save(source, MODEL)
    elsewhere.mkdir()
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        (source / name).rename(elsewhere / name)
    with pytest.raises(ConfigError, match=r"no tokenizer; add tokenizer=none, or a file, directory or hub name"):
        importer.import_model(str(source), tmp_path / "run")
    with pytest.raises(ConfigError, match="tokenizer=gpt2: its 50257 tokens are more than the model's 50; use"):
        importer.import_model(str(source), tmp_path / "run", "gpt2")
    importer.import_model(str(source), tmp_path / "without", "none")
    assert Checkpoint.open(tmp_path / "without").meta.identity == {"data": str(source)}
    importer.import_model(str(source), tmp_path / "with", str(elsewhere))
    for run, files in (("without", set()), ("with", {"tokenizer.json", *TOKENIZER_FILES})):
        exporter.export(Checkpoint.open(tmp_path / run), tmp_path / f"{run}_exported")
        names = {path.name for path in (tmp_path / f"{run}_exported").iterdir()}
        assert names == files | {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    with pytest.raises(ConfigError, match="it has no tokenizer; import the model with tokenizer"):
        generate.main([f"checkpoint={tmp_path / 'without'}", "prompt=w1"])


def test_a_tokenizer_that_the_manifest_does_not_list_is_not_used(tmp_path):
    save(tmp_path / "source", MODEL)
    importer.import_model(str(tmp_path / "source"), tmp_path / "run", "none")
    checkpoint = Checkpoint.open(tmp_path / "run")
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        (checkpoint.path / name).write_bytes((tmp_path / "source" / name).read_bytes())
    exporter.export(checkpoint, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    with pytest.raises(ConfigError, match="it has no tokenizer; import the model with tokenizer"):
        generate.main([f"checkpoint={tmp_path / 'run'}", "prompt=w1"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", r"tokenizer\.json: not a usable tokenizer \(.*\); restore the file"),
        ("tokenizer.json", None, r"its 2147483649 tokens are more than the model's 50; restore the file"),
        ("config.json", b"[" * 100_000, r"config\.json: damaged \(maximum recursion depth"),
    ],
)
def test_an_export_of_a_damaged_file_that_the_manifest_lists_is_one_line(tmp_path, name, content, message):
    save(tmp_path / "source", MODEL)
    importer.import_model(str(tmp_path / "source"), tmp_path / "run")
    directory = Checkpoint.open(tmp_path / "run").path
    if content is None:
        values = json.loads((directory / name).read_bytes())
        values["model"]["vocab"]["far"] = 2**31
        content = json.dumps(values).encode()
    entries = checkpoint_dir.read_manifest(directory)
    for file in (name, "manifest.json"):
        (directory / file).unlink()
    checkpoint_dir.write_manifest(directory, entries | {name: write_file(directory / name, content)})
    with pytest.raises(ConfigError, match=message):
        exporter.export(Checkpoint(directory), tmp_path / "out")


def test_settings_of_older_files_are_read(tmp_path):
    values = hf.hf_config(LLAMA3).to_dict()
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert hf.config_from_hf("source", values) == LLAMA3
    values |= {"rope_scaling": None, "head_dim": None, "num_key_value_heads": None}
    plain = replace(LLAMA3, rope_scaling="none", rope_factor=1.0, rope_original_positions=0, key_value_heads=4)
    assert hf.config_from_hf("source", values) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_act": "gelu"},
            "hidden_act='gelu' in config.json is not supported; use a model with hidden_act='silu'",
        ),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"head_dim": "wide"}, "head_dim='wide' in config.json is not a size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"hidden_size": "wide"}, "hidden_size='wide' in config.json is not a size"),
    ],
)
def test_what_would_be_computed_differently_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        hf.config_from_hf("source", hf.hf_config(MODEL).to_dict() | changes)
