"""Conversations in the formats in which they are published, as one list of messages each."""

import json
import re
from collections import Counter
from typing import Any, NamedTuple

from gpt4d.config import ConfigError
from gpt4d.runtime.errors import one_line

ASSISTANT = "assistant"
COLUMNS = "messages", "conversations", "prompt", "completion", "tools"  # columns of a row that may be read
READ = "weights, parts and tools as texts"  # the read parts of a row, in the identity of prepared conversations
# Names of the speakers in ShareGPT's format, and their roles.
_SPEAKERS = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}
# Keys of a message that decide whether it has a loss: OpenAI's, axolotl's (two) and ms-swift's.
_FLAGS = ("weight", "train", "training", "loss")
Unread = Counter[tuple[str, str]]  # number of rows, messages or parts, by one of the words below and a key
ROWS = "rows that are not read"
PARTS = "parts of messages that are not read"
MESSAGES = "messages that the chat template does not name"  # before the template is known: of all messages
REPEATED = "objects that occur again, whose last value is read"
OTHER_ROLES = "messages without effect, as data.train_on=assistant"


class Conversation(NamedTuple):
    """Messages with ``role`` and ``content``, as chat templates read them."""

    messages: list[dict[str, Any]]
    first: int = 0  # index of the first message that may have a loss
    tools: list | None = None  # descriptions of the tools that the assistant may call; None without tools

    def trained(self, train_on: str) -> list[int]:
        """Return the indices of the messages that have a loss with this value of ``data.train_on``.

        ``assistant``: the assistant's messages from ``first`` on, without empty ones. ``all``: all messages. Messages
        with ``"weight": 0`` have none.
        """
        return [
            index
            for index, message in enumerate(self.messages)
            if has_loss(message)
            and (train_on == "all" or (index >= self.first and message["role"] == ASSISTANT and not _is_empty(message)))
        ]

    def to_text(self, location: str) -> str:
        """Return the conversation as JSON, from which ``from_text`` restores it.

        Raises ConfigError, which names the ``location`` of the row, for values that JSON does not have.
        """
        try:
            return json.dumps(self, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:  # bytes or dates of a file of columns; nested lists
            raise ConfigError(
                f"{location}: a message cannot be written as JSON ({one_line(error)}); correct the row"
            ) from None

    @classmethod
    def from_text(cls, text: str) -> "Conversation":
        return cls(*json.loads(text))


def row_of(line: str, unread: Unread) -> Any:
    """Return the value in a line of JSON. Raises ValueError, or RecursionError for deeply nested lists."""

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            unread.update((REPEATED, key) for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    return json.loads(line, object_pairs_hook=object_of)


def unread_keys(unread: Unread, template: str | None, train_on: str) -> list[str]:
    """Return a line for each kind of keys that neither gpt4d nor a chat template reads, with their numbers.

    ``train_on``: the value of ``data.train_on``.
    """
    names: dict[str, list[str]] = {}
    for (kind, key), count in sorted(unread.items()):
        by_template = kind == MESSAGES and key and re.search(rf"\b{re.escape(key)}\b", template or "")
        if not by_template and not (kind == OTHER_ROLES and train_on == "all"):
            names.setdefault(kind, []).append(f"{one_line(key)} ({count:,})")
    return [f"keys of {kind}: {', '.join(found)}" for kind, found in names.items()]


def has_loss(message: dict[str, Any]) -> bool:
    """Return whether no key of a message, such as ``"weight": 0``, excludes it from the loss."""
    return all(message.get(flag, 1) for flag in _FLAGS)


def _is_empty(message: dict[str, Any]) -> bool:
    return not (message.get("content", "").strip() or message.get("tool_calls"))


def parse(row: Any, location: str, unread: Unread | None = None) -> Conversation:
    """Return the conversation in a row: ``messages``, ``conversations``, or ``prompt`` and ``completion``.

    ``unread`` counts the other keys of the row, and the keys of messages that only a template may read. Raises
    ConfigError, which names the ``location`` of the row, if it has none of these formats.
    """
    unread = Unread() if unread is None else unread
    columns = row if isinstance(row, dict) else {}
    for name in ("messages", "conversations"):
        if isinstance(columns.get(name), list):
            read: tuple[str, ...] = (name,)
            conversation = Conversation(_messages(columns[name], name, location, unread))
            break
    else:
        if "prompt" not in columns or "completion" not in columns:
            if any(name in columns and columns[name] is None for name in ("messages", "conversations")):
                return Conversation([])
            raise ConfigError(
                f"{location}: no conversation in the columns {one_line(', '.join(columns) or '(none)')}; rename one to "
                "messages or conversations (lists of messages), or two to prompt and completion"
            )
        read = ("prompt", "completion")
        prompt, completion = (
            _messages(_turn(columns[name], role), name, location, unread)
            for name, role in zip(read, ("user", ASSISTANT), strict=True)
        )
        conversation = Conversation(prompt + completion, len(prompt))
    unread.update((ROWS, key) for key, value in columns.items() if key not in (*read, "tools") and value is not None)
    return conversation._replace(tools=_tools(columns.get("tools"), location))


def _turn(value: Any, role: str) -> Any:
    """Return a prompt or a completion, which may be a text, as messages. Null is an empty text."""
    return [{"role": role, "content": value or ""}] if value is None or isinstance(value, str) else value


def _tools(tools: Any, location: str) -> list | None:
    """Return the descriptions of tools, which may be a text with JSON; None if there are none."""
    try:
        found = json.loads(tools or "null") if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{location}: tools is a text without JSON ({one_line(error)}); correct the line") from None
    if found and not isinstance(found, list):
        raise ConfigError(f"{location}: tools is not a list of descriptions of tools; correct the line")
    return found or None


def _messages(messages: Any, column: str, location: str, unread: Unread) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise ConfigError(f"{location}: {column} is neither a text nor a list of messages; correct the line")
    return [_message(message, f"{location}: {column}[{index}]", unread) for index, message in enumerate(messages)]


def _message(message: Any, place: str, unread: Unread) -> dict[str, Any]:
    """Return a message with ``role`` and ``content``, and without empty keys, which some templates print."""
    if not isinstance(message, dict):
        raise ConfigError(f"{place} is not an object; use {{role, content}}, or ShareGPT's {{from, value}}")
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        found = {"role": _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker, **found}
    if "content" not in found and "value" in found:
        found["content"] = found.pop("value")
    if isinstance(found.get("content"), list):
        found["content"] = _text_of_parts(found["content"], place, unread)
    role, content = found.get("role"), found.get("content", "" if found.get("tool_calls") else None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(
            f"{place} has no text in role and content (here: {one_line(', '.join(message) or 'nothing')}); use "
            "{role, content}, or ShareGPT's {from, value}"
        )
    for key in found.keys() - {"role", "content"}:
        if key not in _FLAGS:
            unread[MESSAGES, key] += 1
        elif found[key] not in (0, 1):
            raise ConfigError(f"{place}: {key}={one_line(repr(found[key]))}: a message has a loss or none; use 1 or 0")
        elif found[key] and role != ASSISTANT:
            unread[OTHER_ROLES, f"{key}={found[key]!r}"] += 1
    return found


def _text_of_parts(parts: list, place: str, unread: Unread) -> str:
    """Return the text of a content of parts, ``{"type": "text", "text": …}``, which follow each other directly."""
    texts = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{place}: content[{index}] is not a part with a text; use {{type: text, text: …}}, or a text as "
                "content"
            )
        texts.append(part["text"])
        unread.update((PARTS, key) for key in part.keys() - {"type", "text"} if part[key] is not None)
    return "".join(texts)
