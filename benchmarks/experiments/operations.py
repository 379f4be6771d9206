"""FLOPs and bytes of the operations of a training step, and the time they take on one GPU, counted without a GPU.

    python -m benchmarks operations model=gpt_1b3 train.batch_size=8 cluster=dgx_h200
        [out=benchmarks/results/operations]

Other arguments are overrides, as for train.py, of a text model on one device, with the rates ``cluster.matmul_tflops``
and ``cluster.memory_gb_s`` (``benchmarks.laboratory.kernel_counter``). Prints seconds by kind of operation, eager and
with ``train.compile``, where a compiled function reads its arguments and writes its results once, and the planner's
estimate.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.laboratory.kernel_counter import count
from gpt4d.config import Config, ConfigError, GridSizes, compose
from gpt4d.data.completion import complete
from gpt4d.model import registry
from gpt4d.planner.estimate import Estimate
from gpt4d.validation import validate

PACKAGES = ("torch",)


class Settings(NamedTuple):
    config: Config
    out: str | None


def read_settings(arguments: list[str]) -> Settings:
    """Return the composed configuration and ``out``. Raises ConfigError unless the model is a text model."""
    overrides = [argument for argument in arguments if not argument.startswith("out=")]
    out = next((argument.removeprefix("out=") for argument in arguments if argument not in overrides), None)
    config = validate(complete(compose(["train.precision=bf16", "train.compile=false", *overrides])), 1).config
    if registry.of(config.model).task != "language_modeling":
        raise ConfigError(f"model={config.model.name}: only steps of text models are counted; use model=gpt_1b3, say")
    return Settings(config, out)


def planned(config: Config, compiled: bool) -> float:
    """Return the planner's seconds of a step on one device whose kernels start without delay."""
    train, cluster = replace(config.train, compile=compiled), replace(config.cluster, operation_us=0)
    config = replace(config, train=train, cluster=cluster)
    estimate = Estimate(config, GridSizes(), registry.describe_run(config))
    return estimate.step(train.micro_batch_size or train.batch_size).step_time_s


def run(settings: Settings) -> Iterator[dict]:
    config = settings.config
    description = registry.describe_run(config)
    eager, compiled = count(config, False), count(config, True)
    flops = description.training_flops(config.train.batch_size, config.train.seq_len)
    rows = []
    print(f"{'':28}  eager ms  kernels  compiled ms  kernels")
    for kind, _ in eager.seconds.most_common():
        row = {"kind": kind, "eager_s": eager.seconds[kind], "compiled_s": compiled.seconds[kind]}
        rows.append(row | {"eager_kernels": eager.kernels[kind], "compiled_kernels": compiled.kernels[kind]})
        print(
            f"{kind:28}  {row['eager_s'] * 1e3:8.2f}  {eager.kernels[kind]:7}  {row['compiled_s'] * 1e3:11.2f}  "
            f"{compiled.kernels[kind]:7}"
        )
    totals = {}
    for name, counter in (("eager", eager), ("compiled", compiled)):
        totals[name] = {"operations_s": counter.seconds.total(), "planned_s": planned(config, name == "compiled")}
        peak = config.cluster.peak_tflops
        mfu = f", MFU {flops / totals[name]['operations_s'] / peak / 1e12:.1%}" if peak else ""
        print(
            f"{name}: {totals[name]['operations_s'] * 1e3:.1f} ms{mfu}; "
            f"the planner expects {totals[name]['planned_s'] * 1e3:.1f} ms"
        )
    yield {"totals": totals, "flops": flops, "rows": rows}
