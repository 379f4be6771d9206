"""The router of a mixture of experts: the experts of each token and their weights.

Shapes: T: tokens of this rank; H: its features of the residual stream; E: all experts; K: experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpt4d.parallel.engine.prefetch import FORWARD
from gpt4d.parallel.kernels import Function, KernelFunction, Tensor, kernel, wide_dtype
from gpt4d.parallel.layers.exchange import exchanged, summed
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import matmul
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.layout import BETWEEN_LAYERS, STATE, Layout, ParameterSpec, spec_of
from gpt4d.parallel.lazy import torch


def _flops(x_TH, weight_HE, *_) -> int:
    return 2 * x_TH.shape[0] * weight_HE.shape[0] * weight_HE.shape[1]


def _converted(x_TH) -> int:
    """Return the bytes of bf16 activations after their conversion to float32; 0 for other dtypes."""
    return 0 if x_TH.dtype == wide_dtype(x_TH) else x_TH.like(dtype=wide_dtype(x_TH)).nbytes


def _product(a, b):
    """Return the product of matrices in float32 or float64."""
    return matmul(a, b) if a.is_cpu else a @ b


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


@kernel(
    lambda x_TH, weight_HE: x_TH.like((x_TH.shape[0], weight_HE.shape[1]), wide_dtype(x_TH)),
    flops=_flops,
    copied=lambda x_TH, _: 2 * _converted(x_TH),
    temporary=lambda x_TH, _: _converted(x_TH),
)
def router_logits(x_TH, weight_HE):
    """Return ``x·W`` in float32, or float64 for float64."""
    x = _wide(x_TH)
    return _product(x, weight_HE.to(x.dtype))


@kernel(
    lambda d_logits_TE, x_TH, weight_HE: (x_TH.like(), weight_HE.like()),
    flops=lambda d_logits_TE, x_TH, weight_HE: 2 * _flops(x_TH, weight_HE),
    copied=lambda d_logits_TE, x_TH, weight_HE: 4 * _converted(x_TH),
    temporary=lambda d_logits_TE, x_TH, weight_HE: 2 * _converted(x_TH),
)
def router_gradients(d_logits_TE, x_TH, weight_HE):
    """Return the gradients of the input and of the weight of ``router_logits``."""
    x, weight = _wide(x_TH), weight_HE.to(d_logits_TE.dtype)
    return _product(d_logits_TE, weight.t()).to(x_TH.dtype), _product(x.t(), d_logits_TE).to(weight_HE.dtype)


def _scores(logits, scoring):
    return logits.sigmoid() if scoring.sigmoid else logits.softmax(-1)


def _normalized_scores(logits, scoring):
    scores = _scores(logits, scoring)
    return scores / scores.sum(-1, keepdim=True) if scoring.sigmoid else scores


def num_statistics(experts: int) -> int:
    """Return the number of a router's statistics (``routing_statistics``)."""
    return 2 * experts + 2


class Scoring(NamedTuple):
    """How logits become the weights of a token's experts.

    Attributes:
        per_token: number of experts of a token.
        sigmoid: scores are sigmoids of the logits; false: their softmax over all experts.
        normalized: the weights of a token are divided by their sum.
    """

    per_token: int
    sigmoid: bool = False
    normalized: bool = False


class Balance(NamedTuple):
    """Factors of the additions to the gradient of a token's logits.

    Attributes:
        loss: factor of Σ load·score over the experts, where ``load`` is the share of tokens of each expert.
        z_loss: factor of log²(Σ exp(logits)).
    """

    loss: float
    z_loss: float


@kernel(lambda logits_TE, bias_E, scoring: logits_TE.like((logits_TE.shape[0], scoring.per_token), "int64"))
def chosen_experts(logits_TE, bias_E, scoring: Scoring):
    """Return the experts [T, K] with the largest scores, int64. ``bias_E`` is added to the scores; None: nothing."""
    scores = _scores(logits_TE, scoring)
    return (scores if bias_E is None else scores + bias_E).topk(scoring.per_token, -1).indices


@kernel(lambda logits_TE, experts_TK, *_: logits_TE.like(experts_TK.shape))
def expert_weights(logits_TE, experts_TK, scoring: Scoring):
    """Return the weights [T, K] of the chosen experts."""
    scores = _scores(logits_TE, scoring).gather(-1, experts_TK)
    return scores / scores.sum(-1, keepdim=True) if scoring.normalized else scores


@kernel(lambda d_weights_TK, logits_TE, *_: logits_TE.like())
def logits_gradient(d_weights_TK, logits_TE, experts_TK, load_E, unpadded_T, scoring: Scoring, balance: Balance):
    """Return the gradient of the logits from the gradient of ``expert_weights`` and from the losses of ``balance``.

    ``load_E``: the load of each expert; None if there is no balance loss. ``unpadded_T``: the tokens that have the
    losses; None: all.
    """
    with torch.enable_grad():
        logits = logits_TE.detach().requires_grad_()
        total = (expert_weights.in_torch(logits, experts_TK, scoring) * d_weights_TK.detach()).sum()
        if balance.loss:
            of_loads_T = (_normalized_scores(logits, scoring) * load_E.detach()).sum(-1)
            total = total + balance.loss * _total(of_loads_T, unpadded_T)
        if balance.z_loss:
            total = total + balance.z_loss * _total(logits.logsumexp(-1).square(), unpadded_T)
        return torch.autograd.grad(total, logits)[0]


def _total(values, unpadded_T):
    """Return the sum of values [T, …] over the unpadded tokens."""
    return values.sum(0) if unpadded_T is None else unpadded_T.to(values.dtype) @ values


@kernel(lambda logits_TE, *_: logits_TE.like((num_statistics(logits_TE.shape[1]),), "float64"))
def routing_statistics(logits_TE, experts_TK, unpadded_T, scoring: Scoring):
    """Return sums over the unpadded tokens, float64 [2·E + 2]. ``unpadded_T``: None for all.

    They are the number of tokens of each expert, the normalized score of each expert, the entropy of the normalized
    scores, and log²(Σ exp(logits)).
    """
    scores = _normalized_scores(logits_TE, scoring).double()
    one = scores.new_ones(()) if unpadded_T is None else unpadded_T.double()[:, None]
    counts = scores.new_zeros(logits_TE.shape[1])
    counts.scatter_add_(0, experts_TK.flatten(), one.expand_as(experts_TK).flatten())
    entropy_T = -torch.special.xlogy(scores, scores).sum(1)
    z_T = logits_TE.logsumexp(-1).double().square()
    sums = (_total(values, unpadded_T) for values in (scores, entropy_T[:, None], z_T[:, None]))
    return torch.cat((counts, *sums))


class LogitsFunction(KernelFunction):
    """``router_logits`` of this rank's features."""

    output, gradient = router_logits, router_gradients


class ExpertWeightsFunction(Function):
    """``expert_weights``, whose backward adds the gradients of the router's own losses."""

    @staticmethod
    def forward(ctx, logits_TE, experts_TK, load_E, unpadded_T, layer: BoundLayer):
        ctx.save_for_backward(logits_TE, experts_TK)
        ctx.load, ctx.unpadded, ctx.layer = load_E, unpadded_T, layer
        return expert_weights(logits_TE, experts_TK, layer.spec.scoring)

    @staticmethod
    def backward(ctx, d_weights_TK):
        spec, each = ctx.layer.spec, 1 / (ctx.layer.spec.layers_of_model * ctx.layer.unpadded_tokens)
        balance = Balance(0.0 if ctx.load is None else spec.balance_rate * spec.experts * each, spec.z_loss * each)
        d_logits_TE = logits_gradient(d_weights_TK, *ctx.saved_tensors, ctx.load, ctx.unpadded, spec.scoring, balance)
        return d_logits_TE, None, None, None, None


class Routing(NamedTuple):
    """The experts of each token, [T, K], and their weights in float32, or float64 for float64."""

    weights: Tensor
    experts: Tensor


@dataclass(frozen=True)
class RouterSpec(LayerSpec):
    """Chooses ``scoring.per_token`` experts for each token, [T, H over y] → ``Routing``.

    Two ways balance the load of the experts. With ``balance="loss"``, the loss of the model contains ``balance_rate · E
    · Σ load·score`` (Switch Transformer, Eq. 4), averaged over all tokens and all routers. ``load`` is the share of the
    previous step's tokens that each expert had. So the gradients do not depend on the division of a batch into
    microbatches. Padding takes part neither in losses nor in loads. With ``balance="bias"``, a bias is added to the
    scores for the choice of experts only. After each step it grows by ``balance_rate`` for an expert with less than the
    mean load, and falls by it for an expert with more (Wang et al., 2024). ``state`` [E] is the load or the bias. The
    step updates it (``Routers``).

    Attributes:
        hidden: features of the residual stream.
        experts: number of experts.
        scoring: computes the weights of experts.
        layers_of_model: number of routers in the model.
        balance: ``loss`` or ``bias``.
        balance_rate: factor of the loss, or change of a bias per step.
        z_loss: factor of log²(Σ exp(logits)), averaged over all tokens and all routers.
        std: standard deviation of the initial weight.
    """

    hidden: int
    experts: int
    scoring: Scoring
    layers_of_model: int
    balance: str = "loss"
    balance_rate: float = 0.0
    z_loss: float = 0.0
    std: float = 0.02

    def parameters(self) -> dict[str, ParameterSpec]:
        shape, layout = (self.hidden, self.experts), Layout(("y",), ())
        mean = self.scoring.per_token / self.experts if self.balance == "loss" else 0.0
        return {
            "weight": ParameterSpec(shape, layout, std=self.std, group="router", summed=BETWEEN_LAYERS),
            "state": ParameterSpec((self.experts,), Layout(()), mean=mean, group=STATE, frozen=True),
        }

    def prepare(self, layer: BoundLayer) -> None:
        layer.unpadded_tokens = 1.0  # in all microbatches of the step, on all ranks
        layer.add_statistics = lambda sums: None  # ``Routers`` adds the sums of a step

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Routing:
        y = layer.context.grid.y
        logits_TE = LogitsFunction.apply(x_TH, layer.weight)
        if y.size > 1:
            (logits_TE,) = await exchanged((logits_TE, summed(y)))
        bias_E, load_E = (layer.state, None) if self.balance == "bias" else (None, layer.state)
        experts_TK = chosen_experts(logits_TE.detach(), bias_E, self.scoring)
        if layer.current_pass.records and layer.weights.schedule.phase == FORWARD:
            layer.add_statistics(routing_statistics(logits_TE.detach(), experts_TK, tokens.unpadded, self.scoring))
        if not self.balance_rate:
            load_E = None
        weights_TK = ExpertWeightsFunction.apply(logits_TE, experts_TK, load_E, tokens.unpadded, layer)
        return Routing(weights_TK, experts_TK)


class Routers:
    """The routers of a stage in training. Each row of ``totals`` belongs to one router of the model.

    Args:
        model: the layers of the stage.
        experts: the names of all routers of the model, with their numbers of experts.
    """

    def __init__(self, model: Any, experts: Mapping[str, int]):
        context, found = model.context, dict(model.named_modules())
        self.shape = len(experts), num_statistics(max(experts.values(), default=0))
        self._totals = torch.zeros(self.shape, dtype=torch.float64, device=model.weights.device)
        self._own = {row: found[name] for row, name in enumerate(experts) if name in found}
        if context.grid.y.index == 0 and (context.training.splits_tokens or context.grid.x.index == 0):
            for row, layer in self._own.items():
                layer.add_statistics = self._totals[row].add_

    def begin(self, unpadded: float) -> None:
        """Start a step with a global number of ``unpadded`` tokens, by which the losses of routers are divided."""
        for layer in self._own.values():
            layer.unpadded_tokens = unpadded

    def totals(self) -> torch.Tensor:
        """Return this rank's statistics of the step, float64 of this ``shape``, for a sum over all ranks of the job.

        Rows of other stages' routers are zero, as are the rows of all but one of the ranks that have the same tokens.
        """
        totals = self._totals.clone()
        self._totals.zero_()
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


def routing_summary(totals: torch.Tensor, ranks: int) -> dict[str, Any]:
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
