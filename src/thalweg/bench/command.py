"""``thalweg bench``: measure, show tables, write files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from thalweg.bench import process
from thalweg.bench.devices import NAMES
from thalweg.bench.ours import FRONT_ENDS
from thalweg.bench.quiet import WAIT
from thalweg.bench.record import Comparison
from thalweg.bench.rounds import Progress
from thalweg.bench.rules import RULES, USUAL
from thalweg.bench.run import DTYPES, ENGINES, Stopped, bench
from thalweg.errors import CommandError
from thalweg.plan.models import BUILTIN
from thalweg.show.extras import extra
from thalweg.show.lists import chosen, words
from thalweg.show.published import PACKAGES, installed
from thalweg.show.registered import OWN, named
from thalweg.show.units import parse_size

with extra("cli"):
    import click
    from click.shell_completion import CompletionItem

Complete = Callable[[Any, Any, str], list[CompletionItem]]
#: Instead of packages: nobody but ours.
NOBODY = "none"


def completing(names: Iterable[str]) -> Complete:
    """The last word of a list, without those that stand there already."""
    known = list(names)

    def complete(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        before, comma, begun = incomplete.rpartition(",")
        left = [name for name in known if name not in before.split(",")]
        return [CompletionItem(f"{before}{comma}{name}") for name in left if name.startswith(begun)]

    return complete


def complete_model(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
    """What is built in, or else files."""
    return completing(BUILTIN)(ctx, param, incomplete) or [CompletionItem(incomplete, type="file")]


@click.command("bench")
@click.option(
    "--model",
    "models",
    default="gpt2",
    show_default=True,
    metavar="LIST",
    shell_complete=complete_model,
    help=f"Whose shapes: some of {', '.join(BUILTIN)}, or what thalweg plan takes: a file, a folder, module:factory.",
)
@click.option(
    "--rules",
    default=",".join(USUAL),
    show_default=True,
    metavar="LIST",
    shell_complete=completing(RULES),
    help=f"Some of {', '.join(RULES)}, or module:MyRule.",
)
@click.option("--device", type=click.Choice(NAMES), default="cpu", show_default=True, help="Where steps run.")
@click.option(
    "--against",
    metavar="LIST",
    shell_complete=completing([*(package for package in PACKAGES if installed(package)), NOBODY]),
    help=f"Packages to compare with: some of {', '.join(PACKAGES)}, or {NOBODY}.  [default: all that are installed]",
)
@click.option(
    "--front-ends",
    metavar="LIST",
    shell_complete=completing(FRONT_ENDS),
    help=f"Ours: some of {', '.join(FRONT_ENDS)}; others are compared with the first.  [default: all that can run]",
)
@click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True, help="Of ours.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of parameters and gradients."
)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Rounds that count.")
@click.option(
    "--inner",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Steps in a row that make one measurement; in JAX they are one compiled program.",
)
@click.option("--threads", type=click.IntRange(1), help="Cores for everyone.  [default: all there are]")
@click.option("--budget", metavar="SIZE", help="Memory to stay below, such as 12GB.  [default: 60% of what is free]")
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure the peak of memory too.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=WAIT,
    show_default=True,
    help="Seconds to wait before a round while other processes are busy.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("report/bench"),
    show_default=True,
    help="Folder for bench.json, bench.md, bench.png and bench.svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the record, all samples included, instead of tables.")
def command(
    models: str,
    rules: str,
    device: str,
    against: str | None,
    front_ends: str | None,
    budget: str | None,
    threads: int | None,
    out: Path,
    as_json: bool,
    **given: Any,
) -> None:
    """How fast is it here? One optimizer step on the shapes of real models: ours, and whoever is installed beside it.

    \b
    thalweg bench                                   LAMB, LARS and Adafactor on GPT-2
    thalweg bench --model resnet50 --repeats 3 --no-memory               a quick look
    thalweg bench --rules lamb --against torch,timm        beside these packages only
    thalweg bench --device cuda --model gpt2,bert-large                      on a GPU
    thalweg bench --front-ends optax --against optax --inner 20    compiled steps in a row
    thalweg bench --rules kron --against none                          ours by itself

    Everyone steps once in each round, in turns, after the memory's bandwidth was measured. Rounds that other processes
    disturb are run again, and what stays disturbed is marked. Ctrl-C writes what is finished.
    """
    process.prepare(device, threads)
    from thalweg.bench.files import as_json as in_json
    from thalweg.bench.files import write
    from thalweg.bench.terminal import progress_bar, show, show_surroundings
    from thalweg.show.console import aside, console

    named, asked = words(models, "--model"), asked_rules(rules)
    count = len(named) * len(asked)
    measure = partial(
        bench,
        named,
        rules=asked,
        device=device,
        against=packages(against),
        front_ends=None if front_ends is None else chosen(front_ends, FRONT_ENDS, "front end"),
        budget=None if budget is None else parse_size(budget, "a budget"),
        **given,
    )
    results, remarks = console(), aside()
    with progress_bar(remarks, count) as bar:

        def on_progress(progress: Progress) -> None:
            out.mkdir(parents=True, exist_ok=True)  # if that fails, before anything is measured
            bar(progress)

        def on_comparison(comparison: Comparison) -> None:
            with bar.aside():
                if not as_json:
                    show(results, comparison)

        try:
            found = measure(on_progress=on_progress, on_comparison=on_comparison)
        except Stopped as stopped:
            found = stopped.finished
    found.command = spelt_out(click.get_current_context())
    if as_json:
        click.echo(in_json(found), nl=False)
    elif found.comparisons:
        show_surroundings(results, found)
    ran = any(comparison.entrants for comparison in found.comparisons)
    if ran:  # else what an earlier run has left there is worth more
        remarks.print(f"Written: {', '.join(map(str, write(found, out)))}", soft_wrap=True)
    if found.stopped:
        remarks.print(f"{len(found.comparisons)} of {count} comparisons are finished.")
        raise KeyboardInterrupt
    if not ran:
        why = [f"{name} ({why})" for comparison in found.comparisons for name, why in comparison.left_out.items()]
        raise CommandError(f"nobody could run: {', '.join(why) or 'nobody was asked to'}")


def asked_rules(text: str) -> list[str]:
    """Those named, as they are spelt here; one's own as ``module:MyRule``."""
    found = [str(named(word)) for word in words(text, "rule")]
    return chosen(",".join(found), [*RULES, *(name.lower() for name in OWN)], "rule")


def packages(text: str | None) -> list[str] | None:
    """Those named, by the names they are imported by: ``kron-torch`` is ``kron_torch``."""
    if text is None:
        return None
    return [] if text.strip() == NOBODY else chosen(text.replace("-", "_"), PACKAGES, "package")


def spelt_out(ctx: click.Context) -> str:
    """The command with every option that was given, as it can be typed again."""
    said = ["thalweg", "bench"]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE or name in ("out", "as_json"):
            continue
        value = ctx.params[name]
        if isinstance(value, bool):  # a pair of switches
            said.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            said += [parameter.opts[0], str(value)]
    return shlex.join(said)
