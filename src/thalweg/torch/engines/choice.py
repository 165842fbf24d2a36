"""Which engine steps a bucket: the fastest that can serve it, or the one that was asked for; and why others cannot."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import is_number
from thalweg.errors import OptionError
from thalweg.kernels import triton as kernels
from thalweg.kernels.cpu import library
from thalweg.kernels.cpu import reasons as by_native
from thalweg.kernels.triton import served as by_kernels
from thalweg.rules import Annealed, Rule, WholeRule
from thalweg.rules.entries import Count
from thalweg.settings import ParameterOptions
from thalweg.spaces.sharded import Part
from thalweg.storage import Kept
from thalweg.torch.engines.protocol import EngineKind, Foreseen
from thalweg.torch.params.checks import NAMES
from thalweg.torch.params.groups import EngineName
from thalweg.torch.sharding.shards import is_whole

PLAIN = (Tensor, torch.nn.Parameter)
#: What Triton's kernels run on, of NVIDIA's.
LEAST_CAPABILITY = (8, 0)


class Choice(NamedTuple):
    #: As ``optimizer.engine`` tells it.
    way: str
    engine: EngineKind


def chosen(
    wanted: EngineName,
    setting: ParameterOptions,
    p: Tensor,
    name: str,
    part: Part | None,
    *,
    unserved: str,
    counted: bool,
    alone: bool,
) -> Choice:
    """The engine of a bucket; raise if one that was asked for cannot step it.

    p: its first parameter. part: which shard it is, or which replica. unserved: why fused code cannot step it. counted:
    whether the host knows the step count. alone: whether tensors are better stepped one by one.
    """
    if wanted in ("reference", "foreach"):
        return Choice(wanted, "lists")
    on_gpu, missing = is_on_gpu(p), reason_missing_for(p)
    reason = "the host does not know the step count" if not counted and not on_gpu else unserved or missing
    if not reason:
        return Choice("fused", fused_engine(setting, part, on_gpu=on_gpu, counted=counted))
    if wanted == "fused":
        raise OptionError(
            f"engine='fused' cannot run for parameter {name!r}: {reason}; "
            "use engine='auto', which takes the fastest engine that can run"
        )
    if not unserved and missing is not None:
        (kernels if on_gpu else library).warn_once(missing)
    return Choice("reference" if alone and part is None else "foreach", "lists")


def foresee_engine(wanted: EngineName, p: Foreseen) -> EngineKind:
    """The engine that will step a parameter, as far as its shape, dtype, options and device tell."""
    is_stand_in = p.device.type == "meta"
    on_gpu = is_stand_in or p.device.type in kernels.DEVICES
    if wanted in ("reference", "foreach"):
        return "lists"
    if on_gpu:
        kind = p.setting, p.shape, p.dtype, p.entries
        served = not by_kernels.reason_against(*kind)
        missing = None if is_stand_in else reason_missing(p.device)
    else:
        served = not by_native.reason_unserved(p.setting.rule_at(1), p.setting.handling, p.shape, p.dtype)
        missing = library.reason_missing()
    return fused_engine(p.setting, None, on_gpu=on_gpu, counted=True) if served and missing is None else "lists"


def fused_engine(setting: ParameterOptions, part: Part | None, *, on_gpu: bool, counted: bool) -> EngineKind:
    """Which engine has fused code. Products are for lists on CPUs, and for owners unless kernels step their shards."""
    rule = setting.rule
    if not rule.needs_whole:
        return "triton" if on_gpu else "native"
    if not on_gpu or part is None:
        return "triton" if on_gpu else "lists"
    is_known = counted or (isinstance(rule, WholeRule) and rule.IN_PARTS)
    parted = is_known and by_kernels.is_parted(setting, part.shape)
    return "triton" if parted else "lists"


# ---- devices


def is_on_gpu(p: Tensor) -> bool:
    """Whether a parameter is one that kernels for GPUs may serve."""
    return p.device.type in kernels.DEVICES


def is_served_dtype(p: Tensor) -> bool:
    """Whether kernels for GPUs read and write such numbers."""
    return name_of(p) in by_kernels.DTYPES


def name_of(x: Tensor) -> str:
    return NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))


def reason_missing_for(p: Tensor) -> str | None:
    """Why there is no fused code for the device of a parameter, or None if there is."""
    return reason_missing(p.device) if is_on_gpu(p) else library.reason_missing()


@functools.cache
def reason_missing(device: torch.device) -> str | None:
    """Why there are no kernels for a GPU, or None if there are."""
    if (missing := kernels.reason_missing()) is not None:
        return missing
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"{name} has compute capability {found[0]}.{found[1]}, and the kernels need 8.0 or newer"
    return None


def are_for_kernels(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels on one GPU can read all of these, as far as types and places go."""
    first = tensors[0]
    if not is_on_gpu(first) or reason_missing_for(first) is not None:
        return False
    return set(map(type, tensors)) <= {Tensor} and all(x.device == first.device and not x.is_neg() for x in tensors)


# ---- parameters


def reason_against(setting: ParameterOptions, p: Tensor, state: Mapping[str, Tensor], part: Part | None = None) -> str:
    """Why fused code cannot step a parameter, "" if it can. The answer holds as long as its memory does.

    part: which shard p is, if the parameter is sharded. All ranks must find the same answer, whatever the memory layout
    and the size of their shards, so a shard with another memory layout is copied.
    """
    on_gpu, rule = is_on_gpu(p), setting.rule
    if not on_gpu and p.device.type != "cpu":
        return f"there is no fused kernel for tensors on {p.device.type}"
    if reason := reason_against_kind(rule, p):
        return reason
    entries = {key: entry for key, entry in state.items() if key != "step"}
    shape = tuple(p.shape) if part is None else part.shape
    if not on_gpu:
        layout = reason_against_layout(setting, p, list(entries.values())) if part is None else ""
        return layout or by_native.reason_unserved(rule, setting.handling, shape, name_of(p)) or ""
    reason = by_kernels.reason_against(setting, shape, name_of(p), kept_in(entries))
    if reason or part is not None:
        return reason
    if reason := reason_uncounted(setting, p, state):
        return reason
    if isinstance(rule, WholeRule) and not p.is_contiguous():  # in the order of memory it would be another matrix
        return f"it is not contiguous in memory (its strides are {p.stride()}), and {type(rule).__name__} sees it whole"
    return reason_against_layout(setting, p, list(entries.values()))


def kept_in(state: Mapping[str, Tensor]) -> dict[str, Kept]:
    return {key: (tuple(entry.shape), name_of(entry)) for key, entry in state.items()}


def reason_uncounted(setting: ParameterOptions, p: Tensor, state: Mapping[str, Tensor]) -> str:
    """Why the host cannot launch products by the counts of a rule, "" if it can."""
    rule = setting.rule
    if not isinstance(rule, WholeRule):
        return ""
    counts = [*rule.keys(tuple(p.shape), Count), *(() if rule.IN_PARTS else ["step"])]
    if all(state[key].is_cpu for key in counts if key in state):
        return ""
    return f"the device counts its steps (capturable=True), and the host launches the products of {type(rule).__name__}"


def would_lose_kernels(setting: ParameterOptions, p: Tensor, *, capturable: bool) -> bool:
    """Whether kernels for GPUs step a parameter that is whole, and not if its replicas divided the work on it."""
    if not is_on_gpu(p) or reason_missing_for(p) is not None or not is_whole(p):
        return False
    return by_kernels.would_lose_kernels(setting, tuple(p.shape), name_of(p), capturable=capturable)


def reason_against_shard(setting: ParameterOptions, p: Tensor, part: Part, reason: str) -> str:
    """Why fused code cannot step this rank's shard of a parameter. reason: why not the whole parameter."""
    sharded = [axis for axis, groups in enumerate(part.groups) if groups]
    served = by_kernels if is_on_gpu(p) else by_native
    return served.reason_against_shard(setting, part.shape, sharded) or reason


def reason_against_kind(rule: Rule, p: Tensor) -> str:
    """Why no code but torch's own can step a parameter, whatever its memory layout; "" if it can."""
    if (unknown := option_unknown(rule)) is not None:
        return f"{unknown} is a tensor, not a Python number"
    if type(p) not in PLAIN:
        return f"there is no fused kernel for a parameter of type {type(p).__name__}"
    return "its lazy negation bit is set (p.resolve_neg() makes a tensor without it)" if p.is_neg() else ""


def reason_against_layout(setting: ParameterOptions, p: Tensor, entries: Sequence[Tensor]) -> str:
    """Why a parameter and its state cannot be stepped as they lie in memory; "" if they can.

    In any order, as long as all that is as large as the parameter has the same.
    """
    if p.is_contiguous() and all(entry.is_contiguous() for entry in entries):
        return ""
    alike = is_dense(p) and all(e.shape == p.shape and e.stride() == p.stride() for e in entries)
    if alike and not setting.rule.stacked_axes and not setting.handling.is_random:
        return ""
    return f"it or its state is not contiguous in memory (its strides are {p.stride()})"


def option_unknown(rule: Rule) -> str | None:
    """An option whose value is a tensor."""

    def is_known(v: Any) -> bool:
        if isinstance(v, Rule):
            return option_unknown(v) is None
        return v is None or isinstance(v, (str, Annealed)) or is_number(v) or callable(v)

    for name, value in vars(rule).items():
        if not all(map(is_known, value if isinstance(value, tuple) else (value,))):
            return name
    return None


def is_dense(p: Tensor) -> bool:
    """Whether the elements lie side by side in memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
