"""trackio: an SQLite database in run.dir/trackio, or the Space or server that its environment variables name."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gpt4d.config import Config


class TrackioTracker:
    """Logs to a run whose name contains the run's id, because trackio finds a run again by its name."""

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        os.environ["TRACKIO_DIR"] = str((run_dir / "trackio").absolute())  # read when trackio is imported
        if not config.logging.online:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=config.logging.project,
            name=f"{config.run.name}-{run_id}",
            resume="allow",
            config=asdict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._run.log({tag: text}, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._run.log({tag: self._trackio.Image(str(path))}, step)

    def close(self) -> None:
        self._run.finish()
