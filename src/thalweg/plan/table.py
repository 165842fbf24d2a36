"""A plan as people read it: a heading, one table, and what its figures mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from thalweg.plan.cost import BANDWIDTH, Cost, Plan
from thalweg.show.console import make_table
from thalweg.show.extras import extra
from thalweg.show.units import count_words, human_bytes, human_seconds

with extra("cli"):
    from rich.table import Table
    from rich.text import Text


def describe_model(found: Plan) -> Iterator[str]:
    """The model, and what it takes by itself."""
    each = f" on each of {found.world} ranks" if found.world > 1 else ""
    size = f"{found.parameters:,} parameters in {count_words(found.tensors, 'tensor')}, {' and '.join(found.dtypes)}"
    yield f"{found.model}: {size}"
    yield f"parameters take {human_bytes(found.parameter_bytes)}{each}, gradients the same"
    if found.frozen_bytes:
        yield f"frozen: {found.frozen_parameters:,} parameters, take {human_bytes(found.frozen_bytes)}{each}"


def make_cost_table(found: Plan) -> Table:
    """A row for each optimizer."""
    columns: dict[str, Callable[[Cost], str | Text]] = {
        "optimizer": lambda cost: cost.optimizer,
        "state": lambda cost: human_bytes(cost.state_bytes),
        "temporaries at most": lambda cost: human_bytes(cost.temporary_bytes),
        "all together": lambda cost: human_bytes(cost.total_bytes),
        "fits": lambda cost: show_fit(found, cost),
        "moved": lambda cost: human_bytes(cost.moved_bytes),
        "floor": lambda cost: human_seconds(cost.floor_seconds),
    }
    if found.memory is None:
        del columns["fits"]
    table = make_table()
    for title in columns:
        table.add_column(title, justify="left" if title in ("optimizer", "fits") else "right", no_wrap=True)
    for cost in found.optimizers:
        table.add_row(*(show(cost) for show in columns.values()))
    return table


def show_fit(found: Plan, cost: Cost) -> Text:
    left = (found.memory or 0) - cost.total_bytes
    if left < 0:
        return Text(f"no, {human_bytes(-left)} over", style="red")
    return Text(f"yes, {human_bytes(left)} left", style="green")


def describe_figures(found: Plan) -> Iterator[str]:
    """What the columns mean, and what is not counted."""
    frozen = "frozen weights, " if found.frozen_bytes else ""
    assumed = " (an H100's; --bandwidth sets yours)" if found.bandwidth == BANDWIDTH else ""
    yield "state: kept between steps. temporaries: needed within a step, on a GPU with thalweg's kernels."
    yield f"all together: parameters, gradients, {frozen}state and temporaries. Activations are not counted."
    yield (
        f"moved: the least that a step reads and writes; floor: how long that takes at {human_bytes(found.bandwidth)}/s"
        f"{assumed}. Products of matrices come on top."
    )
    for cost in found.optimizers:
        if cost.optimizer not in cost.rules:  # a mixture
            parts = (f"{rule} steps {parameters:,} parameters" for rule, parameters in cost.rules.items())
            yield f"{cost.optimizer}: {'; '.join(parts)}."
    for name, reason in found.refused.items():
        yield f"{name} is not planned: {reason}"
