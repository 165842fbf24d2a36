"""A world of processes that run the checks of ranks, all in one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from thalweg.check.registry import chosen_checks
from thalweg.check.run import FAILED, Verdict, verdict_of
from thalweg.check.subject import subject_of

#: Seconds after which a message that no rank answers is an error.
MESSAGE_LIMIT = 20


def verdicts_of_ranks(
    size: int, given: Any, options: Mapping[str, Any], facts: Mapping[str, Any] | None, only: str | None
) -> list[Verdict]:
    """What the ranks say: of each check the first that is a failure, or what all of them say."""
    chosen_checks("ranks", only)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, folder, given, dict(options), dict(facts or {}), only)
        spawn(run_rank, arguments, size)
        said = [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(size)]
    every = [[Verdict(**each) for each in verdicts] for verdicts in zip(*said, strict=True)]
    return [next((each for each in ranks if each.outcome == FAILED), ranks[0]) for ranks in every]


def run_rank(rank: int, size: int, folder: str, given: Any, options: Any, facts: Any, only: str | None) -> None:
    """What one rank does: form the group, run every check, write down what was found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=MESSAGE_LIMIT), world_size=size, rank=rank
    )
    subject = subject_of(given, options, facts)
    found = [asdict(verdict_of(each, subject)) for each in chosen_checks("ranks", only)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()
