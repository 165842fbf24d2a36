"""Optimizers by name in timm: ``--opt thalweglamb`` of its scripts, ``create_optimizer_v2(model, "thalweglamb")``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from inspect import getdoc
from typing import Any

from timm.optim import list_optimizers
from timm.optim._optim_factory import OptimInfo, default_registry
from torch import Tensor

from thalweg.errors import OptionError
from thalweg.rules import RULES, Rule
from thalweg.settings import defaults, rates_with_adamw
from thalweg.torch import AdamW, Mixture, optimizer, recipes
from thalweg.torch.mixture import Entries
from thalweg.torch.recipes import RECIPES
from thalweg.torch.routing import is_matrix


def register(*rules: type[Rule]) -> list[str]:
    """Make the rules of the package, and some of one's own, known to timm; return the names that it knows them by.

    A name is "thalweg" and that of the rule in small letters without underscores, at which timm splits names; the
    mixtures are "thalwegkronadamw" and "thalwegmuonadamw". timm gives every optimizer a weight_decay, so a rule of
    one's own needs that option.
    """
    infos = [*map(describe_rule, dict.fromkeys((*RULES.values(), *rules))), *map(describe_mixture, RECIPES)]
    names = [info.name for info in infos]
    if twice := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"timm would know two optimizers by one name, {min(twice)!r}: give your rule another name")
    known = list_optimizers("thalweg*")
    for info in infos:
        if info.name not in known or default_registry.get_optimizer_info(info.name) is not info:  # written anew
            default_registry.register(info)
    return names


@functools.cache
def describe_rule(rule: type[Rule]) -> OptimInfo:
    options = defaults(rule)
    # timm has one number for each of these, and 0.9 for the momentum of all that have one
    has_eps, has_momentum = isinstance(options.get("eps"), float), isinstance(options.get("momentum"), float)
    has = {"has_eps": has_eps, "has_momentum": has_momentum, "has_betas": "betas" in options}
    return describe(rule.__name__, optimizer(rule), rule, **has)


@functools.cache
def describe_mixture(recipe: str) -> OptimInfo:
    return describe(recipe, functools.partial(make_mixture, recipe), getattr(recipes, recipe), has_eps=False)


def describe(name: str, make: Any, documented: object, **has: bool) -> OptimInfo:
    """What timm keeps of an optimizer. has: the arguments of its scripts that it takes."""
    description = (getdoc(documented) or "").partition("\n")[0]
    return OptimInfo(f"thalweg{name.lower().replace('_', '')}", make, description, **has)


def make_mixture(
    recipe: str,
    params: Any,
    lr: float | None = None,
    adamw_lr: float | None = None,
    *,
    weight_decay: float = 0.0,
    adamw: Mapping[str, Any] | None = None,
    **options: Any,
) -> Mixture:
    """Matrices by one rule, and all other parameters, and groups that timm marks for it, by AdamW.

    adamw: options of AdamW. options: of the other rule. Without adamw_lr, AdamW's rate follows from lr.
    """
    rule = RECIPES[recipe]
    decay = {"weight_decay_mode": "decoupled"} if recipe == "kron_adamw" else {}  # as the recipe has it
    lr, adamw_lr, _ = rates_with_adamw(rule, options, lr, adamw_lr)
    entries: Entries = [
        (takes_matrix, optimizer(rule).options(lr=lr, weight_decay=weight_decay, **{**decay, **options})),
        ("*", AdamW.options(lr=adamw_lr, weight_decay=weight_decay, **(adamw or {}))),
    ]
    return Mixture(list(route_fallback(params)), entries)


def takes_matrix(name: str, p: Tensor) -> bool:
    return is_matrix(p)


def route_fallback(params: Any) -> Iterator[Any]:
    """The groups, of which those that timm marks with ``use_fallback`` go to AdamW; lone parameters as they are."""
    for group in params:
        if isinstance(group, dict) and group.get("use_fallback"):
            yield {**{key: value for key, value in group.items() if key != "use_fallback"}, "rule": "AdamW"}
        else:
            yield group
