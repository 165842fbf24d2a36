"""Which engine steps a bucket: the fastest that admits it, or the one that was asked for; and why others refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import is_number
from thalweg.errors import Refused, asked_once, no_fused_code, refusal
from thalweg.kernels import triton as kernels
from thalweg.kernels.cpu import admission as by_native
from thalweg.kernels.cpu import library
from thalweg.kernels.triton import admission as by_kernels
from thalweg.rules import Annealed, Rule, WholeRule
from thalweg.rules.entries import Count
from thalweg.settings import ParameterOptions
from thalweg.spaces.sharded import Part
from thalweg.storage import Kept
from thalweg.torch.engines.protocol import EngineKind
from thalweg.torch.params.checks import NAMES
from thalweg.torch.params.groups import EngineName
from thalweg.torch.params.parameter import Param
from thalweg.torch.sharding.shards import is_whole

PLAIN = (Tensor, torch.nn.Parameter)
#: What Triton's kernels run on, of NVIDIA's.
LEAST_CAPABILITY = (8, 0)


def choose(
    wanted: EngineName,
    setting: ParameterOptions,
    p: Tensor,
    name: str,
    part: Part | None,
    *,
    refused: str,
    counted: bool,
    alone: bool,
) -> tuple[str, EngineKind, str]:
    """How a bucket is stepped, as ``optimizer.engine`` tells it; the engine; and why it is not fused code, "" if it is.

    Raise if an engine that was asked for cannot step it.

    p: its first parameter. part: which shard it is, or which replica. refused: why fused code does not step it, "" if
    it does. counted: whether the host knows the step count. alone: whether tensors are better stepped one by one.
    """
    if wanted in ("reference", "foreach"):
        return wanted, "lists", f"engine={wanted!r}"
    on_gpu, missing = is_on_gpu(p), refusal(check_code, p)
    reason = "the host does not know the step count" if not counted and not on_gpu else refused or missing
    if not reason:
        return "fused", fused_engine(setting, part, on_gpu=on_gpu, counted=counted), ""
    if wanted == "fused":
        raise no_fused_code(f" for parameter {name!r}", reason)
    if not refused and missing:
        (kernels if on_gpu else library).warn_once(missing)
    return "reference" if alone and part is None else "foreach", "lists", reason


def foresee_engine(wanted: EngineName, p: Param) -> EngineKind:
    """The engine that will step a parameter, as far as its shape, dtype, options and device tell."""
    is_meta = p.device.type == "meta"
    on_gpu = is_meta or p.device.type in kernels.DEVICES
    if wanted in ("reference", "foreach"):
        return "lists"
    if on_gpu:
        refused = refusal(by_kernels.admit, p.setting, p.shape, p.dtype, p.entries)
        is_here = is_meta or not refusal(check_kernels, p.device)
    else:
        refused = refusal(by_native.admit, p.setting.rule_at(1), p.setting.numerics, p.shape, p.dtype)
        is_here = library.is_here()
    return fused_engine(p.setting, None, on_gpu=on_gpu, counted=True) if is_here and not refused else "lists"


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


def check_code(p: Tensor) -> None:
    """Raise Refused if there is no fused code for the device of a parameter."""
    if is_on_gpu(p):
        check_kernels(p.device)
    else:
        library.load()


def check_kernels(device: torch.device) -> None:
    """Raise Refused if there are no kernels for a GPU."""
    if not kernels.is_here():
        raise Refused("Triton is not installed")
    check_capability(device)


@asked_once
def check_capability(device: torch.device) -> None:
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < LEAST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise Refused(f"{name} has compute capability {major}.{minor}, and the kernels need 8.0 or newer")


def are_for_kernels(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels on one GPU can read all of these, as far as types and places go."""
    first = tensors[0]
    if not is_on_gpu(first) or refusal(check_kernels, first.device):
        return False
    return set(map(type, tensors)) <= {Tensor} and all(x.device == first.device and not x.is_neg() for x in tensors)


# ---- parameters


def admit(setting: ParameterOptions, p: Tensor, state: Mapping[str, Tensor], part: Part | None = None) -> None:
    """Raise Refused if fused code cannot step a parameter. The answer holds as long as its memory does.

    part: which shard p is, if the parameter is sharded. All ranks must find the same answer, whatever the memory layout
    and the size of their shards, so a shard with another memory layout is copied.
    """
    on_gpu, rule = is_on_gpu(p), setting.rule
    if not on_gpu and p.device.type != "cpu":
        raise Refused(f"there is no fused kernel for tensors on {p.device.type}")
    check_plain(rule, p)
    entries = {key: entry for key, entry in state.items() if key != "step"}
    shape = tuple(p.shape) if part is None else part.shape
    if not on_gpu:
        if part is None:
            check_layout(setting, p, list(entries.values()))
        by_native.admit(rule, setting.numerics, shape, name_of(p))
        return
    by_kernels.admit(setting, shape, name_of(p), kept_in(entries))
    if part is not None:
        return
    check_counted(setting, p, state)
    if isinstance(rule, WholeRule) and not p.is_contiguous():  # in the order of memory it would be another matrix
        raise Refused(
            f"it is not contiguous in memory (its strides are {p.stride()}), and {type(rule).__name__} sees it whole"
        )
    check_layout(setting, p, list(entries.values()))


def kept_in(state: Mapping[str, Tensor]) -> dict[str, Kept]:
    return {key: (tuple(entry.shape), name_of(entry)) for key, entry in state.items()}


def check_counted(setting: ParameterOptions, p: Tensor, state: Mapping[str, Tensor]) -> None:
    """Raise Refused if the host cannot launch products by the counts of a rule."""
    rule = setting.rule
    if not isinstance(rule, WholeRule):
        return
    counts = [*rule.keys(tuple(p.shape), Count), *(() if rule.IN_PARTS else ["step"])]
    if not all(state[key].is_cpu for key in counts if key in state):
        name = type(rule).__name__
        raise Refused(f"the device counts its steps (capturable=True), and the host launches the products of {name}")


def would_lose_kernels(setting: ParameterOptions, p: Tensor, *, capturable: bool) -> bool:
    """Whether kernels for GPUs step a parameter that is whole, and not if its replicas divided the work on it."""
    if not is_on_gpu(p) or refusal(check_kernels, p.device) or not is_whole(p):
        return False
    return by_kernels.would_lose_kernels(setting, tuple(p.shape), name_of(p), capturable=capturable)


def admit_shard(setting: ParameterOptions, p: Tensor, part: Part) -> None:
    """Raise Refused if fused code cannot step this rank's shard of a parameter."""
    sharded = [axis for axis, groups in enumerate(part.groups) if groups]
    (by_kernels if is_on_gpu(p) else by_native).admit_shard(setting, part.shape, sharded)


def check_plain(rule: Rule, p: Tensor) -> None:
    """Raise Refused if no code but torch's own can step a parameter, whatever its memory layout."""
    if (unknown := option_unknown(rule)) is not None:
        raise Refused(f"{unknown} is a tensor, not a Python number")
    if type(p) not in PLAIN:
        raise Refused(f"there is no fused kernel for a parameter of type {type(p).__name__}")
    if p.is_neg():
        raise Refused("its lazy negation bit is set (p.resolve_neg() makes a tensor without it)")


def check_layout(setting: ParameterOptions, p: Tensor, entries: Sequence[Tensor]) -> None:
    """Raise Refused if a parameter and its state cannot be stepped as they lie in memory.

    In any order, as long as all that is as large as the parameter has the same.
    """
    if p.is_contiguous() and all(entry.is_contiguous() for entry in entries):
        return
    alike = is_dense(p) and all(e.shape == p.shape and e.stride() == p.stride() for e in entries)
    if not alike or setting.rule.stacked_axes or setting.numerics.is_random:
        raise Refused(f"it or its state is not contiguous in memory (its strides are {p.stride()})")


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
