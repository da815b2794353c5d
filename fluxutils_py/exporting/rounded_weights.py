"""A copy of a model with the weights that a header of 8 bits holds, to say what they cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fluxutils_py.nn.closed_form_model import ClosedFormModel
from fluxutils_py.nn.copying import deep_copy
from fluxutils_py.steps.operations import quantized


def with_rounded_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU whose products have the weights that 8 bits leave.

    The weights of products are the matrices ``weight...`` (n_out, n_in) of its modules.
    """
    model = deep_copy(model)
    # a header has one product for each layer before such a head
    parts: dict[nn.Module, Any] = {
        m.head: [layer.n_out for layer in m.layers]
        for m in model.modules()
        if isinstance(m, ClosedFormModel)
    }
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith("weight") and weight.dim() == 2:
                    for part in weight.split(parts.get(module, weight.shape[1]), 1):
                        integers, scale = quantized(part.t().numpy())
                        part.copy_(torch.from_numpy(integers * scale).t())
    return model
