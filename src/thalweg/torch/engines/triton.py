"""Stepping tensors on GPUs by fused kernels: which can be, and how."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.kernels import triton as kernels
from thalweg.kernels.triton import served
from thalweg.kernels.triton.served import reason_against_shards
from thalweg.rules import Kron, WholeRule
from thalweg.settings import Setting
from thalweg.spaces.sharded import Part
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.engines.protocol import CheckState, Statistics
from thalweg.torch.engines.served import reason_against_kind, reason_against_layout
from thalweg.torch.engines.triton_buckets import KronLaunch, Launch, gradients_of, on_device_of, passes_for, staged
from thalweg.torch.engines.triton_whole import Room, WholeLaunch
from thalweg.torch.params.checks import NAMES
from thalweg.torch.sharding.lockstep import Computation

AnyLaunch: TypeAlias = Launch | KronLaunch | WholeLaunch
#: In how many lists each parameter may be kept with its tables. In most trainings it is always in the same.
MOST_LISTS = 8
#: What Triton's kernels run on, of NVIDIA's.
LEAST_CAPABILITY = (8, 0)


def is_on_gpu(p: Tensor) -> bool:
    """Whether a parameter is one that kernels for GPUs may serve."""
    return p.device.type in kernels.DEVICES


def is_served_dtype(p: Tensor) -> bool:
    return name_of(p) in served.DTYPES


@functools.cache
def reason_missing(device: torch.device) -> str | None:
    """Why there are no kernels for a device, or None if there are."""
    if (missing := kernels.reason_missing()) is not None:
        return missing
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"{name} has compute capability {found[0]}.{found[1]}, and the kernels need 8.0 or newer"
    return None


def reason_against(setting: Setting, p: Tensor, state: Mapping[str, Tensor], part: Part | None = None) -> str:
    """Why fused kernels cannot step this parameter, "" if they can. The answer holds as long as its memory does.

    part: which shard p is, if the parameter is sharded. All ranks must find the same answer, whatever the memory layout
    and the size of their shards, so a shard with another memory layout is copied.
    """
    rule = setting.rule
    shape = tuple(p.shape) if part is None else part.shape
    if reason := reason_against_kind(rule, p):
        return reason
    entries = {key: entry for key, entry in state.items() if key != "step"}
    stored = {key: (tuple(entry.shape), name_of(entry)) for key, entry in entries.items()}
    if reason := served.reason_against(setting, shape, name_of(p), stored):
        return reason
    if part is not None:
        return ""
    turned = isinstance(rule, WholeRule) and rule.is_stackable(shape) and not p.is_contiguous()
    if turned:  # in the order of memory it would be another matrix
        return f"it is not contiguous in memory (its strides are {p.stride()}), and {type(rule).__name__} sees it whole"
    return reason_against_layout(setting, p, list(entries.values()))


def name_of(x: Tensor) -> str:
    return NAMES.get(x.dtype, str(x.dtype))


def reason_against_part(setting: Setting, part: Part) -> str:
    """Why fused kernels cannot step this rank's shard of a parameter, "" if they can."""
    if setting.rule.needs_whole:  # the owner works on the whole tensor, and each rank then steps its shard
        return reason_against_shards(setting.rule, part.shape)
    if setting.rule.stacked_axes:
        return "it is sharded, and GPU kernels step shards only with stacked_axes=0"
    if setting.handling.rounding == "stochastic" and sum(map(bool, part.groups[1:])) > 1:
        return "it is sharded along several axes beyond the first, and GPU kernels then need rounding='nearest'"
    return ""


class Triton:
    """The GPU engine of one optimizer, with tables that are kept between steps."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, ...], AnyLaunch] = {}
        self.launches: list[AnyLaunch] = []
        self.latest: list[AnyLaunch] = []
        #: Those that a CUDA graph goes on using.
        self.captured: list[AnyLaunch] = []
        self.kron: Any = None
        self.room = Room()
        self.names: set[str] = set()
        self.statistics: Statistics = {}

    @torch.compiler.disable
    def prepare(self, buckets: Sequence[Bucket], check_state: CheckState) -> None:
        """Lay out a step of these buckets; nothing is written yet. State that is new is checked."""
        self.launches = []
        for bucket in buckets:
            grads = gradients_of(bucket)
            launch = self.launch(bucket, grads, check_state)
            launch.prepare(bucket, grads)
            self.launches.append(launch)
        if self.launches and is_capturing(self.launches[0].device):
            self.captured += [launch for launch in self.launches if launch not in self.captured]
        if self.launches != self.latest:
            self.latest = list(self.launches)
            for launch in self.launches:
                own = {name: functools.partial(launch.figures, i) for i, name in enumerate(launch.bucket.names)}
                self.statistics.update(own)
            if self.kron is not None:
                self.kron.prepare([launch.arguments() for launch in self.launches if isinstance(launch, KronLaunch)])

    def launch(self, bucket: Bucket, grads: Sequence[Tensor], check_state: CheckState) -> AnyLaunch:
        """As it was at the last step, if nothing has moved but gradients."""
        names = tuple(bucket.names)
        known = self.known.get(names)
        alike = known is not None and known.memory[0] is bucket.setting and known.memory[-1] == (bucket.lr is None)
        if known is not None and alike and known.bucket.params is bucket.params:
            return known  # a step that was recalled: it has been looked at already
        memory = memory_of(bucket, grads)
        if known is not None and known.memory[1:] == memory[1:]:
            known.memory = memory
            return known
        for name, p in zip(bucket.names, bucket.params, strict=True):
            check_state(name, p, bucket.setting)
        made: AnyLaunch
        if isinstance(bucket.setting.rule, Kron):
            if self.kron is None:
                from thalweg.kernels.triton.kron import KronKernels

                self.kron = KronKernels()
            made = KronLaunch(self.kron, memory)
        elif isinstance(bucket.setting.rule, WholeRule):
            made = WholeLaunch(bucket, grads, memory, self.room)
        else:
            stepped, pairs = staged(bucket) if bucket.parts else (bucket, [])
            made = Launch(passes_for(stepped, grads), memory, pairs)
        self.known[names] = made
        self.names.update(names)
        while sum(map(len, self.known)) > MOST_LISTS * len(self.names):
            del self.known[next(iter(self.known))]
        return made

    def measure(self, on_nonfinite: str) -> list[Computation]:
        """All passes before writing. Without a guard they may write state."""
        return [launch.measured() for launch in self.launches]

    @torch.compiler.disable
    def nonfinite(self) -> list[str]:
        launches = [launch for launch in self.launches if isinstance(launch, Launch)]
        names = [name for launch in launches for name in launch.bucket.names]
        flags = torch.cat([launch.finite for launch in launches]).tolist() if launches else []
        return [name for name, finite in zip(names, flags, strict=True) if not finite]

    @torch.compiler.disable
    def write(self) -> Statistics:
        for launch in self.launches:
            with on_device_of(launch):
                launch.write()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version([p for launch in self.launches for p in launch.bucket.params])
        return self.statistics

    def release(self, *, taken: bool) -> None:
        for launch in self.launches:
            launch.release()
        self.launches = []


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def memory_of(bucket: Bucket, grads: Sequence[Tensor]) -> list[Any]:
    """What passes depend on: options, and where everything is that stays from step to step."""
    tensors = [
        (p.data_ptr(), p.dtype, *[(entry.data_ptr(), entry.dtype) for entry in s.values()])
        for p, s in zip(bucket.params, bucket.states, strict=True)
    ]
    parts = [(part.shape, part.offset) for part in bucket.parts]
    handling, rule = bucket.setting.handling, bucket.setting.rule
    return [bucket.setting, rule, handling, grads[0].dtype, parts, tensors, bucket.lr is None]
