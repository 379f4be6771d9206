"""Export to and import from Hugging Face: equal outputs, and training from an import on any grid."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpt4d
from gpt4d import starts
from gpt4d.checkpoint import exporter, finetuning, storage
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, GridSizes
from tests.data import batch
from tests.support.grids import build_model, fill_from_hf, metric_lines, on_grid, to_hf, train_in_rank
from tests.support.settings import configured

GPT = ("model=gpt_tiny",)
LLAMA = ("model=llama_tiny", "model.key_value_heads=2", "model.head_size=8", "model.inner=40", "model.qk_norm=true")


@pytest.fixture(scope="module")
def run(ranks, corpus, tmp_path_factory):
    """Train a GPT-2 briefly on a grid. Returns the run's configuration."""
    return trained(ranks, corpus, tmp_path_factory.mktemp("run"), *GPT)


@pytest.fixture(scope="module", params=[GPT, LLAMA], ids=["gpt2", "qwen3"])
def any_run(request, ranks, corpus, tmp_path_factory):
    """Train a model of each family briefly on a grid. Returns the run's configuration."""
    return trained(ranks, corpus, tmp_path_factory.mktemp("run"), *request.param)


def trained(ranks, corpus, directory, *model):
    overrides = [
        *model, "model.layers=2", "model.hidden=24", "model.heads=4", "model.vocab_size=300", "model.vocab_multiple=16",
        "model.max_positions=32", "data=text", f"data.path={corpus}", "data.tokenizer_vocab=300", "train.steps=3",
        "train.batch_size=8", "logging.sample_tokens=0", f"data.cache_dir={directory / 'cache'}", "parallel.gx=2",
        f"run.dir={directory / 'run'}",
    ]  # fmt: skip
    config = configured(overrides)
    ranks.run(4, train_in_rank, config)
    return config


def our_logits(config, ids):
    """Return the logits of a run's newest checkpoint, computed on one device."""
    files = Checkpoint.open(Path(config.run.dir)).files
    model = build_model(config.model, GridSizes(), torch.float32)
    fill_from_hf(model, to_hf({n: files.global_tensor(f"model.{n}") for n in names(model)}, config.model))
    model.eval()
    with torch.no_grad():
        return model(ids, torch.arange(len(ids)))[..., : config.model.vocab_size]


def names(model):
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("max_file_size", [None, "40KB"])
def test_exported_model_computes_the_same_in_transformers(any_run, tmp_path, max_file_size):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    exporter.export(Checkpoint.open(Path(any_run.run.dir)), out, max_file_size=max_file_size)
    assert (len(list(out.glob("*.safetensors"))) == 1) == (max_file_size is None)
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer.encode("alpha beta gamma delta epsilon zeta")[:12]])
    with torch.no_grad():
        assert torch.allclose(exported(ids).logits, our_logits(any_run, ids), rtol=0, atol=1e-5)
    own = Checkpoint.open(Path(any_run.run.dir)).path / "tokenizer.json"
    from tokenizers import Tokenizer

    text = "alpha beta, and other words\n"
    assert tokenizer.encode(text) == Tokenizer.from_file(str(own)).encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == exported.config.eos_token_id == exported.generation_config.eos_token_id == 0


def test_an_export_is_readable_by_colleagues_and_by_transformers_4(any_run, tmp_path):
    main(["export", f"checkpoint={any_run.run.dir}", f"out={tmp_path / 'out'}"])
    (tmp_path / "ordinary").write_text("")
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "ordinary").stat().st_mode}
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config.get("rope_theta") == config.get("rope_parameters", {}).get("rope_theta"), "the name in transformers 4"


def test_the_model_card_describes_the_run(run, tmp_path):
    main(["export", f"checkpoint={run.run.dir}", f"out={tmp_path / 'out'}"])
    card = (tmp_path / "out" / "README.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert "library_name: transformers\npipeline_tag: text-generation\n" in head
    (start,), last = starts.read(Path(run.run.dir)), metric_lines(run.run.dir)[-1]
    facts = {
        "steps": 3,
        "tokens": 768,
        "data": "text",
        "gpt4d": gpt4d.__version__,
        "optim.lr": 0.016,
        "model.hidden": 24,
        "weights": "raw weights, float32",
        "training loss": f"{last['loss']:.4f} at step 3",
        "commit": start["commit"] + ("" if start["clean"] else ", with uncommitted changes"),
    }
    for name, value in facts.items():
        line = f"| {name} | {value} |\n"
        assert line in body, line


def test_weights_are_exported_in_the_dtype_that_is_asked_for(run, tmp_path, capsys):
    from safetensors.torch import load_file

    for dtype in ("float32", "bfloat16"):
        main(["export", f"checkpoint={run.run.dir}", f"out={tmp_path / dtype}", f"dtype={dtype}"])
        assert f"raw weights, {dtype}" in capsys.readouterr().out
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dtype=int8", "dtype=int8: use one of float32, bfloat16, float16"),
        ("weights=best", "weights=best: use one of average, raw"),
        ("weights=average", "weights=average: .*step_00000003 has no averages of weights; use weights=raw"),
    ],
)
def test_impossible_weights_are_rejected_and_leave_no_files(run, tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        main(["export", f"checkpoint={run.run.dir}", f"out={tmp_path / 'out'}", setting])
    assert not any(tmp_path.iterdir())


def test_weights_beyond_the_range_of_float16_are_rejected(run, tmp_path, monkeypatch):
    read = storage.Files.global_tensor
    monkeypatch.setattr(storage.Files, "global_tensor", lambda files, name: read(files, name) * 1e9)
    with pytest.raises(ConfigError, match=r"dtype=float16: transformer\.wte\.weight has values beyond its range"):
        main(["export", f"checkpoint={run.run.dir}", f"out={tmp_path / 'out'}", "dtype=float16"])


def test_import_of_an_export_has_equal_weights_and_can_be_trained(ranks, any_run, tmp_path, capsys):
    out, imported = tmp_path / "exported", tmp_path / "imported"
    main(["export", f"checkpoint={any_run.run.dir}", f"out={out}"])
    main(["import", f"source={out}", f"out={imported}"])
    command = capsys.readouterr().out.splitlines()[-1]
    main(["verify", f"checkpoint={imported}"])
    before, after = (Checkpoint.open(Path(d)).files for d in (any_run.run.dir, imported))
    vocabulary = any_run.model.vocab_size
    for name in after.tensors:
        exported, reimported = before.global_tensor(name), after.global_tensor(name)
        rows = vocabulary if name == "model.tokens.weight" else None
        assert torch.equal(exported[:rows], reimported[:rows]), name

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


def test_a_fine_tuning_command_fits_in_the_memory_of_a_device(monkeypatch):
    words = {}
    for gib in (8, 40, 160):
        monkeypatch.setattr(finetuning, "for_devices", lambda cluster, _, gib=gib: replace(cluster, memory_gib=gib))
        words[gib] = finetuning._fitting(["model=llama_1b", "optim=finetune", "train.seq_len=1024"])
    assert words[160] == []
    assert words[40] == ["train.micro_batch_size=4"]
    assert words[8] == ["train.activation_checkpointing=full", "train.micro_batch_size=1"]


def first_loss_by_transformers(config, directory):
    from transformers import AutoModelForCausalLM

    from gpt4d.data import sampler
    from gpt4d.data.prepare import corpus

    tokens = corpus(config.data).first.tokens("train")
    data = sampler.Sequences(tokens, config.train.seq_len, config.train.seed, shuffle=True)
    ids, targets = batch(data, 0, config.train.batch_size)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory).eval()(ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/typo", "source=/typo: no such directory"),
        ("./typo", "no such directory"),
        ("a/b/c", "no such directory"),
        ("{file}", "a file; use the directory that contains it"),
    ],
)
def test_a_path_is_never_looked_up_on_the_hub(tmp_path, source, message):
    (tmp_path / "config.json").write_text("{}")
    source = source.format(file=tmp_path / "config.json")
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(["import", f"source={source}", f"out={tmp_path / 'run'}"])


@pytest.fixture
def exported_dir(run, tmp_path):
    directory = tmp_path / "exported"
    exporter.export(Checkpoint.open(Path(run.run.dir)), directory)
    return directory


def change_config(directory, **values):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: change_config(d, model_type="bert"),
            "model_type='bert' is not supported; use a model of type .*gpt2",
        ),
        (lambda d: change_config(d, activation_function="relu"), "activation_function='relu'"),
        (
            lambda d: change_config(d, n_embd=48),
            r"wte\.weight must be of shape \[300, 48\], but is \[300, 24\]",
        ),
        (lambda d: change_config(d, n_layer=3), r"h\.2\..* but is missing"),
        (lambda d: (d / "config.json").unlink(), r"no readable config\.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"no \*\.safetensors"),
        (
            lambda d: (d / "model.safetensors").write_bytes(b"x" * 99),
            r"model\.safetensors: damaged \(.*; download it again",
        ),
    ],
)
def test_unsupported_import_is_rejected_and_leaves_no_files(exported_dir, tmp_path, damage, message):
    damage(exported_dir)
    with pytest.raises(ConfigError, match=message):
        main(["import", f"source={exported_dir}", f"out={tmp_path / 'run'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_unknown_import_source_is_a_one_line_error(tmp_path):
    with pytest.raises(ConfigError, match="source=no/such: not a directory, and the download from the hub failed"):
        main(["import", "source=no/such", f"out={tmp_path / 'run'}"])


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given; use one of verify, inspect, export, import"),
        (["check"], "check: no such command"),
        (["verify"], "checkpoint=… is missing"),
        (["verify", "checkpoint=/nowhere"], "/nowhere: neither a checkpoint nor a run"),
        (["export", "checkpoint=/nowhere", "to=x"], "to: there is no such key"),
    ],
)
def test_mistakes_are_one_line_errors(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(arguments)
