"""The functions of the toy with tensors that skip blocks, in torch. Shapes as in tests/seams/toy.py."""

import torch


def of_rows(x_TF):
    return (x_TF[:, :2] > 0).sum(1), x_TF[:, 2] > 0


def weighted(x_TH, integers_T):
    return 0.5 * x_TH * integers_T.unsqueeze(1)


def flipped(x_TH, mask_T):
    return torch.where(mask_T.unsqueeze(1), x_TH, -0.5 * x_TH)


def scaled(x_TH, scales_TH):
    return x_TH * (1 + scales_TH)


def tanh(x_TH):
    return x_TH.tanh()
