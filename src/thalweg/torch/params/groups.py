"""Parameter groups: options as torch keeps them, plain values in a dictionary that users may change."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from thalweg.errors import OptionError
from thalweg.given import check_known, check_not_misspelt
from thalweg.rules import Annealed, Rule
from thalweg.rules.checks import check_choice, check_flag, require
from thalweg.settings import Entry, RuleOptions, Settings, option_names
from thalweg.torch.params.rates import rate_shown
from thalweg.torch.sharding.agreement import BESIDE_OPTIONS

#: The name of a way to step parameters, as users give it.
EngineName: TypeAlias = Literal["auto", "reference", "foreach", "fused"]

#: The layout of state and groups. Newer layouts are refused by older versions.
LAYOUT = 1
#: What a group has beside the options of its rule. lr_is_scale: its lr multiplies the step size that the rule makes.
BESIDE = ("params", "param_names", *BESIDE_OPTIONS)
#: Keys of schedulers and trainers that resemble options. All that resembles none is kept as well.
FOREIGN = ("max_momentum", "base_momentum", "lr_scale", "wd_scale", "weight_decay_scale")
#: Left out of groups where it is None: schedulers that cycle momentum write it into every group that shows it.
SHOWN_IF_SET = ("momentum",)


def engine_meant(engine: Any, foreach: Any, fused: Any, differentiable: Any) -> Any:
    """The engine that arguments of torch's own optimizers ask for, if they ask for one; checked."""
    check_choice("engine", engine, "auto", "reference", "foreach", "fused")
    for name, value in (("foreach", foreach), ("fused", fused)):
        check_choice(name, value, None, True, False)
    check_flag("differentiable", differentiable)
    require(
        not differentiable,
        "differentiable=True is not supported: a step records no graph; differentiate thalweg.rules with torch.func",
    )
    require(not (foreach and fused), "foreach=True and fused=True are two engines: set only one of them")
    meant = "foreach" if foreach else "fused" if fused else "auto"
    if foreach is False and fused is False:
        meant = "reference"
    wish = f"foreach={foreach}, fused={fused} means engine={meant!r}, but engine={engine!r} was given: give only one"
    require("auto" in (meant, engine) or meant == engine, wish)
    return meant if engine == "auto" else engine


def made_by(rule: type[Rule]) -> dict[str, Any]:
    """What a group, and so a checkpoint, says of the rule that made its state."""
    return {"rule": rule.__name__, "rule_version": rule.version}


def defaults_of(entry: RuleOptions) -> dict[str, Any]:
    """What a group of an entry holds, unless it says otherwise."""
    rate = rate_shown(entry.settings.base.rule, entry.lr)
    return {**rate, **to_plain(entry.settings.options), **made_by(entry.rule)}


def to_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a group shows them and a checkpoint can hold them."""
    return {
        name: ("annealed", value.high, value.low, value.decay, value.flat) if isinstance(value, Annealed) else value
        for name, value in options.items()
        if value is not None or name not in SHOWN_IF_SET
    }


def from_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: Annealed(*value[1:])
        if isinstance(value, (tuple, list)) and value[:1] in (("annealed",), ["annealed"])
        else value
        for name, value in options.items()
    }


def check_options(rule: type[Rule], options: Mapping[str, Any]) -> None:
    """Refuse arguments that are no options, and functions, which no checkpoint could hold."""
    check_known(rule, options, option_names(rule))
    check_no_functions(options)


def check_group(rule: type[Rule], group: Mapping[str, Any]) -> None:
    """Refuse a misspelt option; keys of other tools, which resemble none, are theirs to keep here."""
    options = option_names(rule)
    require(
        not group.get("use_fallback"),
        f"use_fallback=True asks for AdamW in place of {rule.__name__}, which is the only rule of this optimizer: "
        "give these parameters to a mixture, such as thalweg.torch.kron_adamw(model)",
    )
    for name in group:
        if name not in options and name not in BESIDE and name not in FOREIGN:
            check_not_misspelt(rule, name, options)
    check_no_functions({name: group[name] for name in (*options, "lr") if name in group})


def check_no_functions(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if callable(value) and not isinstance(value, Tensor):
            raise OptionError(f"{name} cannot be a function in torch: set the group's value, or use a scheduler for lr")


def loaded_group(
    rule: type[Rule], saved: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """A group of a saved state, for a group of this optimizer: its options, with what other tools keep in either."""
    ours = {*BESIDE, *option_names(rule)}
    foreign = {key: value for key, value in own.items() if key not in ours}
    filled = {key: value for key, value in defaults.items() if key not in (*SHOWN_IF_SET, "lr_is_scale")}
    earlier = rule.first_options()  # for options that are newer than the state
    group = {**filled, **earlier, **foreign, **{key: value for key, value in saved.items() if key != "made_with"}}
    # loaders that keep no tuples make lists of them
    group = {key: tuple(v) if isinstance(v, list) and key in ours else v for key, v in group.items()}
    group["params"] = list(saved["params"])
    # names stay: a loader that goes by name may bring those of another order
    group.pop("param_names", None)
    group.update({key: own[key] for key in ("param_names", "entry") if key in own})
    if "lr_is_scale" in own:
        group.setdefault("lr_is_scale", group["lr"] is None)
        if group["lr"] is None:  # as versions before wrote it
            group["lr"] = 1.0
    return to_plain(group)


class GroupSettings:
    """The settings of a group, made anew only when one of its options has changed.

    entries: the rules of an optimizer. A group's "entry" is the place of its own among them.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.known: dict[int, tuple[RuleOptions, list[Any], Settings]] = {}

    def entry_of(self, group: Mapping[str, Any]) -> RuleOptions:
        place: Any = group.get("entry", 0)
        if place not in range(len(self.entries)):
            raise OptionError(
                f"entry={place!r} in a parameter group is no entry of this optimizer, which has {len(self.entries)}: "
                "leave it out of groups that come from another mixture"
            )
        entry: RuleOptions = self.entries[place][1]
        return entry

    def of(self, index: int, group: Mapping[str, Any]) -> Settings:
        entry = self.entry_of(group)
        given = [group.get(name) for name in option_names(entry.rule)]
        values = [tuple(v) if isinstance(v, list) else v for v in given]  # a list may be edited where it is
        cached = self.known.get(index)
        if cached is not None and cached[0] is entry and same(cached[1], values):
            return cached[2]
        settings = self.made(group)
        self.known[index] = entry, values, settings
        return settings

    def made(self, group: Mapping[str, Any]) -> Settings:
        entry = self.entry_of(group)
        given = from_plain({name: group[name] for name in option_names(entry.rule) if name in group})
        return Settings(entry.rule, given, None, entry.settings.overrides)


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return all(map(operator.is_, first, second)) or all(
        a is b or (type(a) is type(b) and not isinstance(a, Tensor) and a == b)
        for a, b in zip(first, second, strict=True)
    )
