"""From parameters with gradients to buckets that are stepped together, each with the engine that steps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from thalweg.errors import refusal
from thalweg.programs.trace import list_kind
from thalweg.rules import Rule, WholeRule
from thalweg.settings import ParameterOptions, RuleOptions
from thalweg.spaces.sharded import Part
from thalweg.torch.engines.admission import (
    admit,
    admit_shard,
    check_kernels,
    choose,
    is_on_gpu,
    is_served_dtype,
    would_lose_kernels,
)
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.params.groups import EngineName
from thalweg.torch.params.states import form_of
from thalweg.torch.sharding.shards import local, local_state, part_of
from thalweg.torch.sharding.sharing import Sharing
from thalweg.torch.step.gradients import gradient_of

T = TypeVar("T")
#: Of parameter groups, by index.
OfGroups: TypeAlias = Mapping[int, T]


class Sorter:
    """Sorts the parameters of one optimizer, and remembers how each of them is treated."""

    def __init__(self, wanted: EngineName, sharing: Sharing) -> None:
        self.wanted: EngineName = wanted
        #: Whether it is asked at all what fused code can step: some of it is compiled for the answer.
        self.may_fuse = wanted in ("auto", "fused")
        self.sharing = sharing
        self.treatments: dict[Tensor, tuple[Any, Any, Hashable, str]] = {}
        self.parts: dict[Tensor, tuple[Any, Part]] = {}

    def sort(
        self,
        optimizer: Any,
        places: Mapping[Tensor, tuple[str, int]],
        settings: OfGroups[RuleOptions],
    ) -> list[Bucket]:
        """Parameters that can be stepped together, checked, with their state made where there is none.

        places: the name and group of those to be stepped. settings: of their groups, by index.
        """
        optimizer._states.convert_counts(optimizer.state, places, settings, optimizer.param_groups)
        named = [(name, p, index) for p, (name, index) in places.items() if p.grad is not None]
        gradients = {p: gradient_of(name, p, p.grad) for name, p, _ in named if p.grad is not None}
        by_key: dict[Any, list[tuple[str, Tensor, ParameterOptions]]] = defaultdict(list)
        parts: dict[str, Part] = {}
        for name, p, index in named:
            capturable, facts = optimizer.param_groups[index]["capturable"], (name, p, settings[index])
            setting, state = optimizer._states.make_ready(optimizer.state, *facts, capturable=capturable)
            launched = self.is_launched(type(setting.rule), p)
            if launched and state["step"].device != p.device:
                state["step"] = state["step"].to(p.device)
            step = state["step"]
            t = None if launched or not step.is_cpu else int(step.item()) + 1
            g, part = gradients[p], self.part_of(name, p)
            if self.reason_undivided(p, setting, capturable=capturable) == "":
                part = replace(part, replicas=self.sharing.groups_of(p))
            kind, refused = self.treatment(p, setting, state, part)
            if not refused and type(g) is not Tensor:
                refused = f"there is no fused kernel for a gradient of type {type(g).__name__}"
            divided = (part.groups, part.replicas) if part.replicas or any(part.groups) else ()
            if divided and self.may_fuse:
                refused = refusal(admit_shard, setting, p, part) or refused
            key = (index, id(setting), p.device, p.dtype, g.dtype, kind, t, refused, divided)
            by_key[key].append((name, p, setting))
            parts[name] = part
        buckets = []
        for (index, *_, t, refused, divided), members in by_key.items():
            name, first, setting = members[0]
            way, engine, reason = choose(
                self.wanted,
                setting,
                first,
                name,
                parts[name] if divided else None,
                refused=refused,
                counted=t is not None,
                alone=len(members) == 1,
            )
            lr, factor = optimizer._rate(optimizer.param_groups[index])
            buckets.append(
                Bucket(
                    [name for name, *_ in members],
                    [local(p) for _, p, _ in members],
                    [gradients[p] for _, p, _ in members],
                    [local_state(optimizer.state[p]) for _, p, _ in members],
                    setting,
                    lr,
                    t,
                    lr_scale=setting.lr_scale * factor,
                    way=way,
                    engine=engine,
                    refused=reason,
                    group=index,
                    parts=[parts[name] for name, *_ in members] if divided else (),
                )
            )
        return buckets

    def reason_undivided(self, p: Tensor, setting: ParameterOptions, *, capturable: bool) -> str | None:
        """Why replicas do not divide the work on a parameter, "" if they do, None if there is nothing to divide."""
        rule = setting.rule_at(1)
        if not rule.needs_whole or not self.sharing.groups_of(p):
            return None
        reason = self.sharing.reason_against(p, rule, self.wanted)
        can_lose = not reason and self.sharing.divide_work is None and self.wanted == "auto"
        if can_lose and would_lose_kernels(setting, p, capturable=capturable):
            return "fused kernels step it as a whole, and not where work is divided"
        return reason

    def is_launched(self, rule: type[Rule], p: Tensor) -> bool:
        """Whether kernels on a GPU are to step a parameter and to count its steps. Kron's schedule is for the host."""
        return (
            self.may_fuse
            and not is_for_host(rule)
            and is_on_gpu(p)
            and is_served_dtype(p)
            and not refusal(check_kernels, p.device)
        )

    def treatment(
        self, p: Tensor, setting: ParameterOptions, state: Mapping[str, Tensor], part: Part
    ) -> tuple[Hashable, str]:
        """The kind of a parameter, and why fused code cannot step it ("" if it can)."""
        held = local(p)
        memory = held.data_ptr(), held.shape, held.stride(), form_of(state)
        known = self.treatments.get(p)
        if known is None or known[0] != setting.kind or known[1] != memory:
            divided = any(part.groups) or part.replicas
            shard, refused = part if divided else None, ""
            if self.may_fuse:
                refused = refusal(admit, setting, held, local_state(state), shard)
            alike = list_kind(setting.rule, setting.numerics, tuple(p.shape))
            self.treatments[p] = known = setting.kind, memory, alike, refused
        return known[2:]

    def part_of(self, name: str, p: Tensor) -> Part:
        """What this rank holds of a parameter."""
        known = self.parts.get(p)
        layout = (p.shape, getattr(p, "placements", None), getattr(p, "device_mesh", None))
        if known is None or known[0] != layout:
            self.parts[p] = known = layout, part_of(name, p)
        return known[1]


def is_for_host(rule: type[Rule]) -> bool:
    """Whether the host has to know the step count of a rule, because it launches products by it."""
    return rule.needs_whole and not (issubclass(rule, WholeRule) and rule.IN_PARTS)
