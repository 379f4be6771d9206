"""A device of symbolic tensors for tests."""

import itertools


class CountingDevice:
    """A device that counts FLOPs, moved bytes and the memory in use."""

    compiled, is_cpu, records, recomputation, imbalance = True, False, True, None, 1.0

    def __init__(self):
        self.plans, self.numbers = {}, itertools.count()
        self.flops = self.moved = self.held = 0

    def compute(self, computation):
        self.flops, self.moved = self.flops + computation.flops, self.moved + computation.moved

    def hold(self, nbytes):
        self.held += nbytes

    def release(self, nbytes):
        self.held -= nbytes

    def scratch(self, nbytes):
        pass
