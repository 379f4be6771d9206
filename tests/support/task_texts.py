"""A tokenizer of words, prompts of them, and their most likely continuation by a model that reads one text."""

from collections.abc import Callable

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gpt4d.data.tokenizers import END_OF_TEXT
from tests.support.grids import TINY_MODEL

END = 0
WORDS = [END_OF_TEXT, *(f"w{i}" for i in range(1, TINY_MODEL.vocab_size))]
PROMPTS = ["w5 w7 w9", "w3", " ".join(WORDS[1:12]), f"w5 {END_OF_TEXT} w8"]


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def most_likely_text(model, tokenizer: Tokenizer, prompt: str, tokens: int, documents: Callable) -> str:
    """Return the greedy continuation of a prompt by a model that computes the last tokens again for each token."""
    ids = tokenizer.encode(prompt).ids or [END]
    for _ in range(tokens):
        window = torch.tensor([ids[-TINY_MODEL.max_positions :]])
        with torch.no_grad():
            logits = model(window, torch.zeros(1, dtype=torch.int64), documents(window))[0, -1]
        ids.append(int(logits[: TINY_MODEL.vocab_size].argmax()))
    assert END not in ids[-tokens:]
    return tokenizer.decode(ids)
