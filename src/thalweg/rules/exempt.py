"""Trust ratios: what rules that have them share. Tensors of fewer than two axes may be left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from thalweg.arrays import Shape
from thalweg.rules.rule import Rule

#: What holds for a tensor that is left out, as far as a rule has such options.
EXEMPT: Mapping[str, Any] = MappingProxyType({"weight_decay": 0.0, "trust": False})


class TrustRule(Rule):
    """A rule that has a trust ratio for each tensor, and these options."""

    trust: bool
    exempt: Literal["vectors"] | None
    keep_norms: bool

    @property
    def looks_at_shapes(self) -> bool:
        return self.trust

    def for_shape(self, shape: Shape) -> Rule:
        if self.exempt is None:
            return self
        options: Any = {"exempt": None, **(EXEMPT if len(shape) - self.stacked_axes < 2 else {})}
        return replace(self, **options)

    def treatment(self, shape: Shape) -> str:
        if not self.trust:
            return "no trust ratio"
        return "trust ratio, norm kept" if self.keep_norms else "trust ratio"
