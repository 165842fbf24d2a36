"""``thalweg plan``: what will it cost?"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.plan.cost import Cost, Plan, plan
from thalweg.plan.optimizers import MIXTURES
from thalweg.rules import RULES
from thalweg.show.arguments import parse_option, split_words
from thalweg.show.console import console, make_table
from thalweg.show.extras import extra
from thalweg.show.units import count_words, human_bytes, human_seconds, parse_size

with extra("cli"):
    import click
    from rich.table import Table


@click.command("plan")
@click.argument("model")
@click.option(
    "--optimizers",
    metavar="LIST",
    help=f"Only these, separated by commas: {','.join([*RULES, *MIXTURES]).lower()}, module:MyRule, or "
    "module:function for a mixture.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option for all that have it, or kron.NAME=VALUE for one; may be repeated.",
)
@click.option(
    "--dtype",
    metavar=f"[{'|'.join(DTYPES)}]",
    help="Dtype of parameters and gradients; also bf16, fp16, fp32, fp64.  [default: the model's, or float32]",
)
@click.option(
    "--frozen", multiple=True, metavar="PATTERN", help="Parameters that are not trained: '*.embed*'; may be repeated."
)
@click.option("--memory", metavar="SIZE", help="Show what fits into this memory, such as 80GB or 80GiB.")
@click.option(
    "--world", type=click.IntRange(1), default=1, show_default=True, help="Ranks over which FSDP2 shards the model."
)
@click.option(
    "--bandwidth", metavar="RATE", default="3.35TB/s", show_default=True, help="Of your memory; an H100's if left out."
)
@click.option("--explain", is_flag=True, help="List every parameter and how it is treated.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
def command(
    model: str,
    optimizers: str | None,
    options: Sequence[str],
    memory: str | None,
    bandwidth: str,
    world: int,
    explain: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Show what each optimizer will cost: state, temporaries, bytes moved. Nothing is allocated or downloaded.

    MODEL is a built-in name (gpt2, resnet50, llama-1b, llama-8b, small), module:factory, a folder of .safetensors
    files, or a config.json of transformers.

    \b
    thalweg plan llama-8b --dtype bf16 --memory 80GB         which of them fit?
    thalweg plan llama-8b --dtype bf16 --world 64            what each rank of FSDP2 keeps
    thalweg plan mymodel:build --optimizers mymodel:mixture,adamw
    thalweg plan gpt2 --option momentum_dtype=bfloat16 --option kron.max_size_dense=2048

    Parameters, gradients, state and temporaries are counted; activations are not. No GPU is needed.
    """
    try:
        rate = parse_size(bandwidth.lower().removesuffix("/s"), option="--bandwidth")
        most = None if memory is None else parse_size(memory, option="--memory")
        names = [*RULES, *MIXTURES] if optimizers is None else split_words(optimizers, "optimizer")
        planned = plan(model, optimizers=names, options=[parse_option(text) for text in options], world=world, **given)
    except OptimError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    if as_json:
        costs = [describe_cost(cost, rate, most, explain=explain) for cost in planned.optimizers]
        plain = {"model": model, "world": world, "bandwidth": rate, "memory": most, "optimizers": costs}
        click.echo(json.dumps({**plain, "refused": planned.refused}, indent=2, default=str))
        return
    screen = console()
    for text in (*describe_model(model, planned.optimizers[0], world), ""):
        screen.print(text, markup=False, soft_wrap=True)
    screen.print(make_cost_table(planned.optimizers, rate, most))
    for text in ("", *describe_figures(planned, rate)):
        screen.print(text, markup=False, soft_wrap=True)
    if explain:
        for cost in planned.optimizers:
            click.echo(f"\n{cost.optimizer}\n{cost.explanation}")


def describe_cost(cost: Cost, bandwidth: int, memory: int | None, *, explain: bool) -> dict[str, Any]:
    """All figures of an optimizer. explain: every parameter too."""
    figures = {name: value for name, value in vars(cost).items() if name != "explanation"}
    figures |= {"total_bytes": cost.total_bytes, "floor_seconds": cost.moved_bytes / bandwidth}
    figures |= {"rules": count_rules(cost), "fits": None if memory is None else cost.total_bytes <= memory}
    return figures | ({"tensors": list(map(asdict, cost.explanation.rows))} if explain else {})


def count_rules(cost: Cost) -> dict[str, int]:
    """How many numbers each rule steps."""
    rules = Counter[str]()
    for row in cost.explanation.rows:
        rules[row.rule] += math.prod(row.shape)
    return dict(rules)


def describe_model(model: str, cost: Cost, world: int) -> Iterator[str]:
    """The model, and what it takes by itself."""
    on_ranks, rows = f" on each of {world} ranks" if world > 1 else "", cost.explanation.rows
    dtypes = " and ".join(sorted({row.dtype for row in rows}))
    yield f"{model}: {sum(count_rules(cost).values()):,} parameters in {count_words(len(rows), 'tensor')}, {dtypes}"
    yield f"parameters take {human_bytes(cost.parameter_bytes)}{on_ranks}, gradients the same"
    if cost.frozen_bytes:
        yield f"frozen parameters take {human_bytes(cost.frozen_bytes)}{on_ranks}"


def make_cost_table(costs: Sequence[Cost], bandwidth: int, memory: int | None) -> Table:
    """A row for each optimizer."""
    table = make_table()
    for title in ("optimizer", "state", "temporaries at most", "all together", "fits", "moved", "floor"):
        if title != "fits" or memory is not None:
            table.add_column(title, justify="left" if title in ("optimizer", "fits") else "right", no_wrap=True)
    for cost in costs:
        cells = [cost.optimizer, *map(human_bytes, (cost.state_bytes, cost.temporary_bytes, cost.total_bytes))]
        if memory is not None:
            left = memory - cost.total_bytes
            cells.append(f"[red]no, {human_bytes(-left)} over" if left < 0 else f"[green]yes, {human_bytes(left)} left")
        table.add_row(*cells, human_bytes(cost.moved_bytes), human_seconds(cost.moved_bytes / bandwidth))
    return table


def describe_figures(planned: Plan, bandwidth: int) -> Iterator[str]:
    """What the columns mean, and what is not counted."""
    yield "state: kept between steps. temporaries: needed within a step, on a GPU with thalweg's kernels."
    yield "all together: parameters, frozen too, gradients, state and temporaries. Activations are not counted."
    floor = f"floor: how long that takes at {human_bytes(bandwidth)}/s"
    yield f"moved: the least that a step reads and writes; {floor}. Products of matrices come on top."
    for cost in planned.optimizers:
        if len(rules := count_rules(cost)) > 1:
            parts = (f"{rule} steps {parameters:,} parameters" for rule, parameters in rules.items())
            yield f"{cost.optimizer}: {'; '.join(parts)}."
    for name, reason in planned.refused.items():
        yield f"{name} is not planned: {reason}"
