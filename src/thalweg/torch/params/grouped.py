"""A torch optimizer as far as it needs no step: groups of parameters, what holds for each, and their state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from thalweg.errors import OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.mixtures import Entry
from thalweg.rules import Rule
from thalweg.rules.checks import require
from thalweg.rules.entries import Count
from thalweg.settings import OverrideList, Pattern, Setting, Settings, option_names, plain
from thalweg.torch.params.checkpoints import (
    check_entries,
    check_is_state,
    check_same_rules,
    check_sizes,
    in_own_order,
    restored,
    shapes_of,
    warn_if_made_otherwise,
)
from thalweg.torch.params.checks import check_parameter, reason_against_flat
from thalweg.torch.params.explain import Explanation, explained, explained_group, source_of
from thalweg.torch.params.groups import (
    EngineName,
    GroupSettings,
    check_group,
    defaults_of,
    loaded_group,
    to_plain,
)
from thalweg.torch.params.members import Members, check_names, named, unused_patterns
from thalweg.torch.params.rates import Rate, check_rate, rate_given, rate_shown
from thalweg.torch.params.states import expected_entries, first_entries
from thalweg.torch.sharding.agreement import in_words

Params: TypeAlias = Iterable[Any]

#: Options that are decided for all groups together.
JOINT = ("max_grad_norm", "on_nonfinite")


class GroupedOptimizer(torch.optim.Optimizer):
    """Groups of parameters with options that are checked, and state that is restored as it was saved."""

    #: What it steps by; a mixture has several rules, and none here.
    rule: ClassVar[type[Rule]]
    _wanted_engine: EngineName

    def __init__(
        self,
        params: Params,
        entries: list[Entry],
        defaults: dict[str, Any],
    ) -> None:
        self._remember(entries)
        super().__init__(params, defaults)

    def _remember(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._group_settings = GroupSettings(entries)
        self._resolved: dict[int, tuple[Settings, Setting]] = {}
        self._members = Members()
        self._reported = False

    def _rule_of(self, group: Mapping[str, Any]) -> type[Rule]:
        """What a group is stepped by."""
        return self._group_settings.entry_of(group).rule

    @property
    def _overrides(self) -> OverrideList:
        """Those of all rules."""
        return tuple(each for _, entry in self._entries for each in entry.settings.overrides)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own; everything is checked before anything is added."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        entry = self._group_settings.entry_of(param_group)
        check_group(entry.rule, param_group)
        given = {name: plain(param_group[name]) for name in option_names(entry.rule) if name in param_group}
        for name in JOINT:
            if given.get(name, self.defaults[name]) != self.defaults[name]:
                raise OptionError(f"{name} concerns the whole step and cannot differ between groups")
        own = {**defaults_of(entry), **self.defaults}
        settings = self._group_settings.made({**own, **param_group, **given})
        rate = {}
        if "lr" in param_group:
            check_rate(param_group["lr"])
            settings.base.rule.validate_lr(plain(param_group["lr"]))
            rate = rate_shown(settings.base.rule, param_group["lr"])
            rate.update({key: param_group[key] for key in rate if key == "lr_is_scale" and key in param_group})
        before = len(self.param_groups)
        super().add_param_group({**own, **param_group, **given, **rate})
        for group in self.param_groups[before:]:
            options = to_plain(group)
            group.clear()
            group.update(options)
        try:
            check_names(self.param_groups, self._overrides)
            for name, p in self._named(before):
                check_parameter(name, p, self._against_flat(before))
                if p.requires_grad:
                    settings.of(name, p)[0].rule.check_shape(name, tuple(p.shape))
        except (OptionError, ParameterError):
            del self.param_groups[before:]
            raise
        self._reported = False
        self._members.note_shapes(self.param_groups)

    def _places(self) -> dict[Tensor, tuple[str, int]]:
        """The name and the group of every parameter. What was remembered by address is dropped if they have changed."""
        if self._members.changed(self.param_groups, self._against_flat):
            check_names(self.param_groups, self._overrides)
            self._forget_memory()
        return self._members.places

    def _forget_memory(self) -> None:
        """Drop what is known by the address of a parameter."""
        self._resolved.clear()

    def _against_flat(self, index: int) -> str:
        """Why the parameters of a group cannot be stepped as one vector; "" if they can."""
        group = self.param_groups[index]
        settings = self._checked_settings(index, group)
        return reason_against_flat(settings.base.rule, group, settings.overrides)

    def _report_unused(self) -> None:
        """Warn, once, of overrides and of entries that match no parameter."""
        if not self._reported:
            self._reported = True
            for what, unused in zip(("overrides", "entries of the mixture"), self._unused(), strict=True):
                if unused:
                    message = f"{what} that match no parameter: {', '.join(map(repr, unused))}"
                    warnings.warn(message, UnusedOverrideWarning, stacklevel=8)

    def _unused(self) -> tuple[list[Pattern], list[Pattern]]:
        """The patterns of overrides that match no parameter, and those of entries."""
        homes = [(name, p, self.param_groups[index].get("entry", 0)) for name, p, index in self._homes()]
        return unused_patterns(self._entries, homes)

    def _named(self, first_group: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name."""
        return named(self.param_groups, first_group)

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter, in the order of the groups."""
        return (p for _, p in self._named())

    @property
    def num_parameters(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    @property
    def lr(self) -> Any:
        """The learning rate of all groups; setting it sets it for all."""
        rates = [group["lr"] for group in self.param_groups]
        if any(rate is not rates[0] and rate != rates[0] for rate in rates):
            raise OptionError(f"groups have different learning rates, {rates}: read them from param_groups")
        return rates[0]

    @lr.setter
    def lr(self, value: Rate) -> None:
        for index, group in enumerate(self.param_groups):
            settings = self._group_settings.of(index, group)
            check_rate(value)
            settings.base.rule.validate_lr(plain(value))
        for group in self.param_groups:
            if value is None:
                group.update(rate_shown(self._group_settings.made(group).base.rule, None))
            else:
                group["lr"] = value if isinstance(value, Tensor) else plain(value)

    def _homes(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every parameter with its name and the index of its group."""
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        return ((name, p, index) for (name, p), index in zip(self._named(), groups, strict=True))

    def _rate(self, group: Mapping[str, Any]) -> tuple[Rate, float]:
        """What the rule is given as lr, and what multiplies the step size that it makes of it."""
        return rate_given(group, shown_only=self._is_shown_only(group))

    def _is_shown_only(self, group: Mapping[str, Any]) -> bool:
        """Whether a scheduler writes the step size into a group for people to read, and not for us.

        ``AdafactorSchedule`` of transformers does, and takes ``initial_lr`` away, which all others leave in groups.
        """
        scheduled = getattr(self.step, "_wrapped_by_lr_sched", False)
        return bool(group.get("lr_is_scale")) and scheduled and "initial_lr" not in group

    def _checked_settings(self, index: int, group: Mapping[str, Any]) -> Settings:
        try:
            settings = self._group_settings.of(index, group)
            check_rate(group["lr"])
            settings.base.rule.validate_lr(plain(group["lr"]))
            for name in JOINT:
                require(
                    group[name] == self.param_groups[0][name],
                    f"{name} concerns the whole step and cannot differ between groups",
                )
        except OptionError as error:
            raise OptionError(f"parameter group {index}: {error}") from None
        return settings

    def _setting(self, settings: Settings, name: str, p: Tensor) -> Setting:
        found = self._resolved.get(id(p))
        if found is None or found[0] is not settings:
            setting, _ = settings.of(name, p)
            # equal settings are one object, so that their parameters share a bucket
            setting = next((s for other, s in self._resolved.values() if other is settings and s == setting), setting)
            setting.rule.check_shape(name, tuple(p.shape))
            self._check_state(name, p, setting)
            self._resolved[id(p)] = found = settings, setting
        return found[1]

    def _check_state(self, name: str, p: Tensor, setting: Setting) -> None:
        """Refuse options that need other state than the parameter has."""
        found = shapes_of({key: entry for key, entry in self.state.get(p, {}).items() if key != "step"})
        wanted = shapes_of(expected_entries(setting, p, name))
        if p in self.state and self.state[p] and found != wanted:
            raise StateError(
                f"the state of {name!r} does not fit its options: they need {wanted}, and the state has {found}; "
                "restore the options that the state was made with, or drop it with clear_state()"
            )

    def _state(self, name: str, p: Tensor, setting: Setting, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            place = self._place_of_counts(p, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
            state.update(first_entries(p, setting, name))
            if p.device.type != "meta":  # counts are beside the step, so that the host can tell without a wait
                state.update({key: state[key].to(place) for key in setting.rule.keys(tuple(p.shape), Count)})
        return state

    def _place_of_counts(self, p: Tensor, group: Mapping[str, Any]) -> torch.device:
        """Where counts live: with the host, unless the device alone may know them."""
        on_device = group["capturable"] or group["on_nonfinite"] == "skip"
        return p.device if on_device else torch.device("cpu")

    def make_state(self) -> None:
        """Make the state of every parameter that has none, as it is before the first step.

        Checkpoint loaders that find no state make it by a step, which counts as the first.
        """
        with torch.no_grad():
            for name, p, index in self._homes():
                if p.requires_grad:
                    settings = self._checked_settings(index, self.param_groups[index])
                    self._state(name, p, self._setting(settings, name, p), self.param_groups[index])

    def explain(self, *, code: bool = False) -> Explanation:
        """How every parameter will be treated, what its state will cost, and what looks like a mistake.

        Parameters that are frozen (``requires_grad=False``) are counted by group and have no row. code: show the source
        of the fused code too, once for each treatment.
        """
        rows, sources = [], {}
        for name, p, index in self._homes():
            if p.requires_grad:
                group = self.param_groups[index]
                setting = self._setting(self._checked_settings(index, group), name, p)
                lr, factor = self._rate(group)
                rows.append(explained(name, p, replace(setting, lr_scale=setting.lr_scale * factor), lr))
                if code:
                    title = f"{rows[-1].rule}, {rows[-1].treatment}, {rows[-1].dtype} on {p.device.type}:"
                    if title not in sources:
                        sources[title] = source_of(setting, p, has_lr=lr is not None)
        several = len({row.rule for row in rows}) > 1
        groups = [
            explained_group(group, shown_only=self._is_shown_only(group), rule=group["rule"] if several else "")
            for group in self.param_groups
        ]
        unused, idle = self._unused()
        return Explanation(rows, unused, groups, sources, idle)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. State keeps the dtype it was saved in; on any error nothing is changed."""
        rules = [self._rule_of(group) for group in self.param_groups]
        check_is_state(rules, state_dict)
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_is_state(rules, state_dict)
        state_dict["param_groups"] = in_own_order(state_dict["param_groups"], self.param_groups)
        check_sizes(state_dict, self.param_groups)
        check_same_rules(state_dict, rules)
        groups = [
            loaded_group(rule, saved, own, {**defaults_of(self._group_settings.entry_of(own)), **self.defaults})
            for rule, saved, own in zip(rules, state_dict["param_groups"], self.param_groups, strict=True)
        ]
        named, (expected, counts) = list(self._named()), self._expected(groups)
        check_entries(state_dict, named, expected)
        state = restored(groups, state_dict, named, expected, counts, self._place_of_counts)
        warn_if_made_otherwise(state_dict, self._made_with())
        state_dict["param_groups"] = groups
        state_dict["state"] = {}  # which torch would cast to the dtypes of parameters
        pre, post = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = type(pre)()
        self._optimizer_load_state_dict_post_hooks = type(post)()
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = pre, post
        self.state.update(state)
        self._resolved.clear()
        self._members.note_shapes(self.param_groups)
        for finish in post.values():
            finish(self)

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters and the options of all groups, for :meth:`load_state_dict`."""
        saved = super().state_dict()
        if isinstance(saved, dict) and isinstance(saved.get("param_groups"), list):  # which hooks may have changed
            shown = [{"lr": 1.0} if self._is_shown_only(group) else {} for group in self.param_groups]
            beside = {"made_with": self._made_with()}
            saved["param_groups"] = [
                {**group, **own, **beside} for group, own in zip(saved["param_groups"], shown, strict=True)
            ]
        return saved

    def _made_with(self) -> str:
        """What a checkpoint remembers of the arguments that are not in groups."""
        entries = [f"({in_words(pattern)}, {in_words(dict(options))})" for pattern, options in self._overrides]
        return f"engine={self._wanted_engine!r}, overrides=[{', '.join(entries)}]"

    def _expected(
        self, groups: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[str]]]:
        """Ghosts of all states under the options of saved groups, which are checked on the way, and keys of counts."""
        entries, counts = {}, {}
        try:
            made = [self._group_settings.made(group) for group in groups]
            for settings, group in zip(made, groups, strict=True):
                check_rate(group["lr"])
                settings.base.rule.validate_lr(plain(group["lr"]))
            for name, p, index in self._homes():
                setting, _ = made[index].of(name, p)
                entries[name] = expected_entries(setting, p, name)
                counts[name] = setting.rule.keys(tuple(p.shape), Count)
        except OptionError as error:
            raise StateError(f"the options of this state are not valid: {error}") from None
        return entries, counts
