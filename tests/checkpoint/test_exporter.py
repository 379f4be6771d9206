"""Export to and import from Hugging Face: equal outputs, and training from an import on any grid."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import gpt4d
from gpt4d.checkpoint import exporter, importer, tensor_files
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, GridSizes
from gpt4d.runs import starts
from tests.support.checkpoint_sources import change_config
from tests.support.checkpoints import tensors_of
from tests.support.commands import wrong_messages
from tests.support.data_files import batch
from tests.support.grids import build_model, fill_from_hf, metric_lines, on_grid, to_hf, train_in_rank
from tests.support.settings import configured

GPT = ("model=gpt_tiny",)
LLAMA = ("model=llama_tiny", "model.key_value_heads=2", "model.head_size=8", "model.inner=40", "model.qk_norm=true")


def trained(ranks, corpus, directory, *model):
    """Train a model briefly on a grid. Returns the run's configuration."""
    overrides = [
        *model, "model.layers=2", "model.hidden=24", "model.heads=4", "model.vocab_size=300", "model.vocab_multiple=16",
        "model.max_positions=32", "data=text", f"data.path={corpus}", "data.tokenizer_vocab=300", "train.steps=3",
        "train.batch_size=8", "logging.sample_tokens=0", f"data.cache_dir={directory / 'cache'}", "parallel.gx=2",
        f"run.dir={directory / 'run'}",
    ]  # fmt: skip
    config = configured(overrides)
    ranks.run(4, train_in_rank, config)
    return config


@pytest.fixture(scope="module")
def run(ranks, corpus, tmp_path_factory):
    return trained(ranks, corpus, tmp_path_factory.mktemp("run"), *GPT)


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def any_run(request, run, ranks, corpus, tmp_path_factory):
    """Return a run of each family."""
    return run if request.param == "gpt2" else trained(ranks, corpus, tmp_path_factory.mktemp("run"), *LLAMA)


def export(run, out, *settings):
    main(["export", f"checkpoint={run.run.dir}", f"out={out}", *settings])


def our_logits(config, ids):
    """Return the logits of a run's newest checkpoint, computed on one device."""
    model = build_model(config.model, GridSizes(), torch.float32)
    fill_from_hf(model, to_hf(tensors_of(config.run.dir, "model."), config.model))
    model.eval()
    with torch.no_grad():
        return model(ids, torch.arange(len(ids)))[..., : config.model.vocab_size]


@pytest.mark.parametrize("max_file_size", ["5GB", "40KB"])
def test_exported_model_computes_the_same_in_transformers(any_run, tmp_path, max_file_size):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    exporter.export(Checkpoint.open(Path(any_run.run.dir)), out, max_file_size=max_file_size)
    assert (len(list(out.glob("*.safetensors"))) == 1) == (max_file_size == "5GB")
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer.encode("alpha beta gamma delta epsilon zeta")[:12]])
    with torch.no_grad():
        assert torch.allclose(exported(ids).logits, our_logits(any_run, ids), rtol=0, atol=1e-5)
    own = Checkpoint.open(Path(any_run.run.dir)).path / "tokenizer.json"
    text = "alpha beta, and other words\n"
    assert tokenizer.encode(text) == Tokenizer.from_file(str(own)).encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == exported.config.eos_token_id == exported.generation_config.eos_token_id == 0


def test_an_export_is_readable_by_colleagues_and_by_transformers_4(any_run, tmp_path):
    export(any_run, tmp_path / "out")
    (tmp_path / "ordinary").write_text("")
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "ordinary").stat().st_mode}
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config.get("rope_theta") == config.get("rope_parameters", {}).get("rope_theta"), "the name in transformers 4"


def test_weights_have_the_dtype_that_is_asked_for_and_the_model_card_describes_the_run(run, tmp_path, capsys):
    for dtype in ("float32", "bfloat16"):
        export(run, tmp_path / dtype, f"dtype={dtype}")
        assert f"raw weights, {dtype}" in capsys.readouterr().out
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"
    card = (tmp_path / "float32" / "README.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert "library_name: transformers\npipeline_tag: text-generation\n" in head
    (start,), last = starts.read(Path(run.run.dir)), metric_lines(run.run.dir)[-1]
    facts = {
        "steps": 3, "tokens": 768, "data": "text", "gpt4d": gpt4d.__version__, "optim.lr": 0.016, "model.hidden": 24,
        "weights": "raw weights, float32", "training loss": f"{last['loss']:.4f} at step 3",
        "commit": start["commit"] + ("" if start["clean"] else ", with uncommitted changes"),
    }  # fmt: skip
    for name, value in facts.items():
        assert f"| {name} | {value} |\n" in body, name


def test_impossible_weights_are_rejected_and_leave_no_files(run, tmp_path, monkeypatch):
    cases = [
        ("dtype=int8", "dtype=int8: use one of float32, bfloat16, float16"),
        ("weights=best", "weights=best: use one of average, raw"),
        ("weights=average", "step_00000003 has no averages of weights; use weights=raw"),
    ]
    assert not wrong_messages(cases, lambda setting: export(run, tmp_path / "out", setting))
    assert not any(tmp_path.iterdir())
    read = tensor_files.Files.global_tensor
    monkeypatch.setattr(tensor_files.Files, "global_tensor", lambda files, name: read(files, name) * 1e9)
    with pytest.raises(ConfigError, match=r"dtype=float16: transformer\.wte\.weight has values beyond its range"):
        export(run, tmp_path / "out", "dtype=float16")


def test_import_of_an_export_has_equal_weights_and_can_be_trained(ranks, any_run, tmp_path, capsys):
    out, imported = tmp_path / "exported", tmp_path / "imported"
    export(any_run, out)
    main(["import", f"source={out}", f"out={imported}"])
    command = capsys.readouterr().out.splitlines()[-1]
    main(["verify", f"checkpoint={imported}"])
    before = tensors_of(any_run.run.dir)
    for name, reimported in tensors_of(imported).items():
        rows = any_run.model.vocab_size if name == "model.tokens.weight" else None
        assert torch.equal(before[name][:rows], reimported[:rows]), name

    # Train on another grid with the command that import prints.
    overrides = [w for w in re.findall(r"\S+=\S+", command) if not w.startswith("data.path")]
    overrides += [f"data.path={any_run.data.path}", "train.steps=2", "train.batch_size=8", "logging.every=1"]
    overrides += ["logging.sample_tokens=0", f"data.cache_dir={tmp_path / 'cache'}", *on_grid(GridSizes(1, 2, 2))]
    config = configured(overrides)
    ranks.run(4, train_in_rank, config)
    first = metric_lines(config.run.dir)[0]
    assert first["step"] == 1 and config.run.dir == f"{imported}-finetuned"
    assert (config.optim.lr, config.train.seq_len, config.checkpoint.init) == (2e-5, 32, str(imported))
    for name in ("config.json", "tokenizer_config.json"):  # for the next export
        before, after = (Checkpoint.open(Path(run)).path / name for run in (imported, config.run.dir))
        assert before.read_bytes() == after.read_bytes()
    assert first["loss"] == pytest.approx(first_loss_by_transformers(config, out), rel=1e-5)


def test_a_fine_tuning_command_fits_in_the_memory_of_a_device(run, monkeypatch):
    words = {}
    for gib in (8, 40, 160):
        monkeypatch.setattr(importer, "for_devices", lambda cluster, _, gib=gib: replace(cluster, memory_gib=gib))
        command = next(iter(importer.commands(Path(run.run.dir), configured(["model=llama_1b"]).model).values()))
        assert "train.seq_len=1024" in command
        words[gib] = re.findall(r"train\.(?:activation_checkpointing|micro_batch_size)=\w+", command)
    assert words[160] == []
    assert words[40] == ["train.micro_batch_size=4"]
    assert words[8] == ["train.activation_checkpointing=full", "train.micro_batch_size=1"]


def first_loss_by_transformers(config, directory):
    from transformers import AutoModelForCausalLM

    from gpt4d.data import sampler
    from gpt4d.data.corpus import corpus

    tokens = corpus(config.data).first.tokens("train")
    data = sampler.Sequences(tokens, config.train.seq_len, config.train.seed, shuffle=True)
    ids, targets = batch(data, 0, config.train.batch_size)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory).eval()(ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def test_a_path_is_never_looked_up_on_the_hub_and_an_unknown_name_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cases = [
        ("/typo", "source=/typo: no such directory"),
        ("./typo", "no such directory"),
        ("a/b/c", "no such directory"),
        (f"{tmp_path / 'config.json'}", "a file; use the directory that contains it"),
        ("no/such", "source=no/such: not a directory, and the download from the hub failed"),
    ]
    assert not wrong_messages(cases, lambda source: main(["import", f"source={source}", f"out={tmp_path / 'run'}"]))


@pytest.fixture
def exported_dir(run, tmp_path):
    directory = tmp_path / "exported"
    exporter.export(Checkpoint.open(Path(run.run.dir)), directory)
    return directory


def no_weights(directory):
    (directory / "model.safetensors").write_bytes(b"x" * 99)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not supported; use a model of type .*gpt2"),
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"n_embd": 48}, r"wte\.weight must be of shape \[300, 48\], but is \[300, 24\]"),
        ({"n_layer": 3}, r"h\.2\..* but is missing"),
        (lambda d: (d / "config.json").unlink(), r"no readable config\.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"no model\.safetensors, and no index"),
        (no_weights, r"model\.safetensors: damaged \(.*; download it again"),
    ],
)
def test_unsupported_import_is_rejected_and_leaves_no_files(exported_dir, tmp_path, damage, message):
    change_config(exported_dir, **damage) if isinstance(damage, dict) else damage(exported_dir)
    with pytest.raises(ConfigError, match=message):
        main(["import", f"source={exported_dir}", f"out={tmp_path / 'run'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_existing_directory_is_never_overwritten(run, exported_dir, tmp_path):
    for command in (["export", f"checkpoint={run.run.dir}"], ["import", f"source={exported_dir}"]):
        for out, problem in ((exported_dir, "exists"), (run.run.dir, "a run or an import")):
            with pytest.raises(ConfigError, match=f"out={out}: {problem}; choose another name or remove it"):
                main([*command, f"out={out}"])


def test_inspect_prints_metadata_and_tensors(run, capsys):
    main(["inspect", f"checkpoint={run.run.dir}"])
    printed = capsys.readouterr().out
    assert "progress  step 3, samples 24, units 768, skipped 0" in printed
    assert re.search(r"task      language_modeling: tokenizer=[0-9a-f]{64} samples=[0-9a-f]{64} data=text", printed)
    assert "gpt2: layers=2 hidden=24 heads=4 vocab_size=300 max_positions=32" in printed
    assert "grid      2x1x1x2 (x, y, z, data)" in printed
    assert re.search(r"model\.blocks\.\*\.mlp\.up\.weight +2 × \[24, 96\] +float32 +0\.02 MiB", printed)


def test_mistakes_are_one_line_errors():
    cases = [
        ([], "no command given; use one of verify, inspect, export, import"),
        (["check"], "check: no such command"),
        (["verify"], "checkpoint=… is missing"),
        (["verify", "checkpoint=/nowhere"], "/nowhere: neither a checkpoint nor a run"),
        (["export", "checkpoint=/nowhere", "to=x"], "to: there is no such key"),
    ]
    assert not wrong_messages(cases, main)
