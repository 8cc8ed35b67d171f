"""Activations between the parts of a model, by name; can be scripted."""

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation of `config.Activation`; "none" gives `x` itself."""
    if name == "relu":
        return F.relu(x)
    if name == "hardtanh":
        return F.hardtanh(x)
    if name == "sigmoid":
        return torch.sigmoid(x)
    return x
