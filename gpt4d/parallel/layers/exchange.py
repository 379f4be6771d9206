"""Activations that ranks exchange in the forward, and the exchange of their gradients in the backward. No torch here.

A collective starts in one node of the autograd graph and ends in another, and other chunks compute in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.engine.interleave import YieldPoint
from gpt4d.parallel.kernels import Function
from gpt4d.parallel.layers.product import FEATURES, TOKENS, placeholder, start_gather, start_scatter


class ActivationExchange(Protocol):
    """The collectives of one activation and of its gradient."""

    def start(self, sent: Any) -> Any:
        """Start the collective of the forward."""

    def start_gradient(self, d_received: Any) -> None:
        """Start the collective of the backward."""

    def take_gradient(self) -> Any:
        """Wait for the gradient of the tensor that this rank has sent."""


class _Gradient:
    """The collective of a gradient in flight, ``gradient``."""

    gradient: Any = None

    def take_gradient(self) -> Any:
        pending, self.gradient = self.gradient, None
        return pending.wait()


class SentFunction(Function):
    """A placeholder of a tensor that ranks exchange, perhaps in place.

    Its backward waits for the gradient, ``exchange.take_gradient()``.
    """

    @staticmethod
    def forward(ctx, sent, exchange: Any):
        ctx.exchange = exchange
        return placeholder(sent, sent.shape)

    @staticmethod
    def backward(ctx, d_sent):
        return ctx.exchange.take_gradient(), None


class ReceivedFunction(Function):
    """The result of an exchange. Its backward starts to exchange the gradient, ``exchange.start_gradient``."""

    @staticmethod
    def forward(ctx, sent, received, exchange: Any):
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

    def __init__(self, *exchanges: tuple[Any, ActivationExchange]):
        self._sent = [(SentFunction.apply(tensor, exchange), exchange) for tensor, exchange in exchanges]
        self._pending = [exchange.start(tensor.detach()) for tensor, exchange in exchanges]

    async def received(self) -> list[Any]:
        await YieldPoint()
        pairs = zip(self._sent, self._pending, strict=True)
        return [ReceivedFunction.apply(tensor, arrival.wait(), exchange) for (tensor, exchange), arrival in pairs]


async def exchanged(*exchanges: tuple[Any, ActivationExchange]) -> list[Any]:
    """ActivationExchange activations at the same time, each with its exchange."""
    return await Exchanges(*exchanges).received()


class GatheredFeatures(_Gradient):
    """All-gathers features over an axis. The backward reduce-scatters their gradients."""

    def __init__(self, axis: Any):
        self.axis = axis

    def start(self, sent: Any) -> Any:
        return start_gather(sent, self.axis, FEATURES)

    def start_gradient(self, d_received: Any) -> None:
        self.gradient = start_scatter(d_received, self.axis, FEATURES)


class SummedGradient(_Gradient):
    """The input of layers that are split over an axis: the backward sums its gradient over the axis.

    ``splits_tokens``: the axis splits the tokens of the input, which are all-gathered.
    """

    def __init__(self, axis: Any, splits_tokens: bool = False):
        self.axis, self.splits_tokens = axis, splits_tokens

    def start(self, sent: Any) -> Any:
        return start_gather(sent, self.axis, TOKENS) if self.splits_tokens else Pending(sent)

    def start_gradient(self, d_received: Any) -> None:
        d_received = d_received.detach().contiguous()
        if self.splits_tokens:
            self.gradient = start_scatter(d_received, self.axis, TOKENS)
        else:
            self.gradient = self.axis.start_all_reduce(d_received)


class Summed(_Gradient):
    """The output of layers that are split over an axis: it is all-reduced over the axis.

    ``splits_tokens``: the axis splits the tokens of the result, so the sum is a reduce-scatter.
    """

    def __init__(self, axis: Any, splits_tokens: bool = False):
        self.axis, self.splits_tokens = axis, splits_tokens

    def start(self, sent: Any) -> Any:
        return start_scatter(sent, self.axis, TOKENS) if self.splits_tokens else self.axis.start_all_reduce(sent)

    def start_gradient(self, d_received: Any) -> None:
        self.gradient = start_gather(d_received, self.axis, TOKENS) if self.splits_tokens else Pending(d_received)


class AllToAll(_Gradient):
    """Sends rows of a matrix to the ranks of an axis. The backward sends the gradients of the rows back.

    Args:
        axis: the ranks.
        sent: numbers of rows for each rank, in the order of the rows.
        received: numbers of rows from each rank.
        later: computations of the backward, which take place after the start of its exchange.
    """

    def __init__(
        self, axis: Any, sent: Sequence[int], received: Sequence[int], later: list[Callable[[], None]] | None = None
    ):
        self.axis, self.sent, self.received, self.later = axis, sent, received, later

    def start(self, sent: Any) -> Any:
        return self.axis.start_all_to_all(sent, self.sent, self.received)

    def start_gradient(self, d_received: Any) -> None:
        self.gradient = self.axis.start_all_to_all(d_received.detach().contiguous(), self.received, self.sent)
        while self.later:
            self.later.pop(0)()  # and forget its tensors
