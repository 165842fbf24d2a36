"""What a solver will do with each parameter, told before it does anything."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from thalweg.arrays import is_number
from thalweg.errors import ParameterError, UnusedOverrideWarning
from thalweg.explain import Explanation, GroupRow, explain_parameter
from thalweg.optax.batches import Leaf
from thalweg.optax.engines import explain_engines
from thalweg.optax.matrices import rule_of_axes
from thalweg.optax.steps import owner_of
from thalweg.optax.transformation import CONTENTS, Contents, Transformation
from thalweg.optax.trees import Tree, named
from thalweg.optax.values import at_count, concrete


def explain(solver: optax.GradientTransformation, params: Tree) -> Explanation:
    """How each parameter will be treated, how many bytes of state it takes, and what looks like a mistake.

    solver: a transformation of thalweg.optax or a mixture, also within wrappers of optax; parameters that other
    transformations step have no row. params: arrays, or their shapes. A group is a transformation. No state is made.

    >>> import jax.numpy as jnp
    >>> from thalweg.optax import lamb
    >>> print(explain(lamb(0.1), {"w": jnp.ones((2, 3), jnp.float32)}))
    name   shape  dtype    treatment    lr scale  decay  state bytes
    w      2x3    float32  trust ratio  1         0      48
    total                                                48
    group 0: 1 stepped, lr 0.1
    """
    flat, contents = named(params), transformations(solver, params)
    parts = [(owner, leaves) for owner, leaves in contents.parts if leaves]
    if not parts:
        raise ParameterError("explain() needs a transformation of thalweg.optax in the solver, and found none")
    sizes = dict(zip(flat.names, map(rms_of, flat.leaves), strict=True))
    outer = owner_of(solver)
    reached = set() if outer is None else outer.reached()
    is_mixed = contents.mixtures or len({owner.settings.rule for owner, _ in parts}) > 1
    rows, groups, unused = {}, [], []
    for owner, leaves in parts:
        rate = concrete(at_count(owner.learning_rate, 0))
        is_guarded = owner.numerics.on_nonfinite == "skip"
        engines = explain_engines(owner.engine, leaves, guarded=is_guarded, reached=id(owner) in reached)
        for leaf, engine in zip(leaves, engines, strict=True):
            name, shape, dtype = leaf.name, leaf.p.shape, leaf.p.dtype.name
            # one count serves all
            known = {"lr": rate, "rms": sizes[name], "hints": contents.hints.get(name, ())}
            row = explain_parameter(name, shape, dtype, leaf.setting, counter_bytes=0, **known)
            treatment = rule_of_axes(leaf.setting.rule_at(1), leaf.axes).treatment(shape)
            rows[name] = replace(row, weight_decay=show(row.weight_decay), treatment=treatment, engine=engine)
        rule = owner.settings.rule.__name__ if is_mixed else ""
        groups.append(group_of(owner, leaves, rate, rule, contents.group_notes.get(id(owner))))
        unused += owner.settings.unused_overrides((leaf.name, leaf.p) for leaf in leaves)
    ordered = [rows[name] for name in flat.names if name in rows]
    return Explanation(ordered, unused, groups, unused_entries=contents.unused_entries)


def transformations(solver: optax.GradientTransformation, params: Tree) -> Contents:
    """The transformations of thalweg.optax within a solver. Values of their parameters are not known."""
    contents = Contents()
    token = CONTENTS.set(contents)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnusedOverrideWarning)
            jax.eval_shape(lambda params: solver.init(params), params)  # a new function: jax remembers what it traced
    finally:
        CONTENTS.reset(token)
    return contents


def group_of(owner: Transformation, leaves: Sequence[Leaf], rate: Any, rule: str, note: str | None) -> GroupRow:
    schedule = ["a schedule gives lr, shown here as at the first step"] if callable(owner.learning_rate) else []
    notes = [*schedule, *([note] if note else [])]
    return GroupRow(None, len(leaves), 0, show(rate), tuple(notes), rule)


def show(value: Any) -> Any:
    """A number as it is; what is injected as a hyperparameter is known to the state alone."""
    return f"{value:g}" if is_number(value) else value if value is None else "in the state"


def rms_of(p: Any) -> float | None:
    """The root mean square of an array, if all of it is here; 1 where there are no numbers yet."""
    if isinstance(p, jax.ShapeDtypeStruct):
        return 1.0
    array = jnp.asarray(p)
    is_known = array.size and array.is_fully_addressable
    return float(jnp.sqrt(jnp.mean(jnp.square(jnp.float32(array))))) if is_known else None
