"""The audit of one live step of an optimizer of torch, from any library."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thalweg.audit.causes import find_verdicts
from thalweg.audit.model import faults_of_groups, remarks_on, replicas_apart, told_by_ranks
from thalweg.audit.page import SKIPPED, Arr, Step, norm
from thalweg.audit.report import AuditError, Report, line_of
from thalweg.audit.treated import Treated, list_treated, name_state, read_state
from thalweg.boundary import seen
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.rules.spikes import judge
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD, SPIKES, arithmetic
from thalweg.torch.sharding.shards import count_ranks, whole

#: Bytes of copies on the host, if none are said.
MEMORY = 64 * 2**20
#: How often a parameter is rounded in a step of other libraries: decayed by a factor that is rounded itself, and moved.
WRITES = 3
#: How far from 1 a joint norm is that was clipped to 1, by what torch adds to it, and by rounding.
CLIPPED = 1e-4


class Audit:
    """A context manager around one step; afterwards :attr:`report` says whether it was the step of its page.

    optimizer: of torch or of any library, several in a list, or a wrapper with ``.optimizer`` or ``.optimizers``.
    model: to look for parameters that no group has, or two. memory: bytes of copies on the host: of what does not fit,
    the smallest and the largest tensors of each kind are audited. rule: the page of an optimizer that no table has: a
    rule such as ``thalweg.rules.Muon(momentum=0.95)``, or a function of a parameter's name and the parameter.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module | None = None, *, memory: int = MEMORY, rule: Any = None
    ) -> None:
        self.optimizers, self.model, self.memory, self.rule = list(unwrapped(optimizer)), model, memory, rule
        #: Whether a closure may be seen, as that of Lightning, which is called once and steps nothing.
        self.sees_closures = False
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        if self._report is None:
            raise AuditError("there is no report yet: read it after the with block, which one step has to be in")
        return self._report

    def check(self) -> None:
        """Raise an AuditError if anything is not as the page."""
        self.report.check()

    def __str__(self) -> str:
        if self._report is not None and count_ranks() > 1 and torch.distributed.get_rank():
            return "the report is on rank 0"
        return str(self._report or "an audit that has seen no step")

    def __enter__(self) -> Audit:
        self._counts, self._depth, self._problem, self._told = [0 for _ in self.optimizers], 0, "", list[str]()
        self._joint = 0.0
        self._seen: list[tuple[torch.optim.Optimizer, Treated, Step]] = []
        self._names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
        sample = choose(self.optimizers, self.memory)
        if self._names and sample and not any(id(p) in self._names for p in sample):
            raise AuditError("the optimizer steps none of the model's parameters, but copies of them: give it without")
        self._before = {id(p): numbers_of(p) for p in sample}
        self._after: dict[int, Arr] = {}
        hooks = [optimizer.register_step_pre_hook(self._look) for optimizer in self.optimizers]
        self._hooks = [*hooks, register_optimizer_step_post_hook(self._look_again)]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if kind is None:
                self._report = self._replay()
        finally:
            self._before, self._after, self._seen = {}, {}, []

    # ---- around the step

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> Any:
        """Copy what the step is given, after its closure if that may be seen."""
        place = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
        self._depth += 1  # a step may call that of the class that it derives from
        self._counts[place] += self._depth == 1
        if self._depth > 1 or self._counts[place] > 1:
            return None
        closure = named.get("closure", args[1] if args[1:] else None)
        if closure is not None and self.sees_closures:

            def seen_closure() -> Any:
                loss = closure()
                self._copy_all(optimizer)
                return loss

            return args[:1], {**named, "closure": seen_closure}
        if closure is not None:
            self._problem = "a closure computes gradients within step(): call it before, and step() without it"
        elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._problem = "a CUDA graph is being captured, where nothing can be read: audit a step before that"
        else:
            self._copy_all(optimizer)
        return None

    @torch.no_grad()
    def _copy_all(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            stepped = [one for one in list_treated(optimizer, self.rule) if one.p.grad is not None]
            scale, joint = scale_all(optimizer, stepped)
            self._joint = math.hypot(self._joint, joint)
            for one in (one for one in stepped if id(one.p) in self._before):
                step = replace(self._copy(optimizer, one, scale), drawn_by=one.name)
                one = one._replace(name=self._names.get(id(one.p), one.name))
                self._seen.append((optimizer, one, replace(step, name=one.name)))
                self._compare(one, self._before, "before")
        except OptimError as error:  # which is said after the step, and does not keep it from being taken
            self._problem = str(error)

    def _copy(self, optimizer: torch.optim.Optimizer, one: Treated, scale: float) -> Step:
        """What the step is given for one tensor."""
        p, state, dtype = one.p, optimizer.state.get(one.p, {}), xp.dtype(one.p)
        kept = name_state(one, state)
        dtypes = [dtype, *(xp.dtype(entry) for entry in kept.values() if xp.dtype(entry) in DTYPES)]
        before = host(seen(xp, whole(p.detach()), kept)) if RECORD in kept else self._before[id(p)]
        numbers = {key: host(entry) for key, entry in read_state(one, state).items()}
        gradient: Any = p.grad
        arrays: dict[str, Any] = dict(before=before, gradient=numbers_of(gradient), after=before, state=numbers)
        rates: dict[str, Any] = dict(lr=None if one.lr is None else float(one.lr), lr_scale=float(one.factor))
        theirs = dict(writes=WRITES, is_coarse=dtype == "float64", arithmetic=min(dtypes, key=digits_of))
        beside: Any = dict(arithmetic=arithmetic(dtype)) if one.is_ours else theirs
        return Step.by(one.setting, one.t, dtype, scale, name=one.name, group=one.group, **arrays, **rates, **beside)

    def _look_again(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        if any(optimizer is known for known in self.optimizers):
            self._depth -= 1
            if self._depth == 0:
                self._after |= {id(one.p): numbers_of(one.p) for by, one, _ in self._seen if by is optimizer}

    def _compare(self, one: Treated, known: dict[int, Arr], when: str) -> None:
        if not np.array_equal(known[id(one.p)], numbers_of(one.p), equal_nan=True):
            self._told.append(f"{one.name!r} was changed within, {when} the step")

    # ---- after it

    @torch.no_grad()
    def _replay(self) -> Report:
        for _, one, _ in self._seen:
            self._compare(one, self._after, "after")
        problem, most = self._problem, max(self._counts)
        if not problem and self._counts != [1] * len(self._counts):
            problem = (
                f"{f'{most} steps were' if most > 1 else 'no step was'} taken within, and an audit is of one: call "
                "step() once in the with block; a GradScaler that found infinities, a replayed graph and "
                "step_parameter() take none"
            )
        if not problem and self._told:
            problem = f"{'; '.join(self._told[:3])}: let nothing but the step change parameters in the with block"
        if problem := next(filter(None, told_by_ranks(problem)), ""):
            raise AuditError(problem)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        steps = [self._complete(*each) for each in self._seen]
        verdicts = find_verdicts(steps, groups)
        lines = [line_of(step, *found) for step, found in zip(steps, verdicts, strict=True)]
        of_state = [f"{step.name}: {fault}" for step in steps for fault in step.faults_of_state()]
        faults = [*faults_of_groups(self.optimizers, self.model, steps), *of_state, *replicas_apart(steps)]
        named = ", ".join(type(each).__name__ for each in self.optimizers)
        sizes = sum(len(group["params"]) for group in groups)
        title = f"audit of {named}: {len(steps)} of {sizes} tensors, joint norm of gradients {self._joint:.4g}"
        remarks = remarks_on(self.optimizers, [one for _, one, _ in self._seen], steps)
        if abs(self._joint - 1) < CLIPPED:
            remarks.append("the joint norm of gradients is 1.000: they were clipped to it before the step")
        return Report(title, lines, faults, remarks)

    def _complete(self, optimizer: torch.optim.Optimizer, one: Treated, step: Step) -> Step:
        """With what the step has made of the tensor and its state."""
        state = optimizer.state.get(one.p, {})
        kept = name_state(one, state)
        after = host(seen(xp, whole(one.p.detach()), kept)) if RECORD in kept else self._after[id(one.p)]
        read = {key: host(entry) for key, entry in read_state(one, state).items() if key in kept}
        dtypes = {key: xp.dtype(entry) for key, entry in kept.items()}
        return replace(step, after=after, state_after=read, state_dtypes=dtypes)


#: Around one step: copy a sample of tensors, replay the step by its page in float64, and say where it differs.
audit = Audit


def unwrapped(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of torch that are given, or within a wrapper."""
    inner = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    several = optimizer if isinstance(optimizer, (list, tuple)) else inner
    if several is not None:
        for each in several if isinstance(several, (list, tuple)) else [several]:
            yield from unwrapped(each)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        kind = type(optimizer).__name__
        raise AuditError(f"{kind} is no optimizer of torch, and has none as .optimizer: give the one that is stepped")


def digits_of(dtype: str) -> int:
    return DTYPES[dtype].digits


def numbers_of(p: Tensor) -> Arr:
    return host(whole(p.detach()))


def host(x: Tensor) -> Arr:
    """A copy on the host, with all digits."""
    found: Arr = (x if x.dtype is torch.float64 else x.float()).to("cpu", copy=True).numpy()
    return found


def choose(optimizers: Sequence[torch.optim.Optimizer], memory: int) -> list[Tensor]:
    """All parameters, or of each kind the smallest and the largest, of which copies fit into so many bytes."""
    kinds: dict[Any, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for place, p in enumerate(group["params"]):
                state = sum(e.numel() for e in optimizer.state.get(p, {}).values() if isinstance(e, Tensor))
                size = (3 * p.numel() + (state or 2 * p.numel())) * (8 if p.dtype is torch.float64 else 4)
                if p.requires_grad and p.numel():
                    kinds[id(optimizer), index, p.ndim, p.dtype].append((size, place, p))
    if sum(size for kind in kinds.values() for size, *_ in kind) <= memory:
        return [p for kind in kinds.values() for *_, p in kind]
    chosen: dict[int, Tensor] = {}
    for place in (0, -1):
        for i, kind in enumerate(sorted(kinds.values(), key=lambda kind: max(kind)[0])):
            share = memory // (len(kinds) - i) if place else memory
            fitting = sorted((one for one in kind if one[0] <= share), key=lambda one: one[:2])
            if fitting and id(fitting[place][2]) not in chosen:
                size, _, p = fitting[place]
                chosen[id(p)], memory = p, memory - size
    return list(chosen.values())


def scale_all(optimizer: torch.optim.Optimizer, stepped: Sequence[Treated]) -> tuple[float, float]:
    """What multiplies all gradients in a step, by a GradScaler, clipping and spikes; and their joint norm."""
    gradients = [one.p.grad.detach() for one in stepped if one.p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    unscale, infinite = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    scale = 1.0 if unscale is None else 1 / float(unscale)
    joint = norm([float(whole(each)) for each in norms]) * scale
    handling, factors = stepped[0].setting.handling if stepped else Handling(), [1.0]
    if infinite is not None and float(infinite):
        factors.append(SKIPPED)
    if handling.max_grad_norm is not None:
        factors.append(1 / max(1.0, joint / handling.max_grad_norm))
    if handling.guard is not None:
        kept = [optimizer.state[one.p][SPIKES] for one in stepped if SPIKES in optimizer.state.get(one.p, {})]
        norms = kept or [torch.zeros(handling.guard.kept_shape, dtype=torch.float64)]
        judged = judge(xp, handling.guard, torch.tensor([joint], dtype=torch.float64), norms[0].cpu())
        factors.append(SKIPPED if judged.skips and bool(judged.is_spike) else float(judged.scale))
    return scale * min(factors), joint
