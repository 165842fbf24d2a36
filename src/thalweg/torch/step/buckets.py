"""From parameters with gradients to buckets that are stepped together, each with the engine that steps it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from thalweg.rules import Rule, WholeRule
from thalweg.settings import Setting, Settings
from thalweg.spaces.sharded import Part
from thalweg.storage import kind
from thalweg.torch.engines.choice import (
    chosen,
    is_on_gpu,
    is_served_dtype,
    reason_against,
    reason_against_shard,
    reason_missing,
)
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.params.groups import EngineName
from thalweg.torch.params.stateful import StatefulOptimizer
from thalweg.torch.sharding.agreement import Agreement
from thalweg.torch.sharding.shards import is_distributed, local, local_state, part_of
from thalweg.torch.step.gradients import gradient_of

DTYPE, LAYOUT = operator.attrgetter("dtype"), operator.attrgetter("layout")


class Sorter:
    """Sorts the parameters of one optimizer, and remembers what it found from step to step."""

    def __init__(self, wanted: EngineName) -> None:
        self.wanted: EngineName = wanted
        self.agreement = Agreement()
        self.forget()

    def forget(self) -> None:
        """Look at everything anew: parameters or their state were exchanged."""
        self.treatments: dict[int, tuple[Any, Any, Hashable, str]] = {}
        self.parts: dict[int, tuple[Any, Part]] = {}
        self.latest: RepeatedStep | None = None

    @torch.compiler.disable
    def sort(self, optimizer: StatefulOptimizer, only: Tensor | None, *, compiling: bool) -> list[Bucket]:
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
        optimizer: StatefulOptimizer,
        places: Mapping[Tensor, tuple[str, int]],
        settings: Sequence[Settings],
        *,
        compiling: bool,
    ) -> list[Bucket]:
        optimizer._convert_counts(places)
        named = [(name, p, index) for p, (name, index) in places.items() if p.grad is not None]
        gradients = {p: gradient_of(name, p) for name, p, _ in named}
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
                    on_gpu=is_on_gpu(first),
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
            and is_on_gpu(p)
            and is_served_dtype(p)
            and reason_missing(p.device) is None
        )

    def treatment(self, p: Tensor, setting: Setting, state: Mapping[str, Tensor], part: Part) -> tuple[Hashable, str]:
        """The kind of a parameter, and why fused code cannot step it ("" if it can)."""
        held = local(p)
        memory = held.data_ptr(), held.shape, held.stride()
        known = self.treatments.get(id(p))
        if known is None or known[0] != setting.kind or known[1] != memory:
            reason = reason_against(setting, held, local_state(state), part if any(part.groups) else None)
            alike = kind(setting.rule, setting.handling, tuple(p.shape))
            self.treatments[id(p)] = known = setting.kind, memory, alike, reason
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


# ---- repeated steps


class RepeatedStep:
    """A step that is like the one before: the same parameters, state and options, with new gradients alone.

    Sorting parameters into buckets takes the host longer than a GPU needs for a step. So what was found is kept, with
    all that it depends on, and taken again as long as that is unchanged.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        named: Mapping[str, Tensor],
        states: Mapping[Tensor, Any],
        settings: Sequence[Any],
    ) -> None:
        """named: all parameters of the optimizer."""
        # without gradients: they must not be kept alive after the step
        self.buckets = [replace(bucket, grads=()) for bucket in buckets]
        self.settings = settings
        self.params = [named[name] for bucket in buckets for name in bucket.names]
        self.idle = [p for p in named.values() if p.grad is None]
        self.are_dtensors = any(map(is_distributed, self.params))
        self.kinds = kinds_of([p.grad for p in self.params])
        self.holders, self.entries = held_by(states)
        self.memory = memory_of(self.local(self.params), self.local(self.entries))

    def local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's shards of tensors, as they are now: FSDP2 may exchange the shard of a DTensor that stays."""
        return [getattr(x, "_local_tensor", x) for x in tensors] if self.are_dtensors else tensors

    def again(
        self,
        states: Mapping[Tensor, Any],
        settings: Sequence[Any],
        rates: Sequence[tuple[float | Tensor | None, float]],
    ) -> list[Bucket] | None:
        """The same buckets with the current gradients and rates; None if anything else has changed."""
        grads: list[Any] = [p.grad for p in self.params]
        holders, entries = held_by(states)
        if (
            settings != self.settings
            or any(p.grad is not None for p in self.idle)
            or kinds_of(grads) != self.kinds
            or not are_the_same(holders, self.holders)
            or not are_the_same(entries, self.entries)
            or memory_of(self.local(self.params), self.local(entries)) != self.memory
            or (self.are_dtensors and not are_placed_alike(self.params, grads))
        ):
            return None
        if self.are_dtensors:
            grads = local_gradients(self.local(grads), grads)
        buckets, first = [], 0
        for bucket, (lr, factor) in zip(self.buckets, rates, strict=True):
            own = grads[first : first + len(bucket.params)]
            first += len(own)
            t = None
            if bucket.t is not None:  # the host counts, and buckets are of one step
                steps = {s["step"].item() for s in bucket.states}
                if len(steps) > 1:
                    return None
                t = int(steps.pop()) + 1
            buckets.append(replace(bucket, grads=own, lr=lr, lr_scale=bucket.setting.lr_scale * factor, t=t))
        return buckets


def is_repeatable(buckets: Sequence[Bucket]) -> bool:
    return all(bucket.on_gpu for bucket in buckets)


def are_placed_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether gradients can be used as they are: on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(*([getattr(x, "_spec", None) for x in some] for some in (params, grads))) or all(
        p.placements == g.placements and p.device_mesh is g.device_mesh  # type: ignore[attr-defined]
        for p, g in zip(params, grads, strict=True)
        if is_distributed(p)
    )


def local_gradients(held: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Shards of gradients; those that are still on their way from other ranks are waited for."""
    return [x if type(x) is Tensor else local(g) for x, g in zip(held, grads, strict=True)]


# Whole lists go through ``map``: these are asked at every step.


def held_by(states: Mapping[Tensor, Any]) -> tuple[list[Any], list[Tensor]]:
    """The states of parameters, and all entries of them."""
    holders = list(states.values())
    return holders, list(chain.from_iterable(map(dict.values, holders)))


def are_the_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether none of them was replaced."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def memory_of(params: Sequence[Tensor], entries: Sequence[Tensor]) -> list[Any]:
    """Where parameters and state are."""
    return [*map(Tensor.data_ptr, params), *map(Tensor.data_ptr, entries), *map(DTYPE, params)]


def kinds_of(grads: Sequence[Tensor | None]) -> list[Any]:
    """What may be new in a gradient: torch itself sees to it that shape and device are the parameter's."""
    types = list(map(type, grads))
    return types if type(None) in types else [*types, *map(DTYPE, grads), *map(LAYOUT, grads)]
