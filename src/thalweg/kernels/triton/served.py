"""Which parameters fused kernels for GPUs step; told without loading torch or Triton."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thalweg.arrays import Shape
from thalweg.kernels.shown import reason_unread
from thalweg.kernels.triton import READS
from thalweg.programs.parted import reason_unparted
from thalweg.programs.served import reason_underived
from thalweg.rules import Kron, Rule, WholeRule
from thalweg.rules.entries import Count, Factor
from thalweg.settings import Setting
from thalweg.storage import Kept

#: The dtypes of parameters and state that kernels read and write.
DTYPES = ("float32", "bfloat16", "float16")


def is_by_hand(rule: Rule) -> bool:
    """Whether the kernels of a rule are written by hand; those of all others are made from the rule."""
    return isinstance(rule, tuple(READS))


def reason_against(setting: Setting, shape: Shape, dtype: str, state: Mapping[str, Kept]) -> str:
    """Why fused kernels cannot step a parameter whose state has these shapes and dtypes, "" if they can."""
    rule = setting.rule_at(1)
    if is_by_hand(rule):
        unserved = reason_unread(rule, READS)
    elif isinstance(rule, WholeRule):
        unserved = reason_unparted(rule, shape) or reason_against_guards(setting)
    else:
        unserved = reason_underived(rule, shape)
    if unserved:
        return unserved
    if dtype not in DTYPES:
        return f"there is no fused kernel for {dtype} on GPUs"
    if setting.handling.beyond_dtypes:
        return f"there is no fused kernel for {setting.handling.beyond_dtypes} on GPUs"
    entries = rule.entries(shape)
    if any(kept not in DTYPES for key, (_, kept) in state.items() if not isinstance(entries.get(key), Count)):
        return "there is no fused kernel for state of float64 on GPUs"
    if isinstance(rule, Kron):
        from thalweg.kernels.triton.kron_served import reason_unserved

        (factors, *_) = (state[key][1] for key in rule.keys(shape, Factor))
        return reason_unserved(rule, setting.handling, shape, dtype, factors)
    return ""


def reason_against_guards(setting: Setting) -> str:
    """Why fused kernels of the parts of a rule cannot step a parameter, "" if they can."""
    policy = setting.handling.on_nonfinite
    if policy != "propagate":
        return f"there is no fused kernel of {type(setting.rule).__name__} for on_nonfinite={policy!r}"
    return ""


def reason_against_shard(setting: Setting, shape: Shape, sharded: Collection[int]) -> str:
    """Why fused kernels cannot step a shard of a parameter of this shape, or the whole for its owner; "" if they can.

    sharded: along which axes.
    """
    rule = setting.rule
    if isinstance(rule, WholeRule) and rule.is_stackable(shape):
        return f"it is sharded, and owners have library products for {type(rule).__name__}"
    if rule.needs_whole:  # the owner works on the whole tensor, and each rank then steps its shard
        return ""
    if rule.stacked_axes:
        return "it is sharded, and GPU kernels step shards only with stacked_axes=0"
    if setting.handling.rounding == "stochastic" and sum(axis > 0 for axis in sharded) > 1:
        return "it is sharded along several axes beyond the first, and GPU kernels then need rounding='nearest'"
    return ""
