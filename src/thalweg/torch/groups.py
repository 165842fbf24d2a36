"""Parameter groups: options as torch keeps them, plain values in a dictionary that users may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thalweg.errors import OptionError
from thalweg.rules import RULES, Annealed
from thalweg.settings import Overrides, Settings, check_known, option_names

#: The layout of state and groups. Newer layouts are refused by older versions.
LAYOUT = 1
#: What a group has beside the options of its rule.
BESIDE = ("params", "param_names", "lr", "capturable", "rule", "layout")
#: What torch and its schedulers write into groups.
FOREIGN = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "lr_scale")

#: Options of torch's own optimizers that we do not have, with what to do instead.
REFUSED = {
    "foreach": "say engine='foreach' or engine='reference'",
    "fused": "say engine='auto', which takes the fastest there is",
    "differentiable": "steps are taken without a graph; differentiate through thalweg.rules with torch.func instead",
}


def to_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a checkpoint can hold them."""
    return {
        name: ("annealed", value.high, value.low, value.decay, value.flat) if isinstance(value, Annealed) else value
        for name, value in options.items()
    }


def from_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: Annealed(*value[1:])
        if isinstance(value, (tuple, list)) and value[:1] in (("annealed",), ["annealed"])
        else value
        for name, value in options.items()
    }


def check_group(rule_name: str, group: Mapping[str, Any]) -> None:
    """Refuse a misspelt option, and functions, which no checkpoint could hold."""
    known = (*option_names(RULES[rule_name]), *BESIDE, *FOREIGN)
    for name in group:
        if name in REFUSED:
            raise OptionError(f"{rule_name} has no option {name!r}: {REFUSED[name]}")
        if name not in known:
            check_known(rule_name, {name: None}, option_names(RULES[rule_name]))
    for name, value in group.items():
        if callable(value) and name not in ("params",) and not isinstance(value, Tensor):
            raise OptionError(f"{name} cannot be a function here: set the group's value, or use a scheduler for lr")


class GroupSettings:
    """The settings of a group, made anew only when one of its options has changed."""

    def __init__(self, rule_name: str, overrides: Overrides) -> None:
        self.rule_name, self.overrides = rule_name, overrides
        self.names = option_names(RULES[rule_name])
        self.known: dict[int, tuple[list[Any], Settings]] = {}

    def of(self, index: int, group: Mapping[str, Any]) -> Settings:
        values = [group[name] for name in self.names]
        cached = self.known.get(index)
        if cached is not None and same(cached[0], values):
            return cached[1]
        settings = self.made(group)
        self.known[index] = values, settings
        return settings

    def made(self, group: Mapping[str, Any]) -> Settings:
        given = from_plain({name: group[name] for name in self.names})
        return Settings(self.rule_name, given, None, self.overrides)


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return all(
        a is b or (type(a) is type(b) and not isinstance(a, Tensor) and a == b)
        for a, b in zip(first, second, strict=True)
    )
