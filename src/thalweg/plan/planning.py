"""The plan: what each optimizer would cost on a model, as figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from thalweg.errors import CommandError
from thalweg.explain import Explanation, explain_parameter
from thalweg.kernels.cpu.library import reason_missing
from thalweg.plan.costs import COUNTERS
from thalweg.plan.items import DIVIDED_BY_TP, Place, item_of, tp_axis
from thalweg.plan.memory import why_unfused
from thalweg.plan.models import Model, Tensor
from thalweg.plan.optimizers import (
    USUAL,
    Assigned,
    Refused,
    applies,
    assign,
    check_rates_left_out,
    check_used,
    options_of,
    resolve_optimizer,
    resolve_owners,
    setting_of,
)
from thalweg.plan.ranks import reason_against_part
from thalweg.plan.shares import Share, unlike_shares
from thalweg.plan.sources import resolve
from thalweg.rules import RULES
from thalweg.show.arguments import Given, check_options, check_word
from thalweg.show.registered import DEVICES, ENGINES, FRONT_ENDS, MIXTURES, is_mixture

LAYOUTS = ("ddp", "fsdp2")
#: Dimensions of a mesh: over the first parameters are replicated, over the second sharded.
MESH = ("dp", "fsdp", "tp")
#: Bytes a second where none are given: an H100 SXM's memory, and that of a server of a few channels.
BANDWIDTHS = {"cuda": 3.35e12, "cpu": 1e11}


@dataclass(frozen=True)
class Cost:
    """What one optimizer costs the rank that needs most memory."""

    optimizer: str
    #: What holds for each parameter.
    assigned: tuple[Assigned, ...]
    share: Share
    #: Seconds that moving takes at the plan's bandwidth, and products and messages at its rates where those are given.
    seconds: float
    #: The same for a step in which Kron does not refresh its factors.
    seconds_without_refresh: float
    #: Whether parameters, gradients, frozen weights, state and peak fit the memory; None if there is none to fit, or
    #: no peak known.
    fits: bool | None
    #: The rank whose step takes longest, and how long.
    busiest: Share
    busiest_seconds: float

    @property
    def refreshes(self) -> bool:
        """Whether some steps cost more than others."""
        return self.share.product_flops != self.share.product_flops_without_refresh


@dataclass(frozen=True)
class Plan:
    """What every optimizer costs, and what was asked."""

    model: Model
    place: Place
    costs: tuple[Cost, ...]
    #: Bytes a second in memory, floating point operations a second, and bytes a second between ranks.
    bandwidth: float
    flops: float | None
    bus: float | None
    memory: int | None
    #: Seconds of a forward and a backward pass.
    forward_backward: float | None = None
    options: tuple[Given, ...] = ()
    #: Optimizers that do not take this model, by name, and why.
    refused: Mapping[str, str] = field(default_factory=dict)

    def seconds(self, moved: int, products: int, *messages: int) -> float:
        """They take turns: a product waits for what is moved before it."""
        seconds = moved / self.bandwidth + (products / self.flops if self.flops else 0.0)
        return seconds + (max(messages) / self.bus if self.bus else 0.0)

    def step_seconds(self, own: Share) -> float:
        return self.seconds(own.moved_bytes, own.product_flops, own.sent_bytes, own.received_bytes)

    def cost_of(self, name: str, assigned: Sequence[Assigned]) -> Cost:
        shares = unlike_shares([setting for setting, _ in assigned], self.model.tensors, self.place, self.model.frozen)
        share, busiest = max(shares, key=lambda own: own.total_bytes), max(shares, key=self.step_seconds)
        return Cost(
            optimizer=name,
            assigned=tuple(assigned),
            share=share,
            seconds=self.step_seconds(share),
            seconds_without_refresh=self.seconds(
                share.moved_bytes_without_refresh,
                share.product_flops_without_refresh,
                share.sent_bytes_without_refresh,
                share.received_bytes_without_refresh,
            ),
            fits=None if self.memory is None or share.peak_bytes is None else share.total_bytes <= self.memory,
            busiest=busiest,
            busiest_seconds=self.step_seconds(busiest),
        )

    def by_rule(self, cost: Cost) -> dict[str, list[Tensor]]:
        """Which parameters an optimizer steps by which rule."""
        found: dict[str, list[Tensor]] = {}
        for tensor, (setting, _) in zip(self.model.tensors, cost.assigned, strict=True):
            found.setdefault(type(setting.rule).__name__, []).append(tensor)
        return found

    def plain(self, *, explain: bool = False) -> dict[str, Any]:
        """Everything that a plan says, for JSON; with ``explain`` every parameter too."""
        model, own = self.model, ("bandwidth", "flops", "bus", "forward_backward", "memory")
        return {
            "model": {
                "name": model.name,
                "about": model.about,
                "parameters": model.parameters,
                "tensors": len(model.tensors),
                "dtypes": sorted({tensor.dtype for tensor in model.tensors}),
                "frozen_parameters": sum(tensor.elements for tensor in model.frozen),
                "frozen_tensors": len(model.frozen),
                "frozen_dtypes": sorted({tensor.dtype for tensor in model.frozen}),
            },
            **asdict(self.place),
            **{name: getattr(self, name) for name in own},
            "optimizers": [self.plain_cost(cost, explain) for cost in self.costs],
            "refused": dict(self.refused),
        }

    def plain_cost(self, cost: Cost, explain: bool) -> dict[str, Any]:
        share, name = cost.share, cost.optimizer
        asked = {option.name: option.value for option in self.options if applies(option, name)}
        return {
            "optimizer": name,
            "rule": None if is_mixture(name) else name,
            "rules": {
                each: {"tensors": len(some), "parameters": sum(tensor.elements for tensor in some)}
                for each, some in self.by_rule(cost).items()
            },
            "options": {**USUAL.get(name, {}), **asked},
            **asdict(share),
            "gradient_bytes": share.parameter_bytes,
            "total_bytes": share.total_bytes if share.peak_bytes is not None else None,
            "fits": cost.fits,
            "seconds": cost.seconds,
            "seconds_without_refresh": cost.seconds_without_refresh,
            "busiest": {**asdict(cost.busiest), "seconds": cost.busiest_seconds},
            **({"tensors": [asdict(row) for row in self.explain(name).rows]} if explain else {}),
        }

    def explain(self, optimizer: str) -> Explanation:
        """Every parameter, as ``explain()`` of an optimizer lists them."""
        name, place = resolve_optimizer(optimizer), self.place
        known = next((cost.assigned for cost in self.costs if cost.optimizer == name), None)
        assigned = known or assign(name, self.model, self.options)
        return Explanation(
            [
                explain_parameter(
                    t.name,
                    t.shape,
                    t.dtype,
                    setting.for_shape(t.shape),
                    lr=lr,
                    rms=1.0 if t.elements else None,
                    counter_bytes=COUNTERS[place.front_end],
                )
                for t, (setting, lr) in zip(self.model.tensors, assigned, strict=True)
            ]
        )


def plan(
    model: str | Model,
    *,
    optimizers: Iterable[str] | None = None,
    options: Iterable[Given] = (),
    dtype: str | None = None,
    frozen: Sequence[str] = (),
    front_end: str = "torch",
    device: str | None = None,
    engine: str = "auto",
    world: int = 1,
    layout: str = "ddp",
    mesh: Mapping[str, int] | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
    bus: float | None = None,
    forward_backward: float | None = None,
    memory: int | None = None,
) -> Plan:
    """What optimizers will cost on a model, before anything is allocated.

    model: what ``thalweg plan`` takes, or a Model. dtype: of parameters and gradients, whatever the source says; bf16
    and its like are understood. frozen: patterns of the names of parameters that are not trained, ``*.embed*``. device:
    where steps are taken; cuda, but for numpy. mesh: in place of world and layout, the ranks of each dimension:
    ``{"dp": 8, "fsdp": 16, "tp": 4}``.
    bandwidth: bytes a second; flops: operations a second that matrix
    products reach; bus: bytes a second between ranks, each way; forward_backward: seconds of a forward and a backward
    pass; memory: bytes that all should fit. Figures are those of the rank that needs most memory.

    >>> [cost.share.state_bytes for cost in plan("gpt2", optimizers=["SGD", "Adafactor"]).costs]
    [497759824, 1287060]
    """
    device = device or ("cpu" if front_end == "numpy" else "cuda")
    check_word("layout", layout, LAYOUTS)
    if mesh is not None:
        world, layout = read_mesh(mesh, world)
    replicas, tp = ((mesh or {}).get(name, 1) for name in ("dp", "tp"))
    place = Place(front_end, device, engine, world, layout, replicas, tp)
    check_place(place)
    every = [*RULES, *(MIXTURES if front_end == "torch" else ())]
    names = every if optimizers is None else [resolve_optimizer(name) for name in optimizers]
    for name in names:
        if is_mixture(name) and front_end != "torch":
            raise CommandError(f"{name} is a mixture of thalweg.torch: it is planned with --front-end torch")
    numbers = dict(bandwidth=bandwidth, flops=flops, bus=bus, memory=memory, forward_backward=forward_backward)
    for what, value in numbers.items():
        if value is not None and not value > 0:
            raise CommandError(f"{what} must be above 0, got {value}")
    given = resolve_owners(options)
    check_rates_left_out(given)
    check_options(given, {name: options_of(name) for name in names})
    check_used(given, {name: setting_of(name, given) for name in names if not is_mixture(name)})
    patterns = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    found = resolve(model, dtype, patterns)
    if tp > 1 and all(tp_axis(tensor) is None for tensor in found.tensors):
        some = ", ".join(list(DIVIDED_BY_TP)[:3])
        raise CommandError(
            f"mesh dimension 'tp' divides nothing: no parameter of {found.name} is called {some} or the like"
        )
    rate, refused = bandwidth or BANDWIDTHS[place.device], {}
    empty, costs = Plan(found, place, (), rate, flops, bus, memory, forward_backward, given), []
    for name in names:
        try:
            assigned = assign(name, found, given)
        except Refused as reason:
            refused[name] = str(reason)
            continue
        check_served(name, assigned, found, place)
        costs.append(empty.cost_of(name, assigned))
    if not costs:
        raise CommandError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    return replace(empty, costs=tuple(costs), refused=refused)


def read_mesh(mesh: Mapping[str, int], world: int) -> tuple[int, str]:
    """The number of ranks of a mesh, and its layout."""
    for name, size in mesh.items():
        check_word("mesh dimension", name, MESH)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise CommandError(f"mesh dimension {name!r} must have at least one rank, got {size!r}")
    ranks = math.prod(mesh.values())
    if world not in (1, ranks):
        raise CommandError(f"the mesh has {ranks} ranks, and the world {world}: leave out --world")
    sharded = "hsdp" if {"dp", "fsdp"} <= {*mesh} else "fsdp2" if "fsdp" in mesh else "ddp"
    return ranks, f"{sharded} x tp" if "tp" in mesh else sharded


def check_place(place: Place) -> None:
    check_word("front end", place.front_end, FRONT_ENDS)
    check_word("device", place.device, DEVICES)
    check_word("engine", place.engine, ENGINES)
    if place.world < 1:
        raise CommandError(f"the world must have at least one rank, got {place.world}")
    if place.front_end == "numpy" and place.device != "cpu":
        raise CommandError("numpy's arrays are on the CPU: leave out --device, or give --device cpu")
    if place.front_end == "numpy" and place.engine == "foreach":
        raise CommandError("the numpy front end has no engine 'foreach': it must be auto, reference or fused")
    if place.front_end == "numpy" and place.world > 1:
        raise CommandError("the numpy front end runs in one process: for several ranks give --front-end torch or optax")
    if place.front_end == "optax" and place.engine != "auto":
        raise CommandError("in JAX the compiler decides how steps are taken: leave out --engine")
    if place.front_end == "optax" and place.is_divided:
        raise CommandError(
            f"layout {place.layout!r} is for torch: in JAX the compiler shards the work, and state follows parameters; "
            "leave out --layout and --mesh"
        )
    if place.engine == "fused" and place.device == "cpu" and (reason := reason_missing()) is not None:
        raise CommandError(f"engine 'fused' cannot run: {reason}; use 'auto', which takes the fastest that can run")


def check_served(name: str, assigned: Sequence[Assigned], model: Model, place: Place) -> None:
    """Say what native code or kernels do not take, where they are asked for."""
    if place.engine != "fused":
        return
    for tensor, (setting, _) in zip(model.tensors, assigned, strict=True):
        item = item_of(tensor, setting)
        divided = reason_against_part(item, place.device) if place.is_divided else ""
        if reason := divided or why_unfused(item, place.device):
            raise CommandError(
                f"engine 'fused' cannot run {name} for {tensor.name!r}: {reason}; "
                "use 'auto', which takes the fastest that can run"
            )
