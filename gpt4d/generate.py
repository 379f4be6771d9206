"""Generate text or images with a trained model.

python -m gpt4d.generate checkpoint=runs/NAME prompt="…"
python -m gpt4d.generate checkpoint=runs/NAME prompts=FILE tokens=100
python -m gpt4d.generate checkpoint=runs/NAME out=images.png
torchrun --nproc-per-node 4 -m gpt4d.generate checkpoint=runs/NAME prompt="…" gx=4
"""

import sys
from pathlib import Path

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.trained_model import inference_plan, trained_model
from gpt4d.config import ConfigError, asks_for_help, from_arguments
from gpt4d.config.commands import one_line_errors
from gpt4d.runtime.launch import Launch
from gpt4d.task import registry as tasks
from gpt4d.task.task import GenerateConfig


def main(arguments: list[str]) -> None:
    """Generate with the checkpoint that ``arguments`` name, and print the result on rank 0."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    config, launch = from_arguments(GenerateConfig, arguments), Launch.from_environment()
    checkpoint = Checkpoint.open(Path(config.checkpoint))
    generate = tasks.get(checkpoint.meta.task).generate
    if generate is None:
        raise ConfigError(
            f"checkpoint={checkpoint.path}: its task {checkpoint.meta.task} has nothing to generate; use another one"
        )
    plan = inference_plan(checkpoint.meta.model, config, launch.world_size)
    with trained_model(checkpoint, plan, launch) as stage:
        message = generate(config, checkpoint.model_files(), stage)
        if launch.rank == 0:
            print(message)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
