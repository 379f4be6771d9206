"""FLOPs and bytes of the operations of a training step, counted without a GPU.

The step runs on torch's device meta, which knows shapes but computes nothing. Each kernel takes ``max(FLOPs / rate,
bytes / bandwidth)``, where bytes counts the tensors that it reads and writes. Launches take no time, because a GPU
starts kernels concurrently.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.laboratory.virtual_operations import Operations, computes, nbytes, tensors_in
from gpt4d.config import Config
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.step import TrainStep, build_stage

aten = torch.ops.aten
_PACKAGE = str(Path(compile.__file__).parents[1])  # a clone's own name may be gpt4d too
_GROUPED_PRODUCT = aten._grouped_mm  # the products of rows with the weights of their experts
_PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, _GROUPED_PRODUCT}
_ATTENTION = {  # index of the argument that makes attention causal
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_flash_attention_backward: 11,
}
_OPTIMIZER = "norm, clipping and AdamW"
# Kinds of other operations, by parts of the name of the file and function of gpt4d, or of the operation.
_KINDS = {
    "optimizer.py": _OPTIMIZER,
    "muon.py": "Muon",
    "gradient_reducer.py": _OPTIMIZER,
    "routing": "routers",
    "experts": "experts",
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


class KernelCounter(TorchDispatchMode):
    """Adds up the seconds and the number of kernels by kind.

    Args:
        flops: rate of products.
        attention: rate of attention; causal attention does not compute masked products.
        bytes_s: rate of memory.
    """

    def __init__(self, flops: float, attention: float, bytes_s: float):
        super().__init__()
        self.bytes_s = bytes_s
        self.operations = Operations(flops, bytes_s / 1e9, launch_us=0, small=0)
        self.attention = Operations(attention, bytes_s / 1e9, launch_us=0, small=0)
        self.causal_attention = Operations(2 * attention, bytes_s / 1e9, launch_us=0, small=0)  # counts masked products
        self.seconds: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self._inside_compiled = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        on_device = any(tensor.is_meta for tensor in tensors_in((args, kwargs, result)))
        if on_device and computes(func) and not self._inside_compiled:
            self._add(_kind(func, sys._getframe(1)), self._seconds(func, args, kwargs))
        return result

    def _seconds(self, func, args: tuple, kwargs: dict) -> float:
        """Return the seconds of an operation."""
        operations, packet = self.operations, func.overloadpacket
        if (index := _ATTENTION.get(packet)) is not None:
            operations = self.causal_attention if args[index : index + 1] == (True,) else self.attention
        seconds = operations.cost(func, args, kwargs).seconds
        if packet is _GROUPED_PRODUCT:  # torch does not count its FLOPs
            seconds = max(seconds, 2 * args[0].numel() * args[1].shape[-1] / operations.flops)
        return seconds

    def compiled(self, function: Callable, **_: Any) -> Callable:
        """Return a stand-in for torch.compile of an elementwise function: one kernel."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside_compiled:  # part of another one
                return function(*args, **kwargs)
            self._inside_compiled = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside_compiled = False
            # A tensor that it changes in place is an argument and no result, but it is also written.
            tensors = list(tensors_in((args, kwargs, result if result is not None else args[0])))
            place = f"{Path(function.__code__.co_filename).name}:{function.__name__}"
            kind = next((kind for part, kind in _KINDS.items() if part in place), "other")
            self._add(kind, sum(map(nbytes, tensors)) / self.bytes_s)
            return result

        return call

    def _add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] += seconds  # type: ignore[assignment]  # a Counter of seconds
        self.kernels[kind] += 1


def _kind(func, frame: FrameType | None) -> str:
    """Return the kind of an operation that code at ``frame`` has called."""
    if func.overloadpacket in _PRODUCTS:
        return "products"
    if func.overloadpacket in _ATTENTION:
        return "attention"
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame and frame.f_code.co_name == "cast_to" and frame.f_back and _is_layer(frame.f_back):
        frame = frame.f_back  # the conversion belongs to the kernel that calls it
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else ""
    found = (kind for part, kind in _KINDS.items() if part in place or part in str(func))
    return next(found, "other")


def _is_layer(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).parent.name == "layers"


def _flash_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False) -> torch.Tensor:
    """Attention by the operation that torch chooses on a GPU. With a mask, as of a window, it computes all products."""
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


def _loss_sum(module: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return module.loss_sum(*batch)


def count(config: Config, compiled: bool) -> KernelCounter:
    """Return the kernels of a step of ``config`` on one device."""
    train, cluster, device = config.train, config.cluster, torch.device("meta")
    flops = cluster.matmul_tflops * 1e12
    attention = flops / 2 if cluster.attention_tflops is None else cluster.attention_tflops * 1e12
    counter = KernelCounter(flops, attention, cluster.memory_gb_s * 1e9)
    stage = build_stage(one_stage(config), Grid.single_device(), device)
    step = TrainStep(stage, whole_model(_loss_sum), config.optim)
    size = train.micro_batch_size or train.batch_size
    ids = torch.empty(size, train.seq_len, dtype=torch.long, device=device)
    microbatch, count = (ids, ids, ids[:, 0]), train.batch_size // size
    with (
        patch("torch.nn.functional.scaled_dot_product_attention", _flash_attention),
        patch("torch.compile", counter.compiled),
        patch.dict(compile.compiled, clear=True),
        patch.object(compile, "enabled", compiled),
        counter,
    ):
        step([microbatch] * count, count, train.batch_size * train.seq_len, config.optim.lr)
    return counter
