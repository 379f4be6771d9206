"""Conversations with a model: transformers gives the same answers, on every grid, in the terminal and in files."""

import functools
import itertools
import json
import os
import signal
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from gpt4d import chat
from gpt4d.chat import Chat, ChatConfig
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.importer import import_model
from gpt4d.checkpoint.trained_model import inference_plan, load_stage
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.runtime.consensus import all_gather_json
from tests.support.commands import wrong_messages
from tests.support.grids import full

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "Gold and silver are metals – the people of every state know it. 金 und Öl. "
TOKENS = 12
CUT = f"\n(the answer is cut at tokens={TOKENS})"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a directory of transformers with a random model and a chat template, and the run of its import."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, max_position_embeddings=96, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.mul_(8)
    source, run = tmp_path_factory.mktemp("chat") / "source", tmp_path_factory.mktemp("chat") / "run"
    made.save_pretrained(source)
    tokenizer = tokenizers.train([TEXT], 320)
    files = {tokenizers.FILE: tokenizer.to_str().encode(), tokenizers.TEMPLATE: TEMPLATE.encode()}
    transformers_tokenizer.write(tokenizer, files, source, 96)
    import_model(str(source), run)
    return source, run


@functools.cache
def transformers_of(source):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)


def conversation(*texts):
    """Return messages of the user and the assistant in alternation."""
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(["user", "assistant"]), texts)]


def expected_answer(source, *texts):
    tokenizer, made = transformers_of(source)
    messages, options = conversation(*texts), {"return_tensors": "pt", "return_dict": False}
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    mask = torch.ones_like(ids)
    new = made.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True).rstrip("\ufffd")


def opened(run, **settings) -> Chat:
    config = ChatConfig(str(run), **{"temperature": 0, "tokens": TOKENS} | settings)
    checkpoint = Checkpoint.open(run)
    plan = inference_plan(checkpoint.meta.model, config, dist.get_world_size())
    stage = load_stage(checkpoint, plan, dist.get_rank(), torch.device("cpu"), ranks_per_host=1)
    files = checkpoint.model_files()
    tokenizer = transformers_tokenizer.load(files, run, 96)
    return Chat(stage, tokenizer, transformers_tokenizer.end_tokens(tokenizer, files), config)


def terminal(lines):
    """Return a function that reads these lines as a terminal does; a line may be an action."""
    left = iter(lines)

    def read():
        line = next(left, None)
        if line is None:
            raise EOFError
        return line() if callable(line) else line

    return read


def talk(run, lines, settings):
    """On a rank: return all that is written to the terminal, in parts."""
    written = []
    opened(run, **settings).talk(terminal(lines), written.append)
    return written


@pytest.mark.parametrize("settings", [{}, full({"gx": 2}), {"gz": 2}], ids=str)
def test_answers_of_a_conversation_equal_those_of_transformers(ranks, model, settings):
    source, run = model
    first, second = "Gold", "the people"
    written = ranks.run(2 if settings else 1, talk, run, [first, "", second, "/reset", second], settings)[0]
    answer = expected_answer(source, first)
    expected = [answer, expected_answer(source, first, answer, second), expected_answer(source, second)]
    assert "".join(written) == "".join(f"{answer}{CUT}\n" for answer in expected)
    assert len(written) > 12, "the answers appear while they are generated"


def interrupted_talk(run):
    written = []

    def write(text):
        written.append(text)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    opened(run).talk(terminal(["Gold", "silver"]), write)
    return "".join(written).replace(CUT, "").split("\n")


def test_an_interruption_stops_the_answer_and_keeps_the_conversation(ranks, model):
    source, run = model
    ((stopped, second, _),) = ranks.run(1, interrupted_talk, run)
    complete = expected_answer(source, "Gold")
    assert complete.startswith(stopped) and len(stopped) < len(complete)
    assert second == expected_answer(source, "Gold", stopped, "silver")


def interrupted_everywhere(run, during_answer):
    written = []
    made, processes = opened(run, gx=2), all_gather_json(os.getpid(), "gathering the processes")

    def interrupt_both():  # rank 1 is interrupted first and waits for rank 0
        for process in reversed(processes):
            os.kill(process, signal.SIGINT)

    def decode(ids, original=made.tokenizer.decode, **settings):
        if len(ids) == 3 and during_answer:
            os.kill(os.getpid(), signal.SIGINT)
        return original(ids, **settings)

    made.tokenizer.decode = decode
    made.talk(terminal(["Gold", interrupt_both, "silver"]), written.append)
    return "".join(written)


@pytest.mark.parametrize("during_answer", [True, False])
def test_an_interruption_ends_the_talk_of_several_ranks_without_an_error(ranks, model, during_answer):
    source, run = model
    written, nothing = ranks.run(2, interrupted_everywhere, run, during_answer)
    complete = expected_answer(source, "Gold")
    assert nothing == ""
    if during_answer:
        assert complete.startswith(written.removesuffix("\n")) and len(written) < len(complete)
    else:
        assert written == f"{complete}{CUT}\n"


def test_no_message_and_no_answer_is_cut_silently(ranks, model):
    long = "Gold and silver " * 60
    lines = ["Gold and silver " * 3, "metals " * 5, long, "x" * 60, "silver"]
    (written,) = ranks.run(1, talk, model[1], lines, {})
    dropped = [text for text in written if "oldest turn is dropped" in text]
    (ignored,) = [text for text in written if text.startswith("(the message is ignored: with it, ")]
    assert dropped and "tokens, and the model's maximum length is 96; shorten it)\n" in ignored
    assert len([text for text in written if text == CUT]) <= 4
    (written,) = ranks.run(1, talk, model[1], ["Gold"], {"tokens": 500})
    assert written[-2].startswith("\n(the answer is cut at ")
    assert written[-2].endswith(" tokens: the conversation then has the model's maximum length of 96)")


def test_a_character_appears_when_its_last_token_is_there(monkeypatch):
    def continued(stage, texts, tokens, end, sampling, ends, interrupted):
        for size in range(1, len(text) + 1):
            ends(0, text[:size])
        return [text]

    text, shown = [*"aü😀金".encode()][:-1], []
    monkeypatch.setattr(chat, "continued", continued)
    monkeypatch.setattr(Chat, "max_length", 96)
    tokenizer = Mock(decode=lambda ids, **_: bytes(ids).decode("utf-8", errors="replace"))  # its tokens are bytes
    ((answer, _),) = Chat(None, tokenizer, [0], ChatConfig("")).answers([[1]], shown.append)
    assert shown == ["a", "ü", "😀"] and answer == "aü😀"


def test_a_file_of_messages_is_answered(model, tmp_path, capsys):
    source, run = model
    questions, answers = tmp_path / "questions", tmp_path / "answers"
    asked = "Gold and silver", "of every\u2028state\x0c", "the people"
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "people"}]
    rows = {"messages": conversation(asked[1]), "id": 1}, {"conversations": [{"from": "human", "value": parts}]}
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    questions.write_text(f"\ufeff{asked[0]}\r\n\n{lines}\n", encoding="utf-8")
    settings = ["temperature=0", f"tokens={TOKENS}", f"prompts={questions}", f"out={answers}", "batch_size=1"]
    chat.main([f"checkpoint={run}", *settings])
    expected = [conversation(text, expected_answer(source, text)) for text in asked]
    found = [json.loads(line) for line in answers.read_text().split("\n")[:-1]]
    assert found == [{"messages": messages, "finish_reason": "length"} for messages in expected]
    said = capsys.readouterr()
    assert "3 answers" in said.out
    assert f"warning: prompts={questions}: keys of rows that are not read: id (1)\n" in said.err


def test_tools_of_a_file_of_messages_are_rendered_and_written(model, tmp_path):
    from transformers import PreTrainedTokenizerBase

    run, tools = model[1], [{"name": "f"}]
    questions, answers = tmp_path / "questions", tmp_path / "answers"
    questions.write_text(json.dumps({"messages": conversation("Gold"), "tools": json.dumps(tools)}) + "\n")
    apply, seen = PreTrainedTokenizerBase.apply_chat_template, []

    def recorded(self, messages, tools=None, **settings):
        seen.append(tools)
        return apply(self, messages, tools=tools, **settings)

    with patch.object(PreTrainedTokenizerBase, "apply_chat_template", recorded):
        chat.main([f"checkpoint={run}", "tokens=2", f"prompts={questions}", f"out={answers}"])
    assert seen == [tools] and json.loads(answers.read_text())["tools"] == tools


def test_mistakes_are_reported_in_one_line(model, tmp_path):
    source, run = model
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "image").write_text('a\n{"messages": [{"role": "user", "content": [{"type": "image"}]}]}')
    (tmp_path / "json").write_text("{")
    (tmp_path / "half").write_text(json.dumps({"messages": conversation("\ud800")}))
    (tmp_path / "null").write_text('{"messages": null}')
    (tmp_path / "long").write_text(f"Gold\n\n{'Gold and silver ' * 60}\n")
    (source / "chat_template.jinja").rename(tmp_path / "template")
    import_model(str(source), tmp_path / "plain")
    (tmp_path / "template").rename(source / "chat_template.jinja")
    mistakes = [
        ("prompts=a", "prompts=… out=…: set both"),
        (f"prompts={tmp_path / 'none'} out=b", "No such file"),
        (f"prompts={tmp_path / 'image'} out=b", "line 2: messages[0]: content[0] is not a part with a text"),
        (f"prompts={tmp_path / 'json'} out=b", "line 1: invalid JSON"),
        (f"prompts={tmp_path / 'half'} out=b", "conversation 1: the tokenizer cannot encode it ("),
        (f"prompts={tmp_path / 'null'} out=b", "line 1: a conversation without messages"),
        (f"prompts={tmp_path / 'empty'} out=b", "empty; write a message"),
        (f"prompts={tmp_path / 'long'} out=b", "conversation 2 has … in the model's maximum"),
        ("top_p=2", "top_p=2.0: use a value of at most 1"),
        (f"checkpoint={tmp_path / 'plain'}", "its tokenizer has no chat template"),
        ("gx=2", "not a plan for 1 process"),
    ]
    assert not wrong_messages(mistakes, lambda words: chat.main([f"checkpoint={run}", *words.split()]))
