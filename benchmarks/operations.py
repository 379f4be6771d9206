"""FLOPs and bytes of the operations of a training step, and the time they take on one GPU, counted without a GPU.

    python -m benchmarks.operations model=gpt_1b3 train.batch_size=8 cluster=dgx_h200
        [out=benchmarks/results/operations]

Other arguments are overrides, as for train.py, of a text model on one device. The step runs on torch's device meta,
which knows shapes but computes nothing: each kernel takes ``max(FLOPs / cluster.matmul_tflops, bytes /
cluster.memory_gb_s)``, bytes being those of the tensors that it reads and writes. Launches take no time, because a GPU
starts kernels beside others. Prints seconds by kind of operation, eager and with ``train.compile``, where a compiled
function reads its arguments and writes its results once, and the planner's estimate. Writes ``out``.json.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import report
from gpt4d.config import Config, ConfigError, GridSizes, compose, from_arguments
from gpt4d.model import registry
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.planner.estimate import Estimate
from gpt4d.runtime.errors import one_line_errors
from gpt4d.step import TrainStep, build_stage
from gpt4d.testing.virtual_operations import Operations, computes, nbytes, tensors_in
from gpt4d.validation import validate

aten = torch.ops.aten
_PACKAGE = str(Path(compile.__file__).parents[1])  # a clone's own name may be gpt4d too
_PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm}
_ATTENTION = {aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward}
# Of other operations: parts of the name of the file and function of gpt4d, or of the operation, and their kind.
_KINDS = {
    "optim.py": "norm, clipping and AdamW",
    "gradient_reducer.py": "norm, clipping and AdamW",
    "loss": "loss",
    "norm": "norms",
    "dropped": "dropout",
    "row_keys": "dropout",
    "random.py": "dropout",
    "activations": "activations",
    "gelu": "activations",
    "cast_to": "conversion of weights",
    "product": "gradients of biases",
    "attention": "queries, keys and values",
    "heads": "queries, keys and values",
    "aten.stack": "queries, keys and values",
    "aten.cat": "queries, keys and values",
    "embedding": "embedding",
    "aten.add": "residual sums",
}


@dataclass
class OperationsBenchmark:
    out: str | None = None


class KernelCounter(TorchDispatchMode):
    """Adds up the seconds and the number of kernels by kind. ``flops`` and ``bytes_s`` are a device's rates."""

    def __init__(self, flops: float, bytes_s: float):
        super().__init__()
        self.bytes_s = bytes_s
        self.operations = Operations(flops, bytes_s / 1e9, launch_us=0, small=0)
        self.seconds: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self._inside_compiled = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        on_device = any(tensor.is_meta for tensor in tensors_in((args, kwargs, result)))
        if on_device and computes(func) and not self._inside_compiled:
            self._add(_kind(func, sys._getframe(1)), self.operations.cost(func, args, kwargs).seconds)
        return result

    def compiled(self, function: Callable) -> Callable:
        """Return a stand-in for torch.compile of an elementwise function: one kernel."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside_compiled:  # part of another one
                return function(*args, **kwargs)
            self._inside_compiled = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside_compiled = False
            # What it changes in place is an argument and no result: it is written too.
            tensors = list(tensors_in((args, kwargs, result if result is not None else args[0])))
            place = f"{Path(function.__code__.co_filename).name}:{function.__name__}"
            kind = next(kind for part, kind in _KINDS.items() if part in place)
            self._add(kind, sum(map(nbytes, tensors)) / self.bytes_s)
            return result

        return call

    def _add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] += seconds
        self.kernels[kind] += 1


def _kind(func, frame: FrameType | None) -> str:
    """Return the kind of an operation that code at ``frame`` has called."""
    if func.overloadpacket in _PRODUCTS:
        return "products"
    if func.overloadpacket in _ATTENTION:
        return "attention"
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else ""
    found = (kind for part, kind in _KINDS.items() if part in place or part in str(func))
    return next(found, "other")


def _flash_attention(q, k, v, attn_mask=None, is_causal=False, scale=None) -> torch.Tensor:
    """Attention by the operation that torch chooses on a GPU."""
    assert attn_mask is None, "documents are not counted"
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


def count(config: Config, compiled: bool) -> KernelCounter:
    """Return the kernels of a step of ``config`` on one device."""
    train, cluster, device = config.train, config.cluster, torch.device("meta")
    counter = KernelCounter(cluster.matmul_tflops * 1e12, cluster.memory_gb_s * 1e9)
    stage = build_stage(config, Grid.single_device(), device)
    step = TrainStep(stage, whole_model(lambda module, batch: module.loss_sum(*batch)), config.optim)
    size = train.micro_batch_size or train.batch_size
    ids = torch.empty(size, train.seq_len, dtype=torch.long, device=device)
    microbatch, count = (ids, ids, ids[:, 0]), train.batch_size // size
    with (
        patch("torch.nn.functional.scaled_dot_product_attention", _flash_attention),
        patch("torch.compile", counter.compiled),
        patch.dict(compile._compiled, clear=True),
        patch.object(compile, "_enabled", compiled),
        counter,
    ):
        step([microbatch] * count, count, train.batch_size * train.seq_len, config.optim.lr)
    return counter


def planned(config: Config, compiled: bool) -> float:
    """Return the planner's seconds of a step on one device whose kernels start without delay."""
    train, cluster = replace(config.train, compile=compiled), replace(config.cluster, operation_us=0)
    config = replace(config, train=train, cluster=cluster)
    estimate = Estimate(config, GridSizes(), registry.describe_run(config))
    return estimate.plan(train.micro_batch_size or train.batch_size).step_time_s


def main(arguments: list[str]) -> None:
    own = [argument for argument in arguments if argument.startswith("out=")]
    config = compose(["train.precision=bf16", "train.compile=false", *(a for a in arguments if a not in own)])
    config = validate(config, 1).config
    if registry.of(config.model).task != "language_modeling":
        raise ConfigError(f"model={config.model.name}: only steps of text models are counted; use model=gpt_1b3, say")
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
    out = from_arguments(OperationsBenchmark, own).out
    if out:
        command = "python -m benchmarks.operations " + " ".join(arguments)
        report.write(Path(out), command, report.machine("torch"), rows, totals=totals, flops=flops)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
