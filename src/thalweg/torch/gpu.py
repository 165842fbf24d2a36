"""Stepping tensors on GPUs by fused kernels: which can be, and how."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels import triton as kernels
from thalweg.rules import Kron
from thalweg.settings import Setting
from thalweg.spaces.sharded import Part
from thalweg.torch.bucket import Bucket
from thalweg.torch.fused import NAMES, PLAIN, is_dense, option_unknown
from thalweg.torch.rounds import reduced

RULES = ("LARS", "LAMB", "Adafactor", "Kron")
SERVED = (torch.float32, torch.bfloat16, torch.float16)
#: Lists of parameters whose tables are kept: in most trainings they are the same at every step.
MOST_KNOWN = 64
#: What Triton's kernels run on, of NVIDIA's.
LEAST_CAPABILITY = (8, 0)


def is_on_gpu(p: Tensor) -> bool:
    """Whether a parameter is one that kernels for GPUs may serve."""
    return p.device.type in kernels.DEVICES


@functools.cache
def reason_missing(device: torch.device) -> str | None:
    """Why there are no kernels for a device, or None if there are."""
    if (missing := kernels.reason_missing()) is not None:
        return missing
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, below 8.0"
    return None


def reason_against(setting: Setting, p: Tensor, state: Mapping[str, Tensor], *, divided: bool) -> str:
    """Why fused kernels cannot step this parameter, "" if they can. The answer holds as long as its memory does.

    divided: over ranks, which have to find the same answer however their memory lies, so that odd memory is copied.
    """
    rule = setting.rule
    if type(rule).__name__ not in RULES:
        return f"there is no fused kernel of {type(rule).__name__} for GPUs"
    if (unknown := option_unknown(rule)) is not None:
        return f"{unknown} is not a number"
    if type(p) not in PLAIN:
        return f"there is no fused kernel for a {type(p).__name__}"
    if p.dtype not in SERVED:
        return f"there is no fused kernel for {p.dtype} on GPUs"
    if p.is_neg():
        return "it is negated in passing"
    entries = [entry for key, entry in state.items() if key not in ("step", "refresh")]
    if any(entry.dtype not in SERVED for entry in entries):
        return "there is no fused kernel for state of float64 on GPUs"
    if not divided and not (p.is_contiguous() and all(entry.is_contiguous() for entry in entries)):
        # in any order, as long as all that is as large as the parameter has the same
        alike = is_dense(p) and all(e.shape == p.shape and e.stride() == p.stride() for e in entries)
        if not alike or rule.stacked_axes or setting.handling.rounding != "nearest" or isinstance(rule, Kron):
            return f"its strides are {p.stride()}"
    return reason_against_kron(setting, p, state) if isinstance(rule, Kron) else ""


def reason_against_kron(setting: Setting, p: Tensor, state: Mapping[str, Tensor]) -> str:
    if reason_missing(p.device) is not None:  # nobody can tell, and nobody will ask
        return ""
    from thalweg.kernels.triton.kron import reason_unserved

    rule: Any = setting.settled
    return reason_unserved(rule, setting.handling, tuple(p.shape), NAMES[p.dtype], NAMES[state["Q_0"].dtype])


def reason_against_part(setting: Setting, part: Part) -> str:
    """Why fused kernels cannot step what this rank holds of a divided parameter, "" if they can."""
    if setting.rule.needs_whole:
        return f"{type(setting.rule).__name__} works on whole tensors, and this one is divided over ranks"
    if setting.rule.stacked_axes:
        return "it is divided over ranks, and stacked_axes asks for sums over parts of it"
    if setting.handling.rounding == "stochastic" and sum(map(bool, part.groups[1:])) > 1:
        return "its elements have no simple place in the whole parameter, from which random bits could be counted"
    return ""


def operand_of(name: str, p: Tensor, state: Mapping[str, Tensor], keys: Sequence[str], part: Part | None) -> Any:
    from thalweg.kernels.triton.tables import Operand

    entries = tuple(state.get(key) for key in keys)
    if part is None:
        return Operand(name, p, entries, state["step"])
    position = sum(begin * math.prod(part.shape[axis + 1 :]) for axis, begin in enumerate(part.offset))
    divided = [axis for axis, groups in enumerate(part.groups) if groups and axis > 0]
    width = math.prod(p.shape[divided[0] :]) if divided else 0
    whole_width = math.prod(part.shape[divided[0] :]) if divided else 0
    return Operand(name, p, entries, state["step"], position, width, whole_width, part.shape)


def passes_for(bucket: Bucket, grads: Sequence[Tensor]) -> Any:
    """The passes of a bucket's rule over its tensors."""
    rule_name = type(bucket.setting.rule).__name__
    keys = kernels.entries_of(rule_name, bucket.states[0])
    parts: Sequence[Part | None] = bucket.parts or [None] * len(bucket.names)
    operands = [
        operand_of(name, p, state, keys, part)
        for name, p, state, part in zip(bucket.names, bucket.params, bucket.states, parts, strict=True)
    ]
    rule: Any = bucket.setting.settled
    handling = bucket.setting.handling
    if rule_name == "LAMB":
        from thalweg.kernels.triton.lamb import LambPasses

        return LambPasses(operands, grads, rule, handling)
    if rule_name == "LARS":
        from thalweg.kernels.triton.lars import LarsPasses

        return LarsPasses(operands, grads, rule, handling)
    from thalweg.kernels.triton.adafactor import passes_for

    return passes_for(operands, grads, rule, handling)


def gradients_of(bucket: Bucket) -> Sequence[Tensor]:
    """Gradients laid out in memory like their parameters, or contiguous if those are divided; else copies that are."""
    params, grads = bucket.params, bucket.grads
    if not all(map(Tensor.is_contiguous, (*params, *grads))) or any(map(Tensor.is_neg, grads)):
        pairs = zip(params, grads, strict=True)
        return [g.resolve_neg().contiguous() if bucket.parts else alike(p, g) for p, g in pairs]
    return grads


def alike(p: Tensor, g: Tensor) -> Tensor:
    if g.stride() != p.stride() or g.is_neg():
        return torch.empty_like(p, dtype=g.dtype).copy_(g)
    return g


def staged(bucket: Bucket) -> tuple[Bucket, list[tuple[Tensor, Tensor]]]:
    """A bucket of divided parameters with copies in place of what is not contiguous, and which those are."""
    pairs = []

    def contiguous(x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        pairs.append((x, x.contiguous()))
        return pairs[-1][1]

    params = [contiguous(p) for p in bucket.params]
    states = [{key: contiguous(entry) for key, entry in state.items()} for state in bucket.states]
    return replace(bucket, params=params, states=states), pairs


def scratch_bytes(
    buckets: Sequence[tuple[Setting, Sequence[tuple[Shape, str, Mapping[str, tuple[Shape, str]], Shape | None]]]],
) -> int:
    """What kernels keep on a GPU between steps for buckets of parameters, in the blocks that CUDA's memory comes in.

    A parameter is told by its shape and dtype, those of each entry of its state, and the shape of the whole if it is a
    part. Kernels are laid out over tensors without memory: no GPU is needed.
    """

    def ghost(shape: Shape, dtype: str = "float32") -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def held(thing: Any) -> Iterator[Tensor]:
        if isinstance(thing, Tensor):
            yield thing if thing._base is None else thing._base
        elif isinstance(thing, (list, tuple)):
            yield from (tensor for each in thing if not isinstance(each, int) for tensor in held(each))
        elif isinstance(thing, dict):
            yield from held(list(thing.values()))
        elif type(thing).__module__.startswith(kernels.__name__):
            yield from held(list(vars(thing).values()))

    keepers: list[Any] = []
    given: list[Tensor] = []
    kron: Any = None
    for number, (setting, told) in enumerate(buckets):
        names = [f"{number}.{i}" for i in range(len(told))]
        params = [ghost(shape, dtype) for shape, dtype, _, _ in told]
        states = [{"step": ghost(()), **{key: ghost(*e) for key, e in state.items()}} for _, _, state, _ in told]
        given += [*params, *(entry for state in states for entry in state.values())]
        if isinstance(setting.rule, Kron):
            if kron is None:
                from thalweg.kernels.triton.kron import KronKernels

                kron = KronKernels()
                keepers.append(kron)
            rule: Any = setting.settled
            kron.scratch_for(kron.batch(names, params, params, states, rule, setting.handling))
        else:
            parts = [Part(whole, (0,) * len(whole), ((),) * len(whole)) for *_, whole in told if whole is not None]
            keepers.append(passes_for(Bucket(names, params, params, states, setting, None, None, parts=parts), params))
    found = {id(tensor): tensor for tensor in held(keepers)}
    for tensor in given:
        found.pop(id(tensor), None)
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in found.values())


class Launch:
    """One bucket, with its passes, in one step."""

    bucket: Bucket

    @property
    def device(self) -> torch.device:
        device: torch.device = self.passes.device
        return device

    @property
    def finite(self) -> Tensor:
        """For each parameter whether its step is finite, under a guard."""
        finite: Tensor = self.passes.finite
        return finite

    def __init__(self, passes: Any, memory: list[Any], staged: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.passes, self.memory = passes, memory
        #: Tensors that are not contiguous, with the copies that are stepped in their place.
        self.staged = staged

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        from thalweg.kernels.triton.passes import Step

        for tensor, copy in self.staged:
            copy.copy_(tensor)
        #: Gradients are kept until all has been launched: some are copies, whose memory must not be given to others.
        self.bucket, self.grads = bucket, grads
        self.passes.tables.follow(grads)
        lr = bucket.lr
        if isinstance(lr, Tensor) and lr.device != self.passes.device:
            lr = float(lr)
        self.step = Step(lr, bucket.setting.lr_scale, bucket.grad_scale, bucket.allowed)
        self.lr = shown_rate(bucket)

    def rounds(self) -> Iterator[list[tuple[Tensor, tuple[Any, ...]]]]:
        """Run until something is to be written; gives what has to be summed over ranks, if the bucket is divided."""
        parts = self.bucket.parts
        for sums in self.passes.measured(self.step):
            if parts:
                yield [(each.tensor, parts[each.operand or 0].across(each.axes)) for each in sums]

    def write(self) -> None:
        self.passes.write(self.step)
        for tensor, copy in self.staged:
            tensor.copy_(copy)

    def release(self) -> None:
        """Let go of gradients, and of what one step alone has."""
        del self.grads, self.step
        self.bucket = replace(self.bucket, grads=(), grad_scale=None, allowed=None)

    def figures(self, index: int) -> dict[str, Any]:
        """What the last step computed of a parameter, read when somebody asks."""
        slices = self.passes.tables.slices
        first = sum(slices[:index])
        stacked = self.passes.rule.stacked_axes
        stack = self.bucket.params[index].shape[:stacked]
        own = slice(first, first + slices[index])
        stats = self.passes.stats().items()
        return {**self.lr, **{key: v[own].reshape(stack) if stacked else v[first] for key, v in stats}}


class KronLaunch:
    """One bucket of Kron's in one step: whole matrices of one shape, with all that happens to them."""

    bucket: Bucket

    def __init__(self, kernels: Any, memory: list[Any]) -> None:
        self.kernels, self.memory = kernels, memory
        self.outcome: Any = None

    @property
    def device(self) -> torch.device:
        return self.bucket.params[0].device

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        self.bucket, self.grads = bucket, grads
        self.lr = shown_rate(bucket)

    def arguments(self) -> dict[str, Any]:
        bucket = self.bucket
        return dict(
            names=bucket.names,
            params=bucket.params,
            grads=self.grads,
            states=bucket.states,
            rule=bucket.setting.settled,
            handling=bucket.setting.handling,
            t=bucket.t,
        )

    def rounds(self) -> Iterator[Any]:
        """Nothing is summed over ranks: what is divided goes to owners."""
        return iter(())

    def write(self) -> None:
        bucket, given = self.bucket, self.arguments()
        given.update(lr=bucket.lr, lr_scale=bucket.setting.lr_scale)
        self.outcome = self.kernels.step(**given, grad_scale=bucket.grad_scale, allowed=bucket.allowed)

    def release(self) -> None:
        del self.grads
        self.bucket = replace(self.bucket, grads=(), grad_scale=None, allowed=None)

    def figures(self, index: int) -> dict[str, Any]:
        return {**self.lr, **{key: values[index] for key, values in self.outcome.stats.items()}}


def shown_rate(bucket: Bucket) -> dict[str, Any]:
    return {} if bucket.lr is None else {"lr": bucket.lr * bucket.setting.lr_scale}


def on_device_of(launch: Launch | KronLaunch) -> AbstractContextManager[object]:
    """Triton launches on the device that is current, which may be another than the parameters'."""
    return torch.cuda.device(launch.device) if launch.device.type == "cuda" else nullcontext()


class Gpu:
    """The GPU engine of one optimizer, with tables that are kept between steps."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, ...], Launch | KronLaunch] = {}
        self.launches: list[Launch | KronLaunch] = []
        self.latest: list[Launch | KronLaunch] = []
        #: Those that a CUDA graph goes on using.
        self.captured: list[Launch | KronLaunch] = []
        self.kron: Any = None
        self.measured = False
        #: By name, what gives the figures of a parameter's last step.
        self.figures: dict[str, Callable[[], dict[str, Any]]] = {}

    def prepare(self, buckets: Sequence[Bucket], check_state: Callable[[str, Tensor, Setting], None]) -> None:
        """Lay out a step of these buckets; nothing is written yet. State that is new is checked."""
        self.measured = False
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
                self.figures.update(own)
            if self.kron is not None:
                self.kron.prepare([launch.arguments() for launch in self.launches if isinstance(launch, KronLaunch)])

    def launch(
        self, bucket: Bucket, grads: Sequence[Tensor], check_state: Callable[[str, Tensor, Setting], None]
    ) -> Launch | KronLaunch:
        """As it was at the last step, if nothing has moved but gradients."""
        names = tuple(bucket.names)
        known = self.known.get(names)
        if known is not None and known.bucket.params is bucket.params and known.memory[0] is bucket.setting:
            return known  # a step that was recalled: it has been looked at already
        memory = memory_of(bucket, grads)
        if known is not None and known.memory[1:] == memory[1:]:
            known.memory = memory
            return known
        for name, p in zip(bucket.names, bucket.params, strict=True):
            check_state(name, p, bucket.setting)
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        made: Launch | KronLaunch
        if isinstance(bucket.setting.rule, Kron):
            if self.kron is None:
                from thalweg.kernels.triton.kron import KronKernels

                self.kron = KronKernels()
            made = KronLaunch(self.kron, memory)
        else:
            stepped, pairs = staged(bucket) if bucket.parts else (bucket, [])
            made = Launch(passes_for(stepped, grads), memory, pairs)
        self.known[names] = made
        return made

    def measure(self) -> list[Tensor]:
        """For each bucket which of its parameters are finite; nothing is written, under a guard."""
        running = [(launch, launch.rounds()) for launch in self.launches]
        while running:
            asked = []
            for launch, rounds in running:
                with on_device_of(launch):
                    wanted = next(rounds, None)
                if wanted is not None:
                    asked.append((launch, rounds, wanted))
            answers = iter(reduced("sum", [one for *_, wanted in asked for one in wanted]))
            for *_, wanted in asked:
                for tensor, _ in wanted:
                    tensor.copy_(next(answers))
            running = [(launch, rounds) for launch, rounds, _ in asked]
        self.measured = True
        return [launch.finite for launch in self.launches if isinstance(launch, Launch)]

    def write(self) -> None:
        if not self.measured:
            self.measure()
        for launch in self.launches:
            with on_device_of(launch):
                launch.write()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version([p for launch in self.launches for p in launch.bucket.params])

    def release(self) -> None:
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
    return [bucket.setting, bucket.setting.rule, bucket.setting.handling, grads[0].dtype, parts, tensors]
