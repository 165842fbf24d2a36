"""What was measured, for people: tables for terminals and in Markdown, sentences around them, and files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg.bench.record import Bench, Comparison, Row
from thalweg.show.palette import colour_of
from thalweg.show.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.table import Table

    from thalweg.bench.rounds import Progress

NOT_TO_BE_QUOTED = "Disturbed by other processes: do not quote these figures."
#: Columns of text; all others are numbers.
TEXT = ("contestant", "engine")
#: Columns that a narrow terminal leaves out, in this order.
LEAST_NEEDED = ("of the parameters", "bytes a parameter", "engine", "quartiles", "extra memory", "share of the floor")
#: Columns of the terminal between two of the table.
BETWEEN = 3


def make_columns(found: Comparison) -> dict[str, list[str]]:
    """The table, column by column, without columns that are empty."""
    rows = found.rows
    timed = "device ms" if any(row.host for row in rows) else "ms"

    def cells(words: Callable[[float], str], value: Callable[[Row], float | None]) -> list[str]:
        return ["" if (number := value(row)) is None else words(number) for row in rows]

    def extra(row: Row) -> float | None:
        return None if row.memory is None or row.memory.extra is None else float(row.memory.extra)

    def floor(row: Row) -> float | None:
        return None if row.share_of_floor is None else (row.floor or 0) / found.parameters

    def memory(row: Row) -> str:
        if row.memory is None:
            return ""
        return "not known" if row.memory.extra is None else human_bytes(row.memory.extra)

    parameter_bytes = found.itemsize * found.parameters
    ratio, share = "{:.2f}".format, "{:.0%}".format
    table = {
        "contestant": [row.contestant for row in rows],
        "engine": [row.engine for row in rows],
        "host ms": cells(milliseconds, lambda row: row.host_median),
        "host ratio": cells(ratio, lambda row: row.host_ratio),
        timed: cells(milliseconds, lambda row: row.median),
        "quartiles": [" to ".join(map(milliseconds, row.quartiles)) for row in rows],
        "ratio" if timed == "ms" else "device ratio": cells(ratio, lambda row: row.ratio),
        "bytes a parameter": cells("{:.3g}".format, floor),
        "share of the floor": cells(share, lambda row: row.share_of_floor),
        "extra memory": [memory(row) for row in rows],
        "of the parameters": cells(lambda size: f"{size / parameter_bytes:.1%}", extra),
    }
    return {title: own for title, own in table.items() if any(own)}


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3g}"


# ---- sentences


def describe_model(found: Comparison) -> str:
    return f"{found.about}: {found.parameters:,} parameters in {found.tensors} tensors."


def describe_method(found: Comparison) -> str:
    """How fast memory was meanwhile, how many rounds there were, and how quiet."""
    told = [f"Ratios are to {found.reference}."]
    if found.bandwidths:
        median, best = (f"{rate / 1e9:.4g}" for rate in (statistics.median(found.bandwidths), max(found.bandwidths)))
        told.append(f"Bandwidth: {median} GB/s (best {best}) by {found.yardstick}.")
    counted = " + ".join(str(len(heat.rounds)) for heat in found.heats)
    left_out = sum(len(heat.left_out) for heat in found.heats)
    told.append(
        f"Rounds: {counted}, and {left_out} left out as more disturbed; in those that count, other processes took "
        f"{statistics.median(found.others):.0%} of the cores (at most {max(found.others):.0%})."
    )
    return " ".join(told)


def describe_gaps(found: Comparison) -> list[str]:
    """Who is missing, and what could not be measured."""
    told = [f"Left out: {name} ({why})" for name, why in found.left_out.items()]
    for row in found.rows:
        if row.memory is not None and row.memory.extra is None:
            told.append(f"Memory of {row.contestant} is not known ({row.memory.how})")
    return told


def describe_surroundings(found: Bench) -> str:
    """Where, when and with what it was measured."""
    processor = [f"{found.machine['cores']} cores"]
    if "architecture" in found.machine:
        processor.append(found.machine["architecture"])
    if found.device == "cpu" and "native_core" in found.machine:
        level = found.machine["native_core"]
        processor.append("no native core" if level is None else f"native core at level {level}")
    steps = f", {found.inner} steps a measurement" if found.inner > 1 else ""
    grads = "gradients that move" if found.moving_grads else "gradients that stay"
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    where = f"{found.device_about}, {', '.join(processor)}"
    return f"{found.date}. {where}; {found.dtype}{steps}, {grads}; {versions}."


# ---- Markdown and files


def write_files(found: Bench, folder: Path) -> list[Path]:
    """Write bench.json, bench.md, bench.png and bench.svg."""
    from thalweg.bench.draw import draw

    folder.mkdir(parents=True, exist_ok=True)
    record, tables = folder / "bench.json", folder / "bench.md"
    record.write_text(as_json(found), encoding="utf-8")
    tables.write_text(as_markdown(found), encoding="utf-8")
    return [record, tables, *draw(found, folder)]


def as_json(found: Bench) -> str:
    return json.dumps(found.plain(), indent=1) + "\n"


def as_markdown(found: Bench) -> str:
    device = {"cpu": "the CPU", "cuda": "the GPU"}[found.device]
    parts = [f"# One optimizer step on {device}", describe_surroundings(found)]
    if found.command:
        parts.append(f"    {found.command}")
    if found.stopped:
        parts.append("Stopped before everything was measured.")
    return "\n\n".join([*parts, *map(table_in_markdown, found.comparisons)]) + "\n"


def table_in_markdown(found: Comparison) -> str:
    """One comparison, with what stands above and below it."""
    lines = [f"## {found.model}", "", describe_model(found)]
    if found.rows:
        columns = make_columns(found)
        lines += [
            describe_method(found) + (f" **{NOT_TO_BE_QUOTED}**" if found.disturbed else ""),
            "",
            f"| {' | '.join(columns)} |",
            "|" + "".join("---|" if title in TEXT else "---:|" for title in columns),
            *(f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)),
        ]
    else:
        lines.append("No contestant could run.")
    for remark in describe_gaps(found):
        lines += ["", remark]
    return "\n".join(lines)


# ---- the terminal


class Bar:
    """A bar over all comparisons on one moving line, which makes way for what is printed in between."""

    def __init__(self, bars: Bars, comparisons: int) -> None:
        self._bars, self._finished = bars, 0
        self._task = bars.add_task("", total=comparisons, now="")

    def __call__(self, progress: Progress) -> None:
        done = self._finished + progress.done
        self._bars.update(self._task, description=progress.model, completed=done, now=progress.doing)

    @contextmanager
    def step_aside(self) -> Iterator[None]:
        """Leave the terminal to a finished comparison that is printed."""
        self._finished += 1
        self._bars.stop()
        yield
        self._bars.start()


@contextmanager
def show_progress(console: Console, comparisons: int) -> Iterator[Bar]:
    """Show a bar in a terminal, and nothing elsewhere."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield Bar(bars, comparisons)


def show(console: Console, found: Comparison) -> None:
    """Print a comparison as a table, with what a reader needs to know below it."""
    from rich.text import Text

    if found.rows:
        console.print(table_in_terminal(found, console.width))
        console.print(Text(f"{describe_model(found)} {describe_method(found)}", style="dim"))
        if found.disturbed:
            console.print(Text(NOT_TO_BE_QUOTED, style="bold red"))
    else:
        console.print(Text(f"{found.model}: no contestant could run."))
    for remark in describe_gaps(found):
        console.print(Text(remark, style="dim"))
    console.print()


def table_in_terminal(found: Comparison, width: int) -> Table:
    """All columns, or those that matter most where the terminal is narrow: the files have them all."""
    from rich.text import Text

    from thalweg.show.console import make_table

    columns = make_columns(found)
    kept = fit_columns(columns, width)
    left_out = [title for title in columns if title not in kept]
    caption = Text(f"In bench.md only: {'; '.join(left_out)}.", "dim") if left_out else None
    table = make_table(title=Text(found.model, style="bold"), caption=caption)
    for title, room in kept.items():
        table.add_column(title, justify="left" if title in TEXT else "right", width=room)
    for place, row in enumerate(found.rows):
        style = f"bold {colour_of(row.rule)}" if row.package == "thalweg" else ""
        table.add_row(*(Text(columns[title][place], no_wrap=True) for title in kept), style=style)
    return table


def fit_columns(columns: Mapping[str, Sequence[str]], width: int) -> dict[str, int]:
    """Choose columns and their widths: titles are broken into words first, then columns are left out."""
    rooms = {title: max(map(len, cells)) for title, cells in columns.items()}
    whole = {title: max(room, len(title)) for title, room in rooms.items()}
    if total_width(whole) <= width:
        return whole
    broken = {title: max(room, *map(len, title.split())) for title, room in rooms.items()}
    for title in LEAST_NEEDED:
        if total_width(broken) > width:
            broken.pop(title, None)
    return broken


def total_width(columns: Mapping[str, int]) -> int:
    return sum(columns.values()) + BETWEEN * (len(columns) - 1)
