"""Which parameters native code steps; told without a framework."""

from __future__ import annotations

import math
from collections.abc import Collection

from thalweg.arrays import Shape
from thalweg.kernels.cpu.compiled import emitted, kind_of, reason_uncompiled
from thalweg.kernels.cpu.structs import MOST_AFTER
from thalweg.rules import Rule, WholeRule
from thalweg.settings import Handling, Setting


def reason_unserved(rule: Rule, handling: Handling, shape: Shape) -> str | None:
    """Why native code cannot step such a tensor, or None if it can."""
    if isinstance(rule, WholeRule) and rule.is_stackable(shape):
        return f"{type(rule).__name__} is made of matrix products alone, which array libraries do best"
    if rule.needs_whole:  # it is computed by its own formulas, of native noise
        return None
    if handling.beyond_dtypes:
        return f"there is no native code for {handling.beyond_dtypes}"
    if reason := reason_uncompiled(rule, shape):
        return reason
    axes = emitted(kind_of(rule, shape)).kinds.axes
    if axes is None:
        return None
    if math.prod(shape) == 0:
        return f"shape {shape} is empty"
    behind = math.prod(shape[axes[1] + 1 :])
    if behind > MOST_AFTER:
        return f"shape {shape} has {behind} elements behind axis {axes[1]}, and {MOST_AFTER} can be served"
    return None


def reason_against_shard(setting: Setting, shape: Shape, sharded: Collection[int]) -> str:
    """Why native code cannot step a shard of a parameter of this shape, "" if it can. sharded: along which axes."""
    rule, handling = setting.rule, setting.handling
    if rule.needs_whole:
        return f"there is no native code of {type(rule).__name__} for sharded parameters"
    if reason := reason_unserved(rule, handling, shape):
        return reason
    if emitted(kind_of(rule, shape)).kinds.axes is not None:
        return f"there is no native code of {type(rule).__name__} with rows and columns for sharded parameters"
    if handling.on_nonfinite != "propagate" or rule.stacked_axes:
        return "it is sharded, and native code steps shards only with on_nonfinite='propagate' and stacked_axes=0"
    if handling.rounding == "stochastic" and any(axis > 0 for axis in sharded):
        return "it is sharded along an axis beyond the first, and native code then needs rounding='nearest'"
    return ""
