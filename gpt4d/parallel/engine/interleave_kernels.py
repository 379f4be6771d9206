"""Torch kernels for the chunks of a microbatch."""

import torch


def join(*chunks):
    """Concatenate chunks along dim 0."""
    return torch.cat(chunks)
