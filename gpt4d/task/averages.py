"""Exponential moving averages of weights, from which samples are drawn."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gpt4d.parallel.gradient_reducer import own_rows
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.stage import Stage

PREFIX = "average."  # prefix of the names in a checkpoint


class WeightAverages:
    """Averages of this rank's shards of the parameters that its stage saves.

    Step n sets each average to ``average + (1 - d)·(weight - average)``, where d is the minimum of ``decay`` and
    n / (n + 9). So the initial weights lose their influence quickly. With ``decay`` 0 there are no averages, and the
    methods do nothing.

    With ``shard`` a rank averages only the rows that it updates (``optim.shard_states``). An update then needs no rows
    of other ranks, which arrive during the next forward.

    The states of routers are averaged too: a bias balances the router of the same step.
    """

    def __init__(self, stage: Stage, decay: float, shard: bool = False):
        self.stage, self.decay = stage, decay
        named = dict[str, Any](stage.module.named_parameters()) if decay else {}
        self._parameters = {name: parameter for name, parameter in named.items() if name not in stage.copies}
        self._shards: dict[str, Any] = {
            name: own_rows(parameter, stage.grid) if shard else parameter
            for name, parameter in self._parameters.items()
        }
        self._averages = [shard.detach().clone() for shard in self._shards.values()]

    def reset(self) -> None:
        """Set the averages to the current weights."""
        if self.decay:
            torch._foreach_copy_(self._averages, self._current())

    def update(self, step: int) -> None:
        """Update the averages with the weights after ``step``."""
        if self.decay:
            torch._foreach_lerp_(self._averages, self._current(), 1 - min(self.decay, step / (step + 9)))

    def _current(self) -> list[torch.Tensor]:
        return [shard.detach() for shard in self._shards.values()]

    def state(self) -> Mapping[str, tuple[torch.Tensor, ParameterSpec]]:
        """Return the averages for a checkpoint, by name."""
        named = zip(self._shards.items(), self._averages, strict=True)
        return {f"{PREFIX}{name}": (average, shard.spec) for (name, shard), average in named}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by their averages inside the context. All ranks enter it together.

        Stages with copies of weights receive the averages from the stage that saves them.
        """
        if not self.decay:
            yield
            return
        copies = set(self.stage.copies)
        self.stage.wait_for_copies()
        for parameter in self._parameters.values():
            self.stage.weights.pre_gather_hook(parameter)
        current = [parameter.detach() for parameter in self._parameters.values()]
        named = self.stage.module.named_parameters()
        weights = current + [parameter.detach() for name, parameter in named if name in copies]
        trained = [weight.clone() for weight in weights]
        for weight, average in zip(current, self._averages, strict=True):
            if average.shape != weight.shape:
                average = self.stage.grid.data.all_gather(average).view(weight.shape)
            weight.copy_(average)
        self.stage.send_copied_weights()
        yield
        # Not after an error, which must not wait for transfers.
        self.stage.wait_for_copies()
        torch._foreach_copy_(weights, trained)
