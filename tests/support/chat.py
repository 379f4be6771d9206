"""Small conversations about the words of the tests' corpus, and a tokenizer with a chat template for them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import processors

from gpt4d.data import tokenizers
from tests.support.environment import REPOSITORY

CONVERSATIONS = REPOSITORY / "examples" / "chat" / "conversations.jsonl"
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same text, with marks around the assistant's messages.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def conversations(count: int, seed: int = 0) -> list[list[dict]]:
    """Return conversations in which the assistant continues the user's words by the next ones, of several lengths."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        messages = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            at, size = draw.randrange(10), draw.randrange(1, 5)
            messages.append(user(" ".join(WORDS[(at + place) % 10] for place in range(size))))
            messages.append(assistant(" ".join(WORDS[(at + size + place) % 10] for place in range(size))))
        found.append(messages)
    return found


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(
    directory: Path,
    template: str | None = TEMPLATE,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Write a tokenizer of at most 300 tokens and its settings to a new directory, and return the directory.

    It puts the tokens ``first`` before a text and ``last`` after it. ``settings``: further settings.
    """
    directory.mkdir()
    texts = [" ".join(WORDS), "user\n assistant\n system\n"] * 9
    tokenizer = tokenizers.train(texts, 290)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if first or last:
        ids = [(token, tokenizer.token_to_id(token)) for token in {*first, *last}]
        tokenizer.post_processor = processors.TemplateProcessing([*first, "$A", *last], None, ids)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", **({"chat_template": template} if template else {}), **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def chat_overrides(directory: Path, count: int = 60) -> list[str]:
    """Return the overrides of a run on conversations, whose files are written to ``directory``."""
    path = write_lines(directory / "sft.jsonl", [{"messages": messages} for messages in conversations(count)])
    tokenizer = write_tokenizer(directory / "tokenizer")
    return [
        "data=chat", f"data.path={path}", f"data.tokenizer={tokenizer}", "data.validation_fraction=0.2",
        "data.processes=1", "model.max_positions=64", "train.seq_len=64",
    ]  # fmt: skip
