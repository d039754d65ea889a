"""Copying new weights into a model, all or nothing."""

from collections.abc import Mapping
from typing import Any

import torch


def copy_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` (name -> tensor) into the parameters and buffers of ``model``. Tied weights need only one name.

    Raises:
        ValueError: a parameter is missing, a name is unknown or a shape differs; nothing has been written then.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, torch.Tensor] = {**parameters, **dict(model.named_buffers())}
    unknown = sorted(set(weights) - set(own))
    given = {id(own[name]) for name in weights if name in own}
    missing = sorted(name for name, tensor in parameters.items() if id(tensor) not in given)
    if unknown or missing:
        raise ValueError(f"weights do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")
    wrong = [name for name, tensor in weights.items() if tensor.shape != own[name].shape]
    if wrong:
        found = ", ".join(f"{name} {tuple(weights[name].shape)} for {tuple(own[name].shape)}" for name in wrong[:5])
        raise ValueError(f"weights do not fit the model: {found}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
