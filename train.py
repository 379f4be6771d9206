"""The front door: ``python train.py``, ``torchrun --nproc-per-node N train.py`` or ``srun python train.py``.

Words after it are Hydra overrides, such as ``model=gpt_125m parallel.gx=2``. ``--help`` lists the config groups.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us whole; we say them in one line
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank that is lost is told without stacks of C++

import hydra

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.config import CONFIG_DIR, Config, expand_cluster, to_config, validate
from gpt4d.planner.search import choose
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.launch import Launch
from gpt4d.runtime.signals import listen_for_signals


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
@one_line_errors()  # within Hydra, which would announce an error itself, and around it, for what it finds wrong
def main(composed) -> None:
    train(to_config(composed))


def train(config: Config) -> None:
    """Trains as this process's launcher says. Ends it with exit code 75 if it was asked to stop and has saved."""
    launch = Launch.from_environment()
    if config.parallel.mode == "auto":
        config = planned(config, launch)
    sizes = validate(config, launch.world_size)
    checkpoint_dir.check_newest_fits(
        checkpoint_dir.resume_candidates(config.checkpoint.resume, Path(config.run.dir)), config.model
    )

    with listen_for_signals(announce=not launch.rank) as stop:
        # torch takes seconds to import: only once the configuration is known to be right.
        from gpt4d.runtime.job import process_group
        from gpt4d.trainer import Trainer

        with process_group(launch) as job:
            Trainer(config, sizes, job.device).run(stop, job.watchdog)


def planned(config: Config, launch: Launch) -> Config:
    """The same on the grid that the planner thinks best. Every rank finds it by itself, and the same."""
    config, plans = choose(config, launch.world_size)
    if not launch.rank:
        told = ", then ".join(f"{plan.sizes} ({plan.step_time_s:.3g} s a step)" for plan in plans)
        print(f"parallel.mode=auto on {config.cluster.name}: the grid {told}", flush=True)
    return config


if __name__ == "__main__":
    with one_line_errors():
        sys.argv[1:] = expand_cluster(sys.argv[1:])
        main()
