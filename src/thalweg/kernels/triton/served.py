"""Which parameters fused kernels for GPUs step; told without loading torch or Triton."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, grouping, scale_key
from thalweg.kernels.by_hand import reason_unread
from thalweg.kernels.triton import READS
from thalweg.programs.budget import state_entries
from thalweg.programs.extents import kinds_of, spread_shapes
from thalweg.programs.parts import own_key, reason_unparted
from thalweg.programs.reasons import reason_underived
from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Kron, Rule, WholeRule
from thalweg.rules.entries import Count, Factor, PerSlice
from thalweg.rules.rule import stand_in
from thalweg.settings import Setting
from thalweg.storage import Kept, coded_groups

#: The dtypes of parameters and state that kernels read and write.
DTYPES = ("float32", "bfloat16", "float16")


def is_by_hand(rule: Rule) -> bool:
    """Whether the kernels of a rule are written by hand; those of all others are made from the rule."""
    return isinstance(rule, tuple(READS))


def steps_by_hand(setting: Setting, shape: Shape, dtype: str, state: Mapping[str, Kept]) -> bool:
    """Whether kernels that are written for its rule step all of a parameter."""
    return is_by_hand(setting.rule) and not reason_against(setting, shape, dtype, state)


def reason_against(setting: Setting, shape: Shape, dtype: str, state: Mapping[str, Kept]) -> str:
    """Why fused kernels cannot step a parameter whose state has these shapes and dtypes, "" if they can."""
    rule = setting.rule_at(1)
    if is_by_hand(rule):
        unserved = reason_unread(rule, READS)
    elif isinstance(rule, WholeRule):
        unserved = reason_against_state(rule, shape) or reason_unparted(rule, shape) or reason_against_guards(setting)
    else:
        unserved = reason_underived(rule, shape) or reason_against_scalars(rule, shape, state)
    if unserved:
        return unserved
    if dtype not in DTYPES:
        return f"there is no fused kernel for {dtype} on GPUs"
    entries = rule.entries(shape)
    numbers = [kept for key, (_, kept) in state.items() if not isinstance(entries.get(key), Count)]
    if any(kept not in (*DTYPES, *CODECS) for kept in numbers):
        return "there is no fused kernel for state of float64 on GPUs"
    if unserved := reason_against_storage(setting, rule, shape, is_coded=any(scale_key(key) in state for key in state)):
        return unserved
    if isinstance(rule, Kron):
        from thalweg.kernels.triton.kron_served import reason_unserved

        (factors, *_) = (state[key][1] for key in rule.keys(shape, Factor))
        return reason_unserved(rule, setting.handling, shape, factors)
    return ""


def reason_against_scalars(rule: Rule, shape: Shape, state: Mapping[str, Kept]) -> str:
    """Why kernels cannot keep what is one number for each tensor, "" if they can."""
    narrow = [key for key in scalars_of(stand_in(rule), shape) if state[key][1] != "float32"]
    return f"fused kernels keep one number for each tensor in float32, and {narrow[0]!r} is not" if narrow else ""


@functools.lru_cache(maxsize=1024)
def scalars_of(rule: Rule, shape: Shape) -> list[str]:
    return program_of(rule, shape).scalars


def can_be_parted(setting: Setting, shape: Shape, dtype: str, state: Mapping[str, Kept]) -> bool:
    """Whether fused kernels step a parameter before and after what libraries do with it, and with its other state."""
    rule = setting.rule_at(1)
    if not isinstance(rule, WholeRule) or reason_unparted(rule, shape) or reason_against_guards(setting):
        return False
    if setting.handling.may_skip and not rule.IN_PARTS:  # the host counts, and would not know
        return False
    whole, kept = rule.keys(shape, PerSlice), state[own_key(rule, shape)][1]
    are_wide = all(state[key][1] in ("float32", "bfloat16") for key in whole)
    is_plain = setting.handling.state_rounding != "stochastic" and math.prod(shape) > 0
    return are_wide and is_plain and dtype in DTYPES and kept in (*DTYPES, *CODECS)


def reason_against_state(rule: WholeRule, shape: Shape) -> str:
    """Why products alone do not make a step of a rule, "" if they do."""
    return "" if rule.is_stackable(shape) else f"{type(rule).__name__} keeps state that has shapes of its own"


def reason_against_storage(setting: Setting, rule: Rule, shape: Shape, *, is_coded: bool) -> str:
    """Why fused kernels cannot read and write state as it is kept, "" if they can. is_coded: whether some is codes."""
    name, handling = type(rule).__name__, setting.handling
    if (is_by_hand(rule) or isinstance(rule, WholeRule)) and handling.state_rounding == "stochastic":
        return f"there is no fused kernel of {name} for state_rounding='stochastic'"
    if is_by_hand(rule) and handling.rounding == "compensated":
        return f"there is no fused kernel of {name} for rounding='compensated'"
    if is_coded and (not isinstance(rule, WholeRule) or isinstance(rule, Kron)) and cuts_groups(stand_in(rule), shape):
        return f"tiles of rows and columns of a tensor of shape {shape} cut its groups of codes"
    return ""


@functools.lru_cache(maxsize=1024)
def cuts_groups(rule: Rule, shape: Shape) -> bool:
    """Whether a tensor is stepped tile by tile, and its lines do not end with a group, or are not of columns alone."""
    groups = grouping(shape, rule.stacked_axes)
    if isinstance(rule, Kron):
        grid = rule.grid(shape)
        return groups is not None and any(n % groups.size for n in (grid.sizes[-1], grid.sides[-1]))
    axes = kinds_of(program_of(rule, shape), rule.stacked_axes).axes
    if groups is None or axes is None:
        return False
    return math.prod(shape[axes[1] + 1 :]) != 1 or shape[axes[1]] % groups.size != 0


def program_of(rule: Rule, shape: Shape) -> Program:
    example = example_of(rule, shape)
    return trace(rule, example, spread_shapes(rule.entries(example), example))


def reason_against_guards(setting: Setting) -> str:
    """Why fused kernels of the parts of a rule cannot step a parameter, "" if they can."""
    policy = setting.handling.on_nonfinite
    if policy != "propagate":
        return f"there is no fused kernel of {type(setting.rule).__name__} for on_nonfinite={policy!r}"
    return ""


def is_parted(setting: Setting, shape: Shape) -> bool:
    """Whether kernels step shards or replicas of a parameter before and after its owner has transformed the whole."""
    rule, handling = setting.rule, setting.handling
    if not isinstance(rule, WholeRule) or rule.stacked_axes or handling.is_random:
        return False
    if coded_groups(rule, handling, shape) is not None:
        return False
    if is_by_hand(rule):  # owners have kernels; the host counts, and would not know of a step that is skipped
        is_rounded = isinstance(rule, Kron) and rule.precond_precision == "tf32"
        unserved = handling.may_skip or setting.scheduled or reason_against_guards(setting) or not is_rounded
        return not (unserved or reason_unparted(rule, shape))
    return rule.IN_PARTS and rule.is_stackable(shape)


def would_lose_kernels(setting: Setting, shape: Shape, dtype: str, *, capturable: bool = False) -> bool:
    """Whether fused kernels step a parameter that is whole, and not if its replicas divided the work on it."""
    kind, rule = (setting, shape, dtype, state_entries(setting, shape, dtype)), setting.rule
    unserved = reason_against(*kind)
    is_counted = not capturable or (isinstance(rule, WholeRule) and rule.IN_PARTS)
    served_in_parts = not unserved and is_counted and is_parted(setting, shape)
    return not served_in_parts and (not unserved or (is_counted and can_be_parted(*kind)))


def reason_against_shard(setting: Setting, shape: Shape, sharded: Collection[int]) -> str:
    """Why fused kernels cannot step a shard of a parameter of this shape, or the whole for its owner; "" if they can.

    sharded: along which axes.
    """
    rule = setting.rule
    if is_parted(setting, shape):
        return ""
    if isinstance(rule, WholeRule) and rule.is_stackable(shape):
        return f"it is sharded, and owners have library products for {type(rule).__name__} with these options"
    if rule.needs_whole:  # the owner works on the whole tensor, and each rank then steps its shard
        return ""
    if rule.stacked_axes:
        return "it is sharded, and GPU kernels step shards only with stacked_axes=0"
    if setting.handling.is_random and sum(axis > 0 for axis in sharded) > 1:
        return "it is sharded along several axes beyond the first, and GPU kernels then round to the nearest alone"
    return ""
