"""The memory that a function allocates."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def allocated_peak(run: Callable[[], object], device: torch.device | None = None) -> int:
    """Call ``run`` once and return the maximum of the bytes that it has allocated at a time.

    Counts bytes of torch's allocator, not the size of the process: a process retains free memory.

    Args:
        run: the function to measure.
        device: the device whose memory counts; None: the host.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        peak = max(peak, now)
    return peak
