"""Check 14: steps that are replayed as CUDA graphs have the losses of steps without graphs, and take less time."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpt4d.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check, largest_difference
from tests.gpu.timing import synchronize
from tests.gpu.usage import reserved_gib

_STEPS, _TIMED = 16, 8  # the last steps are timed; after each validation, a step is recorded


@pytest.mark.gpu(number=14, part=1, limit_s=30, work_s=25)
def test_replayed_steps_have_the_losses_of_steps_without_graphs(check: Check) -> None:
    overrides = [
        *runs.gpt_tiny(check),
        *runs.write_corpus(check.directory, runs.TINY_VOCABULARY if check.rehearsal else 4096, 100_000),
        f"train.steps={_STEPS}",
        "train.batch_size=16",
        "train.micro_batch_size=4",
        "train.compile=false",
        "train.deterministic=true",
        "data.validation_fraction=0.1",
        "train.validation_batches=1",
        "train.validate_every=4",
        "model.dropout=0.1",
        "logging.every=1",
    ]
    for name, graphs in (("eager", False), ("graphs", not check.rehearsal)):  # a CPU has no graphs
        run_dir = check.directory / name
        setting = [f"train.cuda_graphs={str(graphs).lower()}", f"run.dir={run_dir}"]
        check.values[name] = runs.train([*overrides, *setting], check.device, _observe)
        check.values[name]["losses"] = list(runs.losses(run_dir).values())
    eager, graphs = check.values["eager"], check.values["graphs"]
    difference = largest_difference(graphs["losses"], eager["losses"])
    check.require(difference == 0, f"losses with graphs differ by up to {difference:.1e}")
    faster = graphs["host_s"] < eager["host_s"] or check.rehearsal
    check.require(faster, f"the host takes {graphs['host_s']:.4f} s with graphs, {eager['host_s']:.4f} s without")
    check.figure = "; ".join(f"{name}: {_figure(check.values[name])}" for name in ("eager", "graphs"))


def _figure(values: dict[str, Any]) -> str:
    times = f"{values['step_s'] * 1e3:.1f} ms per step, {values['host_s'] * 1e3:.1f} ms of the host"
    return f"{times}, {values['reserved_gib']:.2f} GiB reserved"


def _observe(trainer: Trainer) -> Callable[[], dict[str, float]]:
    """Time the steps, and the host's part of each of them, while the GPU has nothing else to do."""
    runs.never_save(trainer)
    step, host, total = trainer._step, list[float](), list[float]()

    def observed(*args: Any) -> Any:
        synchronize(trainer.device)
        started = time.perf_counter()
        result = step(*args)
        host.append(time.perf_counter() - started)
        synchronize(trainer.device)
        total.append(time.perf_counter() - started)
        return result

    trainer._step = observed  # type: ignore[method-assign]
    return lambda: {
        "host_s": statistics.median(host[-_TIMED:]),
        "step_s": statistics.median(total[-_TIMED:]),
        "reserved_gib": reserved_gib(trainer.device, peak=True),
    }
