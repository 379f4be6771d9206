"""Utilization (MFU) that other trainers have published, next to the planned one.

``published_mfu.yaml`` has the quartiles by GPU and size of the model, or minimum and maximum of fewer than five runs.
``python -m benchmarks published mfu=FILE`` writes it: dense text models in bf16 or fp16.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from gpt4d.config import Config
from gpt4d.model import registry
from gpt4d.planner.duration import duration, range_text
from gpt4d.planner.stages import PlanEstimate

TABLE = Path(__file__).with_name("published_mfu.yaml")
FEWEST = 8  # GPUs of a published run: one GPU of a smaller run waits for fewer others
LONGEST = 8192  # tokens of a sequence: MFU counts masked products of attention, so longer sequences have a higher MFU


class PublishedRuns(NamedTuple):
    """Published runs on one kind of GPU with models of similar size."""

    gpu: str
    peak_tflops: float  # dense bf16
    billions: tuple[float, float]  # bounds of the number of parameters; the upper one is exclusive
    mfu: tuple[float, float]  # without recomputation
    runs: int

    def step_s(self, plan: PlanEstimate) -> list[float]:
        """Return the seconds of a planned step at the lower and at the upper published MFU."""
        return [plan.step_time_s * (plan.mfu or 0) / mfu for mfu in self.mfu]


@cache
def _table() -> list[PublishedRuns]:
    return [PublishedRuns(**entry) for entry in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]


def comparable(plan: PlanEstimate, config: Config) -> PublishedRuns | None:
    """Return the published runs on GPUs of equal peak with models of similar size; None if there are none.

    A plan that is slower than the lower published MFU has other limits than the published runs, so it has none.
    """
    model, train, peak = registry.describe(config.model), config.train, config.cluster.peak_tflops
    others = model.unused_parameters or config.lora.rank or registry.of(config.model).unit != "tokens"
    similar = plan.devices >= FEWEST and train.seq_len <= LONGEST
    if others or not similar or train.precision not in ("auto", "bf16"):
        return None
    for found in _table():
        low, high = found.billions
        if found.peak_tflops == peak and low <= model.num_parameters / 1e9 < high and (plan.mfu or 0) > found.mfu[0]:
            return found
    return None


def published_lines(plan: PlanEstimate, config: Config, price: float | None = None) -> list[str]:
    """Return a line with duration and cost of a planned run at the published MFU; empty without published runs."""
    if (found := comparable(plan, config)) is None:
        return []
    (low, high), mfu = found.billions, " to ".join(f"{100 * mfu:.0f}" for mfu in found.mfu)
    slow, fast = (duration(config, plan.devices, step_s, price) for step_s in found.step_s(plan))
    runs = f"{found.runs} published runs of {low:g} to {high:g} billion parameters on {found.gpu}"
    return [f"{runs} typically have {mfu}% MFU, this plan {plan.mfu:.0%}: {range_text(fast, slow)}"]
