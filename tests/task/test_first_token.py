"""Prompts, runs and exports of a tokenizer that puts a token before a text, compared with transformers."""

import io
import re
import shutil
from contextlib import redirect_stdout
from functools import partial

import pytest

from gpt4d.chat import ids_of
from gpt4d.checkpoint import exporter
from gpt4d.checkpoint.__main__ import main as checkpoint_command
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.task import language
from gpt4d.task.task import GenerateConfig
from tests.support.chat import chat_overrides, user, write_tokenizer
from tests.support.evaluation_models import imported, shared_model
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure


def generated(run, prompt):
    """On a rank: what gpt4d generate prints."""
    config = GenerateConfig(checkpoint=str(run), prompt=prompt, tokens=20, temperature=0)
    with shared_model(run) as model:
        return language.generate(config, Checkpoint.open(run).model_files(), model.stage)


def printed_by_card(directory, prompt):
    """Return what the example in the model card of an export prints, with another prompt."""
    code = re.search(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)[1]
    with redirect_stdout(io.StringIO()) as out:
        exec(code.replace("PATH", str(directory)).replace("Once upon a time", prompt).replace("=50", "=20"))
    return out.getvalue()[:-1]


def test_an_import_and_its_export_answer_as_transformers_from_the_first_token_on(ranks, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, run = imported("llama", tmp_path, "<s>")
    shutil.rmtree(run)
    checkpoint_command(["import", f"source={source}", f"out={run}"])
    assert "Its tokenizer puts <s> before a text, so prompts" in capsys.readouterr().out
    checkpoint_command(["export", f"checkpoint={run}", f"out={tmp_path / 'exported'}"])
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    answers = set()
    for prompt in ("The union of the states", "<s>The union of the states", "<|endoftext|>"):
        ids = tokenizer(prompt, return_tensors="pt")
        expected = tokenizer.decode(model.generate(**ids, max_new_tokens=20)[0], skip_special_tokens=True)
        assert ranks.run(1, generated, run, prompt)[0] == expected == printed_by_card(tmp_path / "exported", prompt)
        answers.add(expected)
    assert len(answers) == 3, "the first token has an effect"
    chat, messages = transformers_tokenizer.load(Checkpoint.open(run).model_files(), run), [user("laws")]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids_of(messages, chat) == expected and expected.count(tokenizer.bos_token_id) == 1


def printed_in_training(config):
    """On a rank: what a run prints."""
    with redirect_stdout(io.StringIO()) as out:
        train_in_rank(config)
    return out.getvalue()


LLAMA_OVERRIDES = [
    "model=llama_tiny", "model.hidden=32", "model.key_value_heads=2", "model.inner=48", "model.head_size=8",
    "model.tied=true", "model.max_positions=48", "model.norm_epsilon=1e-6", "logging.sample_tokens=4",
    "train.validation_batches=0",
]  # fmt: skip


def test_a_run_keeps_its_first_token_or_its_lack_of_one_in_resumes_prompts_and_exports(ranks, tiny, tmp_path):
    _, base = imported("llama", tmp_path, "<s>")
    common = [*LLAMA_OVERRIDES, f"data.tokenizer={base}", f"checkpoint.init={base}"]
    (tmp_path / "chat").mkdir()
    chat = chat_overrides(tmp_path / "chat")
    bos = transformers_tokenizer.load(Checkpoint.open(base).model_files(), base).bos_token_id
    for name, setting in (("with", ()), ("without", ("data.begin_of_text=false",))):
        run = tmp_path / name
        train = partial(ranks.run, 1, printed_in_training)
        remark = "each document begins with <s>" if name == "with" else "the documents begin without <s>, which"
        for step, given in (1, setting), (2, ()):
            assert remark in train(tiny(*common, *given, f"run.dir={run}", f"train.steps={step}"))[0]
        other = f"data.begin_of_text={str(name == 'without').lower()}"
        with pytest.raises(RankFailure, match=r"was trained with other|was trained with another begin_of_text"):
            train(tiny(*common, f"run.dir={run}", "train.steps=3", other))
        checkpoint = Checkpoint.open(run)
        assert checkpoint.meta.identity.get("begin_of_text", "") == (str(bos) if name == "with" else "")
        exporter.export(checkpoint, tmp_path / f"{name}_exported")
        files = {tokenizers.FILE: (tmp_path / f"{name}_exported" / tokenizers.FILE).read_bytes()}
        for each in (checkpoint.model_files(), files | tokenizers.companions(tmp_path / f"{name}_exported")):
            ids = transformers_tokenizer.load(each, run).encode("The union")
            assert (ids[0] == bos) == (name == "with") and ids.count(bos) <= 1
        # A further run on other text continues as this one.
        text = tmp_path / "other.txt"
        text.write_text("The people of every state. " * 200)
        further = [f"checkpoint.init={run}", f"data.path={text}", f"run.dir={run}2", "train.steps=1"]
        assert remark in train(tiny(*common[:-1], *further))[0]
        # So does a run on conversations, whose prompts without a template begin as the ones of this run.
        tuned = [f"checkpoint.init={run}", f"data.tokenizer={base}", f"run.dir={run}3", "train.seq_len=48"]
        train(tiny(*common[:-2], *chat, *tuned, "model.max_positions=48", "train.steps=1"))
        assert Checkpoint.open(tmp_path / f"{name}3").model_files() == checkpoint.model_files()


def test_a_stream_begins_documents_as_prepared_token_files_do(ranks, tiny, tmp_path):
    tokenizer, losses = write_tokenizer(tmp_path / "tokenizer", first=["<|im_start|>"]), set()
    for stream, begins in ((False, None), (True, None), (True, False)):
        given = f"data.stream={stream}", f"data.begin_of_text={'null' if begins is None else begins}"
        where = f"data.tokenizer={tokenizer}", f"run.dir={tmp_path}/{stream}{begins}"
        config = tiny(*given, *where, "data.shuffle=false", "train.steps=1")
        ranks.run(1, train_in_rank, config)
        losses.add(metric_lines(config.run.dir)[0]["loss"])
    assert len(losses) == 2
