"""The routers of a model during training: statistics of each step, and the update of the routers' states."""

from typing import Any

import torch

from gpt4d.parallel.layers.routing import num_statistics
from gpt4d.parallel.layout import spec_of
from gpt4d.parallel.stage import Stage


class Routers:
    """The routers of a stage. Each row of ``totals`` belongs to one router of the model.

    Args:
        stage: the stage, whose layers record statistics (gpt4d.parallel.layers.routing.routing_statistics).
    """

    def __init__(self, stage: Stage):
        self._stage = stage
        found: dict[str, Any] = dict(stage.module.named_modules())
        self._own = {row: found[name] for row, name in enumerate(stage.routers) if name in found}
        self.shape = len(stage.routers), num_statistics(max(stage.routers.values(), default=0))

    def totals(self) -> torch.Tensor:
        """Return this rank's statistics of the step, float64 of this ``shape``, for a sum over all ranks of the job.

        Rows of other stages' routers are zero, as are the rows of all but one of the ranks that have the same tokens.
        """
        weights, grid = self._stage.weights, self._stage.grid
        totals = torch.zeros(self.shape, dtype=torch.float64, device=weights.device)
        if grid.y.index == 0 and (weights.context.sequence_parallel or grid.x.index == 0):
            for row, layer in self._own.items():
                totals[row] = weights.statistics[layer]
        weights.statistics.clear()
        return totals

    def update(self, totals: torch.Tensor, skipped: torch.Tensor) -> None:
        """Set the states of this stage's routers from the statistics of all ranks, unless the step is skipped.

        Routers that are not trained, because adapters are, retain their biases.
        """
        for row, layer in self._own.items():
            spec, counts = layer.spec, totals[row, : layer.spec.experts]
            if spec.balance == "loss":
                state = counts * (spec.scoring.per_token / counts.sum())
            elif spec_of(layer.weight).frozen:
                continue
            else:
                state = layer.state.double() + spec.balance_rate * (counts.mean() - counts).sign()
            with torch.no_grad():
                layer.state.copy_(torch.where(skipped, layer.state.double(), state))


def summary(totals: torch.Tensor, ranks: int) -> dict[str, Any]:
    """Return the values for metrics.jsonl: means over the routers, and the tokens of the most imbalanced router.

    Args:
        totals: statistics of a step, summed over all ranks of the job.
        ranks: number of ranks that split the experts.
    """
    experts = (totals.shape[1] - 2) // 2
    counts, scores, sums = totals.split((experts, experts, 2), 1)
    tokens = scores.sum(1, keepdim=True)  # a token's scores add up to 1
    of_ranks = counts.unflatten(1, (ranks, -1)).sum(2)
    imbalance = counts.amax(1) / counts.mean(1)
    worst = int(imbalance.argmax())
    return {
        "imbalance": imbalance.mean().item(),
        "rank_imbalance": (of_ranks.amax(1) / of_ranks.mean(1)).mean().item(),
        "entropy": (sums[:, :1] / tokens).mean().item(),
        "balance_loss": (experts * (counts * scores / tokens**2).sum(1)).mean().item(),
        "z_loss": (sums[:, 1:] / tokens).mean().item(),
        "dropped": 0,
        "most_imbalanced": {"router": worst, "tokens": counts[worst].int().tolist()},
    }
