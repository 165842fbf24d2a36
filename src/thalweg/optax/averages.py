"""Parameters as they are to be evaluated: averages that a state keeps."""

from __future__ import annotations

from typing import Any, cast

import optax

from thalweg.boundary import seen
from thalweg.errors import OptionError
from thalweg.optax.explain import transformations
from thalweg.optax.states import own_parts
from thalweg.optax.trees import Tree, parameters
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average
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
    known = {}
    for _, part, by_name in own_parts(state, params):
        known.update({name: (entries, part.count) for name, entries in by_name.items()})
    settings = {leaf.name: leaf.setting for _, leaves in transformations(solver, params).parts for leaf in leaves}
    flat = parameters(params)
    named = dict(zip(flat.names, flat.leaves, strict=True))
    averaging = {name: setting for name, setting in settings.items() if keeps_average(setting.rule)}
    if not averaging:
        raise OptionError(NO_AVERAGE)
    for name, setting in averaging.items():
        p, (entries, count) = named[name], known[name]
        wide = seen(space, p, entries)
        rule = cast(Wrapped, setting.rule_at(count + 1))
        value = rule.evaluate_at(space, entries, wide, space.astype(count, space.dtype(wide)))
        named[name] = space.astype(value, p.dtype.name)
    return flat.treedef.unflatten(list(named.values()))
