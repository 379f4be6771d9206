"""Out-of-memory errors in one line: the layer, planned and used memory, and the settings that fit."""

from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import torch
from torch import nn

from gpt4d.parallel.stage import Stage
from gpt4d.planner.fitting import Fit
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import total_gib
from gpt4d.runtime import gpu
from gpt4d.runtime.errors import OutOfMemory

_HOST = "DefaultCPUAllocator", "not enough memory"  # both are in torch's message about the host's memory
_HOST_OLDER = "DefaultCPUAllocator", "can't allocate memory"
_SAVING = 0.9  # share of the memory planned for tensors: a change that saves less is not suggested


class MemoryWatch:
    """Context that raises OutOfMemory, which is reported in one line, if device or host cannot allocate memory.

    The message needs the ``stage`` of the process, which is set once it is built.
    """

    def __init__(self, plan: PlanEstimate, device: torch.device):
        self.plan, self.device = plan, device
        self.stage: Stage | None = None

    def __enter__(self) -> "MemoryWatch":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and is_out_of_memory(error):
            raise OutOfMemory(self.describe(error)) from error

    def describe(self, error: BaseException) -> str:
        """Return the error in one line. It must not fail in any state of the process."""
        where = _layer(error.__traceback__, self.stage) or (
            "the training step" if self.stage else "the start of the run"
        )
        with suppress(Exception):
            return f"out of memory in {where} ({self._sizes()}): {_remedies(self.plan)}"
        return f"out of memory in {where}; use a smaller train.micro_batch_size"

    def _sizes(self) -> str:
        used, total = gpu.peak_memory_gib(self.device), total_gib(self.plan.config.cluster)
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory / 2**30
        return f"planned {self.plan.memory_gib:.3g} GiB, used {used:.3g} of {total:.3g}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory could not be allocated, on a GPU or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(all(part in text for part in kind) for kind in (_HOST, _HOST_OLDER))


def _layer(traceback: TracebackType | None, stage: Stage | None) -> str | None:
    """Return the name of the innermost module whose forward the error passed through.

    In the backward, which runs no such forward, it is the layer of the weight that was gathered last.
    """
    if stage is None:
        return None
    names = {id(module): name for name, module in stage.module.named_modules() if name}
    found = None
    while traceback:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            found = names.get(id(module), found)
        traceback = traceback.tb_next
    if found:
        return found
    weight = stage.weights.schedule.last_used
    return weight.rpartition(".")[0] if weight else None


def _remedies(plan: PlanEstimate) -> str:
    """Return the settings, or the number of devices, with which a step needs less than was planned."""
    cluster, reserved = plan.config.cluster, plan.memory["reserved"]
    limit = reserved + _SAVING * (min(total_gib(cluster), plan.memory_gib) - reserved)
    smaller = replace(cluster, memory_gib=limit, host_gib=None, margin=0.0)
    tighter = plan.with_config(replace(plan.config, cluster=smaller))
    if changes := Fit(tighter, smaller).changes():
        return f"set {', or '.join(map(str, changes))}"
    return "use more devices, or a smaller model"
