"""Which engine steps a bucket: the fastest that can serve it, or the one that was asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from thalweg.errors import OptionError
from thalweg.kernels import triton as kernels
from thalweg.kernels.cpu.library import reason_missing, warn_once
from thalweg.rules import Rule
from thalweg.settings import Setting
from thalweg.spaces.sharded import Part
from thalweg.torch.engines import native, triton
from thalweg.torch.engines.bucket import EngineKind
from thalweg.torch.params.groups import EngineName

#: Native code depends on the memory layout, which may differ between ranks, and all ranks must send the same messages.
AS_LISTS = "sharded parameters on CPUs are stepped as lists, unless engine='fused' is given"


def reason_missing_for(p: torch.Tensor) -> str | None:
    """Why there is no fused code for the device of a parameter, or None if there is."""
    return triton.reason_missing(p.device) if triton.is_on_gpu(p) else reason_missing()


def reason_against(setting: Setting, p: torch.Tensor, state: Any, part: Part) -> str:
    """Why fused code cannot step a parameter, "" if it can. The answer holds as long as its memory does."""
    if triton.is_on_gpu(p):
        return triton.reason_against(setting, p, state, part if any(part.groups) else None)
    return native.reason_against(setting, p, state)


def reason_against_shard(wanted: EngineName, setting: Setting, p: torch.Tensor, part: Part, reason: str) -> str:
    """Why fused code cannot step this rank's shard of a parameter. reason: what speaks against its memory."""
    if triton.is_on_gpu(p):
        return triton.reason_against_part(setting, part) or reason
    return native.reason_against_part(setting, part) or (reason if wanted == "fused" else AS_LISTS)


class Choice(NamedTuple):
    #: As ``optimizer.engine`` tells it.
    way: str
    engine: EngineKind


def chosen(
    wanted: EngineName,
    rule: Rule,
    p: torch.Tensor,
    name: str,
    *,
    unserved: str,
    counted: bool,
    sharded: bool,
    alone: bool,
) -> Choice:
    """The engine of a bucket; raise if one that was asked for cannot step it.

    p: its first parameter. unserved: why fused code cannot step it. counted: whether the host knows the step count.
    alone: whether tensors are better stepped one by one.
    """
    if wanted in ("reference", "foreach"):
        return Choice(wanted, "lists")
    on_gpu, missing = triton.is_on_gpu(p), reason_missing_for(p)
    reason = "the host does not know the step count" if not counted and not on_gpu else unserved or missing
    if not reason:
        return Choice("fused", fused_engine(rule, on_gpu=on_gpu, sharded=sharded))
    if wanted == "fused":
        raise OptionError(
            f"engine='fused' cannot run for parameter {name!r}: {reason}; "
            "use engine='auto', which takes the fastest engine that can run"
        )
    if not unserved and missing is not None:
        (kernels.warn_once if on_gpu else warn_once)(missing)
    return Choice("reference" if alone and not sharded else "foreach", "lists")


def fused_engine(rule: Rule, *, on_gpu: bool, sharded: bool) -> EngineKind:
    """Which engine has fused code for a rule. Of Kron's, torch does the products: on CPUs, and where owners do them."""
    if on_gpu:
        return "lists" if sharded and rule.needs_whole else "triton"
    return "lists" if rule.needs_whole else "native"
