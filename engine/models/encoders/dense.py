"""The dense layer between pooling and normalisation, computed as in sentence-transformers' Dense."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from common.errors import ConfigError
from engine.models.encoders.files import DenseFiles
from engine.models.encoders.weights import checked, tensors


class DenseLayer:
    """One layer, in fp32 on the model's device."""

    def __init__(self, files: DenseFiles, device: torch.device) -> None:
        """Read the weights; ConfigError names a tensor that is missing or misshapen."""
        found = tensors(files.weights)
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (files.outputs, files.inputs)}
        if files.bias:
            shapes["linear.bias"] = (files.outputs,)
        for name in shapes:
            if name not in found:
                raise ConfigError(f"{files.weights}: tensor {name!r} is missing")
        read = {
            name: checked(found[name], name, shape, files.weights).to(device)
            for name, shape in shapes.items()
        }
        self._weight, self._bias = read["linear.weight"], read.get("linear.bias")
        self._activate: torch.nn.Module = getattr(torch.nn, files.activation)()

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return fp32 (texts, outputs) for fp32 (texts, inputs)."""
        found: Tensor = self._activate(F.linear(vectors, self._weight, self._bias))
        return found
