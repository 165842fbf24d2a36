"""Which parameters an entry of ``overrides`` or of a mixture is for: patterns, and those that go by one word."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from thalweg.errors import OptionError
from thalweg.rules.checks import require
from thalweg.rules.exempt import EXEMPT

#: Chooses parameters: a glob, a compiled regular expression (searched), or a predicate.
Pattern: TypeAlias = str | re.Pattern[str] | Callable[[str, Any], bool]
#: Ordered: where several entries match, all apply and later ones win.
OverrideList: TypeAlias = Sequence[tuple[Pattern, Mapping[str, Any]]]
#: The same as users write it: "standard" stands for an entry, or for a list of this entry alone.
Overrides: TypeAlias = Literal["standard"] | Sequence[Literal["standard"] | tuple[Pattern, Mapping[str, Any]]]

#: The name of a module that normalises, in torch or flax: norm1, input_layernorm, LayerNorm_0, ln_2, bn3.
NORM = re.compile(r"norm|^(ln|bn)(_|\d|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Standard:
    """The pattern of ``overrides="standard"``: tensors of one axis, and norms and biases of more."""

    def __call__(self, name: str, parameter: Any) -> bool:
        module, _, own = name.rpartition(".")
        return parameter.ndim < 2 or "bias" in own or NORM.search(module.rpartition(".")[2]) is not None

    def __repr__(self) -> str:
        return "'standard'"


STANDARD = Standard()


def check_overrides(overrides: Any) -> OverrideList:
    """The entries of overrides, that of "standard" written out."""
    wanted = "overrides must be a list of (pattern, options), such as [('*.bias', dict(weight_decay=0))], or 'standard'"
    overrides = ["standard"] if overrides == "standard" else overrides
    require(is_list(overrides), f"{wanted}, got {overrides!r}")
    entries = tuple((STANDARD, EXEMPT) if entry == "standard" else entry for entry in overrides)
    for entry in entries:
        pair = is_list(entry) and len(entry) == 2 and isinstance(entry[1], Mapping)
        require(pair, f"{wanted}, got the entry {entry!r}")
        check_pattern(entry[0])
    return entries


def as_written(overrides: OverrideList) -> list[Any]:
    """Entries as a user would write them."""
    return ["standard" if isinstance(p, Standard) else (p, dict(options)) for p, options in overrides]


def is_list(value: Any) -> bool:
    """Whether a value is a list of any kind: Python's, or that of a configuration library."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def check_pattern(pattern: Any) -> None:
    chooses = isinstance(pattern, (str, re.Pattern)) or callable(pattern)
    require(chooses, f"a pattern must be a glob, a compiled regular expression or a function, got {pattern!r}")
    if not isinstance(pattern, (str, re.Pattern)):
        check_predicate(pattern)


def check_predicate(function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with a name and a parameter."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that does not tell
        return
    try:
        signature.bind("name", None)
    except TypeError:
        raise OptionError(
            f"a pattern that is a function takes (name, parameter) and answers True or False, got one of {signature}"
        ) from None


def matches(pattern: Pattern, name: str, parameter: Any) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return bool(pattern(name, parameter))
