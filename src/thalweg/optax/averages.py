"""Parameters as they are to be evaluated: averages that a state keeps."""

from __future__ import annotations

from typing import Any, cast

import optax

from thalweg.boundary import seen
from thalweg.errors import OptionError
from thalweg.optax.exchange import entries_by_name, own_parts
from thalweg.optax.explain import transformations
from thalweg.optax.trees import Tree, parameters
from thalweg.rules.around import NO_AVERAGE, Wrapped
from thalweg.spaces import jax as space


def averaged(solver: optax.GradientTransformation, state: Any, params: Tree) -> Tree:
    """The parameters with the averages of ``averaged`` or ``schedule_free`` in their place, in their own dtypes.

    Parameters that have none are as they are. Nothing is changed in place.

    >>> import jax.numpy as jnp
    >>> from thalweg.optax import sgd
    >>> solver, params = sgd(1.0, averaged=0.5), {"w": jnp.ones(2)}
    >>> updates, state = solver.update({"w": jnp.ones(2)}, solver.init(params), params)
    >>> print(averaged(solver, state, {"w": params["w"] + updates["w"]})["w"])
    [0.5 0.5]
    """
    kept = {name: own for _, part in own_parts(state) for name, own in entries_by_name(part, params).items()}
    parts = transformations(solver, params).parts
    rules = {leaf.names[0]: leaf.setting.rule_at(1) for _, leaves in parts for leaf in leaves}
    rules = {name: rule for name, rule in rules.items() if isinstance(rule, Wrapped) and rule.has_average()}
    if not rules:
        raise OptionError(NO_AVERAGE)
    found = parameters(params)
    named = dict(zip(found.names, found.leaves, strict=True))
    for name, rule in rules.items():
        p, entries = named[name], kept[name]
        named[name] = space.astype(
            cast(Wrapped, rule).evaluate_at(space, entries, seen(space, p, entries)), p.dtype.name
        )
    return found.treedef.unflatten(list(named.values()))
