"""Measurement of what torch's allocator gives out."""

from collections.abc import Callable

import torch


def allocated_peak(run: Callable[[], object], device: torch.device | None = None) -> int:
    """Return the most bytes that ``run`` had allocated at once, over what was there before.

    Args:
        run: called once.
        device: whose memory counts; None: the host's.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        peak = max(peak, now)
    return peak
