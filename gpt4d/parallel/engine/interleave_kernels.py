"""The functions of chunks in torch."""

import torch


def join(*chunks):
    return torch.cat(chunks)
