"""What a call of the suite asks for, checked before anything trains."""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.protocol import TASKS


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.run",
        description="Train every contestant on every task, and record each run.",
    )
    parser.add_argument("--tasks", type=names, default=list(TASKS), help=f"default: {','.join(TASKS)}")
    parser.add_argument(
        "--contestants",
        dest="chosen",
        type=contestants,
        default=list(CONTESTANTS),
        help="globs of names, with ; between them, in the order to run (default: all)",
    )
    parser.add_argument(
        "--trials",
        type=counts,
        default=[5],
        help="rates that each contestant tries (default: 5); 3,5: all 3 first, then 5",
    )
    parser.add_argument(
        "--beyond", type=count_from(0), default=0, help="rates more while the best is at an edge (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=count_from(1), default=1, help="seeds at the two best rates (default: %(default)s)"
    )
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder of the four files of Fashion-MNIST")
    parser.add_argument("--records", type=Path, required=True, help="folder where records are written")
    parser.add_argument("--resume", type=Path, help="folder of earlier records, which are copied into --records")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--shared", action="store_true", help="others use the device too: times do not count")
    parser.add_argument("--steps", type=count_from(1), help="other steps than the task's")
    parser.add_argument("--tiny", action="store_true", help="small models and data, to try the scripts")
    return parser.parse_args(arguments)


def names(text: str) -> list[str]:
    """
    >>> names("text, fashion-512")
    ['text', 'fashion-512']
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("name at least one, with commas between them")
    return found


def count_from(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"it must be a whole number from {least} on, got {text!r}")
        return int(text)

    return count


def counts(text: str) -> list[int]:
    return [count_from(1)(number) for number in names(text)]


def contestants(text: str) -> list[str]:
    """Everyone whom a glob matches, once; a glob that matches nobody is a mistake.

    >>> contestants("LAMB*; Kron")
    ['LAMB', 'LAMB paper', 'LAMB, norms kept', 'Kron']
    """
    found: dict[str, None] = {}
    for glob in (word.strip() for word in text.split(";")):
        matched = fnmatch.filter(CONTESTANTS, glob)
        if not matched:
            raise argparse.ArgumentTypeError(
                f"nobody is called {glob!r}; put ; between names, which are {'; '.join(CONTESTANTS)}"
            )
        found |= dict.fromkeys(matched)
    return list(found)


def device(text: str) -> str:
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"it must be cpu or cuda, got {text!r}")
    if text != "cpu" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no GPU here: use cpu")
    return text
