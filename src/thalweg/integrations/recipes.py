"""Mixtures by name, and the learning rates of their two rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from thalweg import torch as front_end
from thalweg.rules import Kron, Muon, Rule
from thalweg.settings import rates_with_adamw

#: Makes an optimizer of a model, with the arguments of ``thalweg.torch.kron_adamw``.
Recipe: TypeAlias = Callable[..., front_end.Optimizer]
RECIPES: Mapping[str, Recipe] = {"kron_adamw": front_end.kron_adamw, "muon_adamw": front_end.muon_adamw}
#: The rules of hidden matrices, by the names of the mixtures.
RULE_OF: Mapping[str, type[Rule]] = {"kron_adamw": Kron, "muon_adamw": Muon}


def with_rates(recipe: Recipe, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a recipe, with a learning rate for AdamW that follows from the user's, where none is given."""
    given = {name: value for name, value in arguments.items() if name not in ("lr", "adamw_lr") or value is not None}
    name = next((name for name, own in RECIPES.items() if own is recipe), None)
    if name is None:  # a function of the user's own: the ratio of its defaults
        usual = {name: p.default for name, p in inspect.signature(recipe).parameters.items()}
        lr = given.get("lr", usual["lr"])
        return {"lr": lr, "adamw_lr": lr * usual["adamw_lr"] / usual["lr"], **given}
    rule = RULE_OF[name]
    lr, adamw_lr = rates_with_adamw(rule, given.get(rule.__name__.lower(), {}), given.get("lr"))
    return {"lr": lr, "adamw_lr": adamw_lr, **given}
