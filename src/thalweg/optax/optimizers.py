"""Optimizers that are written by hand, with the names, defaults and numbers of optax where optax has them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from thalweg.errors import OptionError
from thalweg.optax.matrices import UNDECLARED, Layout, check_layout
from thalweg.optax.options import AdafactorExtras, KronExtras, LambExtras, LarsExtras, Mask, MuonExtras, Schedulable
from thalweg.optax.signatures import OPTAX, PSGD_JAX, counted, extras, with_signature
from thalweg.optax.transformation import as_transformation, stacks, without_where_false
from thalweg.optax.values import dtype_name, pair
from thalweg.options import Unpack
from thalweg.overrides import Overrides, is_list
from thalweg.rules import LAMB, LARS, Adafactor, Kron, Muon
from thalweg.rules.checks import require
from thalweg.rules.muon import PUBLISHED


@with_signature(LARS)
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
        **extras(LARS, options),
    }
    choices = [
        *without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0),
        *without_where_false("trust_ratio_mask", trust_ratio_mask, trust=False),
        *stacks(stacked_axes),
    ]
    return as_transformation(
        LARS, learning_rate, given, variant="optax", overrides=overrides, choices=choices, specs=specs
    )


@with_signature(LAMB)
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
        **extras(LAMB, options),
    }
    choices = [
        *without_where_false("mask", mask, weight_decay=0.0),
        *without_where_false("trust_ratio_mask", trust_ratio_mask, trust=False),
        *stacks(stacked_axes),
    ]
    return as_transformation(
        LAMB,
        learning_rate,
        given,
        variant="optax",
        overrides=overrides,
        choices=choices,
        specs=specs,
        called=OPTAX["LAMB"],
    )


@with_signature(Adafactor)
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
    require(not is_list(eps), f"eps is one number here, and the second is min_scale, got eps={eps!r}")
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
        **extras(Adafactor, options),
    }
    choices = [*without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0), *stacks(stacked_axes)]
    return as_transformation(
        Adafactor,
        learning_rate,
        given,
        variant="optax",
        overrides=overrides,
        choices=choices,
        specs=specs,
        called=OPTAX["Adafactor"],
    )


@with_signature(Muon)
def muon(
    learning_rate: Schedulable,
    ns_coeffs: Any = PUBLISHED,
    ns_steps: int = 5,
    beta: Schedulable = 0.95,
    eps: Schedulable = 1e-8,
    weight_decay: Schedulable = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    consistent_rms: Schedulable | None = None,
    layout: Layout | None = None,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[MuonExtras],
) -> optax.GradientTransformationExtraArgs:
    """Steps along momentum whose singular values are all made about 1, as ``optax.contrib.muon`` takes matrices.

    layout: which axes of a parameter are inputs and outputs: "flax", "equinox", "torch", a :class:`MatrixAxes`, or a
    function of a name and a parameter. Without one, parameters have two axes, (in, out), and others are refused.
    Vectors are refused: :func:`muon_adamw` gives them to AdamW. Options: docs/jax.md.

    >>> import jax.numpy as jnp
    >>> solver = muon(learning_rate=0.1)
    >>> params = jnp.ones((2, 2))
    >>> updates, state = solver.update(jnp.diag(jnp.array([4.0, 3.0])), solver.init(params), params)
    >>> print((params + updates).round(2))
    [[0.89 1.  ]
     [1.   0.93]]
    """
    if layout is not None:
        check_layout(layout)
    given = {
        "ns_coefficients": ns_coeffs,
        "ns_steps": ns_steps,
        "momentum": beta,
        "eps": eps,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        **({} if mu_dtype is None else {"momentum_dtype": dtype_name("mu_dtype", mu_dtype)}),
        **({} if consistent_rms is None else {"scaling": "match_rms_adamw", "rms": consistent_rms}),
        **counted(stacked_axes),
        **extras(Muon, options),
    }
    choices = [*without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0), *stacks(stacked_axes)]
    return as_transformation(
        Muon,
        learning_rate,
        given,
        variant="optax",
        overrides=overrides,
        choices=choices,
        specs=specs,
        called=OPTAX["Muon"],
        layout=UNDECLARED if layout is None else layout,
    )


@with_signature(Kron)
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
    >>> bool(jnp.sqrt(jnp.mean(updates**2)) <= 1.1 * 0.1 * 1.001)
    True
    """
    named: dict[str, Any] = {} if stacked_axes is None else {"stacked_axes": stacked_axes}
    called = {PSGD_JAX[name]: name for name in options if name in PSGD_JAX}
    for name, value in extras(Kron, options).items():
        own = PSGD_JAX.get(name, name)
        if own in named:
            theirs = next(alias for alias, meant in PSGD_JAX.items() if meant == own)
            raise OptionError(f"{theirs} is psgd-jax's name of {own}: give one of them")
        named[own] = value
    stacked = named.pop("stacked_axes", None)
    choices = [*without_where_false("weight_decay_mask", weight_decay_mask, weight_decay=0.0), *stacks(stacked)]
    return as_transformation(
        Kron,
        learning_rate,
        {**named, **counted(stacked)},
        variant=variant,
        overrides=overrides,
        choices=choices,
        specs=specs,
        called=called,
    )
