"""Validation sets: losses, perplexities and bits per byte equal plain torch's on every plan and change no training."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.sampler import PackedSequences
from gpt4d.validation import validate
from tests.support.chat import chat_overrides, conversations, write_lines
from tests.support.data_files import documents_of, one_line
from tests.support.grids import build_model, full, hf_model, on_grid, train_in_rank
from tests.support.rank_pool import RankFailure
from tests.support.settings import configured
from tests.support.task_oracles import expected_metrics, metrics_of, summed_loss, validations
from tests.support.training import losses_and_norms, mean_loss, plain_torch_run

STEPS = [
    "train.steps=4", "train.batch_size=8", "train.validate_every=2", "train.validation_batches=3", "train.seq_len=32",
]  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}.{% endfor %}"
BOOK, LINES = "beta gamma é € delta alpha ", "zeta eta theta \U0001f600 iota "


def chat_tokens(tiny, directory):
    """Prepare conversations with the tokenizer of the small corpus, and return the directory of their token files."""
    own = prepared(tiny().data).first.directory
    lines = write_lines(directory / "sft.jsonl", [{"messages": messages} for messages in conversations(40)])
    (directory / "template.jinja").write_text(TEMPLATE)
    chat = [f"data.path={lines}", f"data.tokenizer={own}", f"data.chat_template={directory / 'template.jinja'}"]
    return prepared(tiny("data=chat", *chat, "data.processes=1").data).first.directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a directory for the files of the sets, and what tests have made of them: ``sets``, ``serial``."""
    return tmp_path_factory.mktemp("sets"), {}


@pytest.fixture
def sets(tiny, made):
    """Return the override of three sets: text files, JSON lines and token files of conversations."""
    directory, found = made
    if not found:
        for number in range(3):
            (directory / f"{number}.txt").write_text(BOOK * 90 + str(number))
        (directory / "empty.txt").write_text("")
        write_lines(directory / "lines.jsonl", [{"text": LINES * 40 + str(number)} for number in range(9)])
        paths = {"books": directory / "*.txt", "lines": directory / "lines.jsonl", "chat": chat_tokens(tiny, directory)}
        found["sets"] = "data.validation={" + ", ".join(f"{name}: {path}" for name, path in paths.items()) + "}"
    return found["sets"]


@pytest.fixture
def serial(ranks, tiny, sets, made):
    """Return the configuration of a finished run on one device, which evaluates the sets."""
    directory, found = made
    if "serial" not in found:
        found["serial"] = tiny(*STEPS, sets, f"run.dir={directory}/run")
        ranks.run(1, train_in_rank, found["serial"])
    return found["serial"]


def final_metrics(run_dir):
    """Return all metrics of the last validation of a run."""
    last = validations(run_dir)[-1]
    return [value for each in (last, *last["sets"].values()) for value in metrics_of(each)]


def trained_models(config):
    """Return transformers' model after the steps of a run, and the averages of its weights, in plain torch."""
    model = hf_model(build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed))
    averages = copy.deepcopy(model)

    def update(step):
        decay = min(config.optim.ema_decay or 0, step / (step + 9))
        with torch.no_grad():
            for average, weight in zip(averages.parameters(), model.parameters(), strict=True):
                average += (1 - decay) * (weight - average)

    def loss_of(model, step):
        update(step)
        return mean_loss(config)(model, step)

    plain_torch_run(config, model, loss_of)
    update(config.train.steps)
    return model, averages


def expected_chat(model, directory, config):
    """Return the metrics of all conversations in token files, one conversation at a time."""
    from gpt4d.data.tokens import ALL, TokenFiles

    files = TokenFiles(directory)
    packed = PackedSequences(files, ALL, config.train.seq_len, 0, False, config.train.batch_size)
    used = min(packed.count, config.train.batch_size * config.train.validation_batches)
    documents = packed.documents[: packed.bounds[used]]
    with torch.no_grad():
        total, count = summed_loss(model, files, ALL, documents.tolist())
    starts, tokens, mask = packed.starts, files.tokens(ALL)[:], files.mask(ALL)[:].astype(bool)
    spans = [slice(starts[document], packed.ends[document]) for document in documents]
    text = "".join(files.tokenizer().decode(tokens[span][mask[span]].tolist()) for span in spans)
    loss = total.item() / count
    return [loss, math.exp(loss), total.item() / math.log(2) / len(text.encode())]


def test_the_metrics_of_validation_sets_equal_plain_torch(serial, made):
    config, (directory, _) = serial, made
    (model, _), files = trained_models(config), prepared(config.data).first
    tokenizer = files.tokenizer()
    first, last = validations(config.run.dir)
    assert (first["step"], last["step"]) == (2, 4) and last["sets"].keys() == {"books", "lines", "chat"}
    held_out = [tokenizer.decode(ids.tolist()) for ids in documents_of(files, "validation")]
    books = [(directory / f"{number}.txt").read_text() for number in range(3)]
    lines = [(LINES * 40 + str(number)) for number in range(9)]
    for values, texts in ((last, held_out), (last["sets"]["books"], books), (last["sets"]["lines"], lines)):
        assert metrics_of(values) == pytest.approx(expected_metrics(model, tokenizer, texts, config), rel=1e-5)
    chat = Path(config.data.validation["chat"])
    assert metrics_of(last["sets"]["chat"]) == pytest.approx(expected_chat(model, chat, config), rel=1e-5)


def test_validation_sets_change_no_bit_of_training_and_of_the_held_out_loss(ranks, tiny, serial):
    without, found = tiny(*STEPS), []
    ranks.run(1, train_in_rank, without)
    for config in (without, serial):
        validation = [{k: value for k, value in line.items() if k != "sets"} for line in validations(config.run.dir)]
        found.append((losses_and_norms(config), validation))
    assert found[0] == found[1] and len(found[0][1]) == 2


@pytest.mark.parametrize("plan", [(), full(("parallel.gdata=2", "optim.shard_states=true"))])
def test_averaged_weights_have_a_validation_loss_of_their_own(ranks, tiny, tmp_path, plan):
    averages = "optim.ema_decay=0.9"
    config = tiny(*STEPS, averages, "optim.validate_averages=true", f"run.dir={tmp_path / 'with'}")
    without = tiny(*STEPS, averages, f"run.dir={tmp_path / 'without'}")
    on_stages = tiny(*STEPS, averages, "optim.validate_averages=true", "parallel.pipeline.stages=2",
                     "parallel.pipeline.microbatches=2", *plan)  # fmt: skip
    for run, count in ((config, 1), (without, 1), (on_stages, 4 if plan else 2)):
        ranks.run(count, train_in_rank, run)
    files = prepared(config.data).first
    held_out = [files.tokenizer().decode(ids.tolist()) for ids in documents_of(files, "validation")]
    expected, *_ = expected_metrics(trained_models(config)[1], files.tokenizer(), held_out, config)
    for run in (config, on_stages):
        last = validations(run.run.dir)[-1]
        assert last["average_loss"] == pytest.approx(expected, rel=1e-5)
        assert last["loss"] != pytest.approx(expected, rel=1e-3)
    assert losses_and_norms(config) == losses_and_norms(without)
    with_averages, plain = ([line["loss"] for line in validations(run.run.dir)] for run in (config, without))
    assert with_averages == plain


PLANS = [
    (GridSizes(), ("parallel.pipeline.stages=2", "parallel.pipeline.microbatches=2", "train.loss_chunks=2")),
    full(GridSizes(2, 2, 2), ("parallel.pipeline.stages=2", "parallel.pipeline.microbatches=2", "train.loss_chunks=2")),
    full(GridSizes(1, 1, 1, 2), ("train.micro_batch_size=2", "parallel.chunks=2")),
    (GridSizes(2, 1, 2), ("parallel.sequence_parallel=true",)),
]


@pytest.mark.parametrize(("sizes", "settings"), PLANS)
def test_the_plan_does_not_change_the_metrics_of_validation_sets(ranks, tiny, sets, serial, sizes, settings):
    config = tiny(*STEPS, sets, *on_grid(sizes), *settings)
    ranks.run(sizes.devices * (config.parallel.pipeline.stages or 1), train_in_rank, config)
    assert final_metrics(config.run.dir) == pytest.approx(final_metrics(serial.run.dir), rel=1e-5)


def sequences_of(config):
    """Return the tokens of the sequences of each validation set that a run evaluates."""
    from gpt4d.training.trainer import Trainer

    trainer = Trainer(validate(config, 1), torch.device("cpu"))
    try:
        return {name: len(found.source.tokens) for name, found in trainer.task.validation.items()}
    finally:
        trainer.task.close()
        trainer.checkpoints.close()


def test_a_set_is_all_of_its_token_files_unless_the_run_trains_on_them(ranks, tiny, tmp_path):
    own = prepared(tiny().data).first
    (tmp_path / "new.txt").write_text(BOOK * 200)
    other = prepared(
        tiny(f"data.path={tmp_path}/*.txt", f"data.tokenizer={own.directory}", "data.validation_fraction=0").data
    ).first
    config = tiny(f"data.validation={{own: {own.directory}, other: {other.directory}}}")
    (found,) = ranks.run(1, sequences_of, config)
    held_out = own.count("validation", "tokens")
    assert found == {"held_out": held_out, "own": held_out, "other": other.count("train", "tokens")}


def test_json_lines_are_conversations_for_a_run_on_conversations(ranks, tiny, tmp_path):
    overrides = chat_overrides(tmp_path)
    lines = write_lines(tmp_path / "more.jsonl", [{"messages": messages} for messages in conversations(30, seed=1)])
    settings = f"data.path={lines}", "data.validation_fraction=0.3", "data.name=more"
    directory = prepared(tiny(*overrides, *settings).data).first.directory
    sets = f"data.validation={{lines: {lines}, tokens: {directory}}}"
    config = tiny(*overrides, sets, "train.steps=1", "train.batch_size=4", "train.validation_batches=99")
    ranks.run(1, train_in_rank, config)
    (line,) = validations(config.run.dir)
    lines, tokens = line["sets"]["lines"], line["sets"]["tokens"]  # equal conversations in another order
    assert metrics_of(lines) == pytest.approx(metrics_of(tokens), rel=1e-5) and lines["loss"] != line["loss"]


def test_the_error_for_impossible_validation_sets_comes_before_a_process_group(tiny, tmp_path):
    (tmp_path / "set.py").touch()
    config = tiny()
    start, invalid = r"^data\.validation", "a map of names to token directories, prefixes or globs of files; use 'data"
    for value, message in (
        (7, rf"=7: not {invalid}"),
        ({}, r"=\{\}: not a map"),
        ({"books": 3}, r"=\{'books': 3\}: not a map"),
        ({"my books": "tests"}, "=.*: 'my books' is not a name of a validation set; use letters"),
        ({"held_out": f"{tmp_path}/*.py"}, rf"\.held_out={tmp_path}/\*\.py: held_out is the name of the docum"),
        ({"books": f"{tmp_path}"}, rf"\.books={tmp_path}: a directory without token files; use a directory that"),
        ({"books": f"{tmp_path}/*.x"}, rf"\.books={tmp_path}/\*\.x: matches no file; use a path or glob"),
        ({"books": f"{tmp_path}*"}, rf"\.books={tmp_path}\*: matches directories only; use"),
    ):
        with one_line(start + message):
            validate(replace(config, data=replace(config.data, validation=value)), 1)
    for overrides, message in (
        (["model=unet_tiny", "data=blue_marble"], "=.*: model=unet_tiny is trained on images"),
        (["train.validation_batches=0"], r"=.*: train\.validation_batches=0 does not read it; set"),
    ):
        with one_line(start + message):
            validate(configured([f"data.validation={{code: '{tmp_path}/*.py'}}", *overrides]), 1)


def test_the_error_for_a_short_set_and_for_another_tokenizer_names_the_set(ranks, tiny, tmp_path):
    (tmp_path / "short.txt").write_text(BOOK)
    short = tiny(f"data.validation={{books: {tmp_path}/*.txt}}")
    with pytest.raises(RankFailure, match=r"validation\.books=.*/\*\.txt: \d+ tokens are less than a batch of 16"):
        ranks.run(1, train_in_rank, short)
    other = prepared(tiny("data.tokenizer_vocab=280").data).first
    config = tiny(f"data.validation={{books: {other.directory}}}")
    with pytest.raises(RankFailure, match=r"data\.validation\.books=.*: made with another tokenizer than .*; prepare"):
        ranks.run(1, train_in_rank, config)
