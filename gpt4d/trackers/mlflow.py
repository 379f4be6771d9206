"""MLflow: an SQLite database in run.dir/mlflow, or the server that MLFLOW_TRACKING_URI names."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gpt4d.config import Config, flattened

_TAG = "gpt4d.run_id"  # MLflow chooses the ids of its runs, so a tag identifies the run
_PARAMETERS = 100  # maximum number of parameters per call


class MlflowTracker:
    """Logs to the run of the experiment ``logging.project`` that has this run's id as a tag."""

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
