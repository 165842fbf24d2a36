"""The audit of one update of a gradient transformation of optax: ours, or a chain whose page is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from thalweg.audit.page import SKIPPED, Arr, Step
from thalweg.audit.report import AuditError, Report, report_on
from thalweg.boundary import seen
from thalweg.dtypes import NARROW
from thalweg.errors import StateError
from thalweg.optax.explain import transformations
from thalweg.optax.peers import count_steps, fit_entries, read_entries, walk
from thalweg.optax.states import own_parts
from thalweg.optax.transformation import join
from thalweg.optax.trees import Tree, named
from thalweg.optax.values import at_count, concrete
from thalweg.rules import Rule
from thalweg.settings import Handling, ParameterOptions
from thalweg.spaces import jax as xp
from thalweg.spaces import numpy as on_host
from thalweg.storage import RECORD, SPIKES, arithmetic, decoded


class Leaves:
    """What an update was given and has made, by names of parameters."""

    def __init__(self, solver: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree) -> None:
        self.solver, self.state, self.params = solver, state, params
        updates, self.new_state = solver.update(grads, state, params)
        trees = params, grads, updates, optax.apply_updates(params, updates)
        pairs = [(tree.names, tree.leaves) for tree in map(named, trees)]
        self.p, self.g, self.moved, self.after = (dict(zip(*pair, strict=True)) for pair in pairs)

    def step(self, name: str, setting: ParameterOptions, t: int, lr: Any, scale: float, kept: Any, ours: bool) -> Step:
        """One parameter. kept: its state before and after."""
        p, dtype, moved = self.p[name], xp.dtype(self.p[name]), xp.dtype(self.moved[name])
        shaped = setting.for_shape(p.shape)
        shaped = replace(shaped, rule=shaped.rule_at(t))
        weights = (host(seen(xp, x, s) if RECORD in s else x) for x, s in zip((p, self.after[name]), kept, strict=True))
        states = ({key: host(x) for key, x in decoded(xp, shaped.rule, p, s).items()} for s in kept)
        precision = moved if moved in NARROW or not ours else arithmetic(dtype)
        given = dict(name=name, setting=shaped, gradient=host(self.g[name]), t=t, lr=lr, scale=scale, dtype=dtype)
        made: dict[str, Any] = dict(zip(("before", "after", "state", "state_after"), (*weights, *states), strict=True))
        beside: Any = dict(arithmetic=precision, sums=arithmetic(dtype), biases="" if ours else precision)
        return Step(**given, **made, **beside, state_dtypes={key: xp.dtype(x) for key, x in kept[1].items()})

    def ours(self) -> list[Step]:
        """The parameters that transformations of ours step."""
        try:
            parts = own_parts(self.state, self.params), own_parts(self.new_state, self.params)
        except StateError:
            return []
        before, after = ({name: (part, s) for _, part, own in each for name, s in own.items()} for each in parts)
        steps = []
        for owner, leaves in transformations(self.solver, self.params).parts:
            names = [leaf.names[0] for leaf in leaves]
            norms = getattr(before[names[0]][0], SPIKES, None) if names else None
            gradients = [(xp, self.g[name], self.p[name]) for name in names]
            scale, judgement = join(owner.settings.base.handling, gradients, norms)
            if judgement is not None and judgement.skips and bool(judgement.is_spike[0]):
                scale = SKIPPED
            for name, leaf in zip(names, leaves, strict=True):
                count = int(before[name][0].count)
                rate = concrete(at_count(owner.learning_rate, count))
                if leaf.axes is not None or not (rate is None or isinstance(rate, (int, float))):
                    what = "axes that a layout tells" if leaf.axes else "a learning rate that is in the state"
                    raise AuditError(f"{name!r} has {what}, of which no step is replayed")
                kept, factor = (before[name][1], after[name][1]), 1.0 if scale is None else float(scale)
                steps.append(self.step(name, leaf.setting, count + 1, rate, factor, kept, ours=True))
        return steps

    def of_optax(self, rule: Rule, lr: Any) -> list[Step]:
        """The parameters of a chain of optax's own."""
        chains = [[*walk(state)] for state in (self.state, self.new_state)]
        t, entries, steps = count_steps(chains[1]), [read_entries(chain) for chain in chains], []
        for name, p in self.p.items():
            like = rule.for_shape(p.shape).init(on_host, np.zeros(p.shape))
            kept = [fit_entries(each.get(name, {}), like) for each in entries]
            rate, setting = None if lr is None else float(at_count(lr, t - 1)), ParameterOptions(rule, Handling())
            steps.append(self.step(name, setting, t, rate, 1.0, kept, ours=False))
        return steps


def audit(
    solver: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, *, rule: Any = None, lr: Any = None
) -> Report:
    """Replay one update by its page in float64, and say where it differs; nothing is changed.

    rule, lr: of a chain of optax's own, which does not tell its options: its page, such as
    ``thalweg.rules.AdamW(weight_decay=1e-4)``, and its learning rate, or a function of the count.
    """
    leaves = Leaves(solver, grads, state, params)
    steps = leaves.ours() if rule is None else leaves.of_optax(rule, lr)
    if not steps:
        raise AuditError(
            "the solver has no transformation of thalweg.optax, and optax's do not tell their options: say the page, "
            "such as rule=thalweg.rules.AdamW(weight_decay=1e-4), and lr="
        )
    return report_on(f"audit of one update: {len(steps)} tensors", steps)


def host(x: Any) -> Arr:
    return np.asarray(x if x.dtype == jnp.float64 else x.astype(jnp.float32))
