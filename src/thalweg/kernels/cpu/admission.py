"""Which parameters native code steps; told without a framework."""

from __future__ import annotations

import math
from collections.abc import Collection

from thalweg.arrays import Shape
from thalweg.errors import Refused
from thalweg.kernels.cpu.compiled import check_kind, emit_kind, kind_of
from thalweg.kernels.cpu.structs import MOST_AFTER
from thalweg.rules import Rule, WholeRule
from thalweg.settings import Numerics, ParameterOptions
from thalweg.storage import coded_groups


def admit(rule: Rule, numerics: Numerics, shape: Shape, dtype: str = "float32") -> None:
    """Raise Refused if native code cannot step such a tensor."""
    if isinstance(rule, WholeRule) and rule.is_stackable(shape):
        raise Refused(f"{type(rule).__name__} is made of matrix products alone, which array libraries do best")
    if rule.needs_whole:  # it is computed by its own formulas, of native noise
        return
    if numerics.state_rounding == "stochastic" and dtype == "float64":
        raise Refused("there is no native code for state_rounding='stochastic' of float64")
    check_kind(kind_of(rule, shape))
    axes = emit_kind(kind_of(rule, shape)).kinds.axes
    if axes is None:
        return
    if math.prod(shape) == 0:
        raise Refused(f"shape {shape} is empty")
    behind = math.prod(shape[axes[1] + 1 :])
    if behind > MOST_AFTER:
        raise Refused(f"shape {shape} has {behind} elements behind axis {axes[1]}, and {MOST_AFTER} can be served")
    groups = coded_groups(rule, numerics, shape)
    if groups is not None and (piece_of(behind) % groups.size or shape[axes[1]] * behind % groups.size):
        raise Refused(
            f"rows and columns of shape {shape} are gone through in pieces that cut its groups of {groups.size}"
        )


def piece_of(behind: int) -> int:
    """How many elements of a factored tensor are taken at a time, as native/passes.h has it."""
    unit = 32 * behind if behind <= 32 else behind
    return unit * max(1, 1024 // unit)


def admit_shard(setting: ParameterOptions, shape: Shape, sharded: Collection[int]) -> None:
    """Raise Refused if native code cannot step a shard of a parameter of this shape. sharded: along which axes."""
    rule, numerics = setting.rule, setting.numerics
    if rule.needs_whole:
        raise Refused(f"there is no native code of {type(rule).__name__} for sharded parameters")
    admit(rule, numerics, shape)
    if emit_kind(kind_of(rule, shape)).kinds.axes is not None:
        raise Refused(f"there is no native code of {type(rule).__name__} with rows and columns for sharded parameters")
    if numerics.on_nonfinite != "propagate" or rule.stacked_axes:
        raise Refused(
            "it is sharded, and native code steps shards only with on_nonfinite='propagate' and stacked_axes=0"
        )
    if numerics.is_random and any(axis > 0 for axis in sharded):
        raise Refused("it is sharded along an axis beyond the first, and native code then rounds to the nearest alone")
