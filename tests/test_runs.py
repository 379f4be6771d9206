"""Runs as their files describe them: the lock of a directory, states, differing settings, plots."""

import errno
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gpt4d.config import ConfigError
from gpt4d.data.directory import write_once
from gpt4d.runs import lock
from gpt4d.runs.__main__ import main
from gpt4d.runs.history import History, Point, interval_means
from gpt4d.runs.logger import last_elapsed_s
from gpt4d.runs.plots import plot_losses
from gpt4d.runs.summary import Run, State, differences, differing_keys, find_runs, state_of
from gpt4d.runs.tables import console, runs_table
from gpt4d.runtime.files import read_log
from gpt4d.trackers.run_trackers import RunTrackers
from gpt4d.training.run import train
from tests.support.commands import wrong_messages
from tests.support.damage import DAMAGES, NOT_FILES
from tests.support.grids import full
from tests.support.run_files import append, event, locked_by_another_process, step, write_run


def test_a_second_run_in_one_directory_ends_with_one_line_and_the_lock_ends_with_its_process(tmp_path, tiny):
    config = tiny()
    run_dir = Path(config.run.dir)
    with locked_by_another_process(run_dir) as process:
        expected = rf"run\.dir={run_dir}: another run \(\S+, pid {process.pid}, since .*\) is using it; wait"
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


def test_a_history_follows_a_run_and_drops_what_a_restart_repeats(tmp_path):
    lines = event("start"), step(1, 4.0), step(2, 3.0), event("validation", 2, loss=3.5), step(3, 2.5)
    path = write_run(tmp_path, *lines)
    history = History(path)
    assert [point.loss for point in history.training.values()] == [4.0, 3.0, 2.5]
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo\n[1]\n')  # cut off by a crash
        file.write(json.dumps(event("start", 1)) + "\n" + json.dumps(step(2, None)) + "\n" + json.dumps(step(3, 2.9)))
        file.flush()
        history.update()
        # The last line is incomplete.
        assert list(history.training) == [1] and not history.validation and history.step == 2
        file.write("\n" + json.dumps(event("done", 3)) + "\n")
    history.update()
    assert history.training == {1: Point(1, 10, 1.0, 4.0), 3: Point(3, 30, 3.0, 2.9)}
    assert (history.step, history.ending, history.time, history.per_s) == (3, "done", 1003.0, 20.0)


STARTED, DONE, FAILED = [event("start"), step(1)], event("done", 9), event("failed", problem="…")
STATES = [
    ([], True, "here", 0, State.RUNNING),
    ([], False, "here", 0, State.NEW),
    (STARTED, True, "here", 1e9, State.RUNNING),
    (STARTED, False, "here", 1002, State.INTERRUPTED),  # killed
    (STARTED, False, "there", 1002, State.RUNNING),  # no lock reaches that host
    (STARTED, False, "there", 2000, State.INTERRUPTED),
    ([*STARTED, event("signal", 1)], False, "there", 1002, State.INTERRUPTED),
    ([event("start"), FAILED], False, "here", 0, State.FAILED),
    ([event("start"), DONE], False, "here", 0, State.FINISHED),
    ([event("start"), DONE, event("start", 9), step(10)], False, "here", 0, State.INTERRUPTED),
    ([event("start"), FAILED, event("start"), DONE], False, "here", 0, State.FINISHED),
]


@pytest.mark.parametrize(("lines", "locked", "host", "now", "state"), STATES)
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
        assert subprocess.check_output([sys.executable, "-c", probe, path], text=True) == "True\n"
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
    second = [event("start"), step(1, 5.0), event("failed", 1, problem="no\n")]
    start = {"commit": "abc", "clean": True, "grids": ["1x1x1x1"], "data": {"samples": "f"}}
    write_run(tmp_path / "sweep/lr=0.1", *first, config=config(0.1), **start, versions={"torch": "2.11"})
    start["commit"] = "def"
    write_run(tmp_path / "sweep/lr=0.2", *second, config=config(0.2), **start, versions={"torch": "2.13"})
    (tmp_path / "sweep/lr=0.1/checkpoints/step_00000003").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    return tmp_path


def rows(text):
    """Return the lines of a table that are not empty, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_runs_are_listed_recursively_with_differing_settings(two_runs, capsys, monkeypatch):
    monkeypatch.chdir(two_runs)  # a long path takes a second line
    main(["."])
    heading, *_, first, second, note = rows(capsys.readouterr().out)
    assert heading == "run optim.lr state step loss (last 10) validation speed left last line"
    assert "sweep/lr=0.1 0.1 finished 3/3 3.5000 3.5000 20 tokens/s" in first
    assert "sweep/lr=0.2 0.2 failed 1/3 5.0000" in second
    assert note.endswith("sweep/lr=0.2: no")
    main(["sweep", "format=json"])
    one, two = json.loads(capsys.readouterr().out)
    assert (one["run"], one["state"], one["validation_loss"]) == ("sweep/lr=0.1", "finished", 3.5)
    assert two["problem"] == "no\n"


def test_validation_sets_of_a_run_are_read_listed_and_plotted(two_runs, tmp_path, capsys, monkeypatch):
    sets = [{"books": {"loss": 3.0, "perplexity": 20.1}, "code": {"loss": None}}, {"books": {"loss": 2.5}}]
    lines = [event("validation", step, loss=None, sets=values) for step, values in zip((1, 2), sets, strict=True)]
    path = write_run(tmp_path / "sweep/sets", event("start"), step(1, 4.0), *lines, config=config(0.3))
    history = History(path)
    assert not history.validation and history.sets["books"] == {1: Point(1, 10, 1.0, 3.0), 2: Point(2, 20, 1.0, 2.5)}
    append(path, event("start", 1))
    history.update()
    assert list(history.sets["books"]) == [1] and not history.sets["code"]
    monkeypatch.chdir(two_runs)  # a long path takes a second line
    main(["sweep"])
    heading, *lines = rows(capsys.readouterr().out)
    assert heading == "run optim.lr state step loss (last 10) validation books code speed left last line"
    assert any("sweep/sets 0.3 interrupted 1/3 4.0000 3.0000 20 tokens/s" in line for line in lines)
    main([str(path), "format=json"])
    assert json.loads(capsys.readouterr().out)[0]["validation_sets"] == {"books": 3.0, "code": None}
    for runs in ([path], [path, two_runs / "sweep/lr=0.1"]):
        main(["plot", *map(str, runs), f"out={tmp_path / 'losses.svg'}"])
        text = (tmp_path / "losses.svg").read_text()
        assert ("points: validation, squares: books, triangles: code" in text) == (len(runs) > 1)
        assert ("<!-- books -->" in text) == (len(runs) == 1)


def test_a_difference_of_runs_names_settings_commit_versions_and_not_equal_ones(two_runs, capsys, monkeypatch):
    monkeypatch.chdir(two_runs)  # a long path takes a second line
    main(["diff", "sweep/lr=0.1", "sweep/lr=0.2"])
    differences = rows(capsys.readouterr().out)[2:]
    assert differences == ["optim.lr 0.1 0.2", "commit abc def", "version of torch 2.11 2.13"]
    main(["diff", *["sweep/lr=0.1"] * 2])
    assert "have equal settings" in capsys.readouterr().out


def test_losses_are_plotted_over_steps_tokens_or_hours_with_a_panel_for_each_axis(two_runs, tmp_path):
    for x in ("step", "tokens", "hours"):
        main(["plot", *map(str, (two_runs / "sweep").iterdir()), f"out={tmp_path / x}.png", f"x={x}"])
        assert (tmp_path / f"{x}.png").read_bytes().startswith(b"\x89PNG")
    plot_losses({"a": History(two_runs / "sweep/lr=0.1")}, tmp_path / "a.svg", "tokens", "hours")
    text = (tmp_path / "a.svg").read_text()
    assert [text.count(f"<!-- {label} -->") for label in ("tokens seen", "hours", "loss per token")] == [1, 1, 1]


def test_training_losses_are_averaged_over_intervals():
    points = [Point(step, 10 * step, step / 2, float(step)) for step in range(1, 8)]
    means = [(mean.step, mean.seen, mean.loss) for mean in interval_means(points, 3)]
    assert means == [(2, 20, 1.5), (4, 40, 3.5), (7, 70, 6)]
    assert interval_means(points, 100) == points
    assert interval_means([], 3) == []


def test_the_watched_table_follows_the_files(two_runs, monkeypatch, capsys):
    path, seen = two_runs / "sweep/lr=0.2", []

    def sleep(_):
        seen.append(find_runs([path])[0].state)
        if len(seen) == 2:
            raise KeyboardInterrupt
        append(path, event("start"), event("done", 3))

    monkeypatch.setattr("time.sleep", sleep)
    main(["watch", str(path)])
    assert seen == [State.FAILED, State.FINISHED]
    assert "finished" in capsys.readouterr().out


MISTAKES = [  # arguments and the beginning of the line
    ("/no/such", "/no/such: no such directory; pass a run"),
    ("{empty}", "{empty}: no run in it or below"),
    ("{empty} format=xml", "format=xml: use one of table, json"),
    ("diff {empty}", "diff: 1 run(s); pass two"),
    ("diff {empty} {empty}", "{empty}: not a run"),
    ("plot {empty}", "out=… is missing"),
    ("plot out=a.png", "plot: no run"),
    ("plot {empty} out=a.jpeg", "out=a.jpeg: not a format of plots"),
    ("plot {empty} out=a.png x=days", "x=days: use one of step, tokens, hours"),
    ("watch {empty} every_s=0", "every_s=0.0: use a value above 0"),
]


def test_a_mistake_is_one_line(tmp_path):
    cases = [[text.replace("{empty}", str(tmp_path)) for text in case] for case in MISTAKES]
    assert not wrong_messages([(words.split(), f"^{message}") for words, message in cases], main)


def test_the_command_has_a_help_and_does_not_import_torch():
    check = "import sys; from gpt4d.runs import __main__; __main__.main(['--help']); assert 'torch' not in sys.modules"
    assert "watch [DIR …]" in subprocess.check_output([sys.executable, "-c", check], text=True)


FILES = "metrics.jsonl", "starts.jsonl", "config.yaml", "lock"
SAMPLED = [("metrics.jsonl", "wrong types"), ("metrics.jsonl", "FIFO"), ("starts.jsonl", "NULs"), ("lock", "FIFO")]
SAMPLED += [("config.yaml", "bomb"), ("config.yaml", "FIFO"), ("config.yaml", "nested")]


@pytest.mark.parametrize("cases", [SAMPLED, full([*itertools.product(FILES, DAMAGES)])], ids=["sampled", "all"])
def test_a_damaged_run_is_a_row_with_its_reason(two_runs, capsys, monkeypatch, cases):
    good, found = two_runs / "sweep/lr=0.1", {}
    for file, name in cases:
        bad = two_runs / f"bad/{file} {name}"
        shutil.copytree(good, bad)
        (bad / "lock").touch()
        DAMAGES[name](bad / file)
        found[str(bad)] = file, name
    shutil.copytree(good, two_runs / "bad/\udcff\x1b[31m")  # a name that is not UTF-8, and one that changes colors
    main([str(two_runs / "bad"), "format=json"])
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == len(found) + 1
    for run, (file, name) in found.items():
        row, unreadable = rows[run], file == "metrics.jsonl" and name in NOT_FILES
        assert (row["state"] == "unreadable") == unreadable
        reason = {"metrics.jsonl": "metrics.jsonl: ", "config.yaml": f"{run}/config.yaml: "}.get(file)
        intact = name in ("a bad byte", "cut", "empty") if file == "config.yaml" else not unreadable
        assert intact or row["problem"].startswith(reason), run
        with suppress(ConfigError):
            main(["plot", run, f"out={two_runs / 'a.png'}"] if file == "metrics.jsonl" else ["diff", str(good), run])
    monkeypatch.chdir(two_runs)  # so that the lines of the table are short
    main(["bad"])
    assert "unreadable" in (out := capsys.readouterr().out) and "\\udcff\\x1b[31m" in out


VALUES = ["null", "true", "-1", "1e400", "NaN", "9" * 400, '"a"', "[]", "{}", '{"a": 1}', '"\\ud800"', "1e99", "-1e99"]


def damaged(content, draw):
    """Return a file with random changes: bytes that are lost or inserted, lines in another order, other values."""
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(content) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            content = content[:start] + draw.randbytes(draw.randrange(1, 9)) + content[start:]
        elif kind == 1:
            content = content[:start] + content[start + draw.randrange(1, 40) :]
        elif kind == 2:
            lines = content.split(b"\n")
            draw.shuffle(lines)
            content = b"\n".join(lines)
        else:
            places = [match.span() for match in re.finditer(rb'(?<=": )[^,}]+', content)]
            if places:
                start, end = draw.choice(places)
                content = content[:start] + draw.choice(VALUES).encode() + content[end:]
    return content


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_random_damage_of_the_files_of_a_run_never_ends_a_reader(two_runs, tmp_path, seed, capsys):
    draw, run = random.Random(seed), two_runs / "sweep/lr=0.1"
    (run / "lock").write_text(json.dumps(lock.Holder.this_process()._asdict()) + "\n")
    names = ("metrics.jsonl", "starts.jsonl", "config.yaml", "lock")
    intact = {name: (run / name).read_bytes() for name in names}
    for _ in range(200):
        for name in names:
            (run / name).write_bytes(damaged(intact[name], draw) if draw.random() < 0.5 else intact[name])
        found = Run(run)
        json.dumps(found.to_json())
        console().print(runs_table([found, Run(two_runs / "sweep/lr=0.2")]))
        differences(found, found)
        earlier = read_log(run / "metrics.jsonl")
        RunTrackers({}, earlier)
        assert 0 <= abs(last_elapsed_s(earlier)) < 1e100
        lock.DirectoryLock(run).close()
