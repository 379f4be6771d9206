"""Conversations become tokens as transformers renders and encodes them, with a loss on the answers."""

import gzip
import hashlib
import json
import re
from dataclasses import replace

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from gpt4d.config import DataConfig
from gpt4d.data import preparation, prepare, tokenizers, transformers_tokenizer
from gpt4d.data.chat_template import ChatEncoder
from gpt4d.data.checks import check_data
from gpt4d.data.conversations import Conversation, parse
from gpt4d.data.corpus import corpus as prepared
from tests.support.chat import (
    CONVERSATIONS,
    MARKED,
    TEMPLATE,
    assistant,
    conversations,
    user,
    write_lines,
    write_tokenizer,
)
from tests.support.data_files import one_line
from tests.support.settings import configured


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture
def config(directory, tmp_path):
    paths = {"tokenizer": str(directory), "cache_dir": str(tmp_path / "cache")}
    return DataConfig("chat", "chat", None, tokenizer_vocab=None, validation_fraction=0, processes=1, **paths)


def test_the_project_has_200_conversations_with_alternating_roles_and_without_repetitions():
    rows = [json.loads(line) for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
    found = [parse(row, f"line {number}").messages for number, row in enumerate(rows, 1)]
    roles = {tuple(message["role"] for message in messages) for messages in found}
    assert len(found) == 200 and roles == {("user", "assistant"), ("user", "assistant") * 2}
    texts = [message["content"] for messages in found for message in messages]
    assert len(set(texts)) == len(texts)
    answers = [message["content"] for messages in found for message in messages if message["role"] == "assistant"]
    assert all(re.fullmatch(r"Ship's log, \w+ watch: the \w+ .+\.", answer) for answer in answers)


def encoder(directory, template=None, train_on="assistant"):
    files = tokenizers.companions(directory) | ({tokenizers.TEMPLATE: template.encode()} if template else {})
    files[tokenizers.FILE] = (directory / tokenizers.FILE).read_bytes()
    return ChatEncoder(files, directory, train_on)


def shown(encoder, conversation):
    """Return the text of the tokens that have a loss."""
    ids, mask, _ = encoder.encode(conversation, "here")
    return encoder.tokenizer.decode(np.array(ids)[mask].tolist(), skip_special_tokens=False)


STRICT = "{% if messages[0].role %}{% endif %}" + TEMPLATE  # as many templates, it needs a message


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


QUESTION, ANSWER = "alpha beta", "gamma delta"
SHAREGPT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user(QUESTION), assistant(ANSWER)], "id": 7},
        {"messages": [{**user(QUESTION), "name": None}, assistant(ANSWER)]},
        {"conversations": SHAREGPT},
        {"conversations": [user(QUESTION), assistant(ANSWER)]},
        {"prompt": QUESTION, "completion": ANSWER},
        {"prompt": [user(QUESTION)], "completion": [assistant(ANSWER)]},
        {"messages": [user(parts("alpha ", "beta")), assistant(parts(ANSWER))], "tools": "[]"},
    ],
    ids=["messages", "empty keys", "ShareGPT", "conversations", "prompt", "prompt of messages", "parts"],
)
def test_every_format_gives_the_messages_and_a_loss_on_the_answer(directory, row):
    conversation = Conversation.from_text(parse(row, "a.jsonl:1").to_text("here"))
    assert conversation.messages == [user(QUESTION), assistant(ANSWER)]
    assert shown(encoder(directory), conversation) == f"{ANSWER}<|im_end|>\n"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["rendered prefixes", "marks"])
def test_only_the_completion_has_a_loss_even_if_the_prompt_has_answers(directory, template):
    prompt = [user("alpha"), assistant("beta"), user("gamma")]
    conversation = parse({"prompt": prompt, "completion": [assistant("delta")]}, "here")
    assert shown(encoder(directory, template), conversation) == "delta<|im_end|>\n"
    assert shown(encoder(directory, template, "all"), conversation).startswith("user\nalpha<|im_end|>\n")


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": False}, {"weight": 0.0}])
@pytest.mark.parametrize("template", [TEMPLATE, MARKED, STRICT], ids=["rendered prefixes", "marks", "no empty list"])
def test_a_message_that_its_keys_exclude_has_no_loss(directory, template, flag):
    messages = [user("alpha") | flag, assistant("beta") | flag, user("gamma"), assistant("delta") | {"weight": 1}]
    conversation = parse({"messages": messages}, "here")
    assert shown(encoder(directory, template), conversation) == "delta<|im_end|>\n"
    rest = "<|im_start|>user\ngamma<|im_end|>\n<|im_start|>assistant\ndelta<|im_end|>\n"
    assert shown(encoder(directory, template, "all"), conversation) == rest


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["rendered prefixes", "marks"])
def test_tokens_and_masks_equal_those_of_transformers(directory, template):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>")
    ours = encoder(directory, template)
    for messages in [*conversations(30), [user("é 語 <|im_end|>"), assistant("語 é 🙂")]]:
        expected = theirs.apply_chat_template(messages, chat_template=MARKED, return_assistant_tokens_mask=True)
        ids, mask, _ = ours.encode(Conversation(messages), "here")
        assert ids == expected["input_ids"] and mask.astype(int).tolist() == expected["assistant_masks"]


def test_a_template_is_found_where_transformers_looks(directory, config, tmp_path):
    bare = write_tokenizer(tmp_path / "bare", template=None)
    config = replace(config, path=str(write_lines(tmp_path / "a.jsonl", [{"messages": conversations(1)[0]}] * 9)))
    expected = prepare.prepare(config, tmp_path / "expected")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    named = settings | {"chat_template": [{"name": "other", "template": ""}, {"name": "default", "template": TEMPLATE}]}
    places = {
        "chat_template.jinja": TEMPLATE, "chat_template.json": json.dumps({"chat_template": TEMPLATE}),
        "tokenizer_config.json": json.dumps(named), "own.jinja": TEMPLATE,
    }  # fmt: skip
    for name, content in places.items():
        before = (bare / "tokenizer_config.json").read_bytes()
        (bare / name).write_text(content)
        own = str(bare / name) if name == "own.jinja" else None
        files = prepare.prepare(replace(config, tokenizer=str(bare), chat_template=own), tmp_path / name)
        assert files.tokens("train")[:].tolist() == expected.tokens("train")[:].tolist()
        assert name != "own.jinja" or (files.directory / tokenizers.TEMPLATE).read_text() == TEMPLATE
        (bare / name).unlink()
        (bare / "tokenizer_config.json").write_bytes(before)
    with one_line(r"data\.tokenizer=.*bare: it has no chat template; set data\.chat_template"):
        prepare.prepare(replace(config, tokenizer=str(bare)), tmp_path / "none")


def test_the_tokenizer_of_a_run_is_in_its_newest_checkpoint(directory, tmp_path):
    for step in (5, 100_000_000):
        checkpoint = tmp_path / f"run/checkpoints/step_{step:08}"
        checkpoint.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (checkpoint / name).write_bytes((directory / name).read_bytes() if step > 5 else b"")
    (tmp_path / "run/checkpoints/step_200000000.partial").mkdir()
    of_run, of_directory = (
        transformers_tokenizer.files_of("data.tokenizer", str(path)) for path in (tmp_path / "run", directory)
    )
    assert of_run == of_directory


def test_parts_processes_and_batches_do_not_change_tokens_and_masks(config, tmp_path, monkeypatch):
    rows = [{"messages": messages} for messages in conversations(60)]
    config = replace(config, path=str(write_lines(tmp_path / "a.jsonl", rows)), validation_fraction=0.2)
    whole = prepare.prepare(config, tmp_path / "whole")
    monkeypatch.setattr(preparation, "PART_TOKENS", 300)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 2000)
    digests = []
    for processes in (1, 2):
        files = prepare.prepare(replace(config, processes=processes), tmp_path / f"by{processes}")
        assert len(files.header["parts"]) > 3
        for split in ("train", "validation"):
            assert files.tokens(split)[:].tolist() == whole.tokens(split)[:].tolist()
            assert files.mask(split)[:].tolist() == whole.mask(split)[:].tolist()
            assert files.document_ends(split).tolist() == whole.document_ends(split).tolist()
            assert files.count(split, "trained") == files.mask(split)[:].sum() > 0
        paths = sorted(files.directory.iterdir())
        digests.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths])
    assert digests[0] == digests[1]
    (files.directory / "train_00000.msk").write_bytes(b"")
    with one_line(r"train_00000\.msk: 0 bytes long"):
        prepare.main([f"verify={files.directory}"])


def test_another_mask_or_another_limit_of_conversations_is_other_data(config, tmp_path):
    first, second = [user("alpha"), assistant("beta")], [user("gamma"), assistant("delta")]
    fingerprints, tokens, two = set(), set(), [first, second]
    for name, rows, train_on in (
        ("two", two, "assistant"),
        ("all", two, "all"),
        ("one", [first + second], "assistant"),
    ):
        path = write_lines(tmp_path / f"{name}.jsonl", [{"messages": messages} for messages in rows])
        given = replace(config, path=str(path), train_on=train_on)
        found = prepared(given)
        fingerprints.add(found.fingerprint())
        tokens.add(found.first.tokens("train")[:].tobytes())
    assert len(tokens) == 1 and len(fingerprints) == 3


GOOD = {"messages": [user("alpha"), assistant("beta")]}
MISTAKES = {  # a line that is wrong, and the error
    "no column": ({"text": "alpha", "id": 3}, r"no conversation in the columns text, id; rename one to messages or"),
    "a list": ([1], r"a list in place of a row; write each object in a line of its own"),
    "no object": (1, r"no conversation in the columns \(none\)"),
    "a message as text": ({"messages": ["alpha"]}, r"messages\[0\] is not an object; use \{role, content\}"),
    "no role": ({"messages": [{"text": "a"}]}, r"messages\[0\] has no text in role and content \(here: text\); use"),
    "no text": ({"messages": [user("a"), assistant(3)]}, r"messages\[1\] has no text in role and content"),
    "half a prompt": ({"prompt": 3, "completion": "a"}, r"prompt is neither a text nor a list of messages"),
    "no answer": (
        {"messages": [user("alpha")]},
        r"a conversation without an answer to train on; remove .* data\.skip_empty",
    ),
    "an empty answer": ({"messages": [user("alpha"), assistant(" ")]}, r"a conversation without an answer"),
    "a weight between": ({"messages": [user("a"), assistant("b") | {"weight": 0.5}]}, r"messages\[1\]: weight=0\.5: a"),
    "no loss": ({"messages": [user("a"), assistant("b") | {"train": False}]}, r"without an answer to train on"),
    "an image": (
        {"messages": [user([{"type": "image_url"}])]},
        r"messages\[0\]: content\[0\] is not a part with a text",
    ),
    "tools": ({**GOOD, "tools": "[1"}, r"tools is a text without JSON"),
    "one tool": ({**GOOD, "tools": {"name": "a"}}, r"tools is not a list of descriptions"),
    "lines in a key": ({"a\nb": 1}, r"no conversation in the columns a b; rename"),
    "half a character": ({"messages": [user("\ud800"), assistant("a")]}, r"is half of a surrogate pair"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_for_a_wrong_line_names_file_line_and_remedy(config, tmp_path, name):
    row, message = MISTAKES[name]
    path = write_lines(tmp_path / "a.jsonl", [GOOD, row])
    with one_line(re.escape(f"{path}:2: ") + ".*" + message):
        prepare.prepare(replace(config, path=str(path)), tmp_path / "out")


def test_keys_that_are_not_read_are_named_once_with_their_number(config, tmp_path, capfd):
    asked = {"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}], "name": "x", "weight": 1}
    rows = [{"messages": [asked, assistant("b") | {"id": 7}], "source": "s", "null": None, "tools": None}] * 3
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("{{ message.role }}", "{{ message.role }} {{ message.name }}"))
    config = replace(config, path=str(write_lines(tmp_path / "a.jsonl", rows)))
    first = [
        "warning: data=chat: keys of messages that the chat template does not name: id (3), name (3)",
        "warning: data=chat: keys of messages without effect, as data.train_on=assistant: weight=1 (3)",
        "warning: data=chat: keys of parts of messages that are not read: cache (3)",
        "warning: data=chat: keys of rows that are not read: source (3)",
    ]
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace('"source"', '"source": "r", "source"', 1))
    first.insert(2, "warning: data=chat: keys of objects that occur again, whose last value is read: source (1)")
    prepare.prepare(config, tmp_path / "first")
    assert capfd.readouterr().err.splitlines() == first
    prepare.prepare(replace(config, chat_template=str(tmp_path / "own.jinja"), train_on="all"), tmp_path / "second")
    assert capfd.readouterr().err.splitlines() == [first[0].replace(", name (3)", ""), *first[2:]]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "NDJSON"])
def test_conversations_in_files_of_all_formats_have_equal_tokens(config, tmp_path, suffix):
    rows = [{"messages": messages, "tools": "[]"} for messages in conversations(5)]
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    rows += [{"messages": [user("a"), assistant("b") | {"tool_calls": [call]}], "tools": json.dumps([{"name": "f"}])}]
    rows += [{"messages": [user("a"), assistant("b") | {"tool_calls": [{"function": {"name": "g"}}]}]}]
    template = tmp_path / "calls.jinja"
    template.write_text(TEMPLATE.replace("{{ message.content }}", "{{ message | tojson }}{{ tools }}"))
    expected = write_lines(tmp_path / "expected.jsonl", rows)
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "arrow":
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        (path,) = (tmp_path / "saved").glob("*.arrow")
    else:
        path.write_bytes(gzip.compress(expected.read_bytes()) if suffix == "jsonl.gz" else expected.read_bytes())
    found = [
        prepare.prepare(replace(config, path=str(each), chat_template=str(template)), tmp_path / name)
        for name, each in (("one", expected), ("two", path))
    ]
    assert found[0].tokens("train")[:].tolist() == found[1].tokens("train")[:].tolist()


def test_conversations_without_an_answer_are_skipped_on_request(config, tmp_path):
    rows = [GOOD, {"messages": [user("alpha")]}, {"messages": None}, {"prompt": "alpha", "completion": None}, GOOD]
    config = replace(config, path=str(write_lines(tmp_path / "a.jsonl", rows)), skip_empty=True)
    assert prepare.prepare(config, tmp_path / "out").count("train", "documents") == 2


THINKING = "{% for m in messages %}{% if loop.last %}(thinks){% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (THINKING, r"the chat template renders message 1 differently if more messages follow; set"),
        ("{{ raise_exception('no system') }}", r"the chat template cannot render .* \(no system\); correct"),
        ("{% for", r"the chat template cannot render the conversation \(.*\); correct the line, or set data\.chat"),
        ("{{ messages[0].content }}", r"the chat template renders no token to train on"),
    ],
)
def test_the_error_for_a_template_that_shows_no_turns_names_the_line(directory, template, message):
    messages = [user("alpha"), assistant("beta"), user("gamma"), assistant("delta")]
    with one_line(f"a.jsonl:1: {message}"):
        encoder(directory, template).encode(Conversation(messages), "a.jsonl:1")


def test_settings_of_conversations_are_checked_before_they_are_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [GOOD])
    for overrides, message in (
        ([], r"data\.tokenizer=null: conversations need the tokenizer of the model"),
        (["data.tokenizer=gpt2", "data.chat_template=none.jinja"], r"data\.chat_template=none\.jinja: no such file"),
    ):
        with one_line(message):
            check_data(configured(["data=chat", f"data.path={path}", *overrides]).data, "gpt_tiny")


def test_a_blend_has_either_conversations_or_text(config, corpus, tmp_path):
    chat = replace(config, path=str(write_lines(tmp_path / "a.jsonl", [GOOD])))
    prepare.prepare(chat, tmp_path / "chat")
    prepare.prepare(replace(chat, source="text", path=corpus), tmp_path / "text")
    blend = {str(tmp_path / "text"): 1, str(tmp_path / "chat"): 1}
    with one_line(r"data\.blend: .*chat has conversations and .*text has text; blend one kind"):
        prepared(replace(chat, source="blend", blend=blend, tokenizer_vocab=300))
