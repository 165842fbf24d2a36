"""Tensors of fewer than two axes, which rules with a trust ratio may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from thalweg.arrays import Shape

#: What holds for a tensor that is left out, as far as a rule has such options.
EXEMPT: Mapping[str, Any] = MappingProxyType({"weight_decay": 0.0, "trust": False})

R = TypeVar("R")


def exempted(rule: R, shape: Shape) -> R:
    """A rule as its option ``exempt`` has it for a parameter of this shape."""
    known: Any = rule
    if known.exempt is None:
        return rule
    is_vector = len(shape) - known.stacked_axes < 2
    made: R = replace(known, exempt=None, **(EXEMPT if is_vector else {}))
    return made


def treatment_of(rule: Any) -> str:
    """What a tensor that is not left out meets, in words."""
    if not rule.trust:
        return "no trust ratio"
    return "trust ratio, norm kept" if rule.keep_norms else "trust ratio"
