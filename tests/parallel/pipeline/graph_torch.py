"""The toy with tensors that skip blocks: what needs torch. Shapes as in tests/seams/toy_torch.py."""

from collections.abc import Mapping

import torch

from gpt4d.data.batch import Batch
from gpt4d.model.description import Part
from gpt4d.parallel.chunks import run_blocks
from gpt4d.parallel.turns import run_alone
from tests.seams.toy_torch import Regression, SquaredErrorFunction, Toy, own_part

Tensors = dict[str, torch.Tensor]


def of_rows(x_TF: torch.Tensor) -> Tensors:
    """Return the integers and the mask, [T], of rows of data."""
    return {"classes": (x_TF[:, :2] > 0).sum(1), "mask": x_TF[:, 2] > 0}


def joined(block: int, x_TH: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the input of a block from the stream and the tensors that the block uses."""
    if block in (1, 3):
        x_TH = x_TH + 0.5 * tensors["embedded"] * tensors["classes"].unsqueeze(1)
    if block == 2:
        x_TH = torch.where(tensors["mask"].unsqueeze(1), x_TH, -0.5 * x_TH)
    if block == 3:
        x_TH = x_TH * (1 + tensors["scales"])
    return x_TH


class Graph(Toy):
    def compute(self, part: Part, x_BSF: torch.Tensor, received: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the tensors after a part, or the outputs of the last one."""
        tensors, weights = dict(received), self.weights
        if part.begins:
            rows_TF = x_BSF.flatten(0, 1)
            x_TF = own_part(rows_TF, weights.grid.x).to(weights.compute_dtype)
            tensors = {"stream": run_alone(self.input(x_TF)), **of_rows(rows_TF)}
            tensors["embedded"] = tensors["stream"]
        for block in part.blocks:
            x_TH = joined(block, tensors["stream"], tensors)
            tensors["stream"] = run_blocks(weights, [self.blocks[str(block)]], x_TH)
            if block == 1:
                tensors["scales"] = tensors["stream"].tanh()
        if part.ends:
            return {"outputs": run_alone(self.output(tensors["stream"])).unflatten(0, x_BSF.shape[:2])}
        return tensors


class GraphRegression(Regression):
    def compute(self, module, part: Part, batch: Batch, received: Mapping[str, torch.Tensor]) -> Tensors:
        produced, axis = module.compute(part, batch.inputs["rows"], received), self._stage.grid.x
        if not part.ends:
            return produced
        return {"loss": SquaredErrorFunction.apply(produced["outputs"], own_part(batch.targets, axis), axis)}
