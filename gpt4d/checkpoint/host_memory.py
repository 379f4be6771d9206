"""Host memory for copies of a GPU's tensors."""

from collections.abc import Mapping

import torch


class HostMemory:
    """Tensors in host memory by name, in one block per dtype.

    For a GPU the blocks are pinned, so that it copies to them concurrently with the computation. torch's own allocator
    of pinned memory rounds each allocation up to a power of two, which takes up to twice the memory.

    Args:
        pinned: pin the memory.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self._tensors: dict[str, torch.Tensor] = {}
        self._blocks: list[torch.Tensor] = []

    def like(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return host tensors with the shapes and dtypes of ``tensors``. A name has the same tensor in each call."""
        new = {name: tensor for name, tensor in tensors.items() if name not in self._tensors}
        for dtype in dict.fromkeys(tensor.dtype for tensor in new.values()):
            own = {name: tensor for name, tensor in new.items() if tensor.dtype == dtype}
            sizes = [tensor.numel() for tensor in own.values()]
            block = self._allocate(sum(sizes), dtype)
            for (name, tensor), part in zip(own.items(), block.split(sizes), strict=True):
                self._tensors[name] = part.view(tensor.shape)
        return {name: self._tensors[name] for name in tensors}

    def _allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(elements, dtype=dtype)
        if self.pinned and elements:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))
            self._blocks.append(block)
        return block

    def close(self) -> None:
        """Unpin the memory. No copy may be in flight."""
        for block in self._blocks:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self._blocks.clear()
        self._tensors.clear()
