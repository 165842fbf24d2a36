"""A plan as seen in a terminal: one table, and what its figures mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from thalweg.plan.models import Tensor
from thalweg.plan.planning import BANDWIDTHS, Cost, Plan
from thalweg.plan.shares import Share
from thalweg.show.console import make_table
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of
from thalweg.show.registered import is_mixture
from thalweg.show.units import human_bytes, human_seconds, scale_down

with extra("cli"):
    from rich.table import Table
    from rich.text import Text


#: Whose bandwidth is taken where none is given.
ASSUMED = {"cuda": "an H100's; set --bandwidth for yours", "cpu": "a guess; set --bandwidth for yours"}


def heading(found: Plan) -> str:
    """The model, and where it would be trained."""
    model, place, share = found.model, found.place, found.costs[0].share
    several = place.world > 1
    where = f"{place.front_end} on {place.device}" + (f", {place.world} ranks, {place.layout}" if several else "")
    each = " on each rank" if several else ""
    told = (
        f"{model.name} ({model.about}): {count_parameters(model.tensors)}\n"
        f"{where}: parameters take {human_bytes(share.parameter_bytes)}, gradients the same{each}"
    )
    if not model.frozen:
        return told
    without = "without gradients and state"
    return f"{told}\nfrozen: {count_parameters(model.frozen)}, take {human_bytes(share.frozen_bytes)}{each}, {without}"


def count_parameters(tensors: Sequence[Tensor]) -> str:
    """How many numbers there are, in how many tensors, and in which dtypes, the one of most numbers first."""
    by_dtype = Counter[str]()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.elements
    dtypes = " and ".join(dtype for dtype, _ in by_dtype.most_common())
    plural = "s" * (len(tensors) != 1)
    return f"{by_dtype.total():,} parameters in {len(tensors)} tensor{plural}, {dtypes}"


def table_of(found: Plan) -> Table:
    """A row for each optimizer, without columns that would be empty."""
    several = any(cost.refreshes for cost in found.costs)
    columns: dict[str, Callable[[Cost], str | Text]] = {
        "optimizer": lambda cost: Text(cost.optimizer, style=colour_of(cost.optimizer)),
        "state": lambda cost: human_bytes(cost.share.state_bytes),
        "peak": lambda cost: peak_of(cost.share),
        "all together": lambda cost: human_bytes(cost.share.total_bytes) + "+" * (cost.share.peak_bytes is None),
        **({"fits": lambda cost: fitting(found, cost)} if found.memory is not None else {}),
        "moved": lambda cost: human_bytes(cost.share.moved_bytes),
        "time": lambda cost: human_seconds(cost.seconds),
        **(
            {"products": lambda cost: human_flops(cost.share.product_flops) if cost.share.product_flops else "-"}
            if several
            else {}
        ),
        **({"sent": lambda cost: human_bytes(cost.share.sent_bytes)} if found.place.world > 1 else {}),
        "engine": lambda cost: cost.share.engine,
    }
    table = make_table()
    for title in columns:
        table.add_column(title, justify="left" if title in ("optimizer", "fits", "engine") else "right", no_wrap=True)
    for cost in found.costs:
        table.add_row(*(cell(cost) for cell in columns.values()))
    return table


def peak_of(share: Share) -> str:
    if share.peak_bytes is None:
        return "XLA decides"
    return ("≤ " if share.peak_is_bound else "") + human_bytes(share.peak_bytes)


def fitting(found: Plan, cost: Cost) -> Text:
    assert found.memory is not None
    left = found.memory - cost.share.total_bytes
    if left < 0:
        return Text(f"no, {human_bytes(-left)} over", style="red")
    if cost.fits is None:
        return Text("not known")
    return Text(f"yes, {human_bytes(left)} left", style="green")


def notes(found: Plan) -> Iterator[str]:
    """What the columns mean, and what is not counted."""
    place = found.place
    bound = " ≤: it is a bound." if any(cost.share.peak_is_bound for cost in found.costs) else ""
    yield f"state: kept between steps. peak: needed in addition during a step, after the first.{bound}"
    frozen = "frozen weights, " if found.model.frozen else ""
    yield f"all together: parameters, gradients, {frozen}state and peak. Activations are not counted."
    assumed = f" ({ASSUMED[place.device]})" if found.bandwidth == BANDWIDTHS[place.device] else ""
    time = f"time: how long that takes at {human_bytes(found.bandwidth)}/s{assumed}"
    products = f", and products at {human_flops(found.flops)}/s" if found.flops else ""
    products += f", and messages at {human_bytes(found.bus)}/s" if found.bus else ""
    yield f"moved: the least that a step must read and write. {time}{products}."
    for cost in found.costs:
        if cost.refreshes:
            share = cost.share
            without = human_bytes(share.moved_bytes_without_refresh)
            without += f", {human_flops(share.product_flops_without_refresh)}"
            if share.sent_bytes:
                without += f", {human_bytes(share.sent_bytes_without_refresh)} sent"
            yield (
                f"{cost.optimizer}: a step that refreshes its factors. One that does not: {without}, "
                f"{human_seconds(cost.seconds_without_refresh)}."
            )
        if cost.share.product_flops and not found.flops:
            cores = place.device == "cuda" and "fused" in cost.share.engine
            rate = "on tensor cores, such as --flops 300TFLOPS" if cores else "in float32, such as --flops 60TFLOPS"
            yield f"{cost.optimizer}: the time of its products is not counted; set their rate {rate}."
    for cost in found.costs:
        busy, took, around = cost.busiest, cost.busiest_seconds, found.forward_backward
        part = f", {took / (around + took):.1%} of a step" if around else ""
        if place.replicas > 1 and busy.product_flops:
            yield f"{cost.optimizer}: replicas divide the work on {busy.divided_tensors} tensors."
        if place.world > 1 and busy.product_flops:
            yield (
                f"{cost.optimizer}: the busiest rank, {busy.rank}, computes {human_flops(busy.product_flops)}, "
                f"receives {human_bytes(busy.received_bytes)} and sends {human_bytes(busy.sent_bytes)} in "
                f"{busy.collectives} collectives, keeps {human_bytes(busy.state_bytes)} of state, needs "
                f"{peak_of(busy)} in a step, {human_bytes(busy.slot_bytes)} of it for messages, and takes "
                f"{human_seconds(took)}{part}."
            )
    for cost in found.costs:
        if is_mixture(cost.optimizer):
            own = sorted(found.by_rule(cost).items(), key=lambda pair: pair[0] == "AdamW")
            parts = (f"{rule} steps {count_parameters(some)}" for rule, some in own)
            names = "" if found.model.module is not None else " (told apart by their names)"
            yield f"{cost.optimizer}: {'; '.join(parts)}{names}."
    for name, reason in found.refused.items():
        yield f"{name} is not planned: {reason}"
    if place.world > 1:
        yield "Figures are those of the rank that needs most memory. sent: without the reduction of gradients."


def human_count(count: int) -> str:
    """
    >>> human_count(124_439_808), human_count(999)
    ('124 M', '999')
    """
    size, prefix = scale_down(count, ("", "k", "M", "B", "T"))
    return f"{size:.3g} {prefix}".strip()


def human_flops(count: float) -> str:
    """
    >>> human_flops(1.178e12)
    '1.18 TFLOP'
    """
    count, prefix = scale_down(count, ("", "k", "M", "G", "T", "P"))
    return f"{count:.3g} {prefix}FLOP"
