"""``thalweg bench``: measure, show tables, write files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thalweg.bench.ours import ALL, USUAL
from thalweg.bench.quiet import WAIT
from thalweg.bench.record import Comparison
from thalweg.bench.rounds import Progress
from thalweg.bench.run import DTYPES, Stopped, bench
from thalweg.errors import CommandError
from thalweg.plan.command import complete_model
from thalweg.rules import RULES
from thalweg.show.arguments import choose_names, parse_option, split_words
from thalweg.show.choices import complete_list
from thalweg.show.devices import prepare_process
from thalweg.show.extras import extra
from thalweg.show.published import PACKAGES, is_installed
from thalweg.show.registered import DEVICES, ENGINES, FRONT_ENDS, MIXTURES
from thalweg.show.units import parse_size

with extra("cli"):
    import click

#: Instead of packages: ours alone.
NOBODY = "none"


@click.command("bench")
@click.argument("models", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.option("--model", "--workload", "other_models", metavar="MODEL", shell_complete=complete_model, help="The same.")
@click.option(
    "--optimizers",
    "--optimizer",
    "--rules",
    default=",".join(USUAL),
    show_default=True,
    metavar="LIST",
    shell_complete=complete_list([*RULES, *MIXTURES, ALL]),
    help=f"Some of {', '.join([*RULES, *MIXTURES]).lower()}, or {ALL}, module:MyRule, module:function for a mixture.",
)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True, help="Device of the steps.")
@click.option(
    "--against",
    metavar="LIST",
    shell_complete=complete_list([*(package for package in PACKAGES if is_installed(package)), NOBODY]),
    help=f"Packages to compare with: some of {', '.join(PACKAGES)}, or {NOBODY}.  [default: all that are installed]",
)
@click.option(
    "--front-ends",
    metavar="LIST",
    shell_complete=complete_list(FRONT_ENDS),
    help=f"Front ends of thalweg: some of {', '.join(FRONT_ENDS)}.  [default: all that can run]",
)
@click.option(
    "--reference",
    metavar="NAME",
    help="Contestant that ratios are to, by a part of its name.  [default: torch's fused AdamW]",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option of thalweg's optimizers that have it, or kron.NAME=VALUE for one; may be repeated.",
)
@click.option(
    "--engine", type=click.Choice(ENGINES), default="auto", show_default=True, help="Engine of thalweg's steps."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Dtype of parameters and gradients.",
)
@click.option(
    "--gradients",
    type=click.Choice(["move", "stay"]),
    default="move",
    show_default=True,
    help="New gradient tensors for every step, as zero_grad() and backward() make them, or the same ones.",
)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Number of rounds that count.")
@click.option(
    "--inner",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Steps of one measurement; in JAX they are one compiled program.",
)
@click.option("--threads", type=click.IntRange(1), help="Cores to use.  [default: all]")
@click.option("--budget", metavar="SIZE", help="Memory to stay below, such as 12GB.  [default: 60% of what is free]")
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure the peak memory too.")
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
    models: str | None,
    other_models: str | None,
    optimizers: str,
    device: str,
    against: str | None,
    front_ends: str | None,
    options: Sequence[str],
    gradients: str,
    budget: str | None,
    threads: int | None,
    out: Path,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure the time of one optimizer step on this machine: thalweg, and the packages that are installed beside it.

    MODEL is one or several of gpt2, bert-large, resnet50, llama-1b, llama-8b, llama-70b, or any MODEL of thalweg
    plan: a file, a folder, module:factory. "small" has 148 small tensors. The default is gpt2.

    \b
    thalweg bench                                        LAMB, LARS and Adafactor on GPT-2
    thalweg bench resnet50 --repeats 3 --no-memory       a quick look
    thalweg bench small --optimizers all --threads 1     what a step costs beside its arithmetic
    thalweg bench --optimizers lamb --against torch,timm       beside these packages only
    thalweg bench gpt2,resnet50 --device cuda            on a GPU: time of the host and of the device
    thalweg bench --optimizers muon_adamw,adamw          a mixture
    thalweg bench --front-ends optax --against optax --inner 20      compiled steps in a row
    thalweg bench --optimizers kron --option precond_update_probability=0 --against none

    Contestants take turns, after the memory's bandwidth was measured. Rounds that other processes disturb are
    repeated, and what stays disturbed is marked. Ctrl-C writes what is finished.
    """
    prepare_process(device, threads)
    from thalweg.bench import report
    from thalweg.show.console import aside, console

    if models is not None and other_models is not None:
        raise CommandError(f"MODEL and --model are one and the same: write thalweg bench {models},{other_models}")
    asked = split_words(next((text for text in (models, other_models) if text is not None), "gpt2"), "MODEL")
    measure = partial(
        bench,
        asked,
        optimizers=split_words(optimizers, "--optimizers"),
        options=[parse_option(text) for text in options],
        device=device,
        against=choose_packages(against),
        front_ends=None if front_ends is None else choose_names(front_ends, FRONT_ENDS, "front end"),
        moving_grads=gradients == "move",
        budget=None if budget is None else parse_size(budget, "a budget"),
        **given,
    )
    results, remarks = console(), aside()
    with report.show_progress(remarks, len(asked)) as bar:

        def on_progress(progress: Progress) -> None:
            out.mkdir(parents=True, exist_ok=True)  # if that fails, before anything is measured
            bar(progress)

        def on_comparison(comparison: Comparison) -> None:
            with bar.step_aside():
                if not as_json:
                    report.show(results, comparison)

        try:
            found = measure(on_progress=on_progress, on_comparison=on_comparison)
        except Stopped as stopped:
            found = stopped.finished
    found.command = shlex.join(["thalweg", *sys.argv[1:]])
    if as_json:
        click.echo(report.as_json(found), nl=False)
    elif found.comparisons:
        results.print(report.describe_surroundings(found), style="dim", markup=False)
    ran = any(comparison.rows for comparison in found.comparisons)
    if ran:  # else what an earlier run has left there is worth more
        remarks.print(f"Written: {', '.join(map(str, report.write_files(found, out)))}", soft_wrap=True)
    if found.stopped:
        remarks.print(f"Stopped: {len(found.comparisons)} of {len(asked)} models have results.")
        raise KeyboardInterrupt
    if not ran:
        why = [f"{name} ({why})" for comparison in found.comparisons for name, why in comparison.left_out.items()]
        raise CommandError(f"no contestant could run: {', '.join(why) or 'none was chosen'}")


def choose_packages(text: str | None) -> list[str] | None:
    """Packages by the names they are imported by: ``kron-torch`` is ``kron_torch``."""
    if text is None:
        return None
    return [] if text.strip() == NOBODY else choose_names(text.replace("-", "_"), PACKAGES, "package")
