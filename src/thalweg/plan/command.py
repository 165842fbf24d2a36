"""``thalweg plan``: what will it cost?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.plan.cost import BANDWIDTH, plan
from thalweg.plan.optimizers import MIXTURES
from thalweg.rules import RULES
from thalweg.show.arguments import parse_option, split_words
from thalweg.show.choices import json_option, option_option
from thalweg.show.extras import extra
from thalweg.show.units import parse_rate, parse_size

with extra("cli"):
    import click


class CannotPlan(click.ClickException):
    """What was asked for cannot be planned."""

    exit_code = 2


@click.command("plan")
@click.argument("model")
@click.option(
    "--optimizers",
    metavar="LIST",
    help=f"Only these, separated by commas: {','.join([*RULES, *MIXTURES]).lower()}, module:MyRule, or "
    "module:function for a mixture.",
)
@option_option
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
@click.option("--bandwidth", metavar="RATE", help="Memory bandwidth, such as 1.5TB/s.  [default: 3.35TB/s]")
@click.option("--explain", is_flag=True, help="List every parameter and how it is treated.")
@json_option
def command(
    model: str,
    optimizers: str | None,
    options: Sequence[str],
    memory: str | None,
    bandwidth: str | None,
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
        found = plan(
            model,
            optimizers=None if optimizers is None else split_words(optimizers, "optimizer"),
            options=[parse_option(text) for text in options],
            bandwidth=BANDWIDTH if bandwidth is None else parse_rate(bandwidth, option="--bandwidth"),
            memory=None if memory is None else parse_size(memory, option="--memory"),
            **given,
        )
    except OptimError as error:
        raise CannotPlan(str(error)) from None
    if as_json:
        click.echo(json.dumps(found.to_plain(explain=explain), indent=2, default=str))
        return
    from thalweg.plan.table import describe_figures, describe_model, make_cost_table
    from thalweg.show.console import console

    screen = console()
    screen.print("\n".join(describe_model(found)), markup=False, soft_wrap=True)
    screen.print()
    screen.print(make_cost_table(found))
    screen.print()
    screen.print("\n".join(describe_figures(found)), markup=False, soft_wrap=True)
    for cost in found.optimizers if explain else ():
        click.echo(f"\n{cost.optimizer}\n{cost.explanation}")
