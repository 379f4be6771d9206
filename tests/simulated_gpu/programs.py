"""Small programs on a simulated GPU, with the problem that the simulation must report."""

from collections.abc import Callable

import torch

from tests.simulated_gpu.job import GPU


class Programs(dict[str, tuple[str, Callable]]):
    """Programs by name: a part of the message of their problem, or "" if they are correct; and their function."""

    def reports(self, message: str) -> Callable:
        """Return a decorator that adds a program."""
        return lambda program: self.setdefault(program.__name__, (message, program))[1]


def ones() -> torch.Tensor:
    return torch.ones(8, device=GPU)
