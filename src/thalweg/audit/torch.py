"""The audit of one live step of an optimizer of torch, from any library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thalweg.audit.causes import find_verdict
from thalweg.audit.page import Arr, Step
from thalweg.audit.report import AuditError, Line, Report
from thalweg.audit.treat import Treatment, floats_of, named_state, peer_of, treatments, without_step
from thalweg.boundary import seen
from thalweg.dtypes import DTYPES
from thalweg.rules.spikes import judge
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD, SPIKES, arithmetic
from thalweg.torch.base import Optimizer
from thalweg.torch.sharding.shards import whole

#: Bytes of copies on the host, if none are said.
MEMORY = 64 * 2**20


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
        return str(self._report or "an audit that has seen no step")

    def __enter__(self) -> Audit:
        names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
        self._names, self._counts, self._problem = names, [0 for _ in self.optimizers], ""
        self._steps: list[tuple[int, Treatment, Step]] = []
        self._after: dict[int, Arr] = {}
        self._told: list[str] = []
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._before = {id(p): numbers_of(p) for p in choose(params, self.optimizers, self.memory)}
        hooks = [optimizer.register_step_pre_hook(self._look) for optimizer in self.optimizers]
        self._hooks = [*hooks, register_optimizer_step_post_hook(self._look_again)]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._finish()
        self._before, self._after, self._steps = {}, {}, []

    # ---- around the step

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        """Copy what the step is given."""
        place = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
        self._counts[place] += 1
        closure = named.get("closure", args[1] if len(args) > 1 and args[0] is optimizer else None)
        if closure is not None:
            self._problem = "a closure computes gradients within step(): call it before, and step() without it"
        elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._problem = "a CUDA graph is being captured, where nothing can be read: audit a step before that"
        if self._problem or self._counts[place] > 1:
            return
        found = [one for one in treatments(optimizer, self.rule) if one.p.grad is not None]
        scale = joint_scale(optimizer, found)
        for one in found:
            if id(one.p) in self._before:
                self._steps.append((place, one, self._step_of(optimizer, one, scale)))

    def _step_of(self, optimizer: torch.optim.Optimizer, one: Treatment, scale: float) -> Step:
        name, (p, setting) = self._names.get(id(one.p), one.name), (one.p, one.setting)
        if not np.array_equal(self._before[id(p)], numbers_of(p), equal_nan=True):
            self._told.append(f"{name!r} was changed within, before the step")
        dtypes = {key: xp.dtype(entry) for key, entry in one.state.items()}
        state = {key: host(entry) for key, entry in floats_of(setting, p, one.state).items() if key != RECORD}
        is_ours = isinstance(optimizer, Optimizer)
        own = [xp.dtype(p), *(dtype for key, dtype in dtypes.items() if dtype in DTYPES)]
        precision = arithmetic(xp.dtype(p)) if is_ours else min(own, key=lambda dtype: DTYPES[dtype].digits)
        before = host(seen(xp, whole(p.detach()), {key: whole(e) for key, e in one.state.items() if key == RECORD}))
        return Step(
            name,
            setting.rule_at(one.t),
            before,
            host(whole(p.grad.detach())) if p.grad is not None else before,
            before,
            state,
            {},
            one.t,
            None if one.lr is None else float(one.lr),
            float(one.factor),
            scale * (-1.0 if setting.handling.maximize else 1.0),
            one.group,
            xp.dtype(p),
            dtypes,
            precision,
            setting.handling.rounding if xp.dtype(p) in ("bfloat16", "float16") else "nearest",
            setting.handling.seed,
            1 if is_ours else 3,
        )

    def _look_again(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        if any(optimizer is known for known in self.optimizers):
            mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._before]
            self._after |= {id(p): numbers_of(p) for p in mine}

    # ---- after it

    @torch.no_grad()
    def _finish(self) -> None:
        if self._problem:
            raise AuditError(self._problem)
        if 0 in self._counts:
            raise AuditError(
                "no step was taken within: call optimizer.step() once in the with block; a GradScaler that found "
                "infinities, a replayed graph and step_parameter() take none that can be seen"
            )
        if max(self._counts) > 1:
            raise AuditError(f"{max(self._counts)} steps were taken within: an audit is of one step")
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        lines, steps = list[Line](), list[Step]()
        faults, remarks = list[str](), list[str]()
        for place, one, step in self._steps:
            if not np.array_equal(self._after[id(one.p)], numbers_of(one.p), equal_nan=True):
                self._told.append(f"{step.name!r} was changed within, after the step")
            steps.append(self._completed(place, one, step))
        if self._told:
            raise AuditError(
                "; ".join(self._told[:3]) + ": let nothing but the step change parameters in the with block"
            )
        for (_, one, _), step in zip(self._steps, steps, strict=True):
            verdict, found = find_verdict(step, steps, groups)
            lines.append(line_of(one, step, verdict, found.off, found.allowed))
            faults += [f"{step.name}: {words}" for words in step.wrong_state()]
        title = f"audit of {', '.join(type(each).__name__ for each in self.optimizers)}: {len(lines)} tensors"
        self._report = Report(title, lines, faults, remarks)

    def _completed(self, place: int, one: Treatment, step: Step) -> Step:
        """What the step has made of a tensor and its state."""
        optimizer, p = self.optimizers[place], one.p
        state, peer = optimizer.state.get(p, {}), None
        if not isinstance(optimizer, Optimizer):
            peer = peer_of(optimizer, optimizer.param_groups[one.group])
            entries = named_state(peer, state, one.setting, p, one.t)
        else:
            entries = without_step(state)
        record = {key: whole(entry) for key, entry in entries.items() if key == RECORD}
        after = host(seen(xp, whole(p.detach()), record)) if record else self._after[id(p)]
        kept = {key: host(e) for key, e in floats_of(one.setting, p, entries).items() if key != RECORD}
        dtypes = {key: xp.dtype(entry) for key, entry in entries.items()}
        return replace(step, after=after, state_after=kept, state_dtypes=dtypes)


def audit(optimizer: Any, model: nn.Module | None = None, *, memory: int = MEMORY, rule: Any = None) -> Audit:
    """Around one step: copy a sample of tensors, replay the step by its page in float64, and say where it differs."""
    return Audit(optimizer, model, memory=memory, rule=rule)


def unwrapped(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of torch that are given, or within a wrapper."""
    inner = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, (list, tuple)) or inner is not None:
        several = optimizer if inner is None else inner if isinstance(inner, (list, tuple)) else [inner]
        for each in several:
            yield from unwrapped(each)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        raise AuditError(
            f"{type(optimizer).__name__} is no optimizer of torch, and has none as .optimizer: give the one whose "
            "step() is called"
        )


def numbers_of(p: Tensor) -> Arr:
    return host(whole(p.detach()))


def host(x: Tensor) -> Arr:
    """A copy on the host, with all digits."""
    wide = x if x.dtype is torch.float64 else x.float()
    found: Arr = wide.to("cpu", copy=True).numpy()
    return found


def choose(params: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], memory: int) -> list[Tensor]:
    """All parameters, or of each kind the smallest and the largest, of which copies fit into so many bytes."""
    kinds: dict[Any, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p.requires_grad and p.numel():
                    state = sum(e.numel() for e in optimizer.state.get(p, {}).values() if isinstance(e, Tensor))
                    size = (3 * p.numel() + (state or 2 * p.numel())) * (8 if p.dtype is torch.float64 else 4)
                    kind = id(optimizer), index, p.ndim, p.dtype
                    kinds[kind].append((size, len(kinds[kind]), p))
    if sum(size for kind in kinds.values() for size, *_ in kind) <= memory:
        return [p for kind in kinds.values() for *_, p in kind]
    chosen: dict[int, Tensor] = {}
    for place in (0, -1):
        for i, kind in enumerate(kinds.values()):
            share = memory // (len(kinds) - i) if place else memory
            fitting = sorted((one for one in kind if one[0] <= share), key=lambda one: one[:2])
            if fitting and id(fitting[place][2]) not in chosen:
                size, _, p = fitting[place]
                chosen[id(p)], memory = p, memory - size
    return list(chosen.values())


def joint_scale(optimizer: torch.optim.Optimizer, found: Sequence[Treatment]) -> float:
    """What multiplies all gradients in a step: 1 over the scale of a GradScaler, clipping, spikes."""
    unscale = getattr(optimizer, "grad_scale", None)
    scale = 1.0 if unscale is None else 1 / float(unscale)
    handling = found[0].setting.handling if found else Handling()
    if not handling.needs_norm:
        return scale
    size = joint_norm([one.p.grad for one in found if one.p.grad is not None]) * scale
    factors = [1 / max(1.0, size / handling.max_grad_norm)] if handling.max_grad_norm is not None else []
    if handling.guard is not None:
        state: Any = next((optimizer.state[one.p] for one in found if SPIKES in optimizer.state.get(one.p, {})), {})
        norms = state.get(SPIKES, torch.zeros(handling.guard.kept_shape, dtype=torch.float64))
        judged = judge(xp, handling.guard, torch.tensor([size], dtype=torch.float64), norms.cpu())
        factors.append(0.0 if judged.skips and bool(judged.is_spike) else float(judged.scale))
    return scale * min(factors)


def joint_norm(gradients: Sequence[Tensor]) -> float:
    wide = [torch.linalg.vector_norm(g.detach(), dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return float(sum(float(whole(each)) ** 2 for each in wide) ** 0.5)


def line_of(one: Treatment, step: Step, verdict: str, off: float, allowed: float) -> Line:
    shape = tuple(step.before.shape)
    treatment, dtypes = step.rule.treatment(shape), sorted(set(step.state_dtypes.values()))
    page = type(step.rule).__name__ + ("" if treatment == "elementwise" else f": {treatment}")
    rate = "by the page" if step.lr is None else f"{step.lr * step.lr_scale:.4g}"
    state_bytes = sum(np.prod(x.shape) for x in step.state_after.values()) * 4 / max(1, step.before.size)
    return Line(
        (step.name,),
        page,
        f"{'x'.join(map(str, shape)) or '()'} {step.dtype}",
        rate,
        f"{getattr(step.rule, 'weight_decay', 0.0):g}",
        f"{state_bytes:.3g} B {', '.join(dtypes)}",
        off,
        allowed,
        verdict,
    )
