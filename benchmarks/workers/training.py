"""The workload of ``benchmarks.peers``, equal for all workers: a GPT-2, its initial weights, tokens and AdamW."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.interleave import ContenderStep, redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import DeviceConfig, WorkerConfig
from gpt4d.config import Config, OptimConfig, ParallelConfig, from_arguments
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage

OPTIM = OptimConfig()  # used with a constant learning rate and gradient clipping


class Workload(NamedTuple):
    model: GPT2Config
    batch: int  # sequences per step, over all ranks
    steps: int  # consecutive steps per turn, so that work that a step defers to the next one is measured


def workload(virtual: bool) -> Workload:
    """Return the work of ranks that share this machine's cores, or that have virtual devices."""
    if virtual:
        model = GPT2Config("benchmark", layers=4, hidden=1024, heads=16, vocab_size=512, max_positions=256)
        return Workload(model, batch=16, steps=2)
    model = GPT2Config("benchmark", layers=4, hidden=512, heads=8, vocab_size=512, max_positions=128)
    return Workload(model, batch=8, steps=3)


def our_workload(config: DeviceConfig) -> Workload:
    """Return ``workload`` with the settings of ``config`` in the place of its own."""
    work = workload(config.virtual)
    model = replace(work.model, layers=config.layers or work.model.layers)
    return Workload(model, config.sequences or work.batch, config.steps or work.steps)


def run_worker(build_contenders: Callable[[WorkerConfig], Mapping[str, ContenderStep]]) -> None:
    """Serve the contenders that ``build_contenders`` makes from the arguments of this worker."""
    answers = redirect_stdout_for_answers()
    config = from_arguments(WorkerConfig, sys.argv[1:])
    device = config.virtual_device()
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        with device or nullcontext():
            contenders = build_contenders(config)
        serve(contenders, answers, device)


def repeat_step(step: ContenderStep, steps: int, finish: Callable[[], None] = lambda: None) -> ContenderStep:
    """Return a turn of ``steps`` steps; ``finish`` waits for what the last one left in flight."""

    def turn() -> Callable[[], dict]:
        for _ in range(steps):
            collect_results = step()
        finish()
        return lambda: _per_step(collect_results(), steps)

    return turn


def _per_step(answer: dict, steps: int) -> dict:
    exposed = {axis: seconds / steps for axis, seconds in answer.get("exposed_s", {}).items()}
    return {**answer, "steps": steps} | ({"exposed_s": exposed} if exposed else {})


def our_stage(grid: Grid, model: GPT2Config, **parallel: Any) -> Stage:
    """Return our model on ``grid``. As in the other workers, gathered weights stay until the backward."""
    config = Config(model=model, parallel=ParallelConfig(cache_layers="all", **parallel))
    return build_stage(config, grid, torch.device("cpu"))


def initial_weights(model: GPT2Config) -> dict[str, torch.Tensor]:
    """Return the global tensors with which all workers start."""
    return {name: p.detach() for name, p in our_stage(Grid.single_device(), model).module.named_parameters()}


def sequences(share: int, shares: int, config: GPT2Config, batch: int) -> tuple[torch.Tensor, ...]:
    """Return token ids and targets [batch / shares, positions]: share number ``share`` of the batch.

    The tokens are random and the same in each step: the model memorizes them, and the loss falls fast enough to show
    that two workers compute the same.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, config.max_positions + 1), generator=generator)
    tokens = tokens[share * batch // shares : (share + 1) * batch // shares]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
