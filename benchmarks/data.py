"""How fast a corpus becomes tokens, and how fast tokens become batches.

    python -m benchmarks.data [repeats=5] [copies=4] [out=docs/data]

Preparation of the speeches with GPT-2's vocabulary takes turns with ``datasets.map`` and the same tokenizer, by as many
processes; both write their files. The loader's shuffled batches take turns with a plain sequential read of the same
file of random tokens, too large for a cache. Writes the figures as ``out``.json.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import report
from gpt4d.config import DataConfig, from_arguments
from gpt4d.data import documents, prepare, tokenizers
from gpt4d.data.sampler import Sequences
from gpt4d.data.tokens import Tokens
from gpt4d.runtime.errors import one_line_errors

LENGTH, BATCH = 1024, 64
TOKENS = 2**26
PROCESSES = len(os.sched_getaffinity(0))


@dataclass
class DataBenchmark:
    repeats: int = 5
    copies: int = 4  # of the speeches: 12 MB each
    out: str = "docs/data"


def ours(source: Path, home: Path) -> int:
    config = DataConfig(source="jsonl", path=str(source), tokenizer="gpt2", tokenizer_vocab=50257, processes=PROCESSES)
    files = prepare.prepare(config, home / "ours")
    return files.count("train", "tokens") + files.count("validation", "tokens")


def theirs(source: Path, home: Path) -> int:
    import datasets

    datasets.disable_progress_bars()
    texts = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(home / "cache"))
    tokenizer = tokenizers.gpt2()

    def encode(batch: dict) -> dict:
        found = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*text.ids, 50256] for text in found]}

    mapped = texts.map(encode, batched=True, batch_size=50, num_proc=PROCESSES, remove_columns=texts.column_names)
    mapped.save_to_disk(str(home / "theirs"))
    return sum(map(len, mapped["ids"]))


def random_tokens(path: Path) -> Tokens:
    np.random.default_rng(0).integers(0, 50257, TOKENS, np.uint16).tofile(path)
    return Tokens([np.memmap(path, np.uint16, mode="r").view(np.ndarray)], "uint16")


def loaded(tokens: Tokens) -> int:
    import torch  # not above: the processes of a preparation import this module too

    from gpt4d.data.loader import Loader

    sequences = Sequences(tokens, LENGTH, seed=0, shuffle=True)
    loader = Loader(sequences, BATCH, 0, 1, None, torch.device("cpu"), workers=1)
    batches = sequences.count // BATCH
    for batch in range(batches):
        for _ in loader.step(batch * BATCH):
            pass
    loader.close()
    return batches * BATCH * LENGTH


def read(tokens: Tokens) -> int:
    """The same tokens in their order, as the same tensors."""
    import torch

    (ids,) = tokens.parts
    rows = BATCH * LENGTH
    batches = (len(ids) - 1) // rows
    for batch in range(batches):
        start = batch * rows
        torch.from_numpy(ids[start : start + rows].astype(np.int64)).view(BATCH, LENGTH)
        torch.from_numpy(ids[start + 1 : start + rows + 1].astype(np.int64)).view(BATCH, LENGTH)
    return batches * rows


def turns(contenders: dict[str, Callable[[], int]], repeats: int) -> list[dict]:
    """A row for each: seconds, and tokens a second."""
    found = {name: [] for name in contenders}
    for turn in range(-1, repeats):
        for name, work in contenders.items():
            started = time.perf_counter()
            tokens = work()
            seconds = time.perf_counter() - started
            if turn >= 0:
                found[name].append({"seconds": seconds, "tokens": tokens})
    rows = [
        report.row("ours" if name.startswith("ours") else "plain", name, answers) for name, answers in found.items()
    ]
    for row in rows:
        row["tokens_per_s"] = row["tokens"] / row["median_s"]
        print(f"{report.line(row)}  {row['tokens']:,} tokens, {row['tokens_per_s']:,.0f} a second", flush=True)
    return rows


def main(arguments: list[str]) -> None:
    config = from_arguments(DataBenchmark, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        source, home = Path(temporary) / "speeches.jsonl", Path(temporary) / "home"
        texts = [document.text for document in documents.documents(DataConfig())]
        with open(source, "w", encoding="utf-8") as file:
            for copy in range(config.copies):
                file.writelines(json.dumps({"text": f"{copy}. {text}"}) + "\n" for text in texts)

        def anew(work: Callable[[Path, Path], int]) -> Callable[[], int]:
            def turn() -> int:
                shutil.rmtree(home, ignore_errors=True)
                home.mkdir()
                return work(source, home)

            return turn

        rows = turns({"ours: prepare": anew(ours), "datasets.map": anew(theirs)}, config.repeats)
        tokens = random_tokens(Path(temporary) / "tokens.bin")
        rows += turns(
            {"ours: shuffled batches": lambda: loaded(tokens), "sequential read": lambda: read(tokens)}, config.repeats
        )
    rate = {row["name"]: row["tokens_per_s"] for row in rows}
    ratios = {
        "prepare / datasets.map": rate["ours: prepare"] / rate["datasets.map"],
        "loader / sequential read": rate["ours: shuffled batches"] / rate["sequential read"],
    }
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    command, machine = (
        "python -m benchmarks.data " + " ".join(arguments),
        report.machine("torch", "tokenizers", "datasets"),
    )
    report.write(Path(config.out), command.strip(), machine, rows, processes=PROCESSES, ratios=ratios)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
