"""The front door: ``python train.py``, ``torchrun --nproc-per-node N train.py`` or ``srun python train.py``.

Words after it are Hydra overrides, such as ``model=gpt_125m parallel.gx=2``. ``--help`` lists the config groups.
"""

import os
from pathlib import Path

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us whole; we say them in one line

import hydra

from gpt4d.checkpoint import catalog
from gpt4d.config import CONFIG_DIR, typed, validate
from gpt4d.errors import one_line_errors
from gpt4d.parallel.launch import Launch, device_of, process_group
from gpt4d.signals import listening


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
@one_line_errors()  # within Hydra, which would announce an error itself, and around it, for what it finds wrong
def main(composed) -> None:
    config, launch = typed(composed), Launch.from_environment()
    sizes = validate(config, launch.world_size)
    catalog.check_newest_fits(catalog.to_try(config.checkpoint.resume, Path(config.run.dir)), config.model)

    with listening(told=not launch.rank) as stop:
        from gpt4d.trainer import Trainer  # torch takes seconds to import: only once the configuration is right

        device = device_of(launch)
        with process_group(launch, device):
            Trainer(config, sizes, device).run(stop)


if __name__ == "__main__":
    with one_line_errors():
        main()
