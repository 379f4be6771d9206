"""Models of transformers' Llama, Qwen2, Qwen3, OLMo 2, Gemma 3 and mixtures in directories: import and export."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from gpt4d import generate
from gpt4d.checkpoint import exporter, importer, tensor_files
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, tokenizer_file
from gpt4d.model.llama import ADAPTER as hf
from gpt4d.model.llama import LlamaConfig
from gpt4d.runtime.files import write_file
from tests.support.checkpoint_sources import (
    GEMMA3,
    LLAMA3,
    MIXTRAL,
    MODEL,
    OLMO2,
    OLMOE,
    QWEN2,
    QWEN3_MOE,
    TOKENIZER_FILES,
    YARN,
    change_config,
    save,
)  # fmt: skip
from tests.support.checkpoints import equal
from tests.support.commands import wrong_messages
from tests.support.settings import configured

WITHOUT_TOKENIZER = {"config.json", "generation_config.json", "model.safetensors", "README.md"}


@pytest.fixture
def paths(tmp_path):
    """Return the directories of the source, of its import and of the export."""
    return tmp_path / "source", tmp_path / "run", tmp_path / "out"


def tensors(directory):
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def names(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(
    "config",
    [MODEL, LLAMA3, QWEN2, YARN, OLMO2, GEMMA3, MIXTRAL, OLMOE, QWEN3_MOE],
    ids=["llama", "llama3", "qwen2", "qwen3", "olmo2", "gemma3", "mixtral", "olmoe", "qwen3_moe"],
)
def test_an_import_exported_again_is_equal_tensor_by_tensor(paths, config):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, run, out = paths
    save(source, config, "20KB")
    assert (source / "model.safetensors.index.json").exists()
    assert importer.import_model(str(source), run) == replace(config, name=str(source))
    exporter.export(Checkpoint.open(run), out)
    assert equal(tensors(source), tensors(out))
    built = set() if config is not QWEN2 else {"tokenizer.json", "tokenizer_config.json"}  # by the class of Qwen2
    for name in {"tokenizer.json", "generation_config.json", *TOKENIZER_FILES} - built:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    settings, exported = (json.loads((path / "config.json").read_text()) for path in (source, out))
    assert {key: exported[key] for key in exported if key in settings} == settings
    assert list(settings) == [key for key in exported if key in settings]
    older = {"rope_theta", "rope_local_base_freq", "rope_scaling"}
    assert exported.keys() - settings.keys() <= older, "the names in transformers 4"
    ids = torch.arange(24).view(2, 12)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits for path in (source, out))
    assert torch.equal(theirs, ours)
    theirs, ours = (AutoTokenizer.from_pretrained(path).backend_tokenizer.to_str() for path in (source, out))
    assert theirs == ours


def test_the_dtype_is_kept_and_files_of_transformers_5_are_exported_for_transformers_4(paths):
    source, run, out = paths
    save(source, MODEL, dtype=torch.bfloat16)
    settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["w2"], "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    importer.import_model(str(source), run)
    assert exporter.export(Checkpoint.open(run), out) == "raw weights, bfloat16"
    assert equal(tensors(source), tensors(out)) and {tensor.dtype for tensor in tensors(out).values()} == {
        torch.bfloat16
    }
    assert json.loads((out / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["w2"], "eos_token": "</s>",
    }  # fmt: skip


def test_an_export_in_another_dtype_says_so_in_both_names_of_the_setting(paths):
    source, run, out = paths
    save(source, MODEL)
    change_config(source, dtype="float32", torch_dtype="float32")
    importer.import_model(str(source), run)
    exporter.export(Checkpoint.open(run), out, "bfloat16")
    settings = json.loads((out / "config.json").read_text())
    assert settings["dtype"] == settings["torch_dtype"] == "bfloat16"


def printed_configurations(capsys):
    """Return the configurations of the commands that an import has printed."""
    commands = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("python")]
    return [configured([w for w in words if "=" in w and "data.path" not in w]) for words in commands]


def test_an_import_with_a_chat_template_prints_a_command_for_text_and_one_for_conversations(paths, tmp_path, capsys):
    source, run, _ = paths
    save(source, replace(MODEL, norm_epsilon=9.999999747378752e-06))
    main(["import", f"source={source}", f"out={run}"])
    for config, kind, epochs in zip(printed_configurations(capsys), ("text", "chat"), (None, 3), strict=True):
        assert (config.data.source, config.train.epochs, config.optim.lr) == (kind, epochs, 2e-5)
        assert config.model.norm_epsilon == 9.999999747378752e-06
        assert tokenizer_file(config.data.tokenizer) == Checkpoint.open(run).path / "tokenizer.json"
    (source / "chat_template.jinja").unlink()
    main(["import", f"source={source}", f"out={tmp_path / 'other'}"])
    assert "data=chat" not in capsys.readouterr().out


def test_an_import_with_all_default_sizes_of_its_family_prints_a_command_with_sizes(paths, capsys):
    source, run, _ = paths
    save(source, LlamaConfig(vocab_size=4096))
    main(["import", f"source={source}", f"out={run}", "tokenizer=none"])
    (config,) = printed_configurations(capsys)
    assert replace(config.model, name="") == LlamaConfig(name="", vocab_size=4096)


def test_a_tokenizer_is_optional_and_can_come_from_elsewhere_but_is_used_only_if_it_is_listed(tmp_path):
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    save(source, MODEL)
    elsewhere.mkdir()
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        (source / name).rename(elsewhere / name)
    mistakes = [
        ((), "no tokenizer; add tokenizer=none, or a file, directory or hub name"),
        (("gpt2",), "tokenizer=gpt2: its 50257 tokens are more than the model's 50; use"),
    ]
    assert not wrong_messages(mistakes, lambda words: importer.import_model(str(source), tmp_path / "run", *words))
    runs = {"without": set(), "unlisted": set(), "with": {"tokenizer.json", *TOKENIZER_FILES}}
    for run in runs:
        importer.import_model(str(source), tmp_path / run, str(elsewhere) if run == "with" else "none")
    assert Checkpoint.open(tmp_path / "without").meta.identity == {"data": str(source)}
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        (Checkpoint.open(tmp_path / "unlisted").path / name).write_bytes((elsewhere / name).read_bytes())
    for run, files in runs.items():
        exporter.export(Checkpoint.open(tmp_path / run), tmp_path / f"{run}_exported")
        assert names(tmp_path / f"{run}_exported") == files | WITHOUT_TOKENIZER
    mistakes = [(tmp_path / run, "it has no tokenizer; import the model with tokenizer") for run in list(runs)[:2]]
    assert not wrong_messages(mistakes, lambda run: generate.main([f"checkpoint={run}", "prompt=w1"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", r"tokenizer\.json: not a usable tokenizer \(.*\); restore the file"),
        ("tokenizer.json", None, r"its 2147483649 tokens are more than the model's 50; restore the file"),
        ("config.json", b"[" * 100_000, r"config\.json: damaged \(maximum recursion depth"),
    ],
)
def test_an_export_of_a_damaged_file_that_the_manifest_lists_is_one_line(paths, name, content, message):
    source, run, out = paths
    save(source, MODEL)
    importer.import_model(str(source), run)
    directory = Checkpoint.open(run).path
    if content is None:
        values = json.loads((directory / name).read_bytes())
        values["model"]["vocab"]["far"] = 2**31
        content = json.dumps(values).encode()
    entries = tensor_files.read_manifest(directory)
    for file in (name, "manifest.json"):
        (directory / file).unlink()
    tensor_files.write_manifest(directory, entries | {name: write_file(directory / name, content)})
    with pytest.raises(ConfigError, match=message):
        exporter.export(Checkpoint(directory), out)


def test_settings_of_older_files_are_read():
    values = hf.hf_config(LLAMA3).to_dict()
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert hf.config_from_hf("source", values) == LLAMA3
    values |= {"rope_scaling": None, "head_dim": None, "num_key_value_heads": None}
    plain = replace(LLAMA3, rope_scaling="none", rope_factor=1.0, rope_original_positions=0, key_value_heads=4)
    assert hf.config_from_hf("source", values) == plain


def test_what_would_be_computed_differently_is_rejected():
    gelu = "hidden_act='gelu' in config.json is not supported; use a model with hidden_act='silu'"
    partial = {"rope_type": "default", "partial_rotary_factor": 0.5}
    cases = [
        ({"hidden_act": "gelu"}, gelu),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": partial}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"hidden_size": 0}, "hidden_size=0 in config.json is not a size"),
    ]
    settings = hf.hf_config(MODEL).to_dict()
    assert not wrong_messages(cases, lambda changes: hf.config_from_hf("source", settings | changes))
