"""Weights & Biases: offline in run.dir/wandb, or online."""

import html
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt4d.config import Config


class WandbTracker:
    """Logs to a run whose id is the same over all restarts."""

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        import wandb

        self._wandb, self._step = wandb, 0
        self._run = wandb.init(
            project=config.logging.project,
            name=config.run.name,
            id=run_id,
            resume="allow",
            mode="online" if config.logging.online else "offline",
            dir=str(run_dir),
            config=asdict(config),
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._log({tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._log({tag: self._wandb.Image(str(path))}, step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._step = max(self._step, step)  # wandb requires increasing steps
        self._run.log(values, step=self._step)

    def close(self) -> None:
        self._run.finish()
