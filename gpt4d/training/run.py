"""The command ``train.py``: help, dry run, sweep, or a run under this process's launcher."""

import faulthandler
import os
import sys
from pathlib import Path

import hydra

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.space import check_space
from gpt4d.config import CONFIG_DIR, Config, asks_for_help, to_config, train_help
from gpt4d.config.commands import one_line_errors
from gpt4d.data.completion import completion
from gpt4d.runs import lock
from gpt4d.runtime import gpu
from gpt4d.runtime.launch import Launch
from gpt4d.runtime.signals import exit_immediately, listen_for_signals
from gpt4d.training import dry_run, sweep
from gpt4d.validation import validate


def main(arguments: list[str]) -> None:
    """Train with the arguments of ``train.py``, or print its help."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach one_line_errors, which prints them in one line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is reported without C++ stacks
    if asks_for_help(arguments):
        print(train_help())
        return
    arguments = dry_run.dry_arguments(arguments)
    if sweep.requested(arguments):
        sweep.run(arguments)
    else:
        sweep.end_with_sweep()
        sys.argv[1:] = sweep.for_hydra(arguments)
        _run()


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
@one_line_errors()  # inside Hydra, whose reports are long, and also around Hydra for its own errors
def _run(composed) -> None:
    gpu.set_environment()  # the detection of cluster=auto may ask torch for the GPU
    train(to_config(composed))


def train(config: Config) -> None:
    """Train as a rank of this process's launcher. Exits with code 75 after a signal, once the run is saved."""
    faulthandler.enable()  # a mapped file that is truncated ends this process with SIGBUS; the stack shows its reader
    launch = Launch.from_environment()
    config, origins = completion(config)
    plan = validate(config, config.run.world_size or launch.world_size)
    checkpoint_dir.check_run(config)
    if config.run.dry:
        text = dry_run.report(plan, config, origins)
        if not launch.rank:
            print(text)
        return
    lock.check_unused(Path(config.run.dir))
    check_space(plan)
    if plan.candidates and not launch.rank:
        mode, chosen = f"parallel.mode={config.parallel.mode} on {config.cluster.name}", ", then ".join(plan.candidates)
        print(f"{mode}: {chosen}", flush=True)

    with listen_for_signals(announce=not launch.rank) as stop:
        # Import torch, which takes seconds, only after all other checks of the configuration.
        if config.train.cuda_graphs:
            gpu.check_cuda_graphs()
        from gpt4d.runtime.job import process_group
        from gpt4d.training.out_of_memory import MemoryWatch
        from gpt4d.training.trainer import Trainer

        timeout_s, deterministic = config.parallel.timeout_s, config.train.deterministic
        group = process_group(launch, timeout_s=timeout_s, deterministic=deterministic, run_dir=Path(config.run.dir))
        with group as job, MemoryWatch(plan, job.device) as memory:
            trainer = Trainer(plan, job.device, job.ranks)
            memory.stage = trainer.stage
            trainer.run(stop)
    if trainer.files.hangs:
        exit_immediately(code=0)
