"""Trackers: one curve per run over its restarts, samples, missing packages, failures and plots during a run."""

import json
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from gpt4d import metrics
from gpt4d.config import Config, ConfigError
from gpt4d.runtime.signals import Stopped, StopRequest
from gpt4d.trackers import registry
from gpt4d.trackers.run_trackers import RunTrackers, tag
from gpt4d.validation import validate
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure
from tests.support.settings import configured


def tensorboard_points(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


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


POINTS = {
    "tensorboard": tensorboard_points,
    "wandb": wandb_points,
    "trackio": trackio_points,
    "mlflow": mlflow_points,
}


@pytest.mark.parametrize("name", POINTS)
def test_a_run_in_three_parts_that_repeats_steps_is_one_curve(ranks, tiny, name):
    pytest.importorskip(name, reason=f"the package {name} is not installed")
    options = [f"logging.trackers=[{name}]", "optim.schedule_steps=20", "checkpoint.every=2", "checkpoint.keep=9"]
    for steps in (4, 7, 9):
        config = tiny(*options, f"train.steps={steps}")
        run_dir = Path(config.run.dir)
        if newest := max(run_dir.glob("checkpoints/step_*"), default=None):
            shutil.rmtree(newest)  # as if the last part had been killed before it saved, one or two steps later
        ranks.run(2, train_in_rank, config)
    lines = [(line["step"], line["loss"]) for line in metric_lines(run_dir)]
    assert [step for step, _ in lines] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 7, 8, 9]
    once = dict(reversed(lines))  # the first loss of each step
    assert sorted(POINTS[name](run_dir)) == [(step, pytest.approx(once[step], rel=1e-6)) for step in sorted(once)]


@pytest.fixture
def sample(tmp_path):
    """Return the values of a sample with a text of two lines and an image."""
    image = tmp_path / "samples.png"
    Image.new("RGB", (4, 2), (250, 0, 0)).save(image)
    return {"text": "one <b>\n\n  two", "image": str(image), "frechet": 0.5}


def log_sample(directory, name, sample):
    config = Config()
    config.logging.trackers = [name]
    config.run.name = "run"
    log = metrics.RunLogger(config, directory)
    log.event("sample", "", step=3, tokens=48, **sample)
    log.close()


def test_a_sample_is_a_text_and_an_image_in_tensorboard(tmp_path, sample):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_sample(tmp_path, "tensorboard", sample)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
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
    """A tracker that stores its points, and fails from step ``fails_at`` on."""

    def __init__(self, fails_at=None):
        self.fails_at, self.points, self.closed = fails_at, [], False

    def scalars(self, values, step):
        if self.fails_at is not None and step >= self.fails_at:
            raise OSError("no\nspace")
        self.points.append((step, values))

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_costs_a_warning_and_no_other_tracker(capsys):
    first, second = Recorder(fails_at=2), Recorder()
    trackers = RunTrackers({"first": first, "second": second}, [])
    for step in (1, 2, 3):
        trackers.log({"step": step, "loss": float(step)})
    trackers.close()
    trackers.log({"step": 4, "loss": 4.0})
    assert first.points == [(1, {"loss": 1.0})]
    assert second.points == [(step, {"loss": step}) for step in (1, 2, 3)] and second.closed
    assert capsys.readouterr().err == (
        "warning: first: OSError: no space; nothing more is logged to it, and metrics.jsonl has all values\n"
    )


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
    assert tag("tasks/gsm8k/exact_match (strict-match)", "evaluation") == (
        "evaluation/tasks/gsm8k/exact_match__strict-match_"
    )
    assert tag("sources/../tokens//a.b") == "sources/tokens/a.b"


@pytest.mark.parametrize("name", POINTS)
def test_a_missing_package_is_one_line_with_the_command_before_any_process_group(monkeypatch, name):
    monkeypatch.setattr(registry, "find_spec", lambda module: None)
    with pytest.raises(ConfigError) as error:
        validate(configured([f"logging.trackers=[{name}]", "cluster=local"]), 1)
    install = "wandb" if name == "wandb" else f"'gpt4d[{name}]'"
    assert str(error.value) == (
        f"logging.trackers=[{name}]: the package {name} is not installed; run pip install {install}"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["logging.online=true", "logging.trackers=[mlflow]"], r"logging\.online=true: .*MLFLOW_TRACKING_URI, or"),
        (["logging.trackers=[wandb,comet]"], r"logging\.trackers\[1\]=comet: use one of tensorboard, wandb, trackio"),
        (["logging.project=''", "logging.trackers=[wandb]"], r"logging\.project='': trackers need a name"),
    ],
)
def test_a_setting_that_a_tracker_needs_is_checked(monkeypatch, overrides, message):
    monkeypatch.setattr(registry, "find_spec", lambda module: module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=message):
        validate(configured([*overrides, "cluster=local"]), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"online": True}, r"logging\.online=true: wandb reports 'No API key configured"),
        ({"project": "a/b"}, r"logging\.project=a/b logging\.online=false: wandb reports .*Invalid project name"),
    ],
)
def test_an_error_of_wandb_is_one_line(tmp_path, monkeypatch, settings, message):
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # without a key in ~/.netrc
    config = Config()
    config.logging.trackers = ["wandb"]
    for key, value in settings.items():
        setattr(config.logging, key, value)
    with pytest.raises(ConfigError, match=message) as raised:
        metrics.RunLogger(config, tmp_path)
    assert "\n" not in str(raised.value)


def train_and_note_plots(config, fails, signal=None):
    """Train, and write the last step of metrics.jsonl at each plot to the file ``plots``."""
    from gpt4d import trainer

    original = trainer.plot_losses

    def plot(runs, path, *x_axes, title):
        (history,) = runs.values()
        with open(path.parent / "plots", "a") as file:
            file.write(f"{history.step} {history.ending} {' '.join(x_axes)}\n")
        if fails:
            raise ValueError("no font")
        original(runs, path, *x_axes, title=title)

    trainer.plot_losses, stop = plot, StopRequest()
    stop.signal = signal
    try:
        trainer.Trainer(validate(config, dist.get_world_size()), torch.device("cpu")).run(stop)
    except Stopped:
        pass
    finally:
        trainer.plot_losses = original


def plots(config):
    return (Path(config.run.dir) / "plots").read_text().splitlines()


def test_the_losses_are_plotted_at_each_validation_and_at_the_end_and_no_error_ends_the_run(ranks, tiny):
    config = tiny("parallel.gz=2", "train.steps=5", "train.validate_every=2")
    ranks.run(2, train_and_note_plots, config, True)
    assert plots(config) == [f"{step} None tokens hours" for step in (2, 4, 5)]
    assert not (Path(config.run.dir) / "loss.png").exists()
    assert json.loads((Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "done"


def test_the_losses_are_plotted_at_a_signal(ranks, tiny):
    config = tiny("train.steps=5")
    ranks.run(2, train_and_note_plots, config, False, "SIGTERM")
    assert plots(config) == ["1 signal tokens hours"]
    assert (Path(config.run.dir) / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_losses_are_plotted_at_a_failure(ranks, tiny):
    config = tiny("optim.lr=1e6", "optim.warmup_steps=0")
    with pytest.raises(RankFailure, match="Non-finite steps"):
        ranks.run(2, train_and_note_plots, config, False)
    *_, last = plots(config)
    assert last.split()[1:] == ["failed", "tokens", "hours"]
    assert (Path(config.run.dir) / "loss.png").read_bytes().startswith(b"\x89PNG")
