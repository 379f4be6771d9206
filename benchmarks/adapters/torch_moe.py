"""torch: expert parallelism in plain torch. Each rank has equally many experts of each layer."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.gradient_steps import global_tensor, gradient_contender
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.moe_steps import MoeWork, MoeWorkerConfig, token_tensors
from benchmarks.worker import Contender, share_process_groups


class AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.splits = received, sent, group
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllToAll.apply(d_out, *ctx.splits), None, None, None


class ExpertParallel(nn.Module):
    """A router and this rank's experts, whose output is added to the input."""

    def __init__(self, work: MoeWork, layer: int, group: dist.ProcessGroup):
        super().__init__()
        config = work.config
        self.group, self.experts, self.own = group, config.experts, config.experts // group.size()
        own = slice(group.rank() * self.own, (group.rank() + 1) * self.own)
        self.router = nn.Parameter(work.weights[f"{layer}.router"].clone())
        self.up = nn.ParameterList(work.weights[f"{layer}.up"][own].flatten(2).unbind())
        self.down = nn.ParameterList(work.weights[f"{layer}.down"][own].unbind())

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        each, ranks = experts.shape[1], self.group.size()
        weights = (x @ self.router).gather(1, experts).softmax(-1)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = flat.new_zeros(self.experts).scatter_add_(0, flat, torch.ones_like(flat))
        from_ranks = torch.empty_like(counts)
        dist.all_to_all_single(from_ranks, counts, group=self.group)
        parts = from_ranks.view(ranks, self.own)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), parts.sum(1).tolist()
        rows = AllToAll.apply(x.index_select(0, order // each), sent, received, self.group)
        back = AllToAll.apply(self._experts_of(rows, parts.tolist()), received, sent, self.group)
        chosen = back.index_select(0, place).unflatten(0, (-1, each))
        return x + (chosen * weights.unsqueeze(-1)).sum(1)

    def _experts_of(self, rows: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
        """Return the outputs of this rank's experts. ``sizes``: numbers of rows, by rank and expert."""
        if self.own == 1:
            return self._expert(rows, 0)
        pieces = rows.split([size for of_rank in sizes for size in of_rank])
        outs = list(pieces)
        for index in range(self.own):
            out = self._expert(torch.cat(pieces[index :: self.own]), index)
            outs[index :: self.own] = out.split([of_rank[index] for of_rank in sizes])
        return torch.cat(outs)

    def _expert(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        gate, up = (rows @ self.up[index]).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down[index]


class Mixtures:
    """The layers, whose experts all ranks share."""

    def __init__(self, work: MoeWork, group: dist.ProcessGroup):
        self.work, self.rank, self.group = work, group.rank(), group
        self.layers = [ExpertParallel(work, layer, group) for layer in range(work.config.layers or 0)]
        tokens = work.place(self.rank, group.size())
        self.place = tokens, slice(None)
        self.inputs = work.inputs[tokens].clone().requires_grad_()
        self.upstream, self.routes = work.upstream[tokens], work.routes[tokens]

    def forward_backward(self) -> None:
        x = self.inputs
        for index, layer in enumerate(self.layers):
            x = layer(x, self.routes[:, index])
        self.output = x
        x.backward(self.upstream)
        gradients = [layer.router.grad for layer in self.layers]
        total = torch.stack(gradients)
        dist.all_reduce(total, group=self.group)
        for gradient, summed in zip(gradients, total, strict=True):
            gradient.copy_(summed)

    def collect_results(self) -> dict:
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)
        self.inputs.grad = None
        return {}

    def gradients(self) -> dict[str, torch.Tensor]:
        found = token_tensors(self.output, self.inputs, self.work, self.place)
        config = self.work.config
        for index, layer in enumerate(self.layers):
            found[f"{index}.router"] = layer.router.grad
            own = (slice(self.rank * layer.own, (self.rank + 1) * layer.own),)
            up = torch.stack([p.grad for p in layer.up]).unflatten(2, (2, -1))
            down = torch.stack([p.grad for p in layer.down])
            found[f"{index}.up"] = global_tensor(up, (config.experts, *up.shape[1:]), own)
            found[f"{index}.down"] = global_tensor(down, (config.experts, *down.shape[1:]), own)
        return found


def steps(settings: MoeWorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the steps of the layers whose experts all ranks share."""
    share_process_groups()
    name, group = "expert parallel", dist.new_group()
    return {name: gradient_contender(name, Mixtures(settings.work, group), settings.gradients)}
