"""The audit of one update of a gradient transformation of optax: ours, or one that the table knows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from thalweg.audit.causes import find_verdicts
from thalweg.audit.page import SKIPPED, Arr, Step
from thalweg.audit.report import AuditError, Report, line_of
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
        pairs = [(found.names, found.leaves) for found in map(named, trees)]
        self.p, self.g, self.moved, self.after = (dict(zip(*pair, strict=True)) for pair in pairs)

    def step(
        self, name: str, setting: ParameterOptions, t: int, lr: Any, scale: float, kept: Any, *, is_ours: bool
    ) -> Step:
        """One parameter. kept: its state before and after."""
        p, moved, after = self.p[name], xp.dtype(self.moved[name]), self.after[name]
        weights = [host(seen(xp, x, s) if RECORD in s else x) for x, s in zip((p, after), kept, strict=True)]
        rule = setting.for_shape(p.shape).rule_at(t)
        states = [{key: host(x) for key, x in decoded(xp, rule, p, s).items()} for s in kept]
        arrays = dict(before=weights[0], after=weights[1], gradient=host(self.g[name]), state=states[0])
        dtypes, dtype = {key: xp.dtype(x) for key, x in kept[1].items()}, xp.dtype(p)
        arrays |= dict(state_after=states[1], state_dtypes=dtypes)
        rates = dict(lr=lr, lr_scale=setting.lr_scale, is_coarse=not is_ours)
        precision = moved if moved in NARROW or not is_ours else arithmetic(dtype)
        own = setting.for_shape(p.shape)
        return Step.by(own, t, dtype, scale, name=name, arithmetic=precision, **arrays, **rates)

    def ours(self) -> list[Step]:
        """The parameters that transformations of ours step."""
        try:
            parts = own_parts(self.state, self.params), own_parts(self.new_state, self.params)
        except StateError:
            return []
        before, after = ({name: (part, s) for _, part, own in each for name, s in own.items()} for each in parts)
        found = []
        for owner, leaves in transformations(self.solver, self.params).parts:
            names = [leaf.names[0] for leaf in leaves]
            norms = getattr(before[names[0]][0], SPIKES, None) if names else None
            handling, gradients = owner.settings.base.handling, [(xp, self.g[name], self.p[name]) for name in names]
            scale, judgement = join(handling, gradients, norms)
            if judgement is not None and judgement.skips and bool(judgement.is_spike[0]):
                scale = SKIPPED
            for name, leaf in zip(names, leaves, strict=True):
                count = int(before[name][0].count)
                rate = concrete(at_count(owner.learning_rate, count))
                if leaf.axes is not None or not (rate is None or isinstance(rate, (int, float))):
                    what = "axes that a layout tells" if leaf.axes else "a learning rate that is in the state"
                    raise AuditError(f"{name!r} has {what}, of which no step is replayed")
                factor, kept = 1.0 if scale is None else float(scale), (before[name][1], after[name][1])
                found.append(self.step(name, leaf.setting, count + 1, rate, factor, kept, is_ours=True))
        return found

    def of_optax(self, rule: Rule, lr: Any) -> list[Step]:
        """The parameters of a chain of optax's own."""
        chains = [[*walk(state)] for state in (self.state, self.new_state)]
        t, entries, found = count_steps(chains[1]), [read_entries(chain) for chain in chains], []
        for name, p in self.p.items():
            like = rule.for_shape(p.shape).init(on_host, np.zeros(p.shape))
            kept = [fit_entries(each.get(name, {}), like) for each in entries]
            rate, setting = None if lr is None else float(at_count(lr, t - 1)), ParameterOptions(rule, Handling())
            found.append(self.step(name, setting, t, rate, 1.0, kept, is_ours=False))
        return found


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
    lines = [line_of(step, *found) for step, found in zip(steps, find_verdicts(steps, []), strict=True)]
    faults = [f"{step.name}: {fault}" for step in steps for fault in step.faults_of_state()]
    return Report(f"audit of one update: {len(steps)} tensors", lines, faults)


def host(x: Any) -> Arr:
    return np.asarray(x if x.dtype == jnp.float64 else x.astype(jnp.float32))
