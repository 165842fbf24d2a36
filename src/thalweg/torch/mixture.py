"""One optimizer that steps by several rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from thalweg.given import Overrides, Pattern
from thalweg.rules import Spikes
from thalweg.settings import RuleOptions
from thalweg.torch.base import Optimizer
from thalweg.torch.params.groups import EngineName, Params, check_given, check_no_functions_in, choose_engine
from thalweg.torch.params.rules import Rules
from thalweg.torch.sharding.sharing import Sharing

Entries: TypeAlias = Sequence[tuple[Pattern, RuleOptions]]


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
        whole = dict(
            maximize=maximize, max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite, seed=seed, spikes=spikes
        )
        check_no_functions_in(overrides)
        rules = Rules.mix(entries, whole, overrides)
        engine = choose_engine(engine, foreach, fused, differentiable)
        self._begin(params, rules, engine, capturable, Sharing(replicas, divide_work))
