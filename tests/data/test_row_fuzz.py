"""Random rows are read as they are written, with all keys read or named, or end in one line."""

import json
import random

import pytest
from transformers import PreTrainedTokenizerFast

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data import tokenizers
from gpt4d.data.chat_template import ChatEncoder
from gpt4d.data.conversations import MESSAGES, OTHER_ROLES, PARTS, ROWS, Conversation, Unread
from gpt4d.data.documents import documents
from gpt4d.task.generation import prompt_lines
from tests.support.chat import MARKED, TEMPLATE, assistant, user, write_tokenizer
from tests.support.grids import full

TEXTS = ["", " ", "alpha", "<|im_end|>", "é\u2028語\x0c🙂", "\ufeffbeta", "\ud800", "a\nb\r\n", "null", "[1]"]
NUMBERS = [0, 1, -1, 0.0, 1.0, 0.5, 10**30, float("nan"), float("inf")]
FLAGS = ("weight", "train", "training", "loss")
COLUMNS = "messages conversations prompt completion tools text role content from value type name id"
KEYS = [*FLAGS, *COLUMNS.split(), "tool_calls", "", "a\nb", "\ud800"]


def parts(draw):
    return [{"type": "text", "text": draw.choice(TEXTS)} for _ in range(draw.randrange(1, 4))]


def value(draw, depth=0):
    """Return a random value of JSON."""
    kind = draw.randrange(7 if depth < 3 else 4)
    if kind < 4:
        names = ["user", "assistant", "system", "human", "gpt", "text"]
        return draw.choice([[None, True, False], NUMBERS, TEXTS, names][kind])
    if kind == 4:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 5:
        return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return json.loads("[" * 500 + "]" * 500) if draw.random() < 0.1 else parts(draw)


def changed(draw, found, depth=0):
    """Change a random place of a value."""
    places = [*found] if isinstance(found, dict) else range(len(found))
    inner = [place for place in places if isinstance(found[place], (dict, list))]
    if inner and draw.random() < 0.7:
        changed(draw, found[draw.choice(inner)])
    elif isinstance(found, dict) and "role" in found and draw.random() < 0.5:
        found |= draw.choice([{draw.choice(FLAGS): draw.choice([0, 1, False, True, 0.5])}, {"content": parts(draw)}])
    elif isinstance(found, dict):
        found[draw.choice([*KEYS, *found])] = value(draw)
    elif found and draw.random() < 0.7:
        found[draw.randrange(len(found))] = value(draw)
    else:
        found.append(value(draw))


def row(draw):
    """Return a row of one of the formats with some changes."""
    turns = [user("alpha"), assistant("beta"), user("gamma"), assistant("delta")]
    sharegpt = [{"from": "human", "value": "alpha"}, {"from": "gpt", "value": "beta"}]
    rows = {"messages": turns}, {"text": "a"}, {"prompt": "a", "completion": "b"}, {"conversations": sharegpt}
    found = draw.choice(rows)
    for _ in range(draw.choice([0, 1, 1, 2, 5])):
        changed(draw, found)
    return found


def content(message):
    """Return the text of a message in any format."""
    found = message.get("content") if message.get("content") is not None else message.get("value")
    return "".join(part["text"] for part in found) if isinstance(found, list) else found or ""


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Return encoders of conversations, the first with a template with marks, and the tokenizer of transformers."""
    directory = write_tokenizer(tmp_path_factory.mktemp("fuzz") / "tokenizer", MARKED)
    files = tokenizers.companions(directory) | {"tokenizer.json": (directory / "tokenizer.json").read_bytes()}
    ours = [
        ChatEncoder(files | {tokenizers.TEMPLATE: template.encode()}, directory, on)
        for template, on in ((MARKED, "assistant"), (TEMPLATE, "assistant"), (TEMPLATE, "all"))
    ]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>")
    theirs.chat_template = MARKED
    return ours, theirs


def names(unread, *kinds):
    return {key for kind, key in unread if kind in kinds}


def check_text(found, text, unread):
    assert text == found["text"].strip()
    assert names(unread, ROWS) == {key for key, given in found.items() if key != "text" and given is not None}


def check_conversation(found, text, unread, encoders):
    read = Conversation.from_text(text)
    column = next((name for name in ("messages", "conversations") if isinstance(found.get(name), list)), None)
    if column:
        given = found[column]
    else:
        given = []
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            turn = found[name]
            given += turn if isinstance(turn, list) else [{"role": role, "content": turn or ""}]
    used = {"tools", column} if column else {"tools", "prompt", "completion"}
    assert names(unread, ROWS) == {key for key, each in found.items() if key not in used and each is not None}
    assert [content(message) for message in given] == [message.get("content", "") for message in read.messages]
    for message, kept in zip(given, read.messages, strict=True):
        for key in message.keys() - {"role", "content", "from", "value"}:
            assert message[key] is None or repr(kept[key]) == repr(message[key])
            assert message[key] is None or key in FLAGS or key in names(unread, MESSAGES)
    ours, theirs = encoders
    encoded = [encoder.encode(read, "here") for encoder in ours]
    mask = encoded[0][1]
    expected = theirs.apply_chat_template(read.messages, return_assistant_tokens_mask=True)
    excluded = any(not message.get(flag, 1) for message in read.messages for flag in FLAGS)
    empty = any(message["role"] == "assistant" and not content(message).strip() for message in read.messages)
    assert all(each == expected["input_ids"] for each, _, _ in encoded)
    if column and not excluded:
        assert mask.astype(int).tolist() == [0, *expected["assistant_masks"][1:]]
    assert empty or mask.tolist() == encoded[1][1].tolist()
    assert not (mask & ~encoded[2][1]).any()


@pytest.mark.parametrize("seed", [0, *map(full, range(1, 20))], ids=str)
def test_random_rows_are_read_completely_or_are_one_line(tmp_path, encoders, seed):
    print("seed", seed)
    draw, path, outcomes = random.Random(seed), tmp_path / "a.jsonl", {"read": 0, "line": 0}
    for _ in range(300):
        found = row(draw)
        path.write_text(json.dumps(found) + "\n")
        for source in ("jsonl", "chat"):
            unread = Unread()
            try:
                (document,) = documents(DataConfig(source=source, path=str(path)), unread)
                if source == "jsonl":
                    check_text(found, document.text, unread)
                else:
                    check_conversation(found, document.text, unread, encoders)
                outcomes["read"] += 1
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1, found
                outcomes["line"] += 1
            assert {kind for kind, _ in unread} <= {ROWS, MESSAGES, PARTS, OTHER_ROLES}
    assert min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize("seed", [0, *map(full, range(1, 20))], ids=str)
def test_random_files_of_prompts_have_the_lines_of_python(tmp_path, seed):
    draw, path = random.Random(seed), tmp_path / "prompts"
    for _ in range(100):
        text = "".join(draw.choices("\n\n\r\x0b\x0c\x1c\x1e\x85\u2028\u2029\ufeffa é", k=draw.randrange(20)))
        path.write_bytes(text.encode())
        with open(path, encoding="utf-8-sig", newline="\n") as lines:
            assert prompt_lines(str(path)) == [line.removesuffix("\n").removesuffix("\r") for line in lines]
