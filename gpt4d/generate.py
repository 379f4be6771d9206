"""``python -m gpt4d.generate checkpoint=runs/NAME prompt="…"``: text from a trained model."""

import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.config import Config, ConfigError, from_arguments
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task.generation import continuation


@dataclass
class GenerateConfig:
    checkpoint: str = MISSING  # a checkpoint, or a run directory for its newest one
    prompt: str = MISSING
    tokens: int = 200  # most tokens to add; the text ends earlier at an end-of-text token
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 50  # only the k most likely tokens; 0: all
    seed: int = 0


def main(arguments: list[str]) -> None:
    config = from_arguments(GenerateConfig, arguments)
    for key in ("tokens", "temperature", "top_k"):
        if getattr(config, key) < 0:
            raise ConfigError(f"{key}={getattr(config, key)}: use a value of at least 0")
    directory = checkpoint_dir.located(Path(config.checkpoint))
    with process_group(Launch()) as job:  # one process, whatever a launcher may say
        run = Config(model=checkpoint_dir.Meta.read(directory).model)
        stage = build_stage(run, Grid(device_type=job.device.type), job.device, initialized=False)
        sharded.load(directory, stage.module, None, stage.grid)
        tokenizer = Tokenizer.from_file(str(directory / checkpoint_dir.TOKENIZER))
        sampling = {"temperature": config.temperature, "top_k": config.top_k, "seed": config.seed}
        print(continuation(stage, tokenizer, config.prompt, config.tokens, **sampling))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
