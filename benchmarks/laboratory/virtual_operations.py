"""Time of operations on a virtual device, and stand-ins for their large results."""

import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


_ONE_DNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # None where torch has no oneDNN


def _linear_flops(x, weight, *_, out_val: torch.Tensor) -> int:
    return 2 * out_val.numel() * x.shape[-1]


def _addmm_flops(added, a, b, *_, out_val: torch.Tensor, **__) -> int:
    return 2 * out_val.numel() * a.shape[-1]


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **dict.fromkeys((aten.addmm, aten.addmm_), _addmm_flops),  # with a result of any dtype, new or in place
    **({_ONE_DNN_LINEAR: _linear_flops} if _ONE_DNN_LINEAR else {}),
    _CPU_ATTENTION: flop_registry[aten._scaled_dot_product_flash_attention],
    _CPU_ATTENTION_BACKWARD: flop_registry[aten._scaled_dot_product_flash_attention_backward],
}
_CAUSAL = {_CPU_ATTENTION: 4, _CPU_ATTENTION_BACKWARD: 7}  # index of the argument that makes attention causal
_UNINITIALIZED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_WITHOUT_KERNEL = _UNINITIALIZED | {aten._unsafe_view, aten.lift_fresh, aten.resize_, aten.set_}
_READ_BY_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OVERWRITING = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_}
# Operations that access few elements of their first tensor: as many as their result or their last tensor has.
_LOOKUPS = {aten.embedding, aten.gather, aten.index_select, aten.index}
_UPDATES = {aten.index_add_, aten.index_put_, aten.scatter_, aten.scatter_add_}
_BLOCK_BYTES = 1 << 30  # least size of a block of zeros


class Cost(NamedTuple):
    """Cost and form of an operation's result, known before it runs. The result's tensors are on the device meta."""

    seconds: float
    large: bool  # one of its tensors is not small
    result: Any
    argument: dict[int, int]  # id of a tensor of the result → which of the operation's tensors it is


class Operations:
    """Costs and results of operations. Arguments as for ``VirtualDevice``."""

    def __init__(
        self, flops: float, memory_gb_s: float, launch_us: float, small: int, skips_masked_products: bool = False
    ):
        self.skips_masked_products = skips_masked_products
        self.flops, self.bytes_s, self.launch_s, self.small = flops, memory_gb_s * 1e9, launch_us / 1e6, small
        self._costs: dict[tuple, Cost] = {}
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self._blocks: set[int] = set()  # addresses of all blocks of zeros, earlier ones included

    def cost(self, func, args: tuple, kwargs: dict) -> Cost:
        """Return the cost of an operation, which depends on the shapes, strides and dtypes of its tensors."""
        key = func, _signature(args), _signature(tuple(kwargs.items()))
        if key not in self._costs:
            self._costs[key] = self._compute_cost(func, args, kwargs)
        return self._costs[key]

    def _compute_cost(self, func, args: tuple, kwargs: dict) -> Cost:
        metas = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors_in((args, kwargs))
        ]
        remaining = iter(metas)
        meta_args, meta_kwargs = _map(lambda _: next(remaining), (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            meta_kwargs["device"] = torch.device("meta")
        if "generator" in meta_kwargs:
            meta_kwargs["generator"] = None  # it belongs to another device
        result = func(*meta_args, **meta_kwargs)
        argument = {id(meta): index for index, meta in enumerate(metas)}
        new = [tensor for tensor in tensors_in(result) if id(tensor) not in argument]
        counter = _FLOPS.get(func.overloadpacket)
        flops: float = counter(*meta_args, **meta_kwargs, out_val=result) if counter else 0
        if (
            self.skips_masked_products
            and (index := _CAUSAL.get(func.overloadpacket))
            and args[index : index + 1] == (True,)
        ):
            flops /= 2
        moved = _moved_bytes(func, metas, meta_args, meta_kwargs, new)
        large = any(tensor.numel() > self.small for tensor in metas + new)
        return Cost(max(flops / self.flops, moved / self.bytes_s) + self.launch_s, large, result, argument)

    def result(self, cost: Cost, tensors: list[torch.Tensor]) -> Any:
        """Return the result of an operation on ``tensors`` that is not executed: its own tensors and zeros."""

        def stand_in(meta: torch.Tensor) -> torch.Tensor:
            index = cost.argument.get(id(meta))
            return self._zeros_like(meta) if index is None else tensors[index]

        return _map(stand_in, cost.result)

    def _zeros_like(self, meta: torch.Tensor) -> torch.Tensor:
        if meta.numel() <= self.small:
            return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).zero_()
        elements = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True))
        block = self._zeros.get(meta.dtype)
        if block is None or block.numel() < elements:
            # Mapped memory is zero and takes no space until it is written. Collectives may write zeros into it.
            nbytes = max(elements * meta.itemsize, _BLOCK_BYTES)
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._zeros[meta.dtype] = block = torch.frombuffer(memory, dtype=meta.dtype)
            self._blocks.add(block.data_ptr())
        return torch.empty(0, dtype=meta.dtype).set_(block.untyped_storage(), 0, meta.shape, meta.stride())

    def in_zeros(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is part of a block of zeros."""
        return tensor.untyped_storage().data_ptr() in self._blocks


def has_kernel(func, tensors: list[torch.Tensor], kwargs: dict) -> bool:
    """Return whether an operation on ``tensors`` computes anything: views and uninitialized or meta tensors do not."""
    return (
        computes(func)
        and kwargs.get("device") != torch.device("meta")
        and not any(tensor.is_meta for tensor in tensors)
    )


def computes(func) -> bool:
    """Return whether an operation may compute something: it is neither a view nor leaves its result uninitialized."""
    return not (func.is_view or func.overloadpacket in _WITHOUT_KERNEL or torch.Tag.inplace_view in func.tags)


def host_reads(func, tensors: list[torch.Tensor]) -> bool:
    """Return whether the host has to wait for values of an operation on ``tensors``."""
    if func.overloadpacket is aten.index:
        return tensors[-1].dtype in (torch.bool, torch.uint8)  # the size of the result depends on the mask
    return not _READ_BY_HOST.isdisjoint(func.tags)


def _moved_bytes(func, tensors: list[torch.Tensor], args: tuple, kwargs: dict, new: list[torch.Tensor]) -> int:
    """Return the bytes that an operation on ``tensors`` reads and writes; ``new`` are the tensors that it creates."""
    packet = func.overloadpacket
    if packet in _LOOKUPS | _UPDATES:
        accessed = new[0] if new else tensors[-1]
        return sum(map(nbytes, tensors[1:])) + 2 * nbytes(accessed)
    names = (argument.name for argument in func._schema.arguments)
    values = dict(zip(names, args, strict=False)) | kwargs
    written = [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        # Fused optimizers write gradients only where they scale them.
        and (argument.name != "grads" or values.get("grad_scale") is not None)
        for tensor in tensors_in(values.get(argument.name))
    ]
    only_written = written if packet in _OVERWRITING or func._overloadname.endswith(("out", "grad_input")) else []
    return sum(map(nbytes, tensors + written + new)) - sum(map(nbytes, only_written))


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor: an expanded dim counts once."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size for size, stride in dims if stride or not size)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    if isinstance(value, dict):
        return {name: _map(function, item) for name, item in value.items()}
    return value


def _signature(value: Any) -> Any:
    """Return a key that is equal for equal values, and for tensors of equal shape, strides and dtype."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return type(value), value
