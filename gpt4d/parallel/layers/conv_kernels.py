"""The kernels of convolutions. Weights are [out, in, kh, kw], or [in, out, kh, kw] with ``in_first``."""

import torch
import torch.nn.functional as F


def choose_algorithms(device: torch.device, replicates: bool) -> None:
    """Determine how cuDNN and MIOpen choose the algorithms of convolutions on a GPU.

    cuDNN measures which algorithm is the fastest, unless results must not depend on it: if ranks compute equal values
    from equal inputs (``replicates``), or torch uses deterministic algorithms. MIOpen takes minutes to measure.

    Convolutions in fp32 do not use TF32, which torch permits by default for convolutions, but not for matrix products.
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.allow_tf32 = False
    reproducible = replicates or torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.deterministic = replicates
    torch.backends.cudnn.benchmark = not reproducible and torch.version.hip is None


def enlarged(x, factor: int):
    """Upsample [B, H, W, C] by an integer factor with nearest-neighbor interpolation."""
    b, h, w, c = x.shape
    return x[:, :, None, :, None].expand(b, h, factor, w, factor, c).reshape(b, h * factor, w * factor, c)


def sums_of_repeated(d_large, factor: int):
    """Sum [B, H, W, C] over blocks of ``factor × factor`` pixels."""
    b, h, w, c = d_large.shape
    return d_large.reshape(b, h // factor, factor, w // factor, factor, c).sum((2, 4)).contiguous()


def _out_first(weight: torch.Tensor, in_first: bool) -> torch.Tensor:
    return weight.transpose(0, 1) if in_first else weight


def convolution(x, weight, bias, settings):
    """Apply ``F.conv2d`` to the channels-last ``x`` [B, H, W, C]."""
    weight = _out_first(weight, settings.in_first)
    out = F.conv2d(x.movedim(-1, 1), weight, bias, settings.stride, settings.padding)
    return out.movedim(1, -1).contiguous()


def convolution_input_gradient(d_out, weight, x, settings):
    """Return the gradient of the upsampled input, [B, H, W, C]; ``x`` gives the shape only."""
    b, h, w, c = x.shape
    factor = settings.upsampling
    if factor > 1:
        x = x.new_empty(b, h * factor, w * factor, c)
    d_x = _gradient(d_out, x.movedim(-1, 1), _out_first(weight, settings.in_first), settings, 0).movedim(1, -1)
    return d_x if factor > 1 else d_x.contiguous()


def convolution_weight_gradient(d_out, x, weight, settings):
    """Return the gradient in the layout of ``weight``; on a CPU, in the dtype of ``weight``."""
    dtype = weight.dtype if x.is_cpu else x.dtype
    d_out, x = d_out.to(dtype), x.movedim(-1, 1).to(dtype)
    shape = (d_out.shape[-1], x.shape[1], *weight.shape[2:])
    return _out_first(_gradient(d_out, x, x.new_empty(1).expand(shape), settings, 1), settings.in_first)


def as_stored(gradient, weight):
    """Convert a gradient to the dtype of ``weight`` and make it contiguous."""
    return gradient.to(weight.dtype).contiguous()


def _gradient(d_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, settings, which: int) -> torch.Tensor:
    """Return the gradient of ``x`` (``which=0``) or of ``weight`` (1); only its shape and strides are read."""
    mask, no_dilation, no_output_padding = [which == 0, which == 1, False], (1, 1), (0, 0)
    return torch.ops.aten.convolution_backward(
        d_out.movedim(-1, 1),
        x,
        weight,
        None,
        settings.stride,
        settings.padding,
        no_dilation,
        False,
        no_output_padding,
        1,
        mask,
    )[which]
