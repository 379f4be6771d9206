"""Muon (Jordan et al., 2024) on sharded weights: each matrix is orthogonalized at its home rank, exactly once.

A step has these phases for each exchange of ``gpt4d.optim.matrices``:

1. Each rank sends its parts of the matrices' momentum to their homes, in the compute dtype: one all-to-all.
2. The home orthogonalizes the complete matrix by Newton-Schulz iterations. It never sees how the matrix is sharded, so
   the update has the same bits on every plan.
3. The home returns each part of the update to the ranks that hold it: another all-to-all.
4. Ranks of data that replicate a part gather the rows of the update over data.

While homes orthogonalize the matrices of one exchange, the next exchange is in flight, and so are the results of the
previous ones.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gpt4d.config import MuonConfig
from gpt4d.optim import matrices
from gpt4d.optim.matrices import Matrix, MatrixExchange, Region, row_dim
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.gradient_reducer import own_rows
from gpt4d.parallel.grid import Grid

# Factors of the update for a matrix with these numbers of output features and input features.
SCALES = {
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
    "original": lambda outputs, inputs: math.sqrt(max(1.0, outputs / inputs)),
}


def orthogonalized(matrix: torch.Tensor, config: MuonConfig) -> torch.Tensor:
    """Return the result of Newton-Schulz iterations on ``matrix`` [outputs, inputs], in its dtype.

    The singular values of the result are about 1. Each iteration replaces X by aX + b(XXᵀ)X + c(XXᵀ)²X.
    """
    a, b, c = config.coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=config.epsilon)
    for _ in range(config.steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class _Message(NamedTuple):
    """A part of a matrix in a message."""

    matrix: int
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)


@dataclass(frozen=True)
class _Program:
    """The messages of this rank in one exchange, and its own matrices. Messages are listed by the index of the peer.

    Attributes:
        sends: parts of the momentum that this rank sends to each home.
        receives: parts of its own matrices' momentum that this rank receives from each rank.
        own: the matrices whose home is this rank.
        returns: parts of the updates of its own matrices that this rank sends to each rank.
        arrivals: parts of updates that this rank receives from each home.
    """

    sends: list[list[_Message]]
    receives: list[list[_Message]]
    own: list[int]
    returns: list[list[_Message]]
    arrivals: list[list[_Message]]

    @classmethod
    def of(cls, exchange: MatrixExchange, rank: int, ranks: int) -> "_Program":
        sends, receives, returns, arrivals = ([list[_Message]() for _ in range(ranks)] for _ in range(4))
        for index, home in exchange.homes.items():
            for region, holders in exchange.holders[index].items():
                message = _Message(index, region)
                if holders[0] == rank:
                    sends[home].append(message)
                if home == rank:
                    receives[holders[0]].append(message)
                for holder in holders:
                    if home == rank:
                        returns[holder].append(message)
                    if holder == rank:
                        arrivals[home].append(message)
        own = [index for index, home in exchange.homes.items() if home == rank]
        return cls(sends, receives, own, returns, arrivals)


class _Sharded(NamedTuple):
    """A weight that Muon updates.

    Attributes:
        shard: the weight, or with sharded optimizer states this rank's rows of it.
        rows: this rank's rows of ``shard`` along data.
        momentum: the momentum of these rows.
        matrices: views of the matrices in ``shard``.
    """

    shard: Any  # parameters with the attribute spec
    rows: Any
    momentum: torch.Tensor
    matrices: list[torch.Tensor]


class _Gathering(NamedTuple):
    """The received updates of one exchange.

    Attributes:
        complete: parts for complete shards.
        split: parts for this rank's rows of shards that data replicates.
        rows: the all-gather of ``split`` over data, in flight; None if there are no such parts.
    """

    complete: list[tuple[_Message, torch.Tensor]]
    split: list[tuple[_Message, torch.Tensor]]
    rows: Pending | None


class Muon:
    """Updates this rank's shards of the weights of hidden layers.

    Args:
        shards: the optimizer shards of the weights, by name. The names and their order are equal on all ranks.
        config: momentum and Newton-Schulz iterations.
        grid: the ranks of the stage, with its axis ``stage``.
        dtype: dtype of the exchanged matrices and of their products.
    """

    def __init__(self, shards: Mapping[str, Any], config: MuonConfig, grid: Grid, dtype: torch.dtype):
        self.config, self.grid, self.dtype = config, grid, dtype
        self._device = next(iter(shards.values())).device
        self.weights: dict[str, _Sharded] = {}
        self._matrices: list[Matrix] = []
        # The weight of each matrix, and its index among the weight's matrices that this rank holds; -1: it holds none.
        self._places: list[tuple[str, int]] = []
        for name, shard in shards.items():
            rows, own = own_rows(shard, grid, row_dim(shard.spec)), matrices.views(shard.detach(), shard.spec)
            self.weights[name] = _Sharded(shard, rows, torch.zeros_like(rows, requires_grad=False), own)
            found, number = matrices.matrices_of(shard.spec, grid.sizes), itertools.count()
            self._places += [(name, next(number) if each.is_held_at(grid.indices) else -1) for each in found]
            self._matrices += found
        coordinates = [Grid.coordinates(grid.ranks.index(rank), grid.sizes) for rank in sorted(grid.ranks)]
        planned = matrices.exchanges(self._matrices, coordinates, grid.sizes)
        self._programs = [_Program.of(exchange, grid.stage.index, grid.stage.size) for exchange in planned]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, skipped: torch.Tensor, divisor: torch.Tensor | None) -> None:
        """Update the weights with their gradients divided by ``divisor``. All ranks of the stage call it together.

        Args:
            lr: learning rate.
            weight_decay: decoupled weight decay.
            skipped: a flag on the device; if it is set, weights and momentum stay unchanged.
            divisor: a scalar on the device, the divisor of all gradients; None for 1.
        """
        directions = self._directions(skipped, divisor)
        kept = 1 - skipped.float()
        torch._foreach_mul_([weight.shard.detach() for weight in self.weights.values()], 1 - lr * weight_decay * kept)
        programs, last = self._programs, len(self._programs) - 1
        arriving = {0: self._start_sends(programs[0], directions)}
        returning: dict[int, Pending] = {}
        gathering: dict[int, _Gathering] = {}
        for number in range(len(programs) + 2):
            if number <= last:
                received = arriving.pop(number).wait()
                if number < last:  # not earlier: both exchanges share the links, and this one is waited for
                    arriving[number + 1] = self._start_sends(programs[number + 1], directions)
                returning[number] = self._start_returns(programs[number], self._updates(programs[number], received))
            if (previous := number - 1) in returning:
                gathering[previous] = self._start_gather(programs[previous], returning.pop(previous).wait())
            if number - 2 in gathering:
                self._apply(gathering.pop(number - 2), -lr * kept)

    def _directions(self, skipped: torch.Tensor, divisor: torch.Tensor | None) -> dict[str, list[torch.Tensor]]:
        """Update the momentum, and return this rank's parts of the matrices to orthogonalize, by weight."""
        momentum = self.config.momentum
        weight = (1 - momentum) * (1 - skipped.float())
        found = {}
        for name, (shard, rows, buffer, _) in self.weights.items():
            gradient = shard.grad
            if rows is not shard:
                gradient = gradient.chunk(self.grid.data.size, row_dim(shard.spec))[self.grid.data.index]
            if divisor is not None:
                gradient.div_(divisor)
            gradient.masked_fill_(skipped, 0.0)  # it may not be finite
            buffer.lerp_(gradient, weight)
            direction = gradient.lerp_(buffer, momentum) if self.config.nesterov else buffer
            found[name] = matrices.views(direction, rows.spec)
        return found

    def _start_sends(self, program: _Program, directions: Mapping[str, list[torch.Tensor]]) -> Pending:
        places = [self._places[message.matrix] for messages in program.sends for message in messages]
        parts = [directions[name][place] for name, place in places]
        return self._start_exchange(parts, program.sends, program.receives)

    def _start_exchange(
        self, parts: list[torch.Tensor], sends: list[list[_Message]], receives: list[list[_Message]]
    ) -> Pending:
        """Start an all-to-all of ``parts``, which are the parts in ``sends``."""
        sent = torch.empty(sum(map(torch.numel, parts)), dtype=self.dtype, device=self._device)
        if parts:
            pieces = sent.split([part.numel() for part in parts])
            torch._foreach_copy_([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)], parts)
        sent_counts, received_counts = (
            [sum(math.prod(message.shape) for message in messages) for messages in side] for side in (sends, receives)
        )
        return self.grid.stage.start_all_to_all(sent, sent_counts, received_counts)

    def _updates(self, program: _Program, received: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the updates of the matrices whose home is this rank, in the dims of the weights."""
        complete = {index: received.new_empty(self._matrices[index].shape) for index in program.own}
        for message, part in _parts(received, program.receives):
            complete[message.matrix][tuple(slice(*ends) for ends in message.region)] = part
        found = {}
        for index, full in complete.items():
            matrix = self._matrices[index]
            permuted = full.permute(matrix.order)
            update = orthogonalized(permuted.reshape(matrix.sides), self.config)
            inverse = sorted(range(len(matrix.order)), key=matrix.order.__getitem__)
            found[index] = update.reshape(permuted.shape).permute(inverse)
        return found

    def _start_returns(self, program: _Program, updates: Mapping[int, torch.Tensor]) -> Pending:
        parts = [
            updates[message.matrix][tuple(slice(*ends) for ends in message.region)]
            for messages in program.returns
            for message in messages
        ]
        return self._start_exchange(parts, program.returns, program.arrivals)

    def _start_gather(self, program: _Program, received: torch.Tensor) -> _Gathering:
        """Start to gather the rows of received updates over data, where data replicates the weights."""
        parts = _parts(received, program.arrivals)
        split = [(message, part) for message, part in parts if self._is_split(message.matrix)]
        complete = [(message, part) for message, part in parts if not self._is_split(message.matrix)]
        if not split:
            return _Gathering(complete, split, None)
        packed = torch.cat([part.flatten() for _, part in split])[None]
        return _Gathering(complete, split, self.grid.data.start_all_gather(packed))

    def _apply(self, gathering: _Gathering, factor: torch.Tensor) -> None:
        """Add updates, times ``factor``, to the weights."""
        for message, part in gathering.complete:
            self._add(message.matrix, part, factor)
        if gathering.rows is not None:
            gathered = gathering.rows.wait().split([part.numel() for _, part in gathering.split], 1)
            for (message, part), columns in zip(gathering.split, gathered, strict=True):
                rows = columns.reshape(self.grid.data.size * part.shape[0], *part.shape[1:])
                self._add(message.matrix, rows, factor)

    def _is_split(self, index: int) -> bool:
        """Return whether data splits a matrix, but not the shard to update."""
        name, _ = self._places[index]
        return self.weights[name].rows is not self.weights[name].shard

    def _add(self, index: int, update: torch.Tensor, factor: torch.Tensor) -> None:
        """Add the scaled ``update`` of a matrix, times ``factor``, to its part of this rank's shard."""
        name, place = self._places[index]
        own, scale = self.weights[name].matrices[place], SCALES[self.config.scale](*self._matrices[index].sides)
        own.add_(update.to(own.dtype) * (factor * scale))


def _parts(received: torch.Tensor, messages: list[list[_Message]]) -> list[tuple[_Message, torch.Tensor]]:
    """Return the parts in a received buffer."""
    listed = [message for of_rank in messages for message in of_rank]
    pieces = received.split([math.prod(message.shape) for message in listed]) if listed else ()
    return [(message, piece.view(message.shape)) for message, piece in zip(listed, pieces, strict=True)]
