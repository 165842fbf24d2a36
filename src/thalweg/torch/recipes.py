"""Mixtures that are ready made: hidden matrices by one rule, all other parameters by AdamW."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from thalweg.errors import OptionError, ParameterError
from thalweg.given import Pattern, check_overrides, check_patterns, matches, unused_patterns, warn_of_unused
from thalweg.rules import AdamW, Kron, Muon, Rule
from thalweg.settings import around_options, option_names, rates_with_adamw
from thalweg.torch.mixture import Mixture
from thalweg.torch.optimizers import optimizer
from thalweg.torch.params.rules import Chosen
from thalweg.torch.routing import HIDDEN, OTHER, UNSPLIT, VECTORS, Role, roles_of

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
#: The rules of hidden matrices, by the names of the functions here.
RECIPES: Mapping[str, type[Rule]] = {"kron_adamw": Kron, "muon_adamw": Muon}


def kron_adamw(
    model: nn.Module,
    lr: float | None = None,
    adamw_lr: float | None = None,
    *,
    weight_decay: float | None = None,
    first: Sequence[Pattern] = (),
    other: Sequence[Pattern] = (),
    kron: Mapping[str, Any] = NO_OPTIONS,
    adamw: Mapping[str, Any] = NO_OPTIONS,
    **arguments: Any,
) -> Mixture:
    """Hidden matrices by Kron; embeddings, output layers, norms, biases and vectors by AdamW.

    lr, kron: of Kron; lr is 3e-4 if it is not given. adamw_lr, adamw: of AdamW, which has Kron's rate if it is given
    none. weight_decay: of all matrices, decoupled; None leaves it to each rule. Norms, biases and vectors do not decay.
    first, other: patterns of parameters that go to Kron, or to AdamW, whatever they are found to be; first wins.
    arguments: of :class:`Mixture`, and what is around both rules, such as averaged. docs/mixtures.md says how
    parameters are distinguished.
    """
    decay = {} if weight_decay is None else {"weight_decay_mode": "decoupled"}
    return by_matrices(model, Kron, lr, {**decay, **kron}, adamw_lr, adamw, weight_decay, first, other, arguments)


def muon_adamw(
    model: nn.Module,
    lr: float | None = None,
    adamw_lr: float | None = None,
    *,
    weight_decay: float | None = None,
    first: Sequence[Pattern] = (),
    other: Sequence[Pattern] = (),
    muon: Mapping[str, Any] = NO_OPTIONS,
    adamw: Mapping[str, Any] = NO_OPTIONS,
    **arguments: Any,
) -> Mixture:
    """Hidden matrices by Muon; embeddings, output layers, norms, biases and vectors by AdamW.

    lr, muon: of Muon. adamw_lr, adamw: of AdamW. Without adamw_lr, AdamW has 0.015 of Muon's rate, or the same under
    ``muon=dict(scaling="match_rms_adamw")``; without lr, these are 0.02 and 3e-4, or both 3e-4. weight_decay: of all
    matrices; None leaves it to each rule. Norms, biases and vectors do not decay. first, other: patterns of parameters
    that go to Muon, or to AdamW, whatever they are found to be; first wins. arguments: of :class:`Mixture`, and what
    is around both rules, such as averaged. docs/mixtures.md says how parameters are distinguished.
    """
    return by_matrices(model, Muon, lr, muon, adamw_lr, adamw, weight_decay, first, other, arguments)


def by_matrices(
    model: nn.Module,
    rule: type[Rule],
    lr: float | None,
    options: Mapping[str, Any],
    adamw_lr: float | None,
    adamw: Mapping[str, Any],
    weight_decay: float | None,
    first: Sequence[Pattern],
    other: Sequence[Pattern],
    arguments: Mapping[str, Any],
) -> Mixture:
    recipe = f"{rule.__name__.lower()}_adamw"
    check_model(recipe, model)
    around = {name: value for name, value in arguments.items() if name in around_options()}
    arguments = {name: value for name, value in arguments.items() if name not in around}
    check_arguments(recipe, rule, arguments)
    for argument, patterns in (("first", first), ("other", other)):
        unused = unused_patterns(check_patterns(patterns, argument), model.named_parameters())
        warn_of_unused(f"patterns in {argument}", unused)
    roles = roles_of(model, first, other)
    lr, adamw_lr, rate_hint = rates_with_adamw(rule, options, options.get("lr", lr), adamw.get("lr", adamw_lr))
    shared = around if weight_decay is None else {**around, "weight_decay": weight_decay}
    given = check_overrides(options.get("overrides", ()))
    overrides = [*overrides_of(roles, rule), *given]
    named = dict(model.named_parameters())
    splits = [pattern for pattern, override in given if "split" in override]

    def hints_of(name: str, role: Role) -> tuple[str, ...]:
        is_split = "split" not in option_names(rule) or any(matches(pattern, name, named[name]) for pattern in splits)
        hint = "" if role.hint == UNSPLIT and is_split else role.hint
        return tuple(filter(None, (hint, rate_hint if role.role == HIDDEN else "")))

    makers = {
        HIDDEN: optimizer(rule).options(**{"lr": lr, **shared, **options, "overrides": overrides}),
        OTHER: optimizer(AdamW).options(**{"lr": adamw_lr, **shared, **adamw}),
        VECTORS: optimizer(AdamW).options(**{"lr": adamw_lr, **around, **adamw, "weight_decay": 0.0}),
    }
    entries = []
    for kind, maker in makers.items():
        hints = {name: hints_of(name, role) for name, role in roles.items() if role.role == kind}
        if hints:
            entries.append((Chosen(kind, frozenset(hints), hints), maker))
    return Mixture(model.named_parameters(), entries, **arguments)


def overrides_of(roles: Mapping[str, Role], rule: type[Rule]) -> list[tuple[Pattern, dict[str, Any]]]:
    """What a rule has to know of hidden parameters that are not one matrix as they lie: an entry for each kind."""
    by_options: dict[tuple[tuple[str, Any], ...], set[str]] = {}
    for name, role in roles.items():
        known = tuple((option, value) for option, value in role.options.items() if option in option_names(rule))
        if role.role == HIDDEN and known:
            by_options.setdefault(known, set()).add(name)
    return [(Chosen(HIDDEN, frozenset(names)), dict(known)) for known, names in by_options.items()]


def check_model(recipe: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ParameterError(
            f"{recipe} needs the model itself, whose modules tell what each parameter is, got "
            f"{type(model).__name__}: write {recipe}(model)"
        )


def check_arguments(recipe: str, rule: type[Rule], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a mixture has not, and say where options of its rules belong."""
    known = [name for name in inspect.signature(Mixture).parameters if name not in ("params", "entries")]
    for name in arguments:
        if name in known:
            continue
        owners = [kind.__name__ for kind in (rule, AdamW) if name in option_names(kind) or name in kind.ELSEWHERE]
        places = [f"{owner.lower()}=dict({name}=...)" for owner in owners]
        if name in (f"{rule.__name__.lower()}_lr", "learning_rate"):
            places = [f"lr, the rate of {rule.__name__}; adamw_lr is that of AdamW"]
        places = places or [repr(name) for name in difflib.get_close_matches(name, known, n=1)]
        said = f"write {' or '.join(places)}" if places else f"it has {', '.join(known)}"
        raise OptionError(f"{recipe} has no argument {name!r}: {said}")
