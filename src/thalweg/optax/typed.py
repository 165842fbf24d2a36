"""The functions that are made of rules, for type checkers: nothing here is run."""

from __future__ import annotations

from typing import Any

import optax

from thalweg.optax.options import AdamwExtras, CommonExtras, DType, Mask, Schedulable, SgdExtras
from thalweg.options import Unpack
from thalweg.overrides import Overrides


def sgd(
    learning_rate: Schedulable,
    momentum: Schedulable | None = None,
    nesterov: bool = False,
    accumulator_dtype: DType | None = None,
    *,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[SgdExtras],
) -> optax.GradientTransformationExtraArgs: ...


def lion(
    learning_rate: Schedulable,
    b1: Schedulable = 0.9,
    b2: Schedulable = 0.99,
    mu_dtype: DType | None = None,
    weight_decay: Schedulable = 1e-3,
    mask: Mask = None,
    *,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[CommonExtras],
) -> optax.GradientTransformationExtraArgs: ...


def adamw(
    learning_rate: Schedulable,
    b1: Schedulable = 0.9,
    b2: Schedulable = 0.999,
    eps: Schedulable = 1e-8,
    eps_root: Schedulable = 0.0,
    mu_dtype: DType | None = None,
    weight_decay: Schedulable = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    **options: Unpack[AdamwExtras],
) -> optax.GradientTransformationExtraArgs: ...
