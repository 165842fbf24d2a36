"""One optimizer that steps by several rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from thalweg.errors import OptionError, ParameterError
from thalweg.given import Overrides, Pattern, check_overrides, divided, first_match
from thalweg.rules import Spikes
from thalweg.settings import (
    WHOLE_STEP,
    Entry,
    Handling,
    RuleOptions,
    check_one_rule,
    checked_entries,
    merged,
    option_names,
)
from thalweg.torch.base import Optimizer
from thalweg.torch.params.checks import warn_if_used_up
from thalweg.torch.params.groups import (
    EngineName,
    Params,
    check_given,
    check_names_unneeded,
    choose_engine,
    from_plain,
    to_plain,
)
from thalweg.torch.sharding.sharing import Sharing

Entries: TypeAlias = Sequence[tuple[Pattern, RuleOptions]]


@dataclass(frozen=True)
class Chosen:
    """The pattern of parameters that were chosen by name for a role."""

    role: str
    names: frozenset[str]
    #: What to tell of some of them, by name.
    hints: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        return f"<{self.role}>"


class Mixture(Optimizer):
    """One ``torch.optim.Optimizer`` that steps some parameters by one rule and others by another.

    entries: a list of (pattern, options). A pattern is a glob, a compiled regular expression or a function of a name
    and a parameter; the first that matches a parameter decides. ``options()`` of an optimizer's class makes options.

    Each entry has a parameter group, or one for each group that params has. A group's ``"rule"`` is the rule's name.
    overrides: for the parameters of all entries. The other arguments hold for the whole step.

    >>> import torch
    >>> from thalweg.torch import AdamW, Kron
    >>> model = torch.nn.Linear(3, 2)
    >>> entries = [("weight", Kron.options(lr=3e-4)), ("*", AdamW.options(lr=1e-3))]
    >>> optimizer = Mixture(model.named_parameters(), entries, max_grad_norm=1.0)
    >>> [(group["rule"], group["lr"], group["param_names"]) for group in optimizer.param_groups]
    [('Kron', 0.0003, ['weight']), ('AdamW', 0.001, ['bias'])]
    """

    def __init__(
        self,
        params: Params,
        entries: Entries,
        *,
        overrides: Overrides = (),
        maximize: bool = False,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        seed: int = 0,
        spikes: bool | Spikes = False,
        engine: EngineName = "auto",
        capturable: bool = False,
        replicas: Any = None,
        divide_work: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        check_given(params)
        whole: dict[str, Any] = dict(
            maximize=maximize,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
            spikes=spikes,
        )
        Handling(**whole).validate()
        self._for_all = check_overrides(overrides)
        checked = checked_entries(entries, whole, self._for_all)
        engine = choose_engine(engine, foreach, fused, differentiable)
        sharing = Sharing(replicas, divide_work)
        self._begin(params, checked, to_plain(whole), engine, capturable, sharing)
        if not self.param_groups:
            raise ParameterError("params has groups without any parameter: pass list(model.named_parameters()) in one")
        self.defaults["lr"] = self.param_groups[0]["lr"]  # schedulers of transformers divide by it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which the patterns divide, or which go to one rule; on any error nothing is added.

        ``"rule"`` in the group says to which: options that ``options()`` of a class has made, or the name of a rule of
        this mixture. Other keys are options for all rules that get parameters.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        groups, entries = len(self.param_groups), len(self._groups.entries)
        given = param_group.get("params")
        try:
            for part in self._divide(dict(param_group)):
                self._check_options_of(part)
                super().add_param_group(part)
        except Exception:
            del self.param_groups[groups:], self._groups.entries[entries:]
            raise
        if len(self.param_groups) == groups:
            warn_if_used_up(given, "a parameter group of this mixture")

    def _divide(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A group for each entry that gets some of the parameters."""
        rule = group.get("rule")
        if isinstance(rule, RuleOptions):
            check_one_rule({options.rule.__name__: options.rule for _, options in self._groups.entries}, rule.rule)
            whole = from_plain({name: self.defaults[name] for name in WHOLE_STEP if name in self.defaults})
            self._groups.entries.append((None, merged(rule, whole, self._for_all, "rule of a parameter group")))
            del group["rule"]
            yield {**group, "entry": len(self._groups.entries) - 1}
        elif rule is not None:
            yield {**group, "entry": self._place_of(rule, group.get("entry"))}
        else:
            names = group.pop("param_names", None)
            position = sum(len(present["params"]) for present in self.param_groups)
            pairs, are_named = name_parameters(group["params"], names, position)
            if pairs and not are_named:
                check_names_unneeded("entries", [pattern for pattern, _ in self._groups.entries])
            check_chosen(self._groups.entries, pairs)
            for place, members in divided(self._groups.entries, pairs).items():
                yield {**group, "params": members if are_named else [p for _, p in members], "entry": place}

    def _check_options_of(self, group: dict[str, Any]) -> None:
        """Refuse options that belong to another rule, which would have no effect in this group."""
        rule = self._rule_of(group)
        owners = {name: options.rule for _, options in self._groups.entries for name in option_names(options.rule)}
        for name in group:
            if name in owners and name not in option_names(rule):
                raise OptionError(
                    f"{rule.__name__} has no option {name!r}, which {owners[name].__name__} has: give parameters of "
                    "different rules in groups of their own"
                )

    def _place_of(self, rule: Any, wanted: Any) -> int:
        """The place of a rule's entry: the wanted one, as of a group that was taken from this mixture, or its first."""
        places = [place for place, (_, options) in enumerate(self._groups.entries) if options.rule.__name__ == rule]
        if not places:
            known = ", ".join(dict.fromkeys(options.rule.__name__ for _, options in self._groups.entries))
            raise OptionError(
                f"rule={rule!r} is not a rule of this mixture, which has {known}: give options, such as "
                "AdamW.options(lr=1e-3)"
            )
        return wanted if wanted in places else places[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_for_all": self._for_all}


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


def check_chosen(entries: Sequence[Entry], pairs: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse parameters that are not of the model whose parameters were chosen by name."""
    chosen = [pattern for pattern, _ in entries if isinstance(pattern, Chosen)]
    rules = dict.fromkeys(repr(options.rule.__name__) for _, options in entries)
    for name, p in pairs:
        if chosen and first_match(entries, name, p) is None:
            raise ParameterError(
                f"parameter {name!r} is not of the model that this mixture was made for: say which rule steps it, as "
                f'"rule": {" or ".join(rules)} in its parameter group'
            )
