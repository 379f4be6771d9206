"""The commands with every launcher: output and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.grids import full
from tests.support.jobs import run_command

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    # The command gets its own session, so that a timeout ends all processes that it has started.
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={ranks}"]
    return command("-m", "torch.distributed.run", *options, "train.py", *arguments)


def overrides(config) -> list[str]:
    """Return the configuration of a GPT-2 as overrides for the command line."""
    from gpt4d.config import known_keys, value_of

    keys = [k for k in known_keys() if not k.startswith(("cluster.", "model."))]
    values = {k: value_of(config, k) for k in [*keys, *known_keys(type(config.model), "model.")]}
    return ["model=gpt_tiny", *(f"{k}={json.dumps(v)}" for k, v in values.items())]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.gx=2"], "parallel.gx·gy·gz=2·1·1=2: does not divide the 1 process(es)"),
        (["parallel.gxx=2"], "did you mean parallel.gx?"),
        (["train.seq_len=257"], "train.seq_len=257: longer than model.max_positions=256"),
        (["data=text", "data.path=/no/such/file.txt"], "data.path='/no/such/file.txt': matches no file"),
    ],
)
def test_a_mistake_prints_one_line_and_exits_with_1(ranks, arguments, message, tmp_path):
    done = run_command(ranks.context, "train.py", f"run.dir={tmp_path / 'run'}", *arguments)
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        full(["parallel.gx=3"], "does not divide the 2 process(es)"),
        full(["train.seq_length=2"], "did you mean train.seq_len?"),
        full(["data=text", "data.path={empty}"], "an empty document; remove it"),
        (["train.seq_len=250", "data=text", "data.path={short}", "data.validation_fraction=0"], "takes 251 tokens"),
    ],
)
def test_torchrun_reports_a_mistake_before_or_after_rendezvous(arguments, message, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello there")
    arguments = [a.format(empty=tmp_path / "empty.txt", short=tmp_path / "short.txt") for a in arguments]
    done = torchrun(2, f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", *arguments)
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    # torchrun adds its own report; gpt4d prints one line.
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert message in line
    # torchrun prints its own traceback, and the path of the interpreter, which may be in a clone named gpt4d.
    assert f'File "{ROOT / "gpt4d"}{os.sep}' not in done.stderr, "a traceback through gpt4d"


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_serial_and_torchrun_runs_agree_and_generate_equal_text(ranks, tiny, tmp_path):
    serial, grid = tmp_path / "serial", tmp_path / "grid"
    short = ["train.steps=3", "logging.sample_tokens=12", "logging.sample_prompt=alpha"]
    one = run_command(ranks.context, "train.py", *overrides(tiny()), *short, f"run.dir={serial}")
    assert one.returncode == 0, one.stderr
    assert f"run {serial}" in one.stdout and "validation loss" in one.stdout
    two = torchrun(2, *overrides(tiny()), *short, f"run.dir={grid}", "parallel.gx=2")
    assert two.returncode == 0, two.stderr
    losses = []
    for run in (serial, grid):
        losses.append([line["loss"] for line in lines_of(run) if "event" not in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

    again = run_command(ranks.context, "train.py", *overrides(tiny()), *short, f"run.dir={grid}")
    assert again.returncode == 0 and "is complete" in again.stdout

    generate, arguments = ("-m", "gpt4d.generate"), ("prompt=alpha: ${beta} = ", "tokens=5", "temperature=0")
    texts = [run_command(ranks.context, *generate, f"checkpoint={run}", *arguments) for run in (serial, grid)]
    texts.append(run_command(ranks.context, *generate, f"checkpoint={serial}", *arguments, "gx=2", "stages=2", ranks=4))
    assert all(text.returncode == 0 for text in texts), [text.stderr for text in texts]
    assert texts[0].stdout == texts[1].stdout == texts[2].stdout
    assert texts[0].stdout.startswith("alpha: ${beta} = ")
    settings = "prompt=alpha", "tokens=12", "top_p=0.9", "repetition_penalty=1.1"
    sampled = run_command(ranks.context, *generate, f"checkpoint={serial}", *settings)
    (sample,) = [line["text"] for line in lines_of(serial) if line.get("event") == "sample"]
    assert sampled.stdout == f"{sample}\n"
    alone = run_command(ranks.context, *generate, f"checkpoint={run}", "prompt=a", "gx=2")
    assert "error: gx·gy·gz·gdata·stages=2·1·1·1·1: not a plan for 1 process(es)" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=/no/such", "prompt=a"], "/no/such: neither a checkpoint nor a run"),
        (["prompt=a"], "checkpoint=… is missing"),
        (["checkpoint=/no/such", "prompt=a", "token=3"], "did you mean tokens?"),
    ],
)
def test_generate_reports_mistakes_in_one_line(ranks, arguments, message):
    done = run_command(ranks.context, "-m", "gpt4d.generate", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
