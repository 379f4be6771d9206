"""Trackers of runs: TensorBoard, Weights & Biases, trackio, MLflow. A tracker imports its package when it starts."""

import html
import logging
import os
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from gpt4d.config import Config, flattened

_TAG = "gpt4d.run_id"  # MLflow chooses the ids of its runs, so a tag identifies the run
_PARAMETERS = 100  # maximum number of parameters per call of MLflow


class Tracker(Protocol):
    """Shows the curves and samples of one run. A restart continues the same curves.

    Steps may decrease: a save in the background is reported some steps after its own.
    """

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each tag."""

    def text(self, tag: str, text: str, step: int) -> None: ...

    def image(self, tag: str, path: Path, step: int) -> None: ...

    def close(self) -> None:
        """Write everything that has been logged."""


class TensorBoardTracker:
    """Writes one file of events per start to run.dir/tensorboard. TensorBoard joins all files of the directory."""

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        from torch.utils.tensorboard import SummaryWriter

        _hide_errors_of_writers()
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def text(self, tag: str, text: str, step: int) -> None:
        # TensorBoard shows Markdown, in which an indented block is literal text.
        self._writer.add_text(tag, textwrap.indent(text, "    ", lambda line: True), step)

    def image(self, tag: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def _hide_errors_of_writers() -> None:
    """Print no traceback of the writer's thread: its next call raises the error, which costs one warning."""
    show = threading.excepthook

    def show_others(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            show(arguments)

    threading.excepthook = show_others


class _Logs:
    """A tracker whose package logs numbers, texts and images with one function.

    Args:
        package: the module of the tracker.
        run: the run that the package has started.
    """

    def __init__(self, package: Any, run: Any):
        self._package, self._run = package, run

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._log({tag: text}, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._log({tag: self._package.Image(str(path))}, step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_Logs):
    """Logs to a run whose id is the same over all restarts: offline in run.dir/wandb, or online."""

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        import wandb

        self._step = 0
        run = wandb.init(
            project=config.logging.project,
            name=config.run.name,
            id=run_id,
            resume="allow",
            mode="online" if config.logging.online else "offline",
            dir=str(run_dir),
            config=asdict(config),
        )
        super().__init__(wandb, run)

    def text(self, tag: str, text: str, step: int) -> None:
        self._log({tag: self._package.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._step = max(self._step, step)  # wandb requires increasing steps
        super()._log(values, self._step)


class TrackioTracker(_Logs):
    """Logs to an SQLite database in run.dir/trackio, or to the Space or server that its environment variables name.

    The run's name contains its id, because trackio finds a run again by its name.
    """

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        os.environ["TRACKIO_DIR"] = str((run_dir / "trackio").absolute())  # read when trackio is imported
        if not config.logging.online:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        run = trackio.init(
            project=config.logging.project,
            name=f"{config.run.name}-{run_id}",
            resume="allow",
            config=asdict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        super().__init__(trackio, run)


class MlflowTracker:
    """Logs to the run of the experiment ``logging.project`` that has this run's id as a tag.

    It writes to an SQLite database in run.dir/mlflow, or to the server that MLFLOW_TRACKING_URI names.
    """

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        offline = not config.logging.online
        if offline:
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
        from mlflow import MlflowClient

        # They print a line per table of a new database, and tracebacks of errors that they raise.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        directory, project = (run_dir / "mlflow").absolute(), config.logging.project
        if offline:
            directory.mkdir(exist_ok=True)
        self._client = MlflowClient(f"sqlite:///{directory}/mlflow.db" if offline else None)
        found = self._client.get_experiment_by_name(project)
        location = (directory / "artifacts").as_uri() if offline else None
        experiment = found.experiment_id if found else self._client.create_experiment(project, location)
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run_id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            self._id = self._client.create_run(experiment, tags={_TAG: run_id}, run_name=config.run.name).info.run_id
            self._log_settings(config)

    def _log_settings(self, config: Config) -> None:
        from mlflow.entities import Param

        settings = [Param(key, str(value)) for key, value in flattened(asdict(config), ".").items()]
        for start in range(0, len(settings), _PARAMETERS):
            self._client.log_batch(self._id, params=settings[start : start + _PARAMETERS])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(tag, value, now, step) for tag, value in values.items()])

    def text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self._id, text, f"{tag}/{step}.txt")

    def image(self, tag: str, path: Path, step: int) -> None:
        from PIL import Image

        with Image.open(path) as image:
            self._client.log_image(self._id, image, f"{tag}/{step}.png")

    def close(self) -> None:
        self._client.set_terminated(self._id)
