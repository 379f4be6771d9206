"""Predicted MFU of training steps on GPUs that nobody has measured: the device's time, and the host's time.

    python -m benchmarks mfu [cluster=dgx_h200] [out=benchmarks/results/mfu]

Each case is a step of one microbatch, in bf16 eager, with compiled functions, with CUDA graphs, and with float8
products. The planner predicts the device's time. The host's time is measured on one core of this machine, for a
step with the same layers and tiny tensors: Python and torch's dispatch take most of it. A step takes the longer of both
times. With CUDA graphs the host starts a graph instead of each kernel, so its time does not
count.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from gpt4d.config import Config, GridSizes, compose
from gpt4d.data.completion import complete
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.planner.estimate import Estimate
from gpt4d.step import TrainStep, build_stage
from gpt4d.validation import validate

PACKAGES = ("torch",)
_REPEATS = 15
_COLLECTIVE_S = 60e-6  # host time of a collective, estimated from torch's and our bookkeeping
_LENGTH, _IMAGE = 32, 8  # tokens of a sequence and size of an image in the measured steps

_TINY_GPT = ["model.hidden=32", "model.heads=4", "model.vocab_size=300"]
_TINY_LLAMA = [*_TINY_GPT, "model.key_value_heads=2", "model.head_size=8", "model.inner=64"]
_TINY_UNET = [
    "model.channels=8",
    "model.groups=4",
    "model.head_size=4",
    f"model.image_size={_IMAGE}",
    f"model.attention_at=[{_IMAGE // 2},{_IMAGE // 4}]",
]


class Case(NamedTuple):
    """A training step: overrides of the model and its batch, the grid, and overrides for the host's measurement."""

    name: str
    overrides: list[str]
    tiny: list[str]
    sizes: GridSizes = GridSizes()


CASES = [
    Case("gpt_125m, 32 × 1024 tokens", ["model=gpt_125m", "train.batch_size=32"], _TINY_GPT),
    Case("gpt_1b3, 8 × 2048", ["model=gpt_1b3", "train.batch_size=8"], _TINY_GPT),
    Case("llama_1b, 8 × 2048", ["model=llama_1b", "train.batch_size=8", "train.seq_len=2048"], _TINY_LLAMA),
    Case("gpt_20b, 4 × 2048, x = 8", ["model=gpt_20b", "train.batch_size=4"], _TINY_GPT, GridSizes(8)),
    Case("unet_250m, 64 images", ["model=unet_250m", "train.batch_size=64"], _TINY_UNET),
]
VARIANTS = {
    "eager": ["train.precision=bf16", "train.compile=false"],
    "compiled": ["train.precision=bf16", "train.compile=true"],
    "graphs": ["train.precision=bf16", "train.compile=true", "train.cuda_graphs=true"],
    "fp8": ["train.precision=fp8", "train.compile=true"],
}


@dataclass
class Settings:
    cluster: str = "dgx_h200"
    out: str = "benchmarks/results/mfu"


def device_row(case: Case, variant: str, cluster: str) -> dict[str, Any]:
    """Return the planner's prediction of a step."""
    config = complete(compose([*case.overrides, *VARIANTS[variant], f"cluster={cluster}"]))
    description = registry.describe_run(config)
    plan = Estimate(config, case.sizes, description).step(config.train.batch_size)
    waits = sum(used["exposed_s"] for used in plan.comm.values())
    flops = description.training_flops(config.train.batch_size, config.train.seq_len) / case.sizes.devices
    assert config.cluster.peak_tflops
    return {"device_s": plan.step_time_s, "waiting_s": waits, "least_s": flops / config.cluster.peak_tflops / 1e12}


def host_s(case: Case) -> float:
    """Return the seconds of a step with the layers of ``case`` and tiny tensors, and of its collectives."""
    overrides = [*case.overrides, *case.tiny, "train.batch_size=2", "train.precision=fp32", "train.compile=false"]
    config = complete(compose(overrides))
    step, batch = build(validate(config, 1).config)
    least = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        step([batch], 1, 1.0, 1e-4)
        least = min(least, time.perf_counter() - start)
    collectives = 4 * config.model.layers if case.sizes.x > 1 else 0  # type: ignore[attr-defined]
    return least + _COLLECTIVE_S * collectives


def is_text(config: Config) -> bool:
    """Return whether the model of ``config`` is trained on text."""
    return registry.of(config.model).task == "language_modeling"


def build(config: Config) -> tuple[TrainStep, tuple]:
    """Return the training step of ``config`` on one device, and a microbatch of two samples."""
    stage = build_stage(one_stage(config), Grid.single_device(), torch.device("cpu"))
    step = TrainStep(stage, whole_model(lambda module, batch: cast(Any, module).loss_sum(*batch)), config.optim)
    samples = torch.arange(2)
    if is_text(config):
        ids = torch.zeros(2, _LENGTH, dtype=torch.int64)
        return step, (ids, ids, samples)
    images = torch.zeros(2, _IMAGE, _IMAGE, 3)
    return step, (images, samples, samples, images)


def run(settings: Settings) -> Iterator[dict]:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        measured = host_s(case)
        for variant in VARIANTS:
            if variant == "fp8" and not is_text(compose(case.overrides)):
                continue  # rejected
            found = device_row(case, variant, settings.cluster)
            host = 0.0 if variant == "graphs" else measured
            step = max(found["device_s"], host)
            row = {"case": case.name, "variant": variant, "host_s": host, **found, "step_s": step}
            rows.append(row | {"mfu": found["least_s"] / step})
            print(
                f"{case.name:28} {variant:9} device {found['device_s'] * 1e3:7.1f} ms, host {host * 1e3:6.1f} ms, "
                f"MFU {rows[-1]['mfu']:.0%}",
                flush=True,
            )
        yield {"rows": rows}
