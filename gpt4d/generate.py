"""Text or pictures from a trained model.

python -m gpt4d.generate checkpoint=runs/NAME prompt="…"
python -m gpt4d.generate checkpoint=runs/NAME out=pictures.png
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.config import Config, ConfigError, check_picture, from_arguments
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task.generation import continuation
from gpt4d.task.pictures import generated_pictures, save_pictures


@dataclass
class GenerateConfig:
    checkpoint: str = MISSING  # a checkpoint, or a run directory for its newest one
    prompt: str | None = None  # text to continue
    tokens: int = 200  # most tokens to add; the text ends earlier at an end-of-text token
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 50  # only the k most likely tokens; 0: all
    out: str | None = None  # picture file to write
    images: int = 36  # pictures in it, side by side
    steps: int = 50  # of DDIM for each picture
    seed: int = 0


def _text(config: GenerateConfig, directory: Path, stage: Stage) -> str:
    if config.prompt is None:
        raise ConfigError("prompt=…: missing; set it to the text that the model continues")
    tokenizer = Tokenizer.from_file(str(directory / checkpoint_dir.TOKENIZER))
    return continuation(
        stage,
        tokenizer,
        config.prompt,
        config.tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )


def _pictures(config: GenerateConfig, directory: Path, stage: Stage) -> str:
    if config.out is None:
        raise ConfigError("out=…: missing; set it to the name of the picture file to write")
    check_picture("out", config.out)
    save_pictures(generated_pictures(stage, config.images, config.steps, config.seed), Path(config.out))
    return f"{config.out}: {config.images} pictures"


_GENERATORS: dict[str, Callable[[GenerateConfig, Path, Stage], str]] = {
    "language_modeling": _text,
    "diffusion": _pictures,
}


def main(arguments: list[str]) -> None:
    config = from_arguments(GenerateConfig, arguments)
    for key, least in (("tokens", 0), ("temperature", 0), ("top_k", 0), ("images", 1), ("steps", 1)):
        if getattr(config, key) < least:
            raise ConfigError(f"{key}={getattr(config, key)}: use a value of at least {least}")
    directory = checkpoint_dir.located(Path(config.checkpoint))
    with process_group(Launch()) as job:  # one process, whatever a launcher may say
        meta = checkpoint_dir.Meta.read(directory)
        if meta.task not in _GENERATORS:
            raise ConfigError(f"{directory}: a checkpoint of the task {meta.task}, which has nothing to generate")
        stage = build_stage(Config(model=meta.model), Grid(device_type=job.device.type), job.device, initialized=False)
        sharded.load(directory, stage.module, None, stage.grid)
        sharded.load_averages(directory, stage.module, stage.grid)
        print(_GENERATORS[meta.task](config, directory, stage))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
