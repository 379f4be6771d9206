"""Text or pictures from a trained model.

python -m gpt4d.generate checkpoint=runs/NAME prompt="…"
python -m gpt4d.generate checkpoint=runs/NAME out=pictures.png
"""

import sys
from pathlib import Path

from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.config import Config, ConfigError, from_arguments
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task import registry as tasks
from gpt4d.task.task import GenerateConfig


def main(arguments: list[str]) -> None:
    config = from_arguments(GenerateConfig, arguments)
    for key, least in (("tokens", 0), ("temperature", 0), ("top_k", 0), ("images", 1), ("steps", 1)):
        if getattr(config, key) < least:
            raise ConfigError(f"{key}={getattr(config, key)}: use a value of at least {least}")
    directory = checkpoint_dir.located(Path(config.checkpoint))
    with process_group(Launch()) as job:  # one process, whatever a launcher may say
        meta = checkpoint_dir.Meta.read(directory)
        generate = tasks.get(meta.task).generate
        if generate is None:
            raise ConfigError(f"checkpoint={directory}: its task {meta.task} has nothing to generate; use another one")
        stage = build_stage(Config(model=meta.model), Grid(device_type=job.device.type), job.device, initialized=False)
        sharded.load(directory, stage.module, None, stage.grid)
        sharded.load_averages(directory, stage.module, stage.grid)
        print(generate(config, directory, stage))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
