"""Runs as their files describe them: the lock of a directory, states, differing settings, plots."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpt4d.config import ConfigError
from gpt4d.data.directory import write_once
from gpt4d.runs import lock
from gpt4d.runs.__main__ import main
from gpt4d.runs.history import History, Point, interval_means
from gpt4d.runs.plots import plot_losses
from gpt4d.runs.summary import Run, State, differing_keys, find_runs, state_of

ROOT = Path(__file__).resolve().parents[1]
HOLD = """
import sys
from gpt4d.runs.lock import DirectoryLock, Path
held = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
input()
"""


@contextmanager
def locked_by_another_process(directory):
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_in_one_directory_ends_with_one_line_and_the_lock_ends_with_its_process(tmp_path, tiny):
    from gpt4d.run import train

    config = tiny()
    run_dir = Path(config.run.dir)
    with locked_by_another_process(run_dir) as process:
        expected = (
            rf"run\.dir={re.escape(str(run_dir))}: another run \(\S+, pid {process.pid}, since .*\) is using it; wait"
        )
        with pytest.raises(ConfigError, match=expected):
            train(config)
        with pytest.raises(ConfigError, match=expected):
            lock.DirectoryLock(run_dir)
        assert lock.is_locked(run_dir)
        process.kill()  # like a machine that loses power: nothing is cleaned up
        process.wait()
        assert not lock.is_locked(run_dir)
        assert lock.last_holder(run_dir).pid == process.pid
    lock.DirectoryLock(run_dir).close()


def test_a_file_system_without_locks_costs_a_warning_for_a_run_and_for_its_data(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    lock.DirectoryLock(tmp_path).close()
    assert write_once(tmp_path / "data", lambda directory: None, lambda text: None)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {tmp_path}/lock cannot be locked (Function not implemented); start no other run in this directory",
        f"warning: {tmp_path}/data.partial cannot be locked (Function not implemented); start no other job that "
        "prepares the same data",
    ]


def test_a_requeued_slurm_job_waits_for_the_lock_of_its_earlier_start(tmp_path, monkeypatch):
    first = lock.Holder("nid001", 1, 0.0, "4711", 0)
    assert first.requeued_as(first._replace(host="nid002", restart=1))
    assert not first.requeued_as(first._replace(pid=2))
    assert not first.requeued_as(first._replace(job="4712", restart=1))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with locked_by_another_process(tmp_path) as process:
        with pytest.raises(ConfigError):
            lock.check_unused(tmp_path)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        lock.check_unused(tmp_path)
        monkeypatch.setattr("time.sleep", lambda s: (process.kill(), process.wait()))
        lock.DirectoryLock(tmp_path).close()


def step(number, loss=2.0, **values):
    line = {"step": number, "tokens": 10 * number, "loss": loss, "time": 1000.0 + number, "elapsed_s": float(number)}
    return line | {"step_time_s": 0.5, "tokens_per_s": 20.0} | values


def event(name, number=0, **values):
    return {"event": name, "step": number, "tokens": 10 * number, "time": 1000.0 + number, "elapsed_s": 1.0} | values


def write_run(path, *lines, config="", **start):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(config)
    (path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return path


def test_a_history_follows_a_run_and_drops_what_a_restart_repeats(tmp_path):
    path = write_run(
        tmp_path, event("start"), step(1, 4.0), step(2, 3.0), event("validation", 2, loss=3.5), step(3, 2.5)
    )
    history = History(path)
    assert [point.loss for point in history.training.values()] == [4.0, 3.0, 2.5]
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo\n[1]\n')  # cut off by a crash
        file.write(json.dumps(event("start", 1)) + "\n" + json.dumps(step(2, None)) + "\n" + json.dumps(step(3, 2.9)))
        file.flush()
        history.update()
        assert list(history.training) == [1] and not history.validation and history.step == 2, (
            "the last line is incomplete"
        )
        file.write("\n" + json.dumps(event("done", 3)) + "\n")
    history.update()
    assert history.training == {1: Point(1, 10, 1.0, 4.0), 3: Point(3, 30, 3.0, 2.9)}
    assert (history.step, history.ending, history.time, history.per_s) == (3, "done", 1003.0, 20.0)


@pytest.mark.parametrize(
    ("lines", "locked", "host", "now", "state"),
    [
        ([], True, "here", 0, State.RUNNING),
        ([], False, "here", 0, State.NEW),
        ([event("start"), step(1)], True, "here", 1e9, State.RUNNING),
        ([event("start"), step(1)], False, "here", 1002, State.INTERRUPTED),  # killed
        ([event("start"), step(1)], False, "there", 1002, State.RUNNING),  # no lock reaches that host
        ([event("start"), step(1)], False, "there", 2000, State.INTERRUPTED),
        ([event("start"), step(1), event("signal", 1)], False, "there", 1002, State.INTERRUPTED),
        ([event("start"), event("failed", problem="…")], False, "here", 0, State.FAILED),
        ([event("start"), event("done", 9)], False, "here", 0, State.FINISHED),
        ([event("start"), event("done", 9), event("start", 9), step(10)], False, "here", 0, State.INTERRUPTED),
        ([event("start"), event("failed"), event("start"), event("done")], False, "here", 0, State.FINISHED),
    ],
)
def test_lock_and_last_events_decide_the_state(tmp_path, lines, locked, host, now, state):
    history = History(write_run(tmp_path, *lines))
    assert state_of(history, locked, lock.Holder("here", 1, 0.0), now, host) is state


def test_a_held_lock_shows_as_running_and_reading_does_not_take_it(tmp_path):
    path = write_run(tmp_path / "run", event("start"), step(1))
    with locked_by_another_process(path) as process:
        run = Run(path)
        assert run.state is State.RUNNING
        process.kill()
        process.wait()
        run.update()
        assert run.state is State.INTERRUPTED
    held = lock.DirectoryLock(path)
    probe = "import sys; from gpt4d.runs.lock import *; print(is_locked(Path(sys.argv[1])))"
    for _ in range(2):
        asked = subprocess.run(
            [sys.executable, "-c", probe, path], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert asked.stdout == "True\n"
    held.close()


def test_settings_are_compared_among_runs_of_one_model():
    common = {"run.dir": "a", "logging.every": 1, "train.seed": 0, "cluster.name": "local", "data.name": "sotu"}
    small = common | {"model.name": "small", "model.layers": 2, "optim.lr": 1e-3}
    large = common | {"model.name": "large", "model.layers": 9, "optim.lr": 1e-4}
    assert differing_keys([small, small | {"run.dir": "b", "logging.every": 2, "cluster.name": "other"}]) == []
    assert differing_keys([small, small | {"optim.lr": 2e-3, "train.seed": 1}]) == ["train.seed", "optim.lr"]
    assert differing_keys([small, large]) == ["model.name"]
    assert differing_keys([small, large, large | {"optim.lr": 2e-4}, {}]) == ["model.name", "optim.lr"]


def config(lr, steps=3):
    return f"model: {{name: m}}\ndata: {{name: d}}\ntrain: {{steps: {steps}}}\noptim: {{lr: {lr}}}\nrun: {{dir: x}}\n"


@pytest.fixture
def two_runs(tmp_path):
    first = [event("start"), step(1, 4.0), step(2, 3.0), event("validation", 2, loss=3.5), event("done", 3)]
    start = {
        "commit": "abc",
        "clean": True,
        "versions": {"torch": "2.11"},
        "grids": ["1x1x1x1"],
        "data": {"samples": "f"},
    }
    write_run(tmp_path / "sweep/lr=0.1", *first, config=config(0.1), **start)
    other = start | {"commit": "def", "versions": {"torch": "2.13"}}
    write_run(
        tmp_path / "sweep/lr=0.2",
        event("start"),
        step(1, 5.0),
        event("failed", 1, problem="no\n"),
        config=config(0.2),
        **other,
    )
    (tmp_path / "sweep/lr=0.1/checkpoints/step_00000003").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    return tmp_path


def test_runs_are_listed_recursively_with_differing_settings(two_runs, capsys, monkeypatch):
    main([str(two_runs)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    heading, *_, first, second, note = lines
    assert heading == "run optim.lr state step loss (last 10) validation speed left last line"
    assert "sweep/lr=0.1 0.1 finished 3/3 3.5000 3.5000 20 tokens/s" in first
    assert "sweep/lr=0.2 0.2 failed 1/3 5.0000" in second
    assert note.endswith("sweep/lr=0.2: no")
    monkeypatch.chdir(two_runs)
    main(["sweep", "format=json"])
    (one, two) = json.loads(capsys.readouterr().out)
    assert (one["run"], one["state"], one["validation_loss"], two["problem"]) == (
        "sweep/lr=0.1",
        "finished",
        3.5,
        "no\n",
    )


def test_validation_sets_of_a_run_are_read_listed_and_plotted(two_runs, tmp_path, capsys, monkeypatch):
    sets = [{"books": {"loss": 3.0, "perplexity": 20.1}, "code": {"loss": None}}, {"books": {"loss": 2.5}}]
    lines = [event("validation", step, loss=None, sets=values) for step, values in zip((1, 2), sets, strict=True)]
    path = write_run(tmp_path / "sweep/sets", event("start"), step(1, 4.0), *lines, config=config(0.3))
    history = History(path)
    assert not history.validation and history.sets["books"] == {1: Point(1, 10, 1.0, 3.0), 2: Point(2, 20, 1.0, 2.5)}
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event("start", 1)) + "\n")
    history.update()
    assert list(history.sets["books"]) == [1] and not history.sets["code"]
    monkeypatch.chdir(two_runs)  # a long path takes a second line
    main(["sweep"])
    heading, *rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert heading == "run optim.lr state step loss (last 10) validation books code speed left last line"
    assert any("sweep/sets 0.3 interrupted 1/3 4.0000 3.0000 20 tokens/s" in row for row in rows)
    main([str(path), "format=json"])
    assert json.loads(capsys.readouterr().out)[0]["validation_sets"] == {"books": 3.0, "code": None}
    for runs in ([path], [path, two_runs / "sweep/lr=0.1"]):
        main(["plot", *map(str, runs), f"out={tmp_path / 'losses.svg'}"])
        text = (tmp_path / "losses.svg").read_text()
        assert ("points: validation, squares: books, triangles: code" in text) == (len(runs) > 1)
        assert ("<!-- books -->" in text) == (len(runs) == 1)


def test_a_difference_of_runs_names_settings_commit_versions_and_not_equal_ones(two_runs, capsys):
    main(["diff", str(two_runs / "sweep/lr=0.1"), str(two_runs / "sweep/lr=0.2")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()][2:]
    assert rows == [["optim.lr", "0.1", "0.2"], ["commit", "abc", "def"], ["version", "of", "torch", "2.11", "2.13"]]
    main(["diff", *[str(two_runs / "sweep/lr=0.1")] * 2])
    assert "have equal settings" in capsys.readouterr().out


@pytest.mark.parametrize("x", ["step", "tokens", "hours"])
def test_losses_are_plotted_over_steps_tokens_or_hours(two_runs, tmp_path, x):
    main(["plot", *map(str, (two_runs / "sweep").iterdir()), f"out={tmp_path / 'losses.png'}", f"x={x}"])
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_a_panel_for_each_axis(two_runs, tmp_path):
    plot_losses({"a": History(two_runs / "sweep/lr=0.1")}, tmp_path / "a.svg", "tokens", "hours")
    text = (tmp_path / "a.svg").read_text()
    assert [text.count(f"<!-- {label} -->") for label in ("tokens seen", "hours", "loss per token")] == [1, 1, 1]


def test_training_losses_are_averaged_over_intervals():
    points = [Point(step, 10 * step, step / 2, float(step)) for step in range(1, 8)]
    assert [(mean.step, mean.seen, mean.loss) for mean in interval_means(points, 3)] == [
        (2, 20, 1.5),
        (4, 40, 3.5),
        (7, 70, 6),
    ]
    assert interval_means(points, 100) == points
    assert interval_means([], 3) == []


def test_the_watched_table_follows_the_files(two_runs, monkeypatch, capsys):
    path, seen = two_runs / "sweep/lr=0.2", []

    def sleep(_):
        seen.append(find_runs([path])[0].state)
        if len(seen) == 2:
            raise KeyboardInterrupt
        with open(path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(event("start")) + "\n" + json.dumps(event("done", 3)) + "\n")

    monkeypatch.setattr("time.sleep", sleep)
    main(["watch", str(path)])
    assert seen == [State.FAILED, State.FINISHED]
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such"], "/no/such: no such directory; pass a run"),
        (["{empty}"], "{empty}: no run in it or below"),
        (["{empty}", "format=xml"], "format=xml: use one of table, json"),
        (["diff", "{empty}"], "diff: 1 run(s); pass two"),
        (["diff", "{empty}", "{empty}"], "{empty}: not a run"),
        (["plot", "{empty}"], "out=… is missing"),
        (["plot", "out=a.png"], "plot: no run"),
        (["plot", "{empty}", "out=a.jpeg"], "out=a.jpeg: not a format of plots"),
        (["plot", "{empty}", "out=a.png", "x=days"], "x=days: use one of step, tokens, hours"),
        (["watch", "{empty}", "every_s=0"], "every_s=0.0: use a value above 0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message.format(empty=tmp_path))):
        main([argument.format(empty=tmp_path) for argument in arguments])


def test_the_command_has_a_help_and_does_not_import_torch():
    check = "import sys; from gpt4d.runs import __main__; __main__.main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "watch [DIR …]" in done.stdout
