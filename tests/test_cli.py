"""The commands with every launcher: output and exit codes."""

import os

import pytest

from gpt4d import generate
from tests.support.commands import TRAIN, launcher, overrides, wrong_messages
from tests.support.environment import REPOSITORY
from tests.support.grids import full, metric_lines
from tests.support.jobs import run_command
from tests.support.run_files import events

pytestmark = pytest.mark.slow


def test_a_mistake_prints_one_line_and_exits_with_1(ranks, tmp_path):
    words, message = ["data=text", "data.path=/no/such/file.txt"], "data.path='/no/such/file.txt': matches no file"
    done = run_command(ranks.context, TRAIN, f"run.dir={tmp_path / 'run'}", *words)
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "run").exists()


MISTAKES = [  # the last one is reported after the rendezvous
    full("parallel.gx=3", "does not divide the 2 process(es)"),
    full("train.seq_length=2", "did you mean train.seq_len?"),
    full("data=text data.path={empty}", "an empty document; remove it"),
    ("train.seq_len=250 data=text data.path={short} data.validation_fraction=0", "takes 251 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_torchrun_reports_a_mistake_before_or_after_rendezvous(ranks, arguments, message, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello there")
    arguments = arguments.format(empty=tmp_path / "empty.txt", short=tmp_path / "short.txt").split()
    settings = f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", *arguments
    done = run_command(ranks.context, *launcher(2), *settings)
    assert done.returncode != 0
    # torchrun adds its own report; gpt4d prints one line.
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    # torchrun prints its own traceback, and the path of the interpreter, which may be in a clone named gpt4d.
    assert f'File "{REPOSITORY / "gpt4d"}{os.sep}' not in done.stderr, "a traceback through gpt4d"


def test_serial_and_torchrun_runs_agree_and_generate_equal_text(ranks, tiny, tmp_path):
    serial, grid = tmp_path / "serial", tmp_path / "grid"
    short = ["train.steps=3", "logging.sample_tokens=12", "logging.sample_prompt=alpha"]
    one = run_command(ranks.context, TRAIN, *overrides(tiny()), *short, f"run.dir={serial}")
    assert one.returncode == 0, one.stderr
    assert f"run {serial}" in one.stdout and "validation loss" in one.stdout
    two = run_command(ranks.context, *launcher(2), *overrides(tiny()), *short, f"run.dir={grid}", "parallel.gx=2")
    assert two.returncode == 0, two.stderr
    losses = [[line["loss"] for line in metric_lines(run)] for run in (serial, grid)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

    again = run_command(ranks.context, TRAIN, *overrides(tiny()), *short, f"run.dir={grid}")
    assert again.returncode == 0 and "is complete" in again.stdout

    command, arguments = ("-m", "gpt4d", "generate"), ("prompt=alpha: ${beta} = ", "tokens=5", "temperature=0")
    texts = [run_command(ranks.context, *command, f"checkpoint={run}", *arguments) for run in (serial, grid)]
    texts.append(run_command(ranks.context, *command, f"checkpoint={serial}", *arguments, "gx=2", "stages=2", ranks=4))
    assert all(text.returncode == 0 for text in texts), [text.stderr for text in texts]
    assert texts[0].stdout == texts[1].stdout == texts[2].stdout
    assert texts[0].stdout.startswith("alpha: ${beta} = ")
    settings = "prompt=alpha", "tokens=12", "top_p=0.9", "repetition_penalty=1.1"
    sampled = run_command(ranks.context, *command, f"checkpoint={serial}", *settings)
    (sample,) = events(serial, "sample")
    assert sampled.stdout == f"{sample['text']}\n"
    alone = [f"checkpoint={grid}", "prompt=a", "gx=2"], "^gx·gy·gz·gdata·stages=2·1·1·1·1: not a plan for 1 process(es)"
    assert not wrong_messages([alone], generate.main)


def test_generate_reports_mistakes_in_one_line(ranks):
    mistakes = [
        (["checkpoint=/no/such", "prompt=a"], "/no/such: neither a checkpoint nor a run"),
        (["prompt=a"], "checkpoint=… is missing"),
        (["checkpoint=/no/such", "prompt=a", "token=3"], "did you mean tokens?"),
    ]
    assert not wrong_messages(mistakes, generate.main)
    arguments, message = mistakes[0]
    done = run_command(ranks.context, "-m", "gpt4d", "generate", *arguments)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
