"""Tables in Markdown, and what a reader needs to know to judge them."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from contestants import RULES
from quiet import QUIET
from rounds import Comparison

PACKAGES = ("thalweg", "torch", "numpy", "jax", "jaxlib", "optax", "timm", "transformers", "pytorch_optimizer")


def surroundings() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/step_cpu.py", *sys.argv[1:]]),
        "versions": versions,
        "cpu": first_line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "huge_pages": first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def first_line(path: str, key: str = "") -> str:
    """The first line of a file of the system that begins so, without its beginning."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(key).lstrip("\t :") for line in lines if line.startswith(key)), "")


def heading(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"# One optimizer step on the CPU\n\n{record['date']}. {record['cpu']}, {record['threads']} threads, "
        f"{record['cores']} cores; {versions}.\n\n    {record['command']}"
    )


def comparison_table(found: Comparison, memory: bool) -> str:
    model, rule = found.model, RULES[found.rule]
    lines = [
        f"\n## {rule.title}, {model.name}\n",
        f"{model.about}: {model.elements:,} parameters in {len(model.shapes)} tensors. "
        f"Floor: {rule.floor} bytes a parameter ({rule.why}).",
    ]
    if found.heats:
        update = [b for each in found.rounds for b in each.result.update]
        scale, copy, read = (
            statistics.median(getattr(each.result, kind) for each in found.rounds) for kind in ("scale", "copy", "read")
        )
        lines += [
            f"Bandwidth: {statistics.median(update):.1f} GB/s (best {max(update):.1f}); for information, {scale:.1f} "
            f"in one stream in place, {copy:.1f} as a copy and {read:.1f} reading alone. {disturbance(found)} "
            f"Ratios are to {found.reference}.\n",
            "| contestant | engine | ms | least ms | ratio | GB/s at the floor | bytes a parameter "
            "| share of the floor | with mul_ as yardstick |"
            + (" extra memory, MB | of the parameters |" if memory else ""),
            "|---|---|---:|---:|---:|---:|---:|---:|---:|" + ("---:|---:|" if memory else ""),
        ]
    for row in found.rows():
        line = (
            f"| {row['contestant']} | {row['engine']} | {row['median_ms']:.1f} | {row['min_ms']:.1f} "
            f"| {row['ratio']:.2f} | {row['floor_gb_per_s']:.1f} | {row['bytes_a_parameter']:.0f} "
            f"| {row['share_of_floor']:.0%} | {row['floor_gb_per_s'] / scale:.0%} |"
        )
        if memory and "extra" in row["memory"]:
            line += f" {row['memory']['extra'] / 1e6:.1f} | {row['memory']['percent']:.1f}% |"
        elif memory:
            line += f" {row['memory']['skipped']} | |"
        lines.append(line)
    lines += [f"\nLeft out: {name} ({why})" for name, why in found.skipped.items()]
    return "\n".join(lines)


def disturbance(found: Comparison) -> str:
    """How many rounds there were, and how quiet."""
    counted = " + ".join(str(len(heat.rounds)) for heat in found.heats)
    left_out = sum(len(heat.left_out) for heat in found.heats)
    others = [each.others for each in found.rounds]
    warning = " **Disturbed: these figures are not to be quoted.**" if max(others) > QUIET else ""
    return (
        f"Rounds: {counted}, and {left_out} left out as more disturbed; in those that count, other processes took "
        f"{statistics.median(others):.0%} of the cores (at most {max(others):.0%}).{warning}"
    )


def loop_table(found: dict[str, Any]) -> str:
    lines = [
        "\n## A training loop\n",
        f"A transformer of {found['parameters']:,} parameters in {found['tensors']} tensors, {found['tokens']} "
        f"tokens a batch, {found['iterations']} iterations each. Medians; ratios are to the first row, of iterations "
        f"close to each other in time. Other processes took at most {found['others']:.0%} of the cores.\n",
        "| optimizer | engine | iteration, ms | ratio | forward and backward, ms | ratio | step, ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['engine']} | {row['whole_ms']:.2f} | {row['whole_ratio']:.2f} "
        f"| {row['passes_ms']:.2f} | {row['passes_ratio']:.2f} | {row['step_ms']:.2f} |"
        for row in found["rows"]
    ]
    return "\n".join(lines)
