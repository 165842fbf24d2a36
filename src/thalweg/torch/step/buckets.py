"""From parameters with gradients to buckets that are stepped together, each with the engine that steps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.rules import Rule, WholeRule
from thalweg.settings import Setting, Settings
from thalweg.spaces.sharded import Part
from thalweg.torch.engines import triton
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.engines.choice import chosen, reason_against, reason_against_shard
from thalweg.torch.params.checks import check_gradient
from thalweg.torch.params.grouped import GroupedOptimizer
from thalweg.torch.params.groups import EngineName
from thalweg.torch.sharding.agreement import Agreement
from thalweg.torch.sharding.shards import gradient_like, local, local_state, part_of
from thalweg.torch.step.repeated import RepeatedStep, is_repeatable


class Sorter:
    """Sorts the parameters of one optimizer, and remembers what it found from step to step."""

    def __init__(self, wanted: EngineName) -> None:
        self.wanted: EngineName = wanted
        self.agreement = Agreement()
        self.forget()

    def forget(self) -> None:
        """Look at everything anew: parameters or their state were exchanged."""
        self.treatments: dict[int, tuple[Setting, Any, Hashable, str]] = {}
        self.parts: dict[int, tuple[Any, Part]] = {}
        self.latest: RepeatedStep | None = None

    @torch.compiler.disable
    def sort(self, optimizer: GroupedOptimizer, only: Tensor | None, *, compiling: bool) -> list[Bucket]:
        """Parameters that can be stepped together, checked, with their state made where there is none.

        only: the one parameter to be stepped; None for all.
        """
        groups, places = optimizer.param_groups, optimizer._places()
        optimizer._report_unused()
        rules = [optimizer._rule_of(group) for group in groups]
        self.agreement.reach(rules, places, groups, optimizer._overrides, one_by_one=only is not None)
        settings = [optimizer._checked_settings(i, group) for i, group in enumerate(groups)]
        if only is not None:
            return self.sorted_anew(optimizer, {only: places[only]}, settings, compiling=compiling)
        if self.latest is not None:
            rates = [optimizer._rate(groups[bucket.group]) for bucket in self.latest.buckets]
            buckets = self.latest.again(optimizer.state, settings, rates)
            if buckets is not None:
                return buckets
        buckets = self.sorted_anew(optimizer, places, settings, compiling=compiling)
        self.latest = None
        if is_repeatable(buckets) and not compiling:
            named = {name: p for p, (name, _) in places.items()}
            self.latest = RepeatedStep(buckets, named, optimizer.state, settings)
        return buckets

    def sorted_anew(
        self,
        optimizer: GroupedOptimizer,
        places: Mapping[Tensor, tuple[str, int]],
        settings: Sequence[Settings],
        *,
        compiling: bool,
    ) -> list[Bucket]:
        named = [(name, p, index) for p, (name, index) in places.items() if p.grad is not None]
        gradients = {}
        for name, p, _ in named:
            assert p.grad is not None
            check_gradient(name, p, p.grad)
            gradients[p] = gradient_like(name, p, p.grad)
        members: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
        shared: dict[Any, tuple[int, Setting, int | None, str, bool]] = {}
        for name, p, index in named:
            setting = optimizer._setting(settings[index], name, p)
            state = optimizer._state(name, p, setting, optimizer.param_groups[index])
            launched = self.is_launched(type(setting.rule), p)
            if launched and state["step"].device != p.device:
                state["step"] = state["step"].to(p.device)
            step = state["step"]
            t = None if compiling or launched or not step.is_cpu else int(step.item()) + 1
            g, part = gradients[p], self.part_of(name, p)
            kind, unserved = self.treatment(p, setting, state, part)
            if not unserved and type(g) is not Tensor:
                unserved = f"there is no fused kernel for a gradient of type {type(g).__name__}"
            divided = part.groups if any(part.groups) else ()
            if divided:
                unserved = reason_against_shard(self.wanted, setting, p, part, unserved)
            key = (index, id(setting), p.device, p.dtype, g.dtype, kind, t, unserved, divided)
            members[key].append((name, p))
            shared[key] = index, setting, t, unserved, bool(divided)
        buckets = []
        for key, own in members.items():
            index, setting, t, unserved, sharded = shared[key]
            name, first = own[0]
            way, engine = chosen(
                self.wanted,
                setting.rule,
                first,
                name,
                unserved=unserved,
                counted=t is not None,
                sharded=sharded,
                # a compiler fuses what it can see, and it sees through single tensors
                alone=compiling or len(own) == 1,
            )
            lr, factor = optimizer._rate(optimizer.param_groups[index])
            buckets.append(
                Bucket(
                    [name for name, _ in own],
                    [local(p) for _, p in own],
                    [gradients[p] for _, p in own],
                    [local_state(optimizer.state[p]) for _, p in own],
                    setting,
                    lr,
                    t,
                    lr_scale=setting.lr_scale * factor,
                    way=way,
                    engine=engine,
                    on_gpu=triton.is_on_gpu(first),
                    group=index,
                    parts=[self.part_of(name, p) for name, p in own] if sharded else (),
                )
            )
        return buckets

    def is_launched(self, rule: type[Rule], p: Tensor) -> bool:
        """Whether kernels on a GPU are to step a parameter and to count its steps. Kron's schedule is for the host."""
        return (
            self.wanted in ("auto", "fused")
            and not is_for_host(rule)
            and triton.is_on_gpu(p)
            and triton.is_served_dtype(p)
            and triton.reason_missing(p.device) is None
        )

    def treatment(self, p: Tensor, setting: Setting, state: Mapping[str, Tensor], part: Part) -> tuple[Hashable, str]:
        """The kind of a parameter, and why fused code cannot step it ("" if it can)."""
        held = local(p)
        memory = held.data_ptr(), held.shape, held.stride()
        known = self.treatments.get(id(p))
        if known is None or known[0] is not setting or known[1] != memory:
            reason = reason_against(setting, held, local_state(state), part)
            self.treatments[id(p)] = known = setting, memory, setting.rule.kind(tuple(p.shape)), reason
        return known[2:]

    def part_of(self, name: str, p: Tensor) -> Part:
        """What this rank holds of a parameter."""
        known = self.parts.get(id(p))
        layout = (p.shape, getattr(p, "placements", None), getattr(p, "device_mesh", None))
        if known is None or known[0] != layout:
            self.parts[id(p)] = known = layout, part_of(name, p)
        return known[1]


def is_for_host(rule: type[Rule]) -> bool:
    """Whether the host has to know the step count of a rule, because it launches products by it."""
    return rule.needs_whole and not (issubclass(rule, WholeRule) and rule.IN_PARTS)
