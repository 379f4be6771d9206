"""The kernels of experts. On GPUs one kernel computes the products of all experts; on CPUs each expert has its own."""

import torch
import torch.nn.functional as F

from gpt4d.parallel.layers.linear_kernels import matmul, product


def _grouped(x) -> bool:
    """Return whether the grouped kernel multiplies: for bf16 on GPUs."""
    return not x.is_cpu and x.dtype == torch.bfloat16


def _ends(rows_E):
    return rows_E.cumsum(0, dtype=torch.int32)


def _joined(parts):
    """Concatenate the results of experts. The result of one expert is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _matrices(weight):
    return weight.flatten(2)


def grouped_linear(x_RK, weight, rows_E):
    """Multiply each expert's rows by its weight."""
    if _grouped(x_RK):
        out = F.grouped_mm(x_RK, _matrices(weight), offs=_ends(rows_E))
    else:
        parts = x_RK.split(rows_E.tolist())
        out = _joined([matmul(part, matrix) for part, matrix in zip(parts, _matrices(weight), strict=True)])
    return out.view(len(x_RK), *weight.shape[2:])


def grouped_input_gradient(d_out_RN, weight, x_RK, rows_E):
    """Multiply each expert's rows by its transposed weight."""
    d_rows, matrices = d_out_RN.flatten(1), _matrices(weight).transpose(1, 2)
    if _grouped(d_rows):
        return F.grouped_mm(d_rows, matrices, offs=_ends(rows_E))
    parts = d_rows.split(rows_E.tolist())
    return _joined([matmul(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def grouped_weight_gradient(d_out_RN, x_RK, weight, added_to, rows_E):
    """Return the products of each expert's transposed input with its output's gradient, in the dtype of ``weight``.

    torch's grouped kernel supports only results in bf16, to which each microbatch's gradient is rounded once.
    """
    d_rows = d_out_RN.flatten(1)
    if _grouped(x_RK):
        gradient = F.grouped_mm(x_RK.t(), d_rows, offs=_ends(rows_E)).view(weight.shape)
        return gradient.to(weight.dtype) if added_to is None else added_to.add_(gradient)
    parts = zip(x_RK.split(rows_E.tolist()), d_rows.split(rows_E.tolist()), strict=True)
    if added_to is None:
        return _joined([product(x.t(), d, weight.dtype) for x, d in parts]).view(weight.shape)
    for total, (x, d) in zip(_matrices(added_to), parts, strict=True):
        product(x.t(), d, weight.dtype, total)
    return added_to


def in_expert_order(experts, count: int):
    """Sort stably, so that rows of one expert keep their order."""
    experts = experts.flatten()
    order = experts.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    rows = order.new_zeros(count).scatter_add_(0, experts, order.new_ones(()).expand(len(experts)))
    return order, place, rows


def experts_of_rows(rows_of_ranks, ranks: int, total: int):
    """Repeat the numbers of the experts, rank by rank."""
    experts = torch.arange(len(rows_of_ranks) // ranks, device=rows_of_ranks.device).repeat(ranks)
    return experts.repeat_interleave(rows_of_ranks, output_size=total)


def selected_rows(x, order, each: int):
    """Gather rows."""
    return x.index_select(0, order if each == 1 else order // each)


def summed_rows(rows, place, each: int):
    """Gather rows and sum them in float32, or float64 for float64."""
    return rows.index_select(0, place).unflatten(0, (-1, each)).sum(1)


def weighted_swiglu(gate_and_up, weights):
    """Return ``silu(gate) · up · weight``."""
    gate, up = gate_and_up.unbind(-2)
    return (F.silu(gate) * up * weights).to(gate_and_up.dtype)


def weighted_swiglu_gradients(d_out, gate_and_up, weights):
    """Return the gradients of ``gate_and_up`` and of ``weights``."""
    gate, up = gate_and_up.unbind(-2)
    activated = F.silu(gate)
    d_weights = (d_out * activated * up).sum(-1, keepdim=True, dtype=weights.dtype)
    d_product = (d_out * weights).to(d_out.dtype)
    d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
    return torch.stack((d_gate, d_product * activated), -2), d_weights
