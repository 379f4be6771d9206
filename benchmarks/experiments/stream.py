"""Tokens per second of a training that tokenizes its text, compared with prepared token files.

    python -m benchmarks stream [repeats=5] [steps=150] [out=benchmarks/results/stream]

train.py trains gpt_tiny with 4,096 tokens on the State of the Union speeches, with ``data.stream=true`` and with token
files. Both have the same tokenizer and alternate. The seconds begin with the start of the run and end with its last
step, so they include the tokens of the first block, for which the first step waits.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report

PACKAGES = ("torch", "tokenizers")
CONTENDERS = {"ours: data.stream=true": ["data.stream=true"], "prepared token files": []}


@dataclass
class Settings:
    repeats: int = 5
    steps: int = 150
    out: str = "benchmarks/results/stream"


def run(settings: Settings) -> Iterator[dict]:
    answers: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        train(directory, "tokenizer", 1)
        for repeat in range(-1, settings.repeats):
            for index, (name, overrides) in enumerate(CONTENDERS.items()):
                tokenizer = f"data.tokenizer={directory / 'tokenizer'}"
                answer = train(directory, f"{index}-{repeat}", settings.steps, tokenizer, *overrides)
                if repeat >= 0:  # the first runs warm up, and write the token files
                    answers[name].append(answer)
    rows = [report.row("ours" if name.startswith("ours") else "plain", name, found) for name, found in answers.items()]
    for row in rows:
        row["tokens_per_s"] = row["tokens"] / row["median_s"]
        print(f"{report.line(row)}  {row['tokens']:,} tokens, {row['tokens_per_s']:,.0f} per second", flush=True)
    ratio = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
    print(f"stream / token files: {ratio:.3f}")
    yield {"ratio": ratio, "rows": rows}


def train(directory: Path, name: str, steps: int, *overrides: str) -> dict:
    """Return the tokens of a run of train.py, and its seconds from the start to the last step."""
    run_dir = directory / name
    common = [
        "model=gpt_tiny", "model.vocab_size=4096", f"train.steps={steps}", "train.validation_batches=0",
        f"run.dir={run_dir}", f"data.cache_dir={directory / 'cache'}", "logging.every=1", "logging.sample_tokens=0",
    ]  # fmt: skip
    subprocess.run([sys.executable, "train.py", *common, *overrides], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    start = next(line for line in lines if line.get("event") == "start")
    last = [line for line in lines if "event" not in line][-1]
    return {"seconds": last["time"] - start["time"], "tokens": last["tokens"]}
