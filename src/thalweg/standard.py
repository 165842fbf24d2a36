"""Overrides by one word: what most recipes leave alone, tensors of one axis before all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

#: The name of a module that normalises, in torch or flax: norm1, input_layernorm, LayerNorm_0, ln_2, bn3.
NORM = re.compile(r"norm|^(ln|bn)(_|\d|$)", re.IGNORECASE)
#: What holds for them, as far as a rule has such options.
EXEMPT: Mapping[str, Any] = MappingProxyType({"weight_decay": 0.0, "trust": False})


@dataclass(frozen=True)
class Standard:
    """The pattern of ``overrides="standard"``: tensors of one axis, and norms and biases of more."""

    def __call__(self, name: str, parameter: Any) -> bool:
        module, _, own = name.rpartition(".")
        return parameter.ndim < 2 or "bias" in own or NORM.search(module.rpartition(".")[2]) is not None

    def __repr__(self) -> str:
        return "'standard'"


STANDARD = Standard()
