"""Measured against planned memory of a step: ten random plans of one device, each in a process of its own.

    python -m benchmarks.memory [plans=10] [seed=0] [out=benchmarks/results/memory.json]

Memory is the peak of the bytes that torch's allocator has given out on the host in the second step, weights and states
included. The size of the process is no measure: it also contains free memory that the allocator and gloo retain.
"""

import json
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from gpt4d.config import GridSizes, check_at_least, compose, from_arguments
from gpt4d.runtime.errors import one_line_errors

_GIB = 2**30


@dataclass
class MemoryBenchmarkConfig:
    """Settings of this benchmark."""

    plans: int = 10
    seed: int = 0
    out: str | None = None  # file of the figures, in JSON


def allocated_peak(run: Callable[[], object], device: torch.device | None = None) -> int:
    """Return the most bytes that ``run`` had allocated at once, over what was there before.

    Args:
        run: called once.
        device: whose memory counts; None: the host's.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        peak = max(peak, now)
    return peak


def random_plan(draw: random.Random) -> list[str]:
    """Return the overrides of a random small model with random settings that change memory."""
    family = draw.choice(("gpt_tiny", "llama_tiny"))
    heads = draw.choice((2, 4, 8))
    batch = draw.choice((4, 8, 16))
    length = draw.choice((64, 128, 256))
    words = [
        f"model={family}",
        f"model.layers={draw.randint(1, 8)}",
        f"model.hidden={heads * draw.choice((16, 32, 48))}",
        f"model.heads={heads}",
        f"model.vocab_size={draw.choice((512, 2048, 8192))}",
        f"model.max_positions={length}",
        f"train.batch_size={batch}",
        f"train.micro_batch_size={draw.choice([size for size in (1, 2, 4, 8, 16) if size <= batch])}",
        f"train.activation_checkpointing={draw.choice(('none', 'selective', 'full'))}",
        f"train.loss_chunks={draw.choice((1, 1, 4, 8))}",
        f"train.precision={draw.choice(('fp32', 'fp32', 'bf16'))}",
        f"parallel.cache_layers={draw.choice((0, 'all'))}",
    ]
    if family == "llama_tiny":
        words += [f"model.key_value_heads={heads // 2}", "model.head_size=16", f"model.inner={draw.choice((128, 320))}"]
    return [*words, "cluster=local", "cluster.reserved_gib=0", "parallel.gdata=1"]


def measure(overrides: list[str]) -> tuple[float, float]:
    """Return planned and measured bytes at the peak of a step of one device."""
    from gpt4d.model import registry
    from gpt4d.parallel.grid import Grid
    from gpt4d.parallel.pipeline.runtime import whole_model
    from gpt4d.planner.estimate import Estimate
    from gpt4d.planner.workload import training_state
    from gpt4d.runtime.job import process_group
    from gpt4d.runtime.launch import Launch
    from gpt4d.step import TrainStep, build_stage

    config, sizes = compose(overrides), GridSizes()
    size = config.train.micro_batch_size or config.train.batch_size
    planned = Estimate(config, sizes).memory_gib(size) * _GIB
    state = training_state(registry.describe_run(config), sizes, shard_states=False)
    with process_group(Launch(), torch.device("cpu")) as job:
        stage = build_stage(config, Grid(sizes), job.device)
        vocabulary, length = config.data.tokenizer_vocab or 2, config.train.seq_len
        ids = torch.randint(vocabulary, (config.train.batch_size, length))
        batches = [(part, part, torch.arange(len(part))) for part in ids.split(size)]
        loss = whole_model(lambda module, batch: module.loss_sum(*batch))
        step = TrainStep(stage, loss, config.optim)

        def run() -> None:
            step(batches, len(batches), 1, 1e-3)

        run()  # creates the optimizer's states
        measured = allocated_peak(run) + state["weights"] + state["optimizer"]
    return planned, measured


def main(arguments: list[str]) -> None:
    settings = from_arguments(MemoryBenchmarkConfig, arguments)
    check_at_least("plans", settings.plans, 1)
    draw, rows = random.Random(settings.seed), list[dict]()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for _ in range(settings.plans):
            overrides = random_plan(draw)
            planned, measured = pool.submit(measure, overrides).result()
            rows.append({"overrides": overrides, "planned_bytes": planned, "measured_bytes": measured})
            sizes = f"planned {planned / 2**20:8.2f} MiB, measured {measured / 2**20:8.2f}"
            print(f"{sizes}, ratio {planned / measured:.3f}: {' '.join(overrides[:-3])}", flush=True)
    ratios = [row["planned_bytes"] / row["measured_bytes"] for row in rows]
    print(f"planned/measured: {min(ratios):.3f} to {max(ratios):.3f}")
    if settings.out:
        Path(settings.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
