"""The optimizer for torch: what all four have in common."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError, OptionError, ParameterError
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.plan import ENTRIES, Figures
from thalweg.rules.checks import check_choice, check_flag, check_number
from thalweg.settings import Overrides, Setting
from thalweg.spaces.sharded import Part
from thalweg.torch.agreement import Agreement
from thalweg.torch.bucket import Bucket, Result
from thalweg.torch.engines import ENGINES, Engine, by_shards, engine_for
from thalweg.torch.fused import Fused, reason_against, reason_against_part
from thalweg.torch.joint import check_all_finite, scale_to, squares_of
from thalweg.torch.owners import Owners
from thalweg.torch.parameters import Parameters, Params, Rate
from thalweg.torch.shards import gradient_like, local, local_state, part_of
from thalweg.torch.tensors import check_gradient

#: Native code looks at how memory lies, which ranks may find different, and they must all send the same messages.
DIVIDED = "parameters that are divided over ranks are stepped as lists, unless engine='fused' is asked for"


class Optimizer(Parameters):
    """A ``torch.optim.Optimizer`` around one of our rules.

    The four optimizers derive from it. Gradients are read, never written; parameters and state are
    written in place when the new values are known.
    """

    def __init__(
        self,
        params: Params,
        lr: Rate,
        *,
        variant: str | None = None,
        overrides: Overrides = (),
        engine: Engine = "auto",
        capturable: bool = False,
        **options: Any,
    ) -> None:
        check_choice("engine", engine, "auto", "reference", "foreach", "fused")
        check_flag("capturable", capturable)
        if engine == "fused" and (reason := reason_missing()) is not None:
            raise OptionError(f"engine='fused' cannot run: {reason}; engine='auto' takes the fastest there is")
        self._forget(engine)
        super().__init__(params, lr, variant=variant, overrides=overrides, capturable=capturable, options=options)

    def _forget(self, engine: Engine) -> None:
        """Have seen no step yet."""
        self._wanted_engine = engine
        self._engines_used: set[str] = set()
        self._last: dict[str, Callable[[], dict[str, Any]]] = {}
        self._last_finite: dict[str, Tensor] = {}
        self._skips: Tensor | None = None
        self._fused = Fused(self.rule_name)
        self._treatments: dict[int, tuple[Setting, Any, Hashable, str]] = {}
        self._parts: dict[int, tuple[Any, Part]] = {}
        self._owners = Owners()
        self._agreement = Agreement()

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the one that was asked for."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. A closure is evaluated first, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(None, compiling=torch.compiler.is_compiling())
        return loss

    def step_parameter(self, p: Tensor) -> None:
        """Step one parameter by itself, in the middle of a backward pass for example."""
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            raise OptionError("max_grad_norm needs all gradients of a step at once: use step()")
        if p not in self._place():
            raise ParameterError("step_parameter: this tensor is no parameter of this optimizer")
        with torch.no_grad():
            self._step(p, compiling=torch.compiler.is_compiling())

    # Under torch.compile only the arithmetic of each bucket is compiled; what surrounds it runs as it is.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    def _step(self, only: Tensor | None, *, compiling: bool) -> None:
        with self._fused.lock:
            known = set(self.state)
            try:
                buckets = self._buckets(only, compiling)
                policy = self.param_groups[0]["on_nonfinite"]
                engines = [engine_for(self._wanted_engine, bucket, compiling=compiling) for bucket in buckets]
                self._engines_used = set(engines)
                in_place = [engine == "fused" and self.rule_name in ENTRIES for engine in engines]
                fused = [bucket for bucket, own in zip(buckets, in_place, strict=True) if own]
                divided = [bucket for bucket, own in zip(buckets, in_place, strict=True) if bucket.parts and not own]
                finite = self._prepare_fused(fused, measure=policy != "propagate") if fused else None
                sharded = by_shards(divided, self._owners) if divided else []
                results: Iterable[Result] = itertools.chain(
                    sharded,
                    (
                        result
                        for bucket, engine, own in zip(buckets, engines, in_place, strict=True)
                        if not own and not bucket.parts
                        for result in ENGINES[engine](bucket)
                    ),
                )
                if policy == "raise":
                    # nothing is written before everything is known to be finite
                    results = list(results)
                    self._raise_unless_finite(results, fused, finite or [])
            except BaseException:
                for p in set(self.state) - known:  # what was made for a step that is not taken
                    del self.state[p]
                self._fused.release()
                self._owners.forget()
                raise
            if fused:
                self._write_fused(fused, finite)
            for result in results:
                self._commit(result)

    @torch.compiler.disable
    def _prepare_fused(self, buckets: Sequence[Bucket], *, measure: bool) -> list[bool] | None:
        """Lay out a step for native code; if asked, tell which parameters would be finite after it."""
        self._fused.prepare(buckets, self._check_state)
        if not measure:
            return None
        allowed = [b.allowed is None or bool(b.allowed) for b in buckets for _ in b.params]
        return [fine and free for fine, free in zip(self._fused.measure(), allowed, strict=True)]

    @torch.compiler.disable
    def _write_fused(self, buckets: Sequence[Bucket], finite: Sequence[bool] | None) -> None:
        self._fused.write(finite)
        self._fused.release()
        states = [s for bucket in buckets for s in bucket.states]
        stepped = states if finite is None else [s for s, fine in zip(states, finite, strict=True) if fine]
        if stepped:
            torch._foreach_add_([s["step"] for s in stepped], 1)
        figures, index = self._fused.plan.figures(), 0
        for bucket in buckets:
            lr = {} if bucket.lr is None else {"lr": bucket.lr * bucket.setting.lr_scale}
            for name in bucket.names:
                self._last[name] = functools.partial(with_figures, lr, figures, index)
                index += 1

    @torch.compiler.disable
    def _buckets(self, only: Tensor | None, compiling: bool) -> list[Bucket]:
        """Parameters that can be stepped together, checked, with their state made where there is none."""
        self._report_unused()
        places = self._place()
        self._agreement.reach(self.rule_name, places, self.param_groups, self._overrides, one_by_one=only is not None)
        chosen = places if only is None else {only: places[only]}
        named = [(name, p) for p, (name, _) in chosen.items() if p.grad is not None]
        gradients = {}
        for name, p in named:
            check_gradient(name, p, grad_of(p))
            gradients[p] = gradient_like(name, p, grad_of(p))
        settings = {i: self._checked_settings(i, self.param_groups[i]) for i in sorted({i for _, i in chosen.values()})}
        factors = {i: lr_scale_of(self.param_groups[i]) for i in settings}
        members: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
        shared: dict[Any, tuple[Setting, Any, int | None, str]] = {}
        for name, p in named:
            index = places[p][1]
            group = self.param_groups[index]
            setting = self._setting(settings[index], name, p)
            state = self._state(p, setting, group)
            step = state["step"]
            t = None if compiling or not step.is_cpu else int(step.item()) + 1
            kind, unserved = self._treatment(p, setting, state)
            g, part = gradients[p], self._part(name, p)
            if not unserved and type(g) is not Tensor:
                unserved = f"there is no fused kernel for a gradient that is a {type(g).__name__}"
            divided = part.groups if any(part.groups) else ()
            if divided:
                own = unserved if self._wanted_engine == "fused" else DIVIDED
                unserved = reason_against_part(setting, part) or own
            key = (index, id(setting), p.device, p.dtype, g.dtype, kind, t, unserved, divided)
            members[key].append((name, p))
            if key not in shared:
                lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
                shared[key] = scaled(setting, factors[index]), lr, t, unserved
        scale, allowed = self._joint(named, gradients)
        return [
            Bucket(
                [name for name, _ in bucket],
                [local(p) for _, p in bucket],
                [gradients[p] for _, p in bucket],
                [local_state(self.state[p]) for _, p in bucket],
                *shared[key],
                [self._part(name, p) for name, p in bucket] if key[-1] else (),
                None if scale is None else scale.to(bucket[0][1].device),
                None if allowed is None else allowed.to(bucket[0][1].device),
            )
            for key, bucket in members.items()
        ]

    def _treatment(self, p: Tensor, setting: Setting, state: Mapping[str, Tensor]) -> tuple[Hashable, str]:
        """The kind of a parameter, and why native code cannot step it ("" if it can)."""
        held = local(p)
        memory = (held.data_ptr(), held.shape, held.stride()) if p.is_cpu else None
        known = self._treatments.get(id(p))
        if known is None or known[0] is not setting or known[1] != memory:
            kind = setting.rule.kind(tuple(p.shape))
            reason = reason_against(setting, held, local_state(state))
            self._treatments[id(p)] = known = setting, memory, kind, reason
        return known[2:]

    def _part(self, name: str, p: Tensor) -> Part:
        """What this rank holds of a parameter."""
        known = self._parts.get(id(p))
        layout = (p.shape, getattr(p, "placements", None), getattr(p, "device_mesh", None))
        if known is None or known[0] != layout:
            self._parts[id(p)] = known = layout, part_of(name, p)
        return known[1]

    def _joint(
        self, named: Sequence[tuple[str, Tensor]], gradients: Mapping[Tensor, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """What depends on all gradients together: the scale of max_grad_norm, and whether to skip the step."""
        limit, policy = self.param_groups[0]["max_grad_norm"], self.param_groups[0]["on_nonfinite"]
        if not named or (limit is None and policy != "skip"):
            return None, None
        parts = [self._part(name, p) for name, p in named]
        native = self._wanted_engine in ("auto", "fused")
        squares = squares_of([gradients[p] for _, p in named], parts, native=native)
        finite = torch.stack([torch.isfinite(square).to(squares[0].device) for square in squares])
        names = [name for name, _ in named]
        if policy == "raise":
            check_all_finite(names, finite)
        scale = None if limit is None else scale_to(limit, squares)
        if policy != "skip":
            return scale, None
        self._last_finite = dict(zip(names, finite.unbind(), strict=True))
        allowed = finite.all()
        skipped = (~allowed).to(torch.int64)
        self._skips = skipped if self._skips is None else self._skips + skipped
        return scale, allowed

    @torch.compiler.disable
    def _commit(self, result: Result) -> None:
        """Write new values, in place, and keep what there is to look at."""
        part = result.part
        torch._foreach_copy_(list(part.params), list(result.params))
        for key in result.states[0]:
            torch._foreach_copy_([s[key] for s in part.states], [new[key] for new in result.states])
        steps = [s["step"] for s in part.states]
        if result.finite is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, [finite.to(steps[0].device, torch.float32) for finite in result.finite])
        lr = {} if part.lr is None else {"lr": part.lr * part.setting.lr_scale}
        for i, name in enumerate(part.names):
            self._last[name] = functools.partial(dict, lr, **{key: v[i] for key, v in result.stats.items()})

    @torch.compiler.disable
    def _raise_unless_finite(
        self, results: Sequence[Result], fused: Sequence[Bucket], fused_finite: Sequence[bool]
    ) -> None:
        names = [name for bucket in fused for name in bucket.names]
        guilty = [name for name, finite in zip(names, fused_finite, strict=True) if not finite]
        for result in results:
            assert result.finite is not None
            flags = torch.stack([finite.reshape(()) for finite in result.finite]).tolist()
            guilty += [name for name, finite in zip(result.part.names, flags, strict=True) if not finite]
        if guilty:
            raise NonFiniteError(f"the gradient or the update is not finite: {', '.join(map(repr, guilty))}")

    def stats(self) -> dict[str, dict[str, Any]]:
        """What the last step of each parameter computed on its way, by name. Reading it waits for the device."""

        def shown(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.item() if value.numel() == 1 else value.squeeze().cpu()

        return {name: {key: shown(v) for key, v in figures().items()} for name, figures in self._last.items()}

    @property
    def skipped(self) -> int:
        """How many steps were skipped under ``on_nonfinite="skip"``. Reading it waits for the device."""
        return 0 if self._skips is None else int(self._skips)

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients were not finite in the last step, under ``on_nonfinite="skip"``."""
        return [name for name, finite in self._last_finite.items() if not bool(finite)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._treatments.clear()
        self._owners.forget()
        self._agreement.forget()

    def clear_state(self) -> None:
        """Forget what has been learned; options stay."""
        self.state.clear()
        self._resolved.clear()
        self._forget(self._wanted_engine)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_overrides": self._overrides, "_wanted_engine": self._wanted_engine, "_skips": self._skips}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {key: state.pop(key) for key in ("_overrides", "_wanted_engine", "_skips") if key in state}
        super().__setstate__(state)
        if own:  # a copy or a pickle, and not load_state_dict, which comes here too
            self._remember(own["_overrides"])
            self._forget(own["_wanted_engine"])
            self._skips = own["_skips"]


def with_figures(lr: dict[str, Any], figures: Figures, index: int) -> dict[str, Any]:
    return {**lr, **figures.of(index, lambda values, shape: torch.tensor(values, dtype=torch.float64).reshape(shape))}


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def lr_scale_of(group: Mapping[str, Any]) -> float:
    """The ``lr_scale`` that some schedulers write into groups."""
    factor: float = group.get("lr_scale", 1.0)
    check_number("lr_scale", factor, low=0.0)
    return factor


def scaled(setting: Setting, factor: float) -> Setting:
    return setting if factor == 1.0 else replace(setting, lr_scale=setting.lr_scale * factor)
