"""``thalweg plan``: what will it cost?"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError
from thalweg.plan.models import BUILTIN
from thalweg.plan.optimizers import resolve_optimizer
from thalweg.plan.planning import Plan, plan
from thalweg.rules import RULES
from thalweg.show.arguments import parse_option, split_words
from thalweg.show.choices import complete_list, complete_one, complete_words, json_option, option_option, read_dtype
from thalweg.show.extras import extra
from thalweg.show.registered import DEVICES, ENGINES, FRONT_ENDS, MIXTURES
from thalweg.show.units import parse_quantity, parse_rate, parse_size

with extra("cli"):
    import click
    from click.shell_completion import CompletionItem


def complete_model(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
    """The last of several built-in names, or, once something like a path is there, files."""
    found = complete_words(BUILTIN, incomplete.lower().replace("_", "-"))
    return [CompletionItem(text) for text in found] or [CompletionItem(incomplete, type="file")]


@click.command("plan")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--model", "model_option", hidden=True, shell_complete=complete_model, help="The same as MODEL.")
@click.option(
    "--optimizers",
    "--optimizer",
    "--rules",
    metavar="LIST",
    shell_complete=complete_list([*RULES, *MIXTURES]),
    help=f"Only these, separated by commas: {','.join([*RULES, *MIXTURES]).lower()}, module:MyRule, or "
    "module:function for a mixture.",
)
@click.option(
    "--dtype",
    metavar=f"[{'|'.join(DTYPES)}]",
    callback=read_dtype,
    shell_complete=complete_one(DTYPES),
    help="Dtype of parameters and gradients; also bf16, fp16, fp32, fp64.  [default: the model's, or float32]",
)
@click.option(
    "--frozen",
    multiple=True,
    metavar="PATTERN",
    help="Parameters that are not trained, such as '*.embed*'; may be repeated.",
)
@click.option("--memory", metavar="SIZE", help="Show what fits into this memory, such as 80GB or 80GiB.")
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Number of ranks.")
@click.option(
    "--layout",
    type=click.Choice(("ddp", "fsdp2")),
    default="ddp",
    show_default=True,
    help="How parameters lie over ranks.",
)
@click.option("--mesh", metavar="SIZES", help="In place of both: replicas, shards, tensor parallel: dp=8,fsdp=16,tp=4.")
@click.option("--front-end", type=click.Choice(FRONT_ENDS), default="torch", show_default=True)
@click.option("--device", type=click.Choice(DEVICES), help="Device of the steps.  [default: cuda; numpy: cpu]")
@click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True, help="Engine of the steps.")
@click.option("--bandwidth", metavar="RATE", help="Memory bandwidth.  [default: 3.35TB/s on cuda, 100GB/s on cpu]")
@click.option("--flops", metavar="RATE", help="Rate of matrix products, such as 300TFLOPS.")
@click.option("--bus", metavar="RATE", help="Rate of messages between ranks, each way, such as 50GB/s.")
@click.option("--forward-backward", metavar="SECONDS", type=float, help="Time of a forward and a backward pass.")
@option_option
@click.option("--explain", is_flag=True, help="List every parameter and how it is treated.")
@json_option
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Draw plan.png and plan.svg into this folder."
)
def command(
    model: str | None,
    model_option: str | None,
    optimizers: str | None,
    memory: str | None,
    bandwidth: str | None,
    flops: str | None,
    bus: str | None,
    mesh: str | None,
    options: Sequence[str],
    explain: bool,
    as_json: bool,
    out: Path | None,
    **given: Any,
) -> None:
    """Show what each optimizer will cost: state, peak memory, traffic and time. Nothing is allocated or downloaded.

    MODEL is a built-in name (gpt2, bert-large, resnet50, llama-1b, llama-8b, llama-70b), a .safetensors
    file or a folder of them, a Hugging Face config.json, a JSON of shapes, or module:factory for a model of your
    own in torch or JAX.

    \b
    thalweg plan gpt2                                        all optimizers on GPT-2
    thalweg plan llama-8b --dtype bf16 --memory 80GB         which of them fit?
    thalweg plan llama-8b --frozen '*.embed*'                embeddings are not trained
    thalweg plan llama-70b --world 64 --layout fsdp2         what each rank keeps and sends
    thalweg plan llama-8b --mesh dp=8,fsdp=64 --optimizers muon_adamw --flops 300TFLOPS --bus 50GB/s
    thalweg plan checkpoints/mistral/                        reads only the headers of safetensors
    thalweg plan config.json --front-end optax
    thalweg plan mymodel:build --device cpu                  a function that returns an nn.Module
    thalweg plan gpt2 --optimizers muon_adamw,adamw          Muon for hidden matrices, AdamW for the rest
    thalweg plan mymodel:build --optimizers mymodel:mixture  a function that makes a mixture of a model
    thalweg plan gpt2 --option momentum_dtype=bfloat16 --option kron.max_size_dense=2048
    thalweg plan gpt2 --optimizers adafactor --explain       every parameter and its treatment
    thalweg plan gpt2 --json | jq '.optimizers[] | {optimizer, state_bytes}'
    thalweg plan llama-8b --memory 80GB --out report         a picture of it

    Parameters, gradients, state and peak are counted; activations are not. No GPU is needed.
    """
    if (model is None) == (model_option is None):
        raise click.UsageError(f"MODEL is given {'twice' if model else 'not at all'}: say thalweg plan gpt2")
    found = plan(
        model or model_option or "",
        optimizers=None if optimizers is None else parse_optimizers(optimizers),
        options=[parse_option(text) for text in options],
        bandwidth=None if bandwidth is None else parse_rate(bandwidth, option="--bandwidth"),
        flops=None if flops is None else parse_flops(flops),
        bus=None if bus is None else parse_rate(bus, option="--bus"),
        mesh=None if mesh is None else parse_mesh(mesh),
        memory=None if memory is None else parse_size(memory, option="--memory"),
        **given,
    )
    if as_json:
        click.echo(json.dumps(found.plain(explain=explain), indent=2, default=str))
    else:
        show(found, explain)
    if out is not None:
        from thalweg.plan.draw import draw
        from thalweg.show.console import aside

        paths = draw(found, out)
        aside().print(f"drawn: {', '.join(map(str, paths))}", soft_wrap=True)


def show(found: Plan, explain: bool) -> None:
    from thalweg.plan.terminal import heading, notes, table_of
    from thalweg.show.console import console

    screen = console()
    screen.print(heading(found), markup=False)
    screen.print()
    screen.print(table_of(found))
    screen.print()
    for note in notes(found):
        screen.print(note, markup=False)
    for cost in found.costs if explain else ():
        click.echo(f"\n{cost.optimizer}")
        click.echo(str(found.explain(cost.optimizer)))


def parse_optimizers(text: str) -> list[str]:
    """Each of a list between commas once, as it is spelt here."""
    return list(dict.fromkeys(resolve_optimizer(word) for word in split_words(text, "optimizer")))


def parse_mesh(text: str) -> dict[str, int]:
    """The size of each dimension.

    >>> parse_mesh("dp=8, fsdp=64")
    {'dp': 8, 'fsdp': 64}
    """
    found: dict[str, int] = {}
    for word in split_words(text, "mesh"):
        name, _, size = (part.strip() for part in word.partition("="))
        if name in found or not size.isdecimal():
            raise CommandError(f"--mesh {text}: it must name each dimension once, with its ranks: dp=8,fsdp=64")
        found[name] = int(size)
    return found


def parse_flops(text: str) -> float:
    """Operations a second.

    >>> parse_flops("60TFLOPS"), parse_flops("1.5 PFLOP/s")
    (60000000000000.0, 1500000000000000.0)
    """
    wanted = "a rate of operations such as 60TFLOPS"
    spelt = re.sub("(?i)flop/s$", "FLOPS", text)
    return parse_quantity(spelt, ("FLOPS",), wanted, ("TFLOPS", "GFLOPS"), option="--flops")
