"""The kernels of routers."""

import torch

from gpt4d.parallel.layers.linear_kernels import matmul


def _product(a, b):
    """Return the product of matrices in float32 or float64."""
    return matmul(a, b) if a.is_cpu else a @ b


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def router_logits(x_TH, weight_HE):
    """Multiply in float32 or float64."""
    x = _wide(x_TH)
    return _product(x, weight_HE.to(x.dtype))


def router_gradients(d_logits_TE, x_TH, weight_HE):
    """Return the gradients of both factors, each in the factor's dtype."""
    x, weight = _wide(x_TH), weight_HE.to(d_logits_TE.dtype)
    return _product(d_logits_TE, weight.t()).to(x_TH.dtype), _product(x.t(), d_logits_TE).to(weight_HE.dtype)


def _scores(logits, scoring):
    return logits.sigmoid() if scoring.sigmoid else logits.softmax(-1)


def _normalized_scores(logits, scoring):
    scores = _scores(logits, scoring)
    return scores / scores.sum(-1, keepdim=True) if scoring.sigmoid else scores


def chosen_experts(logits_TE, bias_E, scoring):
    """Return the indices of the largest scores, in descending order."""
    scores = _scores(logits_TE, scoring)
    return (scores if bias_E is None else scores + bias_E).topk(scoring.per_token, -1).indices


def expert_weights(logits_TE, experts_TK, scoring):
    """Return the scores of the chosen experts, normalized if ``scoring`` says so."""
    scores = _scores(logits_TE, scoring).gather(-1, experts_TK)
    return scores / scores.sum(-1, keepdim=True) if scoring.normalized else scores


@torch.enable_grad()
def logits_gradient(d_weights_TK, logits_TE, experts_TK, load_E, unpadded_T, scoring, balance):
    """Differentiate the weights and the losses with torch's autograd."""
    logits = logits_TE.detach().requires_grad_()
    total = (expert_weights(logits, experts_TK, scoring) * d_weights_TK.detach()).sum()
    if balance.loss:
        of_loads_T = (_normalized_scores(logits, scoring) * load_E.detach()).sum(-1)
        total = total + balance.loss * _total(of_loads_T, unpadded_T)
    if balance.z_loss:
        total = total + balance.z_loss * _total(logits.logsumexp(-1).square(), unpadded_T)
    return torch.autograd.grad(total, logits)[0]


def _total(values, unpadded_T):
    """Return the sum of values [T, …] over the unpadded tokens."""
    return values.sum(0) if unpadded_T is None else unpadded_T.to(values.dtype) @ values


def routing_statistics(logits_TE, experts_TK, unpadded_T, scoring):
    """Return the sums over the tokens."""
    scores = _normalized_scores(logits_TE, scoring).double()
    one = scores.new_ones(()) if unpadded_T is None else unpadded_T.double()[:, None]
    counts = scores.new_zeros(logits_TE.shape[1])
    counts.scatter_add_(0, experts_TK.flatten(), one.expand_as(experts_TK).flatten())
    entropy_T = -torch.special.xlogy(scores, scores).sum(1)
    z_T = logits_TE.logsumexp(-1).double().square()
    sums = (_total(values, unpadded_T) for values in (scores, entropy_T[:, None], z_T[:, None]))
    return torch.cat((counts, *sums))
