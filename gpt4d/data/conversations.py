"""Conversations in the formats in which they are published, as one list of messages each."""

import json
from typing import Any, NamedTuple

from gpt4d.config import ConfigError

ASSISTANT = "assistant"
# Names of the speakers in ShareGPT's format, and their roles.
_SPEAKERS = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}


class Conversation(NamedTuple):
    """Messages with ``role`` and ``content``, as chat templates read them.

    Attributes:
        messages: the messages.
        first: index of the first message that may have a loss.
        tools: descriptions of the tools that the assistant may call; None without tools.
    """

    messages: list[dict[str, Any]]
    first: int = 0
    tools: list | None = None

    def answers(self) -> list[int]:
        """Return the indices of the assistant's messages from ``first`` on, without empty ones."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.first
            and message["role"] == ASSISTANT
            and (message.get("content", "").strip() or message.get("tool_calls"))
        ]

    def to_text(self) -> str:
        """Return the conversation as JSON, from which ``from_text`` restores it."""
        return json.dumps(self, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> "Conversation":
        return cls(*json.loads(text))


def parse(row: Any, location: str) -> Conversation:
    """Return the conversation in a row: ``messages``, ``conversations``, or ``prompt`` and ``completion``.

    Raises ConfigError, which names the ``location`` of the row, if it has none of these formats.
    """
    columns = row if isinstance(row, dict) else {}
    for name in ("messages", "conversations"):
        if isinstance(columns.get(name), list):
            return Conversation(_messages(columns[name], name, location), tools=columns.get("tools") or None)
    if "prompt" in columns and "completion" in columns:
        prompt, completion = (
            _messages([{"role": role, "content": value}] if isinstance(value, str) else value, name, location)
            for name, role, value in (
                ("prompt", "user", columns["prompt"]),
                ("completion", ASSISTANT, columns["completion"]),
            )
        )
        return Conversation(prompt + completion, len(prompt), columns.get("tools") or None)
    raise ConfigError(
        f"{location}: no conversation in the columns {', '.join(columns) or '(none)'}; rename one to messages or "
        "conversations (lists of messages), or two to prompt and completion"
    )


def _messages(messages: Any, column: str, location: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise ConfigError(f"{location}: {column} is neither a text nor a list of messages; correct the line")
    return [_message(message, f"{location}: {column}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    """Return a message with ``role`` and ``content``, and without empty keys, which some templates print."""
    if not isinstance(message, dict):
        raise ConfigError(f"{place} is not an object; use {{role, content}}, or ShareGPT's {{from, value}}")
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        found = {"role": _SPEAKERS.get(speaker, speaker), **found}
    if "content" not in found and "value" in found:
        found["content"] = found.pop("value")
    role, content = found.get("role"), found.get("content", "" if found.get("tool_calls") else None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(
            f"{place} has no text in role and content (here: {', '.join(message) or 'nothing'}); use "
            "{role, content}, or ShareGPT's {from, value}"
        )
    return found
