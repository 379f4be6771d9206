"""Speed of the preparation of a corpus and of the loader, in tokens per second.

    python -m benchmarks data [repeats=5] [copies=4] [out=benchmarks/results/data]

The preparation encodes the State of the Union speeches with GPT-2's tokenizer. It is compared with ``datasets.map``
with the same tokenizer and number of processes; both write their output to files. The loader's shuffled batches are
compared with a sequential read of the same file of random tokens, which does not fit into the processor's caches. The
contenders alternate in one run.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import report
from gpt4d.config import DataConfig
from gpt4d.data import documents, prepare, tokenizers
from gpt4d.data.sampler import Sequences
from gpt4d.data.tokens import Tokens

LENGTH, BATCH = 1024, 64
TOKENS = 2**26
PROCESSES = len(os.sched_getaffinity(0))


PACKAGES = ("torch", "tokenizers", "datasets")


@dataclass
class Settings:
    repeats: int = 5
    copies: int = 4  # copies of the speeches, of 12 MB each
    out: str = "benchmarks/results/data"


def prepare_tokens(source: Path, directory: Path) -> int:
    """Encode the JSON lines in ``source`` with ``gpt4d.data.prepare`` and return the number of tokens."""
    config = DataConfig(source="jsonl", path=str(source), tokenizer="gpt2", tokenizer_vocab=50257, processes=PROCESSES)
    files = prepare.prepare(config, directory / "ours")
    return files.count("train", "tokens") + files.count("validation", "tokens")


def map_dataset(source: Path, directory: Path) -> int:
    """Encode the JSON lines in ``source`` with ``datasets.map`` and return the number of tokens."""
    import datasets

    datasets.disable_progress_bars()
    texts = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(directory / "cache"))
    tokenizer = tokenizers.gpt2()

    def encode(batch: dict) -> dict:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, 50256] for encoding in encodings]}

    mapped = texts.map(encode, batched=True, batch_size=50, num_proc=PROCESSES, remove_columns=texts.column_names)
    mapped.save_to_disk(str(directory / "mapped"))
    return sum(map(len, mapped["ids"]))


def random_tokens(path: Path) -> Tokens:
    np.random.default_rng(0).integers(0, 50257, TOKENS, np.uint16).tofile(path)
    return Tokens([np.memmap(path, np.uint16, mode="r").view(np.ndarray)], "uint16", [path], 2**16)


def load_batches(tokens: Tokens) -> int:
    """Load every batch of an epoch in shuffled order and return the number of tokens."""
    import torch  # Imported here: the processes that encode import this module too and need no torch.

    from gpt4d.data.loader import Loader

    sequences = Sequences(tokens, LENGTH, seed=0, shuffle=True)
    loader = Loader(sequences, BATCH, 0, 1, None, torch.device("cpu"), workers=1)
    batches = sequences.count // BATCH
    for batch in range(batches):
        for rows, _ in loader.step(batch * BATCH):
            rows.long()  # as the task does
    loader.close()
    return batches * BATCH * LENGTH


def read_sequentially(tokens: Tokens) -> int:
    """Read the same tokens in the order of the file into tensors of the same shapes; return the number of tokens."""
    import torch

    (ids,) = tokens.parts
    rows = BATCH * LENGTH
    batches = (len(ids) - 1) // rows
    for batch in range(batches):
        start = batch * rows
        torch.from_numpy(ids[start : start + rows].astype(np.int64)).view(BATCH, LENGTH)
        torch.from_numpy(ids[start + 1 : start + rows + 1].astype(np.int64)).view(BATCH, LENGTH)
    return batches * rows


def measure_alternately(contenders: dict[str, Callable[[], int]], repeats: int) -> list[dict]:
    """Run all contenders ``repeats`` times and return a row for each, with its tokens per second.

    The contenders return their numbers of tokens. The first run is a warm-up.
    """
    answers = {name: [] for name in contenders}
    for repeat in range(-1, repeats):
        for name, work in contenders.items():
            started = time.perf_counter()
            tokens = work()
            seconds = time.perf_counter() - started
            if repeat >= 0:
                answers[name].append({"seconds": seconds, "tokens": tokens})
    rows = [report.row("ours" if name.startswith("ours") else "plain", name, steps) for name, steps in answers.items()]
    for row in rows:
        row["tokens_per_s"] = row["tokens"] / row["median_s"]
        print(f"{report.line(row)}  {row['tokens']:,} tokens, {row['tokens_per_s']:,.0f} per second", flush=True)
    return rows


def run(settings: Settings) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as temporary:
        source, directory = Path(temporary) / "speeches.jsonl", Path(temporary) / "output"
        texts = [document.text for document in documents.documents(DataConfig())]
        with open(source, "w", encoding="utf-8") as file:
            for copy in range(settings.copies):
                file.writelines(json.dumps({"text": f"{copy}. {text}"}) + "\n" for text in texts)

        def in_empty_directory(work: Callable[[Path, Path], int]) -> Callable[[], int]:
            def work_once() -> int:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                return work(source, directory)

            return work_once

        preparations = {"ours: prepare": prepare_tokens, "datasets.map": map_dataset}
        rows = measure_alternately(
            {name: in_empty_directory(work) for name, work in preparations.items()}, settings.repeats
        )
        tokens = random_tokens(Path(temporary) / "random.tokens")
        readers = {"ours: shuffled batches": load_batches, "sequential read": read_sequentially}
        rows += measure_alternately({name: partial(work, tokens) for name, work in readers.items()}, settings.repeats)
    rate = {row["name"]: row["tokens_per_s"] for row in rows}
    ratios = {
        "prepare / datasets.map": rate["ours: prepare"] / rate["datasets.map"],
        "loader / sequential read": rate["ours: shuffled batches"] / rate["sequential read"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    yield {"processes": PROCESSES, "ratios": ratios, "rows": rows}
