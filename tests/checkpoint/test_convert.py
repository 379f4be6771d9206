"""To Hugging Face and back: the same function, and from there a run on any grid."""

import json
import re
from pathlib import Path

import pytest
import torch

from gpt4d.checkpoint import checkpoint_dir, convert, storage
from gpt4d.checkpoint.__main__ import main
from gpt4d.config import ConfigError, GridSizes, compose
from gpt4d.model import hf
from tests.data import batch
from tests.grids import build_model, fill_from_hf, metric_lines, on_grid, train_in_rank


@pytest.fixture(scope="module")
def run(ranks, corpus, tmp_path_factory):
    """A short training run on a grid."""
    directory = tmp_path_factory.mktemp("run")
    words = [
        "model.layers=2", "model.hidden=24", "model.heads=4", "model.vocab_size=300", "model.vocab_multiple=16",
        "model.max_positions=32", "data=text", f"data.path={corpus}", "data.tokenizer_vocab=300", "train.steps=3",
        "train.batch_size=8", "logging.sample_tokens=0", f"data.cache_dir={directory / 'cache'}", "parallel.gx=2",
        f"run.dir={directory / 'run'}",
    ]  # fmt: skip
    config = compose(words)
    ranks.run(4, train_in_rank, config)
    return config


def our_logits(config, ids):
    """Of the newest checkpoint of a run, on one device."""
    files = storage.Files(checkpoint_dir.located(Path(config.run.dir)))
    model = build_model(config.model, GridSizes(), torch.float32)
    whole = {hf.hf_name(n): hf.export_tensor(n, files.whole(f"model.{n}"), config.model) for n in names(model)}
    fill_from_hf(model, whole)
    model.eval()
    with torch.no_grad():
        return model(ids, torch.arange(len(ids)))[..., : config.model.vocab_size]


def names(model):
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("shard_bytes", [2 << 30, 40_000])
def test_an_exported_model_computes_the_same_in_transformers(run, tmp_path, shard_bytes):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    convert.export(checkpoint_dir.located(Path(run.run.dir)), out, shard_bytes)
    assert len(list(out.glob("*.safetensors"))) == (1 if shard_bytes > 40_000 else 3)
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer.encode("alpha beta gamma delta epsilon zeta")[:12]])
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, our_logits(run, ids), rtol=0, atol=1e-5)
    own = checkpoint_dir.located(Path(run.run.dir)) / "tokenizer.json"
    from tokenizers import Tokenizer

    text = "alpha beta, and other words\n"
    assert tokenizer.encode(text) == Tokenizer.from_file(str(own)).encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == 0


def test_export_and_import_give_the_same_weights_and_a_run_goes_on_from_them(ranks, run, tmp_path, capsys):
    out, again = tmp_path / "exported", tmp_path / "again"
    main(["export", f"checkpoint={run.run.dir}", f"out={out}"])
    main(["import", f"source={out}", f"out={again}"])
    words = capsys.readouterr().out.splitlines()[-1]
    main(["verify", f"checkpoint={again}"])
    before, after = (storage.Files(checkpoint_dir.located(Path(d))) for d in (run.run.dir, again))
    vocabulary = run.model.vocab_size
    for name in after.tensors:
        here, there = before.whole(name), after.whole(name)
        rows = vocabulary if name == "model.tokens.weight" else None
        assert torch.equal(here[:rows], there[:rows]), name

    # The command that import prints, on another grid.
    words = [w for w in re.findall(r"\S+=\S+", words) if not w.startswith("data.path")]
    more = [f"data.path={run.data.path}", "train.steps=2", "train.batch_size=8", "logging.every=1"]
    more += ["logging.sample_tokens=0", f"data.cache_dir={tmp_path / 'cache'}", *on_grid(GridSizes(1, 2, 2))]
    config = compose([*words, *more])
    ranks.run(4, train_in_rank, config)
    first = metric_lines(again)[0]
    assert first["step"] == 1
    assert first["loss"] == pytest.approx(first_loss_by_transformers(config, out), rel=1e-5)


def first_loss_by_transformers(config, directory):
    from transformers import AutoModelForCausalLM

    from gpt4d.data import sampler
    from gpt4d.data.prepare import corpus as prepared

    tokens = prepared(config.data).first.tokens("train")
    data = sampler.Sequences(tokens, config.train.seq_len, config.train.seed, shuffle=True)
    ids, targets = batch(data, 0, config.train.batch_size)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory).eval()(ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@pytest.fixture
def theirs(run, tmp_path):
    directory = tmp_path / "theirs"
    convert.export(checkpoint_dir.located(Path(run.run.dir)), directory)
    return directory


def changed(directory, **values):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: changed(d, model_type="llama"), r"model_type='llama' .* with model_type='gpt2'"),
        (lambda d: changed(d, activation_function="relu"), "activation_function='relu'"),
        (
            lambda d: changed(d, n_embd=48),
            r"wte\.weight is to be of shape \[300, 48\], but is \[300, 24\]",
        ),
        (lambda d: changed(d, n_layer=3), r"h\.2\..* but is missing"),
        (lambda d: (d / "config.json").unlink(), r"no config\.json that can be read"),
        (lambda d: (d / "model.safetensors").unlink(), r"no \*\.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), r"a \*\.safetensors file is damaged"),
    ],
)
def test_what_cannot_be_imported_is_refused_and_leaves_nothing(theirs, tmp_path, harm, said):
    harm(theirs)
    with pytest.raises(ConfigError, match=said):
        main(["import", f"source={theirs}", f"out={tmp_path / 'run'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_name_that_is_neither_a_directory_nor_on_the_hub_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="source=no/such: neither a directory nor to be had from the hub"):
        main(["import", "source=no/such", f"out={tmp_path / 'run'}"])


def test_an_existing_directory_is_never_written_over(run, theirs, tmp_path):
    for words in (["export", f"checkpoint={run.run.dir}"], ["import", f"source={theirs}"]):
        with pytest.raises(ConfigError, match=r"exists; choose another name"):
            main([*words, f"out={theirs}"])


def test_inspect_tells_what_is_in_it(run, capsys):
    main(["inspect", f"checkpoint={run.run.dir}"])
    told = capsys.readouterr().out
    assert "step    3, 24 sequences, 768 tokens of text" in told
    assert "2 layers, hidden 24, 4 heads, vocabulary 300 (padded 304), 32 positions" in told
    assert "grid    2x1x1x2 (x, y, z, data)" in told
    assert re.search(r"model\.blocks\.\*\.mlp\.up\.weight +2 × \[24, 96\] +float32 +0\.02 MiB", told)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command given; use one of verify, inspect, export, import"),
        (["check"], "check: no such command"),
        (["verify"], "checkpoint=… is missing"),
        (["verify", "checkpoint=/nowhere"], "/nowhere: neither a checkpoint nor a run"),
        (["export", "checkpoint=/nowhere", "to=x"], "to: there is no such key"),
    ],
)
def test_mistakes_are_told_in_one_line(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        main(words)
