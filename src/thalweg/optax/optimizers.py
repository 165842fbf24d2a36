"""The four optimizers, with the names, defaults and numbers of optax where optax has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp
import optax

from thalweg.errors import OptionError
from thalweg.optax import options as typed
from thalweg.optax.options import Mask, Schedulable
from thalweg.optax.transformation import as_transformation, stacks, without_where_false
from thalweg.optax.values import dtype_name, pair
from thalweg.rules import RULES
from thalweg.rules.checks import require
from thalweg.settings import Handling, Overrides, check_known

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from thalweg.optax.options import AdafactorExtras, KronExtras, LambExtras, LarsExtras

F = TypeVar("F", bound=Callable[..., Any])

#: What psgd-jax calls options of ours.
PSGD_JAX = {
    "b1": "momentum",
    "preconditioner_lr": "precond_lr",
    "preconditioner_update_probability": "precond_update_probability",
    "preconditioner_init_scale": "init_scale",
    "max_size_triangular": "max_size_dense",
    "mu_dtype": "momentum_dtype",
    "scanned_layers": "stacked_axes",
}


def extra_names(rule_name: str) -> list[str]:
    """The options that an optimizer takes beside its explicit ones."""
    return list(getattr(typed, f"{rule_name.capitalize()}Extras").__annotations__)


def with_signature(rule_name: str) -> Callable[[F], F]:
    """Show every option with its default where Python is asked for the signature."""

    def decorated(function: F) -> F:
        explicit = [
            p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        variant = RULES[rule_name].VARIANTS.get("optax", {})
        defaults = {f.name: f.default for kind in (RULES[rule_name], Handling) for f in fields(kind)}
        defaults |= {**variant, "seed": None}
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name])
            for name in extra_names(rule_name)
            if name not in PSGD_JAX
        ]
        function.__signature__ = inspect.Signature([*explicit, *shown])  # type: ignore[attr-defined]
        return function

    return decorated


def extras(rule_name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given beside the explicit ones, checked for their names, dtypes as names."""
    explicit = inspect.signature(globals()[rule_name.lower()]).parameters
    check_known(rule_name.lower(), given, [*explicit, *(PSGD_JAX if rule_name == "Kron" else ())])
    options = {name: value for name, value in given.items() if not (name == "seed" and value is None)}
    for name in ("state_dtype", "momentum_dtype", "precond_dtype"):
        if name in options:
            options[name] = dtype_name(name, options[name])
    return options


def counted(stacked_axes: Any) -> dict[str, Any]:
    """``stacked_axes`` as an option of all leaves, where it is one number for all."""
    return {} if stacked_axes is None or stacks(stacked_axes) else {"stacked_axes": stacked_axes}


@with_signature("LARS")
def lars(
    learning_rate: Schedulable,
    weight_decay: Schedulable = 0.0,
    weight_decay_mask: Mask = True,
    trust_coefficient: Schedulable = 0.001,
    eps: Schedulable = 0.0,
    trust_ratio_mask: Mask = True,
    momentum: Schedulable = 0.9,
    nesterov: bool = False,
    *,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[LarsExtras],
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum whose step size follows each layer's norm, as ``optax.lars``.

    ``norm_mode="paper"`` is the paper's ratio; ``trust=False`` makes it SGD with momentum. Options: docs/jax.md.

    >>> import jax.numpy as jnp
    >>> solver = lars(learning_rate=1.0, trust_coefficient=0.1)
    >>> params = jnp.ones((2, 2))
    >>> updates, state = solver.update(jnp.full((2, 2), 0.5), solver.init(params), params)
    >>> print(params + updates)
    [[0.9 0.9]
     [0.9 0.9]]
    """
    given = {
        "weight_decay": weight_decay,
        "trust_coefficient": trust_coefficient,
        "eps": eps,
        "momentum": momentum,
        "nesterov": nesterov,
        **counted(stacked_axes),
        **extras("LARS", options),
    }
    choices = [
        *without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0),
        *without_where_false("trust_ratio_mask", trust_ratio_mask, trust=False),
        *stacks(stacked_axes),
    ]
    return as_transformation(
        "LARS", learning_rate, given, variant="optax", overrides=overrides, choices=choices, specs=specs
    )


@with_signature("LAMB")
def lamb(
    learning_rate: Schedulable,
    b1: Schedulable = 0.9,
    b2: Schedulable = 0.999,
    eps: Schedulable = 1e-6,
    eps_root: Schedulable = 0.0,
    weight_decay: Schedulable = 0.0,
    mask: Mask = None,
    *,
    trust_ratio_mask: Mask = True,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[LambExtras],
) -> optax.GradientTransformationExtraArgs:
    """Adam whose step size follows each layer's norm, as ``optax.lamb``.

    ``trust=False`` makes it AdamW, for all or by ``trust_ratio_mask`` for some. Options: docs/jax.md.

    >>> import jax.numpy as jnp
    >>> solver = lamb(learning_rate=0.1)
    >>> params = jnp.ones((2, 2))
    >>> updates, state = solver.update(jnp.full((2, 2), 0.5), solver.init(params), params)
    >>> print(params + updates)
    [[0.9 0.9]
     [0.9 0.9]]
    """
    given = {
        "betas": pair(b1, b2),
        "eps": eps,
        "eps_root": eps_root,
        "weight_decay": weight_decay,
        **counted(stacked_axes),
        **extras("LAMB", options),
    }
    choices = [
        *without_where_false("mask", mask, weight_decay=0.0),
        *without_where_false("trust_ratio_mask", trust_ratio_mask, trust=False),
        *stacks(stacked_axes),
    ]
    return as_transformation(
        "LAMB",
        learning_rate,
        given,
        variant="optax",
        overrides=overrides,
        choices=choices,
        specs=specs,
        called={"betas[0]": "b1", "betas[1]": "b2"},
    )


@with_signature("Adafactor")
def adafactor(
    learning_rate: Schedulable | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: Schedulable = 0.8,
    decay_offset: Schedulable = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Schedulable | None = 1.0,
    momentum: Schedulable | None = None,
    dtype_momentum: Any = jnp.float32,
    weight_decay_rate: Schedulable | None = None,
    eps: Schedulable = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask = None,
    *,
    min_scale: Schedulable = 1e-3,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[AdafactorExtras],
) -> optax.GradientTransformationExtraArgs:
    """Adaptive step sizes with memory for rows and columns only, as ``optax.adafactor``.

    ``relative_step=True`` takes the paper's own step size, with ``learning_rate`` (or 1e-2) as its cap. Options:
    docs/jax.md.

    >>> import jax.numpy as jnp
    >>> solver = adafactor(learning_rate=0.1)
    >>> params = jnp.ones((2, 2))
    >>> updates, state = solver.update(jnp.full((2, 2), 0.5), solver.init(params), params)
    >>> print(params + updates)
    [[0.9 0.9]
     [0.9 0.9]]
    """
    momentum_dtype = dtype_name("dtype_momentum", dtype_momentum)
    require(
        momentum is not None or momentum_dtype == "float32",
        f"dtype_momentum={momentum_dtype!r} has no effect here: it needs a momentum",
    )
    given = {
        "min_dim_size_to_factor": min_dim_size_to_factor,
        "beta2_decay": decay_rate,
        "decay_offset": decay_offset,
        "scale_parameter": multiply_by_parameter_scale,
        "clip_threshold": clipping_threshold,
        "weight_decay": 0.0 if weight_decay_rate is None else weight_decay_rate,
        "eps": pair(eps, min_scale),
        "factored": factored,
        **({} if momentum is None else {"momentum": momentum, "momentum_dtype": momentum_dtype}),
        **counted(stacked_axes),
        **extras("Adafactor", options),
    }
    choices = [*without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0), *stacks(stacked_axes)]
    return as_transformation(
        "Adafactor",
        learning_rate,
        given,
        variant="optax",
        overrides=overrides,
        choices=choices,
        specs=specs,
        called={
            "beta2_decay": "decay_rate",
            "scale_parameter": "multiply_by_parameter_scale",
            "clip_threshold": "clipping_threshold",
            "weight_decay": "weight_decay_rate",
            "momentum_dtype": "dtype_momentum",
            "eps[0]": "eps",
            "eps[1]": "min_scale",
        },
    )


@with_signature("Kron")
def kron(
    learning_rate: Schedulable,
    *,
    weight_decay_mask: Mask = None,
    variant: str | None = None,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[KronExtras],
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum on gradients whitened by a learned Kronecker product (Kron-PSGD).

    psgd-jax's names of options are understood too; ``variant="kron_torch", merge=None`` is its rule. Options:
    docs/jax.md.

    >>> import jax.numpy as jnp
    >>> solver = kron(learning_rate=0.1)
    >>> params = jnp.ones((2, 2))
    >>> updates, state = solver.update(jnp.eye(2), solver.init(params), params)
    >>> bool(jnp.allclose(params + updates, 1 - 0.1 * jnp.eye(2), atol=1e-3))
    True
    """
    named: dict[str, Any] = {} if stacked_axes is None else {"stacked_axes": stacked_axes}
    called = {PSGD_JAX[name]: name for name in options if name in PSGD_JAX}
    for name, value in extras("Kron", options).items():
        own = PSGD_JAX.get(name, name)
        if own in named:
            theirs = next(alias for alias, meant in PSGD_JAX.items() if meant == own)
            raise OptionError(f"{theirs} is psgd-jax's name of {own}: give one of them")
        named[own] = dtype_name(name, value) if own.endswith("_dtype") else value
    stacked = named.pop("stacked_axes", None)
    choices = [*without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0), *stacks(stacked)]
    return as_transformation(
        "Kron",
        learning_rate,
        {**named, **counted(stacked)},
        variant=variant,
        overrides=overrides,
        choices=choices,
        specs=specs,
        called=called,
    )
