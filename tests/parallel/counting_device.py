"""Counts of operations and bytes: a device of symbolic tensors, and a mode of torch."""

import itertools

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.laboratory.virtual_operations import Operations, has_kernel, tensors_in


class CountingDevice:
    """A device of symbolic tensors that counts FLOPs, moved bytes and the memory in use."""

    compiled, is_cpu, records, recomputation, imbalance = True, False, True, None, 1.0

    def __init__(self):
        self.plans, self.numbers = {}, itertools.count()
        self.events = []  # collectives, waits for them, and the FLOPs of attention, in their order
        self.flops = self.moved = self.held = self.peak = 0

    def compute(self, computation):
        self.flops, self.moved = self.flops + computation.flops, self.moved + computation.moved
        if computation.attention:
            self.events.append(computation.attention)

    def hold(self, nbytes):
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def release(self, nbytes):
        self.held -= nbytes

    def scratch(self, nbytes): ...

    def start(self, kind, axis, nbytes):
        self.events.append((kind, axis, nbytes))
        return len(self.events)

    def wait(self, collective):
        self.events.append("wait")


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations that start a kernel, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        # Products take no time, a byte takes a second.
        self.costs, self.operations, self.moved = Operations(float("inf"), 1e-9, 0.0, 0), 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if has_kernel(func, list(tensors_in((args, kwargs))), kwargs):
            self.operations += 1
            self.moved += self.costs.cost(func, args, kwargs).seconds
        return func(*args, **kwargs)
