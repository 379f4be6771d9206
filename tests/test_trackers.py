"""Trackers: one curve per run over its restarts, samples, missing packages, failures and plots. Secrets stay secret."""

import functools
import json
import os
import shutil
import signal
import sqlite3
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from gpt4d.config import Config
from gpt4d.runs import logger
from gpt4d.runtime.signals import Stopped, StopRequest
from gpt4d.trackers import run_trackers
from gpt4d.trackers.run_trackers import RunTrackers, tag
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.data_files import one_line
from tests.support.faults import at_step, block, fail, shorten_timeouts, signal_itself
from tests.support.grids import metric_lines, train_in_rank
from tests.support.jobs import LaunchedJob, ended_job
from tests.support.rank_pool import RankFailure
from tests.support.run_files import events
from tests.support.settings import configured


def tensorboard_events(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events


def tensorboard_points(run_dir):
    return [(event.step, event.value) for event in tensorboard_events(run_dir).Scalars("loss")]


def wandb_records(path):
    """Yield the records of an offline run, which wandb writes as a log of LevelDB with a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (rest := 32768 - position % 32768) < 7:  # no part of a record begins at the end of a block
            position += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield Record.FromString(record)
            record = b""


def wandb_points(run_dir):
    points, ids = [], set[str]()
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss" in values:
                points.append((json.loads(values["_step"]), json.loads(values["loss"])))
    assert ids == {(run_dir / "run_id").read_text()}
    return points


def trackio_points(run_dir):
    (path,) = (run_dir / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({run_id for run_id, _, _ in rows}) == 1
    return [(step, values["loss"]) for _, step, text in rows if "loss" in (values := json.loads(text))]


def mlflow_points(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("gpt4d").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["train.batch_size"] == "16"
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]


POINTS = {"tensorboard": tensorboard_points, "wandb": wandb_points, "trackio": trackio_points, "mlflow": mlflow_points}


@pytest.mark.parametrize("names", ["tensorboard,wandb", "trackio", "mlflow"])
def test_a_run_in_three_parts_that_repeats_steps_is_one_curve(ranks, tiny, names):
    for name in names.split(","):
        pytest.importorskip(name, reason=f"the package {name} is not installed")
    options = [f"logging.trackers=[{names}]", "optim.schedule_steps=20", "checkpoint.every=2", "checkpoint.keep=9"]
    for steps in (4, 7, 9):
        config = tiny(*options, f"train.steps={steps}")
        run_dir = Path(config.run.dir)
        if newest := max(run_dir.glob("checkpoints/step_*"), default=None):
            shutil.rmtree(newest)  # as if the last part had been killed before it saved, one or two steps later
        ranks.run(2, train_in_rank, config)
    lines = [(line["step"], line["loss"]) for line in metric_lines(run_dir)]
    assert [step for step, _ in lines] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 7, 8, 9]
    once = dict(reversed(lines))  # the first loss of each step
    for name in names.split(","):
        assert sorted(POINTS[name](run_dir)) == [(step, pytest.approx(once[step], rel=1e-6)) for step in sorted(once)]


def wandb_config(directory=""):
    config = Config()
    config.logging.trackers, config.run.name, config.run.dir = ["wandb"], "run", str(directory)
    return config


@pytest.fixture
def sample(tmp_path):
    """Return the values of a sample with a text of two lines and an image."""
    image = tmp_path / "samples.png"
    Image.new("RGB", (4, 2), (250, 0, 0)).save(image)
    return {"text": "one <b>\n\n  two", "image": str(image), "frechet": 0.5}


def log_sample(directory, name, sample):
    config = wandb_config(directory)
    config.logging.trackers = [name]
    log = logger.RunFiles(config, "tokens")
    log.open_log()
    log.event("sample", "", step=3, tokens=48, **sample)
    log.close()


def test_a_sample_is_a_text_and_an_image_in_tensorboard(tmp_path, sample):
    log_sample(tmp_path, "tensorboard", sample)
    events = tensorboard_events(tmp_path)
    assert {*events.Tags()["scalars"]} == {"sample/tokens", "sample/frechet"}
    (image,) = events.Images("sample/image")
    assert (image.step, image.width, image.height) == (3, 4, 2)
    (text,) = events.Tensors("sample/text/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (3, "    one <b>\n    \n      two")


def test_a_sample_is_a_text_and_an_image_in_wandb(tmp_path, sample):
    log_sample(tmp_path, "wandb", sample)
    (html,) = tmp_path.glob("wandb/offline-run-*/files/media/html/sample/text_*.html")
    assert "<pre>one &lt;b&gt;\n\n  two</pre>" in html.read_text()
    (image,) = tmp_path.glob("wandb/offline-run-*/files/media/images/sample/image_*.png")
    assert Image.open(image).size == (4, 2)


def test_a_sample_is_a_text_and_an_image_in_mlflow(tmp_path, sample):
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    log_sample(tmp_path, "mlflow", sample)
    (artifacts,) = tmp_path.glob("mlflow/artifacts/*/artifacts/sample")
    assert (artifacts / "text/3.txt").read_text() == sample["text"]
    assert Image.open(artifacts / "image/3.png").size == (4, 2)


class Recorder:
    """A tracker that stores its points. ``on_step`` is called with each step, and ``on_close`` at the end."""

    def __init__(self, on_step=lambda step: None, on_close=lambda: None):
        self.points, self.closed, self.on_step, self.on_close = [], False, on_step, on_close

    def scalars(self, values, step):
        self.on_step(step)
        self.points.append((step, values))

    def close(self):
        self.on_close()
        self.closed = True


def raise_at_step_2(error):
    def on_step(step):
        if step == 2:
            raise error

    return on_step


def log_steps(trackers, *steps):
    for step in steps:
        trackers.log({"step": step, "loss": float(step)})


KEPT = "metrics.jsonl has all values\n"


@pytest.mark.parametrize("error", [OSError("no\nspace"), SystemExit("no space"), MemoryError("no space")])
def test_a_tracker_that_fails_costs_a_warning_and_no_other_tracker(capsys, error):
    first, second = Recorder(raise_at_step_2(error)), Recorder()
    trackers = RunTrackers({"first": first, "second": second}, [])
    log_steps(trackers, 1, 2, 3)
    trackers.close()
    log_steps(trackers, 4)
    assert first.points == [(1, {"loss": 1.0})] and not trackers.hang
    assert second.points == [(step, {"loss": step}) for step in (1, 2, 3)] and second.closed
    expected = f"warning: first: {type(error).__name__}: no space; nothing more is logged to it, and {KEPT}"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("hanging", ["on_step", "on_close"])
def test_a_tracker_that_hangs_costs_a_warning_and_no_other_tracker(capsys, monkeypatch, hanging):
    answers = threading.Event()
    first, second = Recorder(**{hanging: lambda *_: answers.wait()}), Recorder()
    monkeypatch.setattr(run_trackers, "END_S", 0.2)
    trackers = RunTrackers({"second": second, "first": first}, [])
    log_steps(trackers, 1, 2, 3)
    second_thread = trackers._senders[0]._thread
    trackers.close()
    second_thread.join()
    assert trackers.hang and second.closed and len(second.points) == 3
    error = capsys.readouterr().err
    assert error.startswith("warning: first: does not answer; about ") and error.count("\n") == 1
    answers.set()


def test_the_lines_that_wait_for_a_tracker_are_limited_and_dropped_lines_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(run_trackers, "_WAITING", 2)
    called, answers = threading.Event(), threading.Event()
    slow = Recorder(lambda step: (called.set(), answers.wait()))
    trackers = RunTrackers({"slow": slow}, [])
    log_steps(trackers, 1)
    called.wait()
    log_steps(trackers, 2, 3, 4, 5)
    answers.set()
    trackers.close()
    assert [step for step, _ in slow.points] == [1, 2, 3] and slow.closed
    assert capsys.readouterr().err.splitlines() == [
        f"warning: slow: it is slow or does not answer; lines are dropped while 2 wait, and {KEPT[:-1]}",
        "warning: slow: 2 line(s) were dropped; metrics.jsonl has all values",
    ]


def start_a_hanging_tracker(*_):
    """Return a tracker that hangs and whose package has a thread that Python waits for at its end."""
    threading.Thread(target=block).start()
    return Recorder(block)


def hang_in_the_tracker(signaled, rank):
    run_trackers.END_S = run_trackers.STOP_S = 0.1
    run_trackers._TRACKERS["tensorboard"] = run_trackers._Entry(start_a_hanging_tracker, (), "")
    if signaled:
        signal_itself(signal.SIGTERM, 2, 0, rank)


@pytest.mark.parametrize(("signaled", "code"), [(False, 0), (True, 75)])
def test_a_run_ends_with_its_exit_code_while_a_tracker_hangs(ranks, tiny, signaled, code):
    config = tiny("parallel.gz=2", "train.steps=4", "logging.trackers=[tensorboard]")
    job = ended_job(ranks.context, config, [code] * 2, functools.partial(hang_in_the_tracker, signaled))
    assert job.outputs()[0].count("warning: tensorboard: does not answer; about ") == 1


def test_tensorboard_without_its_directory_costs_one_warning_and_no_traceback(tmp_path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)  # prints tracebacks
    config = wandb_config()
    config.logging.trackers = ["tensorboard"]
    trackers = run_trackers.start_trackers(config, tmp_path, [])
    shutil.rmtree(tmp_path / "tensorboard")
    log_steps(trackers, 1, 2, 3)
    trackers.close()
    error = capsys.readouterr().err
    assert error.startswith("warning: tensorboard: FileNotFoundError") and error.count("\n") == 1 and not shown


def test_only_lines_after_the_last_line_are_new_and_an_event_of_its_step_that_is_missing():
    earlier = [{"event": "start", "step": 0}, {"step": 4, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    tracker = Recorder()
    trackers = RunTrackers({"a": tracker}, earlier)
    for line in ({"step": 3, "loss": 3.0}, {"step": 4, "loss": 4.0}, {"event": "validation", "step": 4, "loss": 5.0}):
        trackers.log(line)
    trackers.log({"step": 5, "loss": 6.0, "sets": {"a": {"loss": 7.0}}, "mfu": None, "text": "a"})
    trackers.close()
    assert tracker.points == [(4, {"validation/loss": 5.0}), (5, {"loss": 6.0, "sets/a/loss": 7.0})]


def test_tags_have_only_characters_that_every_tracker_accepts():
    assert tag("comm/stage 0 to 1/bytes") == "comm/stage_0_to_1/bytes"
    strict = tag("tasks/gsm8k/exact_match (strict-match)", "evaluation")
    assert strict == "evaluation/tasks/gsm8k/exact_match__strict-match_"
    assert tag("sources/../tokens//a.b") == "sources/tokens/a.b"


def check(words):
    return validate(configured([*words.split(), "cluster=local"]), 1)


@pytest.mark.parametrize("name", POINTS)
def test_a_missing_package_is_one_line_with_the_command_before_any_process_group(monkeypatch, name):
    monkeypatch.setattr(run_trackers, "find_spec", lambda module: None)
    install = "wandb" if name == "wandb" else f"'gpt4d[{name}]'"
    message = f"logging.trackers=[{name}]: the package {name} is not installed; run pip install {install}"
    assert not wrong_messages([(f"logging.trackers=[{name}]", f"^{message}")], check)


def test_a_setting_that_a_tracker_needs_is_checked(monkeypatch):
    monkeypatch.setattr(run_trackers, "find_spec", lambda module: module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mistakes = [
        ("logging.online=true logging.trackers=[mlflow]", "^logging.online=true: … MLFLOW_TRACKING_URI, or"),
        ("logging.trackers=[wandb,comet]", "logging.trackers[1]=comet: use one of tensorboard, wandb, trackio"),
        ("logging.project='' logging.trackers=[wandb]", "logging.project='': trackers need a name"),
    ]
    assert not wrong_messages(mistakes, check)


def test_a_connection_to_a_server_is_announced_and_an_end_of_its_package_is_one_line(tmp_path, monkeypatch, capsys):
    def connect(*_):
        assert capsys.readouterr().out == "logging.online=true: connecting wandb to its server\n"
        sys.exit("no server")

    config = wandb_config()
    config.logging.online = True
    monkeypatch.setitem(run_trackers._TRACKERS, "wandb", run_trackers._Entry(connect, (), ""))
    with one_line("logging.online=true: wandb reports 'no server'; correct it, or leave wandb out"):
        run_trackers.start_trackers(config, tmp_path, [])


def test_an_error_of_wandb_is_one_line(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # without a key in ~/.netrc
    online, wrong_name = wandb_config(tmp_path), wandb_config(tmp_path)
    online.logging.online, wrong_name.logging.project = True, "a/b"
    mistakes = [
        (online, "logging.online=true: wandb reports 'No API key configured"),
        (wrong_name, "logging.project=a/b logging.online=false: wandb reports … Invalid project name"),
    ]
    assert not wrong_messages(mistakes, lambda config: logger.RunFiles(config, "tokens").open_log())


def train_and_note_plots(config, fails, signal=None):
    """Train, and write the last step of metrics.jsonl at each plot to the file ``plots``."""
    original, stop = logger.plot_losses, StopRequest()
    stop.signal = signal

    def plot(runs, path, *x_axes, title):
        (history,) = runs.values()
        with open(path.parent / "plots", "a") as file:
            file.write(f"{history.step} {history.ending} {' '.join(x_axes)}\n")
        if fails:
            raise ValueError("no font")
        original(runs, path, *x_axes, title=title)

    with patch.object(logger, "plot_losses", plot), suppress(Stopped):
        Trainer(validate(config, dist.get_world_size()), torch.device("cpu")).run(stop)


def plots(config):
    return (Path(config.run.dir) / "plots").read_text().splitlines()


def test_the_losses_are_plotted_at_each_validation_and_at_the_end_and_no_error_ends_the_run(ranks, tiny):
    config = tiny("parallel.gz=2", "train.steps=5", "train.validate_every=2")
    ranks.run(2, train_and_note_plots, config, True)
    assert plots(config) == [f"{step} None tokens hours" for step in (2, 4, 5)]
    assert not (Path(config.run.dir) / "loss.png").exists()
    assert events(config.run.dir)[-1]["event"] == "done"


def test_the_losses_are_plotted_at_a_signal_and_at_a_failure(ranks, tiny, tmp_path):
    stopped = tiny("train.steps=5")
    ranks.run(2, train_and_note_plots, stopped, False, "SIGTERM")
    assert plots(stopped) == ["1 signal tokens hours"]
    failed = tiny("optim.lr=1e6", "optim.warmup_steps=0", f"run.dir={tmp_path / 'failed'}")
    with pytest.raises(RankFailure, match="Non-finite steps"):
        ranks.run(1, train_and_note_plots, failed, False)
    assert plots(failed)[-1].split()[1:] == ["failed", "tokens", "hours"]
    for config in (stopped, failed):
        assert (Path(config.run.dir) / "loss.png").read_bytes().startswith(b"\x89PNG")


SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_NotARealTokenNotARealToken",
    "HUGGING_FACE_HUB_TOKEN": "hf_AnotherTokenThatIsNotReal",
    "AWS_SECRET_ACCESS_KEY": "NotARealSecretEitherNotARealSecret",
}


def set_secrets_and_fail(rank):
    os.environ.update(SECRETS)
    shorten_timeouts()

    if rank == 1:
        at_step(4, fail)


def test_no_secret_is_in_logs_configs_or_checkpoints(ranks, tiny):
    config = tiny("logging.trackers=[wandb,tensorboard]", "checkpoint.every=2", "profile.steps=1", "parallel.gz=2")
    with LaunchedJob(ranks.context, config, 2, set_secrets_and_fail) as job:
        assert job.exit_codes() == [1, 1], job.outputs()
    files = [path for path in job.run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "meta.json", "run_id"} <= {path.name for path in files}
    for path in [*files, *job.logs]:
        content = path.read_bytes()
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path
