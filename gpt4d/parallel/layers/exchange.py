"""Activations that ranks exchange in the forward, and the exchange of their gradients in the backward. No torch here.

A collective starts in one node of the autograd graph and ends in another, and other chunks compute in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpt4d.parallel.comm.pending import MeshAxis, Pending
from gpt4d.parallel.engine.interleave import YieldPoint
from gpt4d.parallel.kernels import Function, Tensor
from gpt4d.parallel.layers.product import FEATURES, TOKENS, placeholder, start_gather, start_scatter


class ActivationExchange(Protocol):
    """The collectives of one activation and of its gradient."""

    def start(self, sent: Tensor) -> Pending:
        """Start the collective of the forward."""

    def start_gradient(self, d_received: Tensor) -> None:
        """Start the collective of the backward."""

    def take_gradient(self) -> Tensor:
        """Wait for the gradient of the tensor that this rank has sent."""


class _Exchange:
    """An ``ActivationExchange`` of two functions that start the collectives of the forward and of the backward."""

    def __init__(self, start: Callable[[Tensor], Pending], start_back: Callable[[Tensor], Pending]):
        self.start, self.start_back = start, start_back
        self.gradient: Any = None  # the collective of the gradient in flight

    def start_gradient(self, d_received: Tensor) -> None:
        self.gradient = self.start_back(d_received)

    def take_gradient(self) -> Tensor:
        pending, self.gradient = self.gradient, None
        return pending.wait()


class SentFunction(Function):
    """A placeholder of a tensor that ranks exchange, perhaps in place.

    Its backward waits for the gradient, ``exchange.take_gradient()``.
    """

    @staticmethod
    def forward(ctx, sent, exchange):
        ctx.exchange = exchange
        return placeholder(sent, sent.shape)

    @staticmethod
    def backward(ctx, d_sent):
        return ctx.exchange.take_gradient(), None


class ReceivedFunction(Function):
    """The result of an exchange. Its backward starts to exchange the gradient, ``exchange.start_gradient``."""

    @staticmethod
    def forward(ctx, sent, received, exchange: ActivationExchange):
        ctx.shape, ctx.exchange = sent.shape, exchange
        return received.view_as(received)

    @staticmethod
    def backward(ctx, d_received):
        ctx.exchange.start_gradient(d_received)
        return placeholder(d_received, ctx.shape), None, None


class Exchanges:
    """Exchanges of activations that start together. ``received`` waits for their results.

    Args:
        exchanges: activations, each with its exchange.
    """

    def __init__(self, *exchanges: tuple[Tensor, ActivationExchange]):
        self._sent = [(SentFunction.apply(tensor, exchange), exchange) for tensor, exchange in exchanges]
        self._pending = [exchange.start(tensor.detach()) for tensor, exchange in exchanges]

    async def received(self) -> list[Tensor]:
        await YieldPoint()
        pairs = zip(self._sent, self._pending, strict=True)
        return [ReceivedFunction.apply(tensor, arrival.wait(), exchange) for (tensor, exchange), arrival in pairs]


async def exchanged(*exchanges: tuple[Tensor, ActivationExchange]) -> list[Tensor]:
    """Exchange activations at the same time, each with its exchange."""
    return await Exchanges(*exchanges).received()


def gathered_features(axis: MeshAxis) -> ActivationExchange:
    """All-gather features over an axis. The backward reduce-scatters their gradients."""
    return _Exchange(lambda sent: start_gather(sent, axis, FEATURES), lambda d: start_scatter(d, axis, FEATURES))


def summed_gradient(axis: MeshAxis, splits_tokens: bool = False) -> ActivationExchange:
    """Exchange the input of layers that are split over an axis: the backward sums its gradient over the axis.

    ``splits_tokens``: the axis splits the tokens of the input, which are all-gathered.
    """
    if splits_tokens:
        return _Exchange(
            lambda sent: start_gather(sent, axis, TOKENS),
            lambda d: start_scatter(d.detach().contiguous(), axis, TOKENS),
        )
    return _Exchange(Pending, lambda d: axis.start_all_reduce(d.detach().contiguous()))


def summed(axis: MeshAxis, splits_tokens: bool = False) -> ActivationExchange:
    """Exchange the output of layers that are split over an axis: it is all-reduced over the axis.

    ``splits_tokens``: the axis splits the tokens of the result, so the sum is a reduce-scatter.
    """
    if splits_tokens:
        return _Exchange(lambda sent: start_scatter(sent, axis, TOKENS), lambda d: start_gather(d, axis, TOKENS))
    return _Exchange(axis.start_all_reduce, Pending)


def all_to_all(
    axis: MeshAxis, sent_rows: Sequence[int], received_rows: Sequence[int], later: list[Callable] | None = None
) -> ActivationExchange:
    """Send rows of a matrix to the ranks of an axis. The backward sends the gradients of the rows back.

    Args:
        axis: the ranks.
        sent_rows: numbers of rows for each rank, in the order of the rows.
        received_rows: numbers of rows from each rank.
        later: computations of the backward, which take place after the start of its exchange.
    """

    def start_back(d_received: Tensor) -> Pending:
        pending = axis.start_all_to_all(d_received.detach().contiguous(), received_rows, sent_rows)
        while later:
            later.pop(0)()  # and forget its tensors
        return pending

    return _Exchange(lambda sent: axis.start_all_to_all(sent, sent_rows, received_rows), start_back)
