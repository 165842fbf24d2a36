"""The audit of one update of a gradient transformation of optax: ours, or a chain whose page is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optax

from thalweg.audit.page import COARSE, Precision, Step, copy, read
from thalweg.audit.report import AuditError, Report
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import StateError
from thalweg.optax.explain import transformations
from thalweg.optax.peers import count_steps, fit_entries, read_entries, walk
from thalweg.optax.states import own_parts
from thalweg.optax.transformation import join
from thalweg.optax.trees import Tree, named
from thalweg.optax.values import at_count, concrete
from thalweg.rules import Rule
from thalweg.rules.noise import tensor_id
from thalweg.settings import Numerics, ParameterOptions
from thalweg.spaces import jax as xp
from thalweg.spaces import numpy as on_host
from thalweg.storage import SPIKES, arithmetic


def audit(
    solver: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, *, rule: Any = None, lr: Any = None
) -> Report:
    """Replay one update by its page in float64, and say where it differs; nothing is changed.

    rule, lr: of a chain of optax's own, which does not tell its options: its page, such as
    ``thalweg.rules.AdamW(weight_decay=1e-4)``, and its learning rate, or a function of the count.
    """
    updates, new_state = solver.update(grads, state, params)
    trees = map(named, (params, optax.apply_updates(params, updates), grads, updates))
    p, after, g, moves = (dict(zip(tree.names, tree.leaves, strict=True)) for tree in trees)
    states, steps = (state, new_state), []
    treated = list_ours(solver, states, params, g) if rule is None else list_others(rule, lr, states, p)
    for name, setting, t, rate, scale, (entries, new_entries) in treated:
        setting = replace(setting, rule=setting.for_shape(p[name].shape).rule_at(t))
        before, dtypes = read(xp, setting.rule, p[name], entries)
        made, _ = read(xp, setting.rule, after[name], new_entries)
        precision = find_precision(dtypes[""], xp.dtype(moves[name]), is_ours=rule is None)
        given = name, setting, t, rate, scale, copy(xp, g[name])
        steps.append(Step(*given, before, made, dtypes, precision, tensor_id(name)))
    if not steps:
        raise AuditError(
            "the solver has no transformation of thalweg.optax, and optax's do not tell their options: say the page, "
            "such as rule=thalweg.rules.AdamW(weight_decay=1e-4), and lr="
        )
    return Report(f"audit of one update: {len(steps)} tensors").tell(steps, [], {})


def list_ours(solver: Any, states: tuple[Tree, Tree], params: Tree, grads: Mapping[str, Any]) -> Iterator[Any]:
    """Of parameters that ours step: name, options, number of the step, rate, scale of the gradient, state twice."""
    try:
        parts = [own_parts(state, params) for state in states]
    except StateError:
        return
    before, after = (
        {name: (part, entries) for _, part, by_name in of_state for name, entries in by_name.items()}
        for of_state in parts
    )
    for owner, leaves in transformations(solver, params).parts:
        named_leaves = [(leaf.name, leaf) for leaf in leaves]
        norms = next((getattr(before[name][0], SPIKES, None) for name, _ in named_leaves), None)
        gradients = [(xp, grads[name], leaf.p) for name, leaf in named_leaves]
        scale, judgement = join(owner.settings.base.numerics, gradients, norms)
        is_skipped = judgement is not None and judgement.skips and bool(judgement.is_spike[0])
        for name, leaf in named_leaves:
            count = int(before[name][0].count)
            rate = concrete(at_count(owner.learning_rate, count))
            if leaf.axes is not None or not isinstance(rate, (int, float, type(None))):
                what = "axes that a layout tells" if leaf.axes else "a learning rate that is in the state"
                raise AuditError(f"{name!r} has {what}, of which no step is replayed")
            factor = 0.0 if is_skipped else 1.0 if scale is None else float(scale)
            yield name, leaf.setting, count + 1, rate, factor, (before[name][1], after[name][1])


def list_others(rule: Rule, lr: Any, states: tuple[Tree, Tree], params: Mapping[str, Any]) -> Iterator[Any]:
    """The same of parameters that a chain of optax's own steps."""
    chains = [[*walk(state)] for state in states]
    t, states_by_name = count_steps(chains[1]), [read_entries(chain) for chain in chains]
    for name, p in params.items():
        like = rule.for_shape(p.shape).init(on_host, np.zeros(p.shape))
        entries = [fit_entries(by_name.get(name, {}), like) for by_name in states_by_name]
        rate = None if lr is None else float(at_count(lr, t - 1))
        yield name, ParameterOptions(rule, Numerics()), t, rate, 1.0, entries


def find_precision(dtype: str, added: str, *, is_ours: bool) -> Precision:
    """How exactly a parameter is stepped. added: the dtype of its update."""
    usual = arithmetic(dtype)
    if is_ours:
        return Precision(added if added in NARROW else usual, usual)
    return Precision(added, usual, powers=COARSE * DTYPES[added].rounding)
