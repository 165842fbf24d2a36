"""The options of each optimizer as a ``TypedDict``, made from its rule's fields. Type checkers read options.pyi."""

from __future__ import annotations

from typing import Any, TypedDict

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.rules import RULES, Rule
from thalweg.signatures import Pair, Schedulable, Triple, types_of

CommonOptions: Any = TypedDict("CommonOptions", types_of(Rule), total=False)  # type: ignore[misc]
_RULES: dict[str, Any] = {
    f"{name}Options": TypedDict(f"{name}Options", types_of(rule), total=False)  # type: ignore[misc]
    for name, rule in RULES.items()
}
globals().update(_RULES)

__all__ = ["CommonOptions", "DType", "Pair", "Schedulable", "StateDType", "Triple", *_RULES]
