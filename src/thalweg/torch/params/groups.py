"""What users gave: parameters in groups, with their names, options and learning rates.

Groups are the truth, and are looked at again before every step. Trainers exchange parameters inside a group (FSDP2 in
accelerate), move them to another group, or replace one together with its state (densification in Gaussian splatting),
without notice.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from thalweg.arrays import Shape
from thalweg.errors import HintWarning, OptionError, ParameterError, say_where, warn
from thalweg.explain import list_hints
from thalweg.given import (
    OverrideList,
    Overrides,
    Pattern,
    check_overrides,
    hint_for,
    places_of,
    plain,
    warn_of_unused,
)
from thalweg.rules import RULES, Annealed, Rule
from thalweg.rules.checks import check_choice, check_flag, require
from thalweg.rules.spikes import Spikes
from thalweg.settings import JOINT, WHOLE_STEP, RuleOptions, around_options, option_names
from thalweg.torch.params.checks import check_exchanged, check_parameter, reason_against_flat
from thalweg.torch.params.rules import Rules, check_chosen
from thalweg.torch.sharding.agreement import BESIDE_OPTIONS

Params: TypeAlias = Iterable[Any]
Rate: TypeAlias = float | Tensor | None
#: The name of a way to step parameters, as users give it.
EngineName: TypeAlias = Literal["auto", "reference", "foreach", "fused"]
Group: TypeAlias = Mapping[str, Any]

#: The layout of state and groups, and of those saved in eval mode. Newer ones are refused by older versions.
LAYOUT, EVALUATED_LAYOUT = 1, 2
#: What a group holds beside options, in lists.
MEMBERS = ("params", "param_names")
#: In the place of these where values are remembered: parameters are not to be kept alive.
NO_MEMBERS = dict.fromkeys(MEMBERS)
#: What a group has beside the options of its rule. lr_is_scale: its lr multiplies the step size that the rule makes.
BESIDE = (*MEMBERS, *BESIDE_OPTIONS)
#: Keys of schedulers and trainers that resemble options. All that resembles none is kept as well.
FOREIGN = ("max_momentum", "base_momentum", "lr_scale", "wd_scale", "weight_decay_scale")
#: Left out of groups where it is None: schedulers that cycle momentum write it into every group that shows it.
SHOWN_IF_SET = ("momentum",)
#: Asked of groups at every step.
NAMES_OF = operator.methodcaller("get", "param_names")


class Known(NamedTuple):
    """What was found of a group."""

    #: Its entry, all values of the group but its members, and of the first what concerns the whole step; empty where
    #: one is a list, which may be edited in its place.
    values: list[Any]
    #: Its entry, and the values of the options alone.
    given: list[Any]
    options: RuleOptions


class Groups:
    """The parameter groups of one optimizer, as they were at the last look.

    rules: what it steps by. A group's "entry" is the place of its own among several.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        #: The parameters of all groups, and the name and the group of each.
        self.params: list[Tensor] = []
        self.places: dict[Tensor, tuple[str, int]] = {}
        self.sizes: list[int] = []
        self.names: list[list[str] | None] = []
        #: By the address of a group: tools take empty groups away. Parameters themselves are not kept before a first
        #: step, since trainers want to free them.
        self.shapes: dict[int, list[Shape]] = {}
        #: The options of each group, and the values that they were made of.
        self.known: dict[int, Known] = {}
        self.are_reported = self.rates_differ = False

    # ---- which parameters there are

    def look_again(self, groups: Sequence[Group]) -> bool:
        """Whether groups hold other parameters, or other names, than before. On any error nothing is taken over."""
        # whole lists, compared by C code: this is asked at every step
        sizes = [len(group["params"]) for group in groups]
        params = list(chain.from_iterable(group["params"] for group in groups))
        if sizes == self.sizes and self.have_same_names(groups) and all(map(operator.is_, params, self.params)):
            return False
        places = self.find_places(groups)
        check_names(groups, self.rules.overrides)
        self.places, self.sizes, self.params = places, sizes, params
        self.note_shapes(groups)
        given = [group.get("param_names") for group in groups]
        self.names = [None if names is None else list(names) for names in given]
        return True

    def have_same_names(self, groups: Sequence[Group]) -> bool:
        """Whether parameters are named as at the last look."""
        return list(map(NAMES_OF, groups)) == self.names

    def find_places(self, groups: Sequence[Group]) -> dict[Tensor, tuple[str, int]]:
        """The name and the group of every parameter; those that are new are checked."""
        against_flat = [reason_against_flat(self.options_at(groups, index)) for index in range(len(groups))]
        for index, (group, reason) in enumerate(zip(groups, against_flat, strict=True)):
            tensors = [p for p in group["params"] if isinstance(p, torch.Tensor)]
            check_exchanged(index, self.shapes.get(id(group), []), tensors, reason)
        known = set(map(id, self.params))
        places: dict[Tensor, tuple[str, int]] = {}
        for name, p, index in homes_in(groups):
            if not isinstance(p, torch.Tensor):
                raise ParameterError(f"parameter {name!r} in group {index} must be a tensor, got {type(p).__name__}")
            if p in places:
                raise ParameterError(
                    f"parameter {name!r} in group {index} is also {places[p][0]!r} in group {places[p][1]}: "
                    "each parameter may appear only once"
                )
            if id(p) not in known:
                check_parameter(name, p, against_flat[index])
            places[p] = name, index
        return places

    def note_shapes(self, groups: Sequence[Group]) -> None:
        """Remember what groups hold; one that is empty for now, as DeepSpeed has it between steps, held it before."""
        now = {id(group): [tuple(p.shape) for p in group["params"]] for group in groups}
        self.shapes = {key: shapes or self.shapes.get(key, []) for key, shapes in now.items()}

    # ---- new groups

    @property
    def whole(self) -> dict[str, Any]:
        """The options of the whole step, which are the same in all entries."""
        return {name: self.rules.at(0).options[name] for name in WHOLE_STEP}

    @property
    def defaults(self) -> dict[str, Any]:
        """What groups of all entries hold, unless they say otherwise."""
        return to_plain(self.whole) if self.rules.are_mixed else defaults_of(self.rules.at(0))

    def defaults_for(self, group: Group, defaults: Group) -> dict[str, Any]:
        """What a group holds, unless it says otherwise. defaults: of the optimizer, which are of one rule alone."""
        of_all = (*WHOLE_STEP, "capturable", "layout") if "entry" in group else defaults.keys()
        return {**defaults_of(self.entry_of(group)), **{key: v for key, v in defaults.items() if key in of_all}}

    def divide(self, group: Any, position: int) -> Iterator[dict[str, Any]]:
        """A group for each entry that gets some of the parameters. position: how many parameters there are already."""
        if not isinstance(group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(group).__name__}")
        rule, group, rules = group.get("rule"), dict(group), self.rules
        if isinstance(rule, RuleOptions):
            del group["rule"]
            with say_where("rule of a parameter group"):
                rules.add(None, rule, self.whole)
            yield {**group, "entry": len(rules.entries) - 1}
        elif rule is not None:
            place = rules.find_place(rule, group.pop("entry", None))
            yield {**group, "entry": place} if rules.are_mixed else group
        elif [pattern for pattern, _ in rules.entries] == ["*"]:
            yield group
        else:
            pairs, are_named = name_parameters(group["params"], group.pop("param_names", None), position)
            if pairs and not are_named:
                check_names_unneeded("entries", [pattern for pattern, _ in rules.entries])
            check_chosen(rules.entries, pairs)
            places = places_of(rules.entries, pairs)
            for place in sorted(set(places)):
                members = [pair for pair, home in zip(pairs, places, strict=True) if home == place]
                yield {**group, "params": members if are_named else [p for _, p in members], "entry": place}

    def complete(self, group: dict[str, Any], defaults: Group) -> dict[str, Any]:
        """A group that is to be added, with all of its options, checked. defaults: of all groups."""
        rule = self.entry_of(group).rule
        check_group(rule, group, self.rules.owners())
        given = {name: plain(group[name]) for name in option_names(rule) if name in group}
        whole = {**self.defaults_for(group, defaults), **group, **given}
        made = self.make_options(whole).base.rule
        if "lr" in group:
            whole |= show_rate(made, group["lr"])
        if "lr_is_scale" in group:
            whole["lr_is_scale"] = group["lr_is_scale"]
        return to_plain(whole)

    def check_added(self, groups: Sequence[dict[str, Any]], names: Collection[str]) -> None:
        """Check the parameters of the group that was added last. names: those of its options."""
        index = len(groups) - 1
        for name in groups[index].keys() - {*names, *MEMBERS}:  # torch fills in defaults, which are not of every rule
            del groups[index][name]
        check_names(groups, self.rules.overrides)
        settings = self.options_at(groups, index)
        against_flat = reason_against_flat(settings)
        for name, p in ((name, p) for name, p, home in homes_in(groups) if home == index):
            check_parameter(name, p, against_flat)
            if p.requires_grad:
                settings.choose(name, p)[0].rule.check_shape(name, tuple(p.shape))
        self.are_reported = False
        self.note_shapes(groups)
        self.compare_rates(groups)

    # ---- options

    def entry_of(self, group: Group) -> RuleOptions:
        """The options of a group's entry."""
        return self.rules.at(group.get("entry", 0))

    def make_options(self, group: Group) -> RuleOptions:
        """The options of a group, checked, and its rate beside them."""
        entry = self.entry_of(group)
        given = {name: from_plain(group[name]) for name in option_names(entry.rule) if name in group}
        check_no_functions(given)
        options = RuleOptions(entry.rule, given, None, entry.overrides)
        check_rate(options.base.rule, group["lr"])
        return options

    def options_at(self, groups: Sequence[Group], index: int) -> RuleOptions:
        """The options of a group, checked; made anew only if one of them has changed."""
        group, first, known = groups[index], groups[0], self.known.get(index)
        try:
            entry = self.entry_of(group)
            values = [entry, *{**group, **NO_MEMBERS}.values(), *map(first.get, JOINT)]
            if known is not None and len(known.values) == len(values) and all(map(operator.is_, known.values, values)):
                return known.options
            given = [entry, *[group.get(name, ABSENT) for name in option_names(entry.rule)]]
            # a list may be edited where it is
            given = [tuple(value) if isinstance(value, list) else value for value in given]
            if known is not None and are_same(known.given, given):
                options = known.options
                check_rate(options.base.rule, group["lr"])
            else:
                options = self.make_options(group)
            for name in JOINT:
                concerns = f"{name} concerns the whole step and cannot differ between groups"
                require(group.get(name) == first.get(name), concerns)
        except OptionError as error:
            raise OptionError(f"parameter group {index}: {error}") from None
        has_lists = any(type(value) is list for value in values)
        self.known[index] = Known([] if has_lists else values, given, options)
        return options

    def find_unused(self, groups: Sequence[Group]) -> tuple[list[Pattern], list[Pattern]]:
        """The patterns of overrides that match no parameter of their entries, and of entries without parameters."""
        return self.rules.find_unused([(name, p, groups[i].get("entry", 0)) for name, p, i in homes_in(groups)])

    def hints_about(self, name: str, group: Group) -> Sequence[str]:
        """What was not understood about a parameter of a group, or assumed."""
        return getattr(self.rules.entries[group.get("entry", 0)][0], "hints", {}).get(name, ())  # type: ignore[no-any-return]

    def compare_rates(self, groups: Sequence[Group]) -> None:
        """Warn if the rates of different rules were different, and are now the same."""
        numbers = (group for group in groups if not (group.get("lr_is_scale") or isinstance(group["lr"], Tensor)))
        pairs = [(group["rule"], group["lr"]) for group in numbers]
        rates = {lr for _, lr in pairs}
        if len(dict(pairs)) < 2 or rates == {0}:  # those of warm-ups begin there
            return
        if self.rates_differ and len(rates) == 1:
            warn(
                f"{' and '.join(dict(pairs))} had different learning rates, and now have the same, {pairs[0][1]:g}: "
                "schedules that multiply the rate of each group keep them apart, those that write one for all do not",
                HintWarning,
            )
        self.rates_differ = len(rates) > 1

    def report(self, groups: Sequence[Group]) -> None:
        """Warn, once, of overrides and of entries that match no parameter, and of what was assumed."""
        if not self.are_reported:
            self.are_reported = True
            for what, unused in zip(("overrides", "entries of the mixture"), self.find_unused(groups), strict=True):
                warn_of_unused(what, unused)
            stepped = ((name, groups[index]) for name, p, index in homes_in(groups) if p.requires_grad)
            for hint in list_hints((name, self.hints_about(name, group)) for name, group in stepped):
                warn(hint, HintWarning)


#: In the place of an option that a group does not have: it is at its default, which None is not.
ABSENT = object()


def are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(
        a is b or (type(a) is type(b) and not isinstance(a, Tensor) and a == b)
        for a, b in zip(first, second, strict=True)
    )


# ---- parameters and their names


def check_given(params: Any) -> None:
    """Refuse a model, or parameters in a dictionary, and say what to pass instead."""
    if isinstance(params, nn.Module):
        raise ParameterError("params is a model: pass model.named_parameters() or model.parameters()")
    if isinstance(params, Mapping):
        if "params" in params:
            raise ParameterError("params is one parameter group: pass a list of groups, [group]")
        raise ParameterError("params is a dictionary: pass params.items() or model.named_parameters()")


def names_of(group: Group) -> list[str] | None:
    """The names of a group's parameters, unless they were left behind by code that replaced parameters alone."""
    names = group.get("param_names")
    return names if names and len(names) == len(group["params"]) else None


def homes_in(groups: Sequence[Group]) -> Iterator[tuple[str, Tensor, int]]:
    """Every parameter with its name and the index of its group; those without a name are named by their position."""
    position = 0
    for index, group in enumerate(groups):
        params = group["params"]
        names = names_of(group) or [str(position + i) for i in range(len(params))]
        position += len(params)
        yield from ((name, p, index) for name, p in zip(names, params, strict=True))


def check_names(groups: Sequence[Group], overrides: OverrideList) -> None:
    """Refuse overrides by name for parameters that have none, and names that two of them have."""
    if any(group["params"] and names_of(group) is None for group in groups):
        check_names_unneeded("overrides", [pattern for pattern, _ in overrides])
    names = [name for name, _, _ in homes_in(groups)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ParameterError(
            f"two parameters are named {twice!r}: give names that differ, as model.named_parameters() has them"
        )


def check_names_unneeded(what: str, patterns: Sequence[Pattern | None]) -> None:
    """Refuse patterns by name for parameters that have none. what: whose patterns they are."""
    by_name = [pattern for pattern in patterns if pattern not in (None, "*") and not callable(pattern)]
    if by_name:
        raise OptionError(
            f"{what} by name ({by_name[0]!r}) need a name for every parameter: pass model.named_parameters(), "
            "or use a function of (name, parameter) as the pattern"
        )


def name_parameters(params: Any, names: Sequence[str] | None, position: int) -> tuple[list[tuple[str, Tensor]], bool]:
    """Parameters with their names, or else with their positions, and whether they have names."""
    if isinstance(params, set):
        raise TypeError("parameters need an order, which sets do not have: use a list")
    listed = [params] if isinstance(params, Tensor) else list(params)
    named = [entry for entry in listed if isinstance(entry, tuple)]
    if named and len(named) < len(listed):
        raise ParameterError("some parameters have names and others do not: pass model.named_parameters()")
    if names is not None and not named and len(names) == len(listed):
        named = list(zip(names, listed, strict=True))
    pairs = named or [(str(position + i), p) for i, p in enumerate(listed)]
    for name, p in pairs:
        if not isinstance(p, Tensor):
            raise ParameterError(f"parameter {name!r} must be a tensor, got {type(p).__name__}")
    return pairs, bool(named)


# ---- arguments


def name_positional(rule: type[Rule], positional: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were given by position after lr, by name: in the order of torch, where torch has the optimizer."""
    order = ", ".join(("params", "lr", *rule.TORCH))
    if len(positional) > len(rule.TORCH):
        raise TypeError(
            f"{rule.__name__} takes {order} by position, and {2 + len(positional)} were given: give all other options "
            "by name, such as weight_decay=0.01"
        )
    given = dict(zip(rule.TORCH, positional, strict=False))
    for name in given:
        if name in options:
            raise TypeError(f"{rule.__name__} got {name} twice, by position and by name: by position it takes {order}")
    return given


def check_options(
    rule: type[Rule], lr: Any, options: Mapping[str, Any], variant: str | None, overrides: Overrides
) -> RuleOptions:
    """Options and a learning rate as torch has them, checked. Functions are refused, which no checkpoint could hold."""
    check_no_functions(options)
    check_no_functions_in(overrides)
    settings = RuleOptions(rule, options, variant, overrides, lr)
    check_rate(settings.base.rule, lr)
    settings.validate_lr(lr)
    return settings


def check_no_functions(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if callable(value) and not isinstance(value, (Tensor, type)):
            raise OptionError(f"{name} cannot be a function in torch: set the group's value, or use a scheduler for lr")


def check_no_functions_in(overrides: Overrides) -> None:
    """The same of overrides, which engines read once and not at every step."""
    for _, options in check_overrides(overrides):
        check_no_functions(options)


def choose_engine(engine: Any, foreach: Any, fused: Any, differentiable: Any) -> Any:
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


# ---- learning rates


def show_rate(rule: Rule, lr: Rate) -> dict[str, Any]:
    """A learning rate as a group shows it: always a number, or a tensor, that schedulers can multiply."""
    shown = lr if isinstance(lr, Tensor) else plain(lr)
    if not rule.lr_optional:
        return {"lr": shown}
    return {"lr": 1.0, "lr_is_scale": True} if lr is None else {"lr": shown, "lr_is_scale": False}


def check_rate(rule: Rule, lr: Any) -> None:
    if callable(lr) and not isinstance(lr, Tensor):
        raise OptionError("lr cannot be a function in torch: use a scheduler of torch.optim.lr_scheduler")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptionError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
    rule.validate_lr(plain(lr))


def read_rate(group: Group, *, shown_only: bool) -> tuple[Rate, float]:
    """What the rule is given as lr, and what multiplies the step size that it makes of it.

    shown_only: a scheduler writes the step size into the group for people to read.
    """
    lr = group["lr"]
    if lr is None:
        return None, 1.0
    if not group.get("lr_is_scale"):
        return lr.reshape(()) if isinstance(lr, Tensor) else lr, 1.0
    if shown_only:
        return None, 1.0
    if isinstance(lr, Tensor) and not lr.is_cpu:
        raise OptionError("lr multiplies the relative step of this group and must be a number, got a tensor")
    return None, float(lr)


# ---- options in groups: plain values, which users may change and checkpoints can hold


def defaults_of(entry: RuleOptions) -> dict[str, Any]:
    """What a group of an entry holds, unless it says otherwise."""
    rate = show_rate(entry.base.rule, entry.lr)
    return {
        **rate,
        **to_plain(entry.options),
        "rule": entry.rule.__name__,
        "rule_version": entry.rule.version,
    }


def to_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_plain(value) for name, value in options.items() if is_shown(name, value)}


def as_plain(value: Any) -> Any:
    """A value that is an object, as something that every loader reads."""
    if isinstance(value, Annealed):
        return ("annealed", value.high, value.low, value.decay, value.flat)
    if isinstance(value, Spikes):
        return ("spikes", *vars(value).values())
    if isinstance(value, Rule) and RULES.get(type(value).__name__) is type(value):
        return ("rule", type(value).__name__, *((f.name, getattr(value, f.name)) for f in fields(value)))
    return value


def is_shown(name: str, value: Any) -> bool:
    """Whether a group shows an option: not what may be around a rule, or a step, and is not."""
    if name in (*around_options(), "spikes"):
        return value not in (None, False, 0)
    return value is not None or name not in SHOWN_IF_SET


def from_plain(value: Any) -> Any:
    match value:
        case ("annealed", *numbers):
            return Annealed(*numbers)
        case ("spikes", *values):  # 0.2 wrote one more, which said that all gradients are judged together
            return Spikes(**dict(zip(vars(Spikes()), values, strict=False)))
        case ("rule", name, *options):
            return RULES[name](**{option: plain(given) for option, given in options})
    return value


def check_group(rule: type[Rule], group: Group, owners: Mapping[str, str]) -> None:
    """Refuse options that are misspelt or another rule's; keys of other tools, which resemble none, may be here.

    owners: by each option of the optimizer, the name of a rule that has it.
    """
    options = option_names(rule)
    require(
        not group.get("use_fallback"),
        f"use_fallback=True asks for AdamW in place of {rule.__name__}, which is the only rule of this optimizer: "
        "give these parameters to a mixture, such as thalweg.torch.kron_adamw(model)",
    )
    for name in [key for key in group if key not in (*options, *BESIDE, *FOREIGN)]:
        hint = hint_for(rule, name, options, cutoff=0.85)
        if name in owners:
            hint = f"{owners[name]} has it: give parameters of different rules in groups of their own"
        require(not hint, f"{rule.__name__} has no option {name!r}: {hint}")


def load_group(rule: type[Rule], saved: Group, present: Group, defaults: Group) -> dict[str, Any]:
    """A group of a saved state, for a group of this optimizer: its options, with what other tools keep in either."""
    ours = {*BESIDE, *option_names(rule)}
    foreign = {key: value for key, value in present.items() if key not in ours}
    filled = {key: value for key, value in defaults.items() if key not in (*SHOWN_IF_SET, "lr_is_scale")}
    earlier = rule.first_options()  # for options that are newer than the state
    group = {
        **filled,
        **earlier,
        **foreign,
        **{key: value for key, value in saved.items() if key not in ("made_with", "layout")},
    }
    # loaders that keep no tuples make lists of them
    group = {key: tuple(v) if isinstance(v, list) and key in ours else v for key, v in group.items()}
    group["params"] = list(saved["params"])
    # names stay: a loader that goes by name may bring those of another order
    group.pop("param_names", None)
    group.update({key: present[key] for key in ("param_names", "entry") if key in present})
    # a run may gain what is around a rule or a step
    new = [key for key in (*around_options(), "spikes") if key in present and key not in saved]
    group.update({key: present[key] for key in new})
    if "lr_is_scale" in present:
        group.setdefault("lr_is_scale", group["lr"] is None)
        if group["lr"] is None:  # as versions before wrote it
            group["lr"] = 1.0
    return to_plain(group)
