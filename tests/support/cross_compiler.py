"""torch.compile for GPUs that do not exist: the Triton kernels that it generates, compiled or interpreted on a CPU.

Functions are traced with fake CUDA tensors. Their kernels are compiled to machine code for a target, or Triton's
interpreter runs them on the CPU with the arguments' values. ``set_up`` changes a process permanently, so call it in a
separate process, before the process imports Triton.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

# What torch.compile asks about a device. An H100, and one of the two dies of an MI250X.
_H100 = {
    "name": "fake", "major": 9, "minor": 0, "multi_processor_count": 132, "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
    "L2_cache_size": 50 << 20, "shared_memory_per_block_optin": 227 << 10,
}  # fmt: skip
_MI250X = _H100 | {
    "gcnArchName": "gfx90a", "multi_processor_count": 110, "regs_per_multiprocessor": 131_072, "warp_size": 64,
    "L2_cache_size": 8 << 20, "shared_memory_per_block_optin": 64 << 10,
}  # fmt: skip
_index = torch.Tensor.__getitem__
TARGETS = {"sm_90": ("cuda", 90, _H100), "gfx90a": ("hip", "gfx90a", _MI250X)}
_RESOURCES = {
    "ptx": (r"Used (\d+) registers", r"(\d+) bytes spill"),
    "amdgcn": (r"\.vgpr_count: +(\d+)", r"\.[sv]gpr_spill_count: +(\d+)"),
}


class KernelCode(NamedTuple):
    """A kernel with one of its configurations, as the target's compiler reports it."""

    name: str
    block: dict[str, int]  # sizes of the blocks that a program processes
    registers: int  # number of registers of a thread
    spills: int  # number of registers, or bytes of registers, that are stored in memory


class _Generated(Exception):
    """Ends a compilation after the code is generated."""


def set_up(directory: Path, target: str, interprets: bool = False) -> None:
    """Make this process compile for a target, or interpret its kernels. ``directory`` is for generated code."""
    os.environ["TRITON_INTERPRET"] = str(int(interprets))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = str(directory / name)
    backend, architecture, values = TARGETS[target]
    properties = SimpleNamespace(**values)
    torch.version.hip = "6.4" if backend == "hip" else None  # type: ignore[assignment]
    replaced: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor), "is_bf16_supported": True,
        "get_rng_state": torch.zeros(()), "set_rng_state": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    for name, result in replaced.items():
        setattr(torch.cuda, name, lambda *_, result=result, **__: result)

    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    for name in ("current_device", "get_device_properties", "device_count"):
        setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    gpu = GPUTarget(backend, architecture, properties.warp_size)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: gpu))
    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = lambda device: None  # patterns of attention and padding, traced with values on the device
    torch.Tensor.__getitem__ = _indexed
    torch.Tensor.copy_ = lambda tensor, source: torch.ops.aten.copy_(tensor, source)
    AsyncCompile.triton = lambda self, name, source, device_str: _load(name, source)
    if interprets:
        _interpret_math_functions()
    config.joint_graph_constant_folding = False  # computes constants on the device
    config.compile_threads, config.use_static_cuda_launcher, config.fx_graph_cache = 1, False, False


def _interpret_math_functions() -> None:
    """Define the functions of the GPU's library, which Triton's interpreter lacks."""
    import numpy as np
    import triton.language as tl
    from torch._inductor.runtime.triton_helpers import libdevice
    from triton.runtime.interpreter import TensorHandle

    def evaluate(function: Callable, x: Any, **_: Any) -> Any:
        return tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

    for name, function in {"rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "exp": np.exp}.items():
        setattr(libdevice, name, partial(evaluate, function))


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Index a fake CUDA tensor. torch's own function initializes the device first, and so does its ``copy_``."""
    if tensor.device.type != "cuda":
        return _index(tensor, index)
    items, dim = index if isinstance(index, tuple) else (index,), 0
    for place, item in enumerate(items):
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif item is ...:
            dim = tensor.dim() - sum(one is not None for one in items[place + 1 :]) - 1
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice(tensor, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, torch.Tensor):
            tensor = torch.ops.aten.index(tensor, [*[None] * dim, item])
        else:
            tensor, dim = tensor.select(dim, item), dim - 1
        dim += 1
    return tensor


def _load(name: str, source: str) -> Any:
    """Return the kernel that Inductor's source defines, with its configurations."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(source), name)


def generated(function: Callable, args: tuple, **options: Any) -> str:
    """Return the code that torch.compile generates for a call with these arguments."""
    found: list[str] = []

    def stop(graph):
        found.append(graph.codegen()[0].value)
        raise _Generated

    with FakeTensorMode(), _in_place_of_modules(stop):
        try:
            torch.compile(function, fullgraph=True, options=options)(*_fakes(args))
        except Exception:
            if not found:
                raise
    (code,) = found
    return code


def kernels(function: Callable, args: tuple, **options: Any) -> list[KernelCode]:
    """Return the kernels of ``function``, each with all its configurations, compiled for the target."""
    code = generated(function, args, **options)
    sources = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)
    loaded = [(name, _load(name, source)) for name, source in sources]
    return [_compiled(name, kernel, each) for name, kernel in loaded for each in kernel.configs]


def _compiled(name: str, kernel: Any, configuration: Any) -> KernelCode:
    assembly = kernel._precompile_config(configuration).kernel.asm
    kind = next(kind for kind in _RESOURCES if kind in assembly)
    report = assembly[kind] if kind == "amdgcn" else _ptxas_report(assembly[kind])
    used, spilled = _RESOURCES[kind]
    (registers,) = re.findall(used, report)
    spills = sum(map(int, re.findall(spilled, report)))
    return KernelCode(name, configuration.kwargs, int(registers), spills)


def _ptxas_report(ptx: str) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.ptx"
        file.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file, "-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def interpreted(function: Callable, args: tuple, **options: Any) -> Any:
    """Return the results of the kernels for the target, run by Triton's interpreter on values on the CPU."""
    with FakeTensorMode(), _in_place_of_modules(lambda graph: _Module(graph.codegen()[0].value, values)):
        fakes = _fakes(args)
        values = {id(fake): value for fake, value in zip(fakes, args, strict=True)}
        results = torch.compile(function, fullgraph=True, options=options)(*fakes)
        return tree_map_only(torch.Tensor, lambda fake: values[id(fake)], results)


class _Module:
    """The generated module: it launches kernels on the values of fake tensors."""

    __file__ = "generated"

    def __init__(self, code: str, values: dict[int, Any]):
        self.values, self.results = values, []
        own_stream = "from torch._C import _cuda_getCurrentRawStream as get_raw_stream"
        self.names: dict[str, Any] = {"__name__": "generated"}
        with _disable_current_modes():
            exec(code.replace(own_stream, "get_raw_stream = lambda device: 0"), self.names)
        self.names["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)

    def call(self, fakes: list[torch.Tensor]) -> tuple:
        inputs = [self.values[id(fake)] for fake in fakes]
        fakes.clear()
        with _disable_current_modes(), patch.object(torch.cuda, "_DeviceGuard"), patch.object(torch.cuda, "set_device"):
            results = self.names["call"](inputs)
        fake_results = tuple(_fakes(results))
        self.values |= {id(fake): value for fake, value in zip(fake_results, results, strict=True)}
        self.results.append(fake_results)  # a tensor that is freed can have the number of another
        return fake_results


def _fakes(args: tuple) -> list:
    """Return fake CUDA tensors with the shapes and strides of tensors."""

    def fake(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")

    return [fake(value) if isinstance(value, torch.Tensor) else value for value in args]


def _in_place_of_modules(function: Callable) -> Any:
    """Replace the last step of a compilation, the import of the generated module."""
    from torch._inductor.graph import GraphLowering

    torch._dynamo.reset()
    return patch.object(GraphLowering, "compile_to_module", function)
