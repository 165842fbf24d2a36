"""From parameters with gradients to buckets that are stepped together, and what holds for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.settings import Setting, Settings
from thalweg.spaces.sharded import Part
from thalweg.torch.engines import native as fused
from thalweg.torch.engines import triton as gpu
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.engines.lists import Engine
from thalweg.torch.params.checks import check_gradient
from thalweg.torch.params.parameters import Parameters
from thalweg.torch.sharding.agreement import Agreement
from thalweg.torch.sharding.shards import gradient_like, local, local_state, part_of
from thalweg.torch.step.gradient_norm import check_all_finite, scale_to, squares_of
from thalweg.torch.step.repeated import Recall, can_recall

#: Native code depends on the memory layout, which may differ between ranks, and all ranks must send the same messages.
DIVIDED = "sharded parameters on CPUs are stepped as lists, unless engine='fused' is given"


class Sorting(Parameters):
    """Parameters that are sorted into buckets, step by step."""

    def _forget_buckets(self, engine: Engine) -> None:
        """Have seen no step yet."""
        self._wanted_engine = engine
        self._last_finite: tuple[Sequence[str], Tensor] | None = None
        self._skips: Tensor | None = None
        self._treatments: dict[int, tuple[Setting, Any, Hashable, str]] = {}
        self._parts: dict[int, tuple[Any, Part]] = {}
        self._agreement = Agreement()
        self._recall: Recall | None = None

    def _places(self) -> dict[Tensor, tuple[str, int]]:
        """The name and the group of every parameter. What was remembered by address is dropped if they have changed."""
        if self._members.changed(self.param_groups, self._against_flat):
            self._check_names()
            for known in (self._resolved, self._treatments, self._parts):
                known.clear()
            self._recall = None
        return self._members.places

    def _is_launched(self, p: Tensor) -> bool:
        """Whether kernels on a GPU are to step a parameter and to count its steps. Kron's schedule is for the host."""
        return (
            self._wanted_engine in ("auto", "fused")
            and self.rule_name != "Kron"
            and gpu.is_on_gpu(p)
            and p.dtype in gpu.SERVED
            and gpu.reason_missing(p.device) is None
        )

    def _place_of_counts(self, p: Tensor, group: Mapping[str, Any]) -> torch.device:
        return p.device if self._is_launched(p) else super()._place_of_counts(p, group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler may leave ``grad_scale`` and ``found_inf`` to a step, which then waits for nothing."""
        homes = [(p, group) for group in self.param_groups for p in group["params"]]
        return all(not p.is_cpu and self._place_of_counts(p, group) == p.device for p, group in homes)

    @torch.compiler.disable
    def _buckets(self, only: Tensor | None, compiling: bool) -> list[Bucket]:
        """Parameters that can be stepped together, checked, with their state made where there is none."""
        places = self._places()
        self._report_unused()
        self._agreement.reach(self.rule_name, places, self.param_groups, self._overrides, one_by_one=only is not None)
        settings = [self._checked_settings(i, group) for i, group in enumerate(self.param_groups)]
        buckets = None
        if only is None and self._recall is not None:
            rates = [self._rate(self.param_groups[bucket.group]) for bucket in self._recall.buckets]
            buckets = self._recall.again(self.state, settings, rates)
        if buckets is None:
            chosen = places if only is None else {only: places[only]}
            buckets = self._sorted(chosen, settings, compiling)
            if only is None:
                idle = [p for p in chosen if p.grad is None]
                known = can_recall(buckets) and not compiling
                self._recall = Recall(buckets, idle, self.state, settings) if known else None
        return self._joined(buckets)

    def _sorted(
        self, chosen: Mapping[Tensor, tuple[str, int]], settings: Sequence[Settings], compiling: bool
    ) -> list[Bucket]:
        named = [(name, p, index) for p, (name, index) in chosen.items() if p.grad is not None]
        gradients = {}
        for name, p, _ in named:
            assert p.grad is not None
            check_gradient(name, p, p.grad)
            gradients[p] = gradient_like(name, p, p.grad)
        members: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
        shared: dict[Any, Any] = {}
        for name, p, index in named:
            setting = self._setting(settings[index], name, p)
            state = self._state(name, p, setting, self.param_groups[index])
            launched = self._is_launched(p)
            if launched and state["step"].device != p.device:
                state["step"] = state["step"].to(p.device)
            step = state["step"]
            t = None if compiling or launched or not step.is_cpu else int(step.item()) + 1
            g, part = gradients[p], self._part(name, p)
            kind, unserved = self._treatment(p, setting, state, part)
            if not unserved and type(g) is not Tensor:
                unserved = f"there is no fused kernel for a gradient of type {type(g).__name__}"
            divided = part.groups if any(part.groups) else ()
            if divided:
                unserved = self._unserved_part(setting, p, part, unserved)
            key = (index, id(setting), p.device, p.dtype, g.dtype, kind, t, unserved, divided)
            members[key].append((name, p))
            if key not in shared:
                lr, factor = self._rate(self.param_groups[index])
                shared[key] = dict(
                    setting=setting,
                    lr=lr,
                    lr_scale=setting.lr_scale * factor,
                    t=t,
                    unserved=unserved,
                    on_gpu=gpu.is_on_gpu(p),
                    group=index,
                )
        return [
            Bucket(
                [name for name, _ in bucket],
                [local(p) for _, p in bucket],
                [gradients[p] for _, p in bucket],
                [local_state(self.state[p]) for _, p in bucket],
                **shared[key],
                parts=[self._part(name, p) for name, p in bucket] if key[-1] else (),
            )
            for key, bucket in members.items()
        ]

    def _treatment(self, p: Tensor, setting: Setting, state: Mapping[str, Tensor], part: Part) -> tuple[Hashable, str]:
        """The kind of a parameter, and why native code or a fused kernel cannot step it ("" if it can)."""
        held = local(p)
        memory = held.data_ptr(), held.shape, held.stride()
        known = self._treatments.get(id(p))
        if known is None or known[0] is not setting or known[1] != memory:
            own = local_state(state)
            if gpu.is_on_gpu(held):
                reason = gpu.reason_against(setting, held, own, part if any(part.groups) else None)
            else:
                reason = fused.reason_against(setting, held, own)
            self._treatments[id(p)] = known = setting, memory, setting.rule.kind(tuple(p.shape)), reason
        return known[2:]

    def _unserved_part(self, setting: Setting, p: Tensor, part: Part, unserved: str) -> str:
        """Why native code or a fused kernel cannot step this rank's shard of a parameter."""
        if gpu.is_on_gpu(p):
            return gpu.reason_against_part(setting, part) or unserved
        return fused.reason_against_part(setting, part) or (unserved if self._wanted_engine == "fused" else DIVIDED)

    def _part(self, name: str, p: Tensor) -> Part:
        """What this rank holds of a parameter."""
        known = self._parts.get(id(p))
        layout = (p.shape, getattr(p, "placements", None), getattr(p, "device_mesh", None))
        if known is None or known[0] != layout:
            self._parts[id(p)] = known = layout, part_of(name, p)
        return known[1]

    def _joined(self, buckets: list[Bucket]) -> list[Bucket]:
        """With what depends on all gradients together: by what they are scaled, and whether the step is taken."""
        limit, policy = self.param_groups[0]["max_grad_norm"], self.param_groups[0]["on_nonfinite"]
        # a GradScaler leaves these here for the time of a step, and takes what it finds for a user's own
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        unscale = None if grad_scale is None else grad_scale.double().reciprocal().reshape(())
        allowed = None if found_inf is None else (found_inf == 0).reshape(())
        scale = unscale
        if buckets and (limit is not None or policy == "skip"):
            squares = squares_of(buckets, native=self._wanted_engine in ("auto", "fused"))
            every = torch.cat([each.to(squares[0].device, torch.float64) for each in squares])
            finite = torch.cat([torch.isfinite(each).to(squares[0].device) for each in squares])
            names = [name for bucket in buckets for name in bucket.names]
            if policy == "raise":
                check_all_finite(names, finite)
            if limit is not None:
                scale = scale_to(limit, every if unscale is None else every * unscale.square())
                scale = scale if unscale is None else scale * unscale
            if policy == "skip":
                self._last_finite = names, finite
                allowed = finite.all() if allowed is None else finite.all() & allowed
                skipped = (~allowed).to(torch.int64)
                self._skips = skipped if self._skips is None else self._skips + skipped
        if scale is None and allowed is None:
            return buckets

        def at_home(value: Tensor | None, bucket: Bucket) -> Tensor | None:
            return None if value is None else value.to(bucket.params[0].device)

        return [
            replace(bucket, grad_scale=at_home(scale, bucket), allowed=at_home(allowed, bucket)) for bucket in buckets
        ]

    @property
    def skipped(self) -> int:
        """How many steps were skipped under ``on_nonfinite="skip"``. Reading it waits for the device."""
        return 0 if self._skips is None else int(self._skips)

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients were not finite in the last step, under ``on_nonfinite="skip"``."""
        if self._last_finite is None:
            return []
        names, finite = self._last_finite
        return [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
