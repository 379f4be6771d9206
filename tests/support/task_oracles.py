"""Losses and metrics of texts and conversations by transformers' models, and the validation lines of runs."""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from gpt4d.config import Config
from gpt4d.data.tokens import TokenFiles


def summed_loss(model, files: TokenFiles, split: str, documents) -> tuple[torch.Tensor, int]:
    """Return the loss summed over single conversations, and the number of tokens that have a loss."""
    ends = files.document_ends(split)
    starts, tokens, mask = np.concatenate([[0], ends[:-1]]), files.tokens(split)[:], files.mask(split)[:]
    total, count = torch.zeros(()), 0
    for document in documents:
        ids = torch.from_numpy(tokens[starts[document] : ends[document]].astype(np.int64))
        shown = torch.from_numpy(mask[starts[document] : ends[document]].astype(bool))[1:]
        logits = model(ids[None, :-1]).logits[0]
        total = total + F.cross_entropy(logits[shown], ids[1:][shown], reduction="sum")
        count += int(shown.sum())
    return total, count


def validations(run_dir: str | Path) -> list[dict]:
    """Return the validation lines of a run without the time."""
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key not in ("time", "elapsed_s")}
        for line in lines
        if line.get("event") == "validation"
    ]


def metrics_of(values: dict) -> list[float]:
    return [values[key] for key in ("loss", "perplexity", "bits_per_byte")]


def expected_metrics(model, tokenizer, documents, config: Config) -> list[float]:
    """Return the metrics of the first windows of texts by transformers' model; the bytes of targets are decoded."""
    length, end = config.train.seq_len, tokenizer.token_to_id("<|endoftext|>")
    encoded = [torch.tensor([*tokenizer.encode(text).ids, end]) for text in documents]
    tokens, windows = torch.cat(encoded), config.train.batch_size * config.train.validation_batches
    windows = min(windows, (len(tokens) - 1) // length // config.train.batch_size * config.train.batch_size)
    used = windows * length
    ids, targets = tokens[:used].view(-1, length), tokens[1 : used + 1].view(-1, length)
    with torch.no_grad():
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).item()
    # The targets as one text: only its two ends may lie within a character, whose bytes are counted one by one.
    text = tokenizer.decode(tokens[: used + 1].tolist(), skip_special_tokens=True).encode().rstrip("\ufffd".encode())
    tail = sum(len(tokenizer.id_to_token(token)) for token in _trailing_bytes(tokenizer, tokens[: used + 1].tolist()))
    nbytes = len(text) + tail - len(tokenizer.id_to_token(int(tokens[0])))
    return [loss, math.exp(loss), loss * used / math.log(2) / nbytes]


def _trailing_bytes(tokenizer, ids: list[int]) -> list[int]:
    """Return the last tokens of ``ids`` that do not complete a character."""
    count = 0
    while tokenizer.decode(ids[: len(ids) - count]).endswith("\ufffd"):
        count += 1
    return ids[len(ids) - count :]
