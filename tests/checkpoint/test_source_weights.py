"""An import rejects every tensor and setting that it cannot convert for the model."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt4d.checkpoint import importer
from gpt4d.checkpoint.__main__ import main
from gpt4d.config import ConfigError
from gpt4d.config.commands import one_line_errors
from gpt4d.runtime.errors import one_line
from tests.support.checkpoint_sources import MODEL, change_config, save

QUERY = "model.layers.0.self_attn.q_proj.weight"
DTYPE = rf"{QUERY} has dtype \w+; use a model whose weights are F64, F32, BF16 or F16"


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("intact") / "source"
    save(directory, MODEL)
    return directory


@pytest.fixture
def source(intact, tmp_path):
    shutil.copytree(intact, tmp_path / "source")
    return tmp_path / "source"


def import_(source):
    importer.import_model(str(source), source.parent / "run", "none")


def assert_rejected(source, message):
    """Assert that the import ends with a message of one line, and leaves no files."""
    with pytest.raises(ConfigError, match=message):
        import_(source)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def change_tensors(source, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def change_query(source, change):
    change_tensors(source, lambda tensors: tensors.update({QUERY: change(tensors[QUERY])}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_of_other_dtypes_are_rejected(source, dtype):
    change_query(source, lambda query: query.to(dtype))
    assert_rejected(source, DTYPE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_tensors_of_floating_dtypes_are_imported(source, dtype):
    change_query(source, lambda query: query.to(dtype))
    import_(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_values_that_are_not_finite_in_float32_are_rejected(source, value):
    change_query(source, lambda query: query.double().index_fill_(0, torch.tensor(1), value))
    assert_rejected(source, f"{QUERY} has values that are not finite in float32")


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "SCB", "qweight"])
def test_a_quantized_model_is_rejected(source, suffix):
    name = f"{QUERY.removesuffix('weight')}{suffix}"
    change_tensors(source, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert_rejected(source, f"{name} belongs to quantized weights; use the model that it was")
    change_config(source, quantization_config={"quant_method": "fp8"})
    assert_rejected(source, r"config\.json has a quantization_config; use the model that it was")


def test_unknown_tensors_are_rejected_by_name(source):
    change_tensors(source, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.ones(4)}))
    assert_rejected(source, r"model\.layers\.7\.mlp\.up_proj\.weight is not a tensor of a model")


def test_buffers_and_a_copy_of_the_tied_head_are_allowed_and_another_head_is_not(source):
    def add(tensors):
        tensors |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(source, add)
    import_(source)
    shutil.rmtree(source.parent / "run")
    change_tensors(source, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert_rejected(source, r"lm_head\.weight differs from model\.embed_tokens\.weight, but config")


def test_a_base_model_that_was_saved_without_its_head_is_imported(source):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(source, rename)
    import_(source)


def in_two_files(source, *moved, copied=()):
    """Move tensors to other.safetensors, with copies of others, and write an index of both files."""
    tensors = load_file(source / "model.safetensors")
    other = {name: tensors.pop(name) for name in moved} | {name: tensors[name] + 1 for name in copied}
    files = dict.fromkeys(tensors, "first.safetensors") | dict.fromkeys(moved, "other.safetensors")
    save_file(tensors, source / "first.safetensors", {"format": "pt"})
    save_file(other, source / "other.safetensors", {"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_two_sources_of_a_tensor_are_one_line_with_both_and_unlisted_files_are_not_read(source):
    """Transformers prefers model.safetensors to an index, diffusers the index, and the last of two shards wins."""
    save_file({QUERY: torch.zeros(2)}, source / "consolidated.safetensors")
    import_(source)
    shutil.rmtree(source.parent / "run")
    in_two_files(source, QUERY)
    assert_rejected(source, r"model\.safetensors and model\.safetensors\.index\.json, .* are two copies of the weights")
    (source / "model.safetensors").rename(source / "unused")
    import_(source)
    shutil.rmtree(source.parent / "run")
    (source / "unused").rename(source / "model.safetensors")
    in_two_files(source, QUERY, copied=["model.norm.weight"])
    (source / "model.safetensors").unlink()
    assert_rejected(source, r"first\.safetensors and other\.safetensors both have model\.norm\.weight; remove one file")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({QUERY: "../model.safetensors"}, "is not a file name in this directory"),
        ({QUERY: 3}, "is not a file name in this directory"),
        ([], "not a readable index"),
        ({QUERY: "away.safetensors"}, r"away\.safetensors: missing, or not a regular file"),
        ({"other": "model-1.safetensors"}, r"model-1\.safetensors: lacks other, which .* places there"),
    ],
)
def test_an_index_that_does_not_match_the_files_is_rejected(source, files, message):
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert_rejected(source, message)


def test_a_model_with_adapters_in_its_directory_is_rejected(source):
    """Transformers loads such a directory with its adapters."""
    (source / "adapter_config.json").write_text("{}")
    assert_rejected(source, r"contains adapter_config\.json; add adapter=.*, or remove it")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"])
def test_a_pipe_is_rejected_instead_of_read(source, name):
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}.*not a regular file"):
        main(["import", f"source={source}", f"out={source.parent / 'run'}"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported"),
        ({"model_type": {"llama": 1}}, "model_type=.* is not supported"),
        ({"rms_norm_eps": "x"}, r"config\.json has an invalid value \(Validation error for field 'rms_norm_eps'"),
        ({"rms_norm_eps": float("nan")}, r"source=.*: model\.norm_epsilon=nan: use"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000 in config.json is not a size; use a number from 1 to",
        ),
        ({"rope_parameters": {"rope_theta": "fast"}}, r"source=.*: config\.json has an invalid value \(ValueError"),
        ({"rope_parameters": [1]}, r"config\.json has an invalid value \(Validation error for field 'rope_parameters'"),
    ],
)
def test_impossible_settings_are_rejected_as_those_of_a_configuration(source, values, message):
    change_config(source, **values)
    assert_rejected(source, message)


def test_deeply_nested_settings_are_one_line(source):
    (source / "config.json").write_text("[" * 100_000)
    assert_rejected(source, r"no readable config\.json \(maximum recursion depth")


FORGED = "a\nerror: forged\r\x1b[31m\u202e"


@pytest.mark.parametrize(
    "change",
    [
        lambda source: change_tensors(source, lambda tensors: tensors.update({FORGED: torch.ones(1)})),
        lambda source: change_config(source, model_type=FORGED),
        lambda source: change_config(source, rope_parameters={"rope_type": FORGED}),
        lambda source: (source / "adapter_config.json").write_text(json.dumps({FORGED: 1})),
        lambda source: (
            (source / "model.safetensors").rename(source / "other.safetensors")
            and (source / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {FORGED: "other.safetensors"}})
            )
        ),
    ],
    ids=["tensor", "model_type", "rope_type", "adapter", "index"],
)
def test_names_in_files_cannot_print_a_second_line_or_control_the_terminal(source, change, capsys):
    change(source)
    adapter = [f"adapter={source}"] * (source / "adapter_config.json").exists()
    with pytest.raises(SystemExit), one_line_errors():
        main(["import", f"source={source}", f"out={source.parent / 'run'}", "tokenizer=none", *adapter])
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.isprintable() and line.startswith("error: ") and "forged" in line
    assert one_line(ValueError(FORGED)) == "a error: forged \\x1b[31m\\u202e"
