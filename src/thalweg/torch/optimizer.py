"""The optimizer for torch: what all four have in common."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError, OptionError, ParameterError
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.plan import Figures
from thalweg.rules import RULES
from thalweg.rules.checks import check_choice, check_flag
from thalweg.settings import Overrides
from thalweg.torch.engines import triton as gpu
from thalweg.torch.engines.bucket import Bucket, Result
from thalweg.torch.engines.lists import ENGINES, Engine, by_shards, engine_for, is_in_place
from thalweg.torch.engines.native import Fused
from thalweg.torch.engines.triton import Gpu
from thalweg.torch.params.groups import engine_meant
from thalweg.torch.params.parameters import Params, Rate
from thalweg.torch.sharding.owners import Owners
from thalweg.torch.step.buckets import Sorting


class Optimizer(Sorting):
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
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Any,
    ) -> None:
        check_choice("engine", engine, "auto", "reference", "foreach", "fused")
        engine = engine_meant(engine, foreach, fused, differentiable)
        check_flag("capturable", capturable)
        self._forget(engine)
        super().__init__(params, lr, variant=variant, overrides=overrides, capturable=capturable, options=options)
        for p in self.parameters() if engine == "fused" else ():
            missing = gpu.reason_missing(p.device) if gpu.is_on_gpu(p) else reason_missing()
            if missing is not None:
                raise OptionError(
                    f"engine='fused' cannot run: {missing}; "
                    "use engine='auto', which takes the fastest engine that can run"
                )

    def _forget(self, engine: Engine) -> None:
        """Have seen no step yet."""
        self._forget_buckets(engine)
        self._engines_used: set[str] = set()
        self._last: dict[str, Callable[[], dict[str, Any]]] = {}
        self._fused = Fused()
        self._gpu = Gpu()
        self._owners = Owners()

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the requested one before the first step."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. A closure is evaluated first, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if torch.compiler.is_compiling() and RULES[self.rule_name].needs_whole:
                self._step_uncompiled()
            else:
                self._step(None, compiling=torch.compiler.is_compiling())
        return loss

    # A compiler that saw which parameter this is would take it for the one it was compiled for.
    @torch.compiler.disable
    def step_parameter(self, p: Tensor) -> None:
        """Step one parameter by itself, in the middle of a backward pass for example. It is never compiled."""
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            raise OptionError("max_grad_norm needs all gradients of a step at once: use step()")
        if p not in self._places():
            raise ParameterError("step_parameter: this tensor is not a parameter of this optimizer")
        with torch.no_grad():
            self._step(p, compiling=False)

    # A compiler needs minutes for the products and refreshes of a few tensors, and would compute every refresh, due or
    # not. The engines of an eager step have BLAS, native noise and kernels for them.
    @torch.compiler.disable
    def _step_uncompiled(self) -> None:
        self._step(None, compiling=False)

    # Under torch.compile only the arithmetic of each bucket is compiled; what surrounds it runs as it is.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    def _step(self, only: Tensor | None, *, compiling: bool) -> None:
        with self._fused.lock:
            known = len(self.state)
            try:
                buckets = self._buckets(only, compiling)
                policy = self.param_groups[0]["on_nonfinite"]
                engines = [engine_for(self._wanted_engine, bucket, compiling=compiling) for bucket in buckets]
                self._engines_used = set(engines)
                in_place = [is_in_place(engine, bucket) for bucket, engine in zip(buckets, engines, strict=True)]
                own = [bucket for bucket, here in zip(buckets, in_place, strict=True) if here]
                fused = [bucket for bucket in own if not bucket.on_gpu]
                launched = [bucket for bucket in own if bucket.on_gpu]
                divided = [
                    (bucket, engine)
                    for bucket, engine, here in zip(buckets, engines, in_place, strict=True)
                    if bucket.parts and not here
                ]
                finite = self._prepare_fused(fused, measure=policy != "propagate") if fused else None
                if launched:
                    self._prepare_gpu(launched)
                sharded = by_shards(divided, self._owners) if divided else []
                results: Iterable[Result] = itertools.chain(
                    sharded,
                    (
                        result
                        for bucket, engine, here in zip(buckets, engines, in_place, strict=True)
                        if not here and not bucket.parts
                        for result in ENGINES[engine](bucket)
                    ),
                )
                if policy == "raise":
                    # nothing is written before everything is known to be finite
                    results = list(results)
                    self._raise_unless_finite(results, fused, finite or [], launched)
            except BaseException:
                for p in list(self.state)[known:]:  # what was made for a step that is not taken
                    del self.state[p]
                self._fused.release()
                self._gpu.release()
                self._owners.forget()
                raise
            if fused:
                self._write_fused(fused, finite)
            if launched:
                self._write_gpu()
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
    def _prepare_gpu(self, buckets: Sequence[Bucket]) -> None:
        self._gpu.prepare(buckets, self._check_state)

    @torch.compiler.disable
    def _write_gpu(self) -> None:
        self._gpu.write()
        self._last.update(self._gpu.figures)
        self._gpu.release()

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
            lr = {} if bucket.lr is None else {"lr": bucket.lr * bucket.lr_scale}
            for name in bucket.names:
                self._last[name] = functools.partial(with_figures, lr, figures, index)
                index += 1

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
        lr = {} if part.lr is None else {"lr": part.lr * part.lr_scale}
        for i, name in enumerate(part.names):
            self._last[name] = functools.partial(dict, lr, **{key: v[i] for key, v in result.stats.items()})

    @torch.compiler.disable
    def _raise_unless_finite(
        self,
        results: Sequence[Result],
        fused: Sequence[Bucket],
        fused_finite: Sequence[bool],
        launched: Sequence[Bucket],
    ) -> None:
        names = [name for bucket in fused for name in bucket.names]
        guilty = [name for name, finite in zip(names, fused_finite, strict=True) if not finite]
        if launched:
            names = [name for bucket in launched for name in bucket.names]
            flags = torch.cat(self._gpu.measure()).tolist()
            guilty += [name for name, finite in zip(names, flags, strict=True) if not finite]
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._treatments.clear()
        self._recall = None
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
