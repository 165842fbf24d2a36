"""What users give: names of options, as they may be spelt, and values, as they may come."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from thalweg.errors import OptionError
from thalweg.overrides import is_list
from thalweg.rules import Annealed, Rule
from thalweg.rules.checks import is_known


def check_known(owner: type[Rule] | str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse options that are not known. owner: whose they are, as a rule or by another name."""
    for name in given:
        if name not in known:
            hint = hint_for(owner, name, known, cutoff=0.6) or f"it has {', '.join(sorted(known))}"
            raise OptionError(f"{owner_name(owner)} has no option {name!r}: {hint}")


def check_not_misspelt(owner: type[Rule], name: str, known: Sequence[str]) -> None:
    """Refuse a name that resembles an option, which its writer will have meant."""
    if hint := hint_for(owner, name, known, cutoff=0.85):
        raise OptionError(f"{owner_name(owner)} has no option {name!r}: {hint}")


def owner_name(owner: type[Rule] | str) -> str:
    return owner if isinstance(owner, str) else owner.__name__


def hint_for(owner: type[Rule] | str, name: str, known: Sequence[str], *, cutoff: float) -> str:
    """What to write instead of a name that is no option: as other libraries call it, or a likely misspelling."""
    elsewhere = {} if isinstance(owner, str) else owner.ELSEWHERE
    if name in elsewhere:
        return f"here it is {elsewhere[name]}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def differ(first: Any, second: Any) -> bool:
    """Whether two values of an option differ; what is traced or on a device differs from all else."""
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return any(map(differ, first, second))
    if first is second:
        return False
    try:
        return not (is_known(first) and is_known(second)) or bool(first != second)
    except ValueError:  # an array, which no option is
        return True


def plain(value: Any) -> Any:
    """Numbers of array libraries as Python's own, which never widen what they multiply."""
    if type(value) in (float, int, bool) or isinstance(value, Annealed):
        return value
    if is_list(value):
        return tuple(map(plain, value))
    if type(value).__name__ in ("bool_", "bool") and type(value).__module__ == "numpy":
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value
