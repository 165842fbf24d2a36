"""Run the checks of the project and close with one summary.

python tools/check.py          what a change can break
python tools/check.py --all    with the tests marked nightly too
python tools/check.py --fast   without the tests marked slow, and without the docs

Tests have every core; what needs one process runs beside them, and is heard of when it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

#: One thread each: the tests run side by side, and small matrices gain nothing from more. And compiled Python is kept,
#: whatever the machine is used to: dozens of processes import the package, and two collect the same tests.
ALWAYS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
#: jax compiles what is run once without optimization, by a code generator that takes a seventh of the time; and
#: Triton's interpreter does not look for overflows of integers. Every night, both are as users have them.
SOON = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    "THALWEG_TESTS_SOON": "1",
}


class Lane(NamedTuple):
    #: Which tests it has.
    marked: str
    #: How many examples a property is tried with: the name of a profile.
    examples: str
    #: What its tests find in the environment.
    surroundings: dict[str, str]


LANES = {
    "--fast": Lane("not slow and not nightly and not gpu", "few", SOON),
    "": Lane("not nightly and not gpu", "few", SOON),
    "--all": Lane("not gpu", "thalweg", {}),
}


class Result(NamedTuple):
    name: str
    passed: bool
    seconds: float


def tests(lane: str) -> list[str]:
    parallel = ["--numprocesses", str(os.cpu_count() or 1), "--dist", "worksteal"]
    marked, examples, _ = LANES[lane]
    return ["pytest", "--quiet", *parallel, f"--hypothesis-profile={examples}", "-m", marked, "tests"]


def beside(lane: str) -> dict[str, list[str]]:
    every = {
        "style": ["ruff", "check"],
        "format": ["ruff", "format", "--check"],
        "types": ["mypy", "--strict"],
        "imports": ["lint-imports"],
        # in one process: the examples of a page follow from one another
        "docs": ["pytest", "--quiet", "README.md", "CONTRIBUTING.md", "docs", "src"],
    }
    return {name: command for name, command in every.items() if not (lane == "--fast" and name == "docs")}


def run(name: str, command: list[str], surroundings: Mapping[str, str], *, shown: bool = False) -> Result:
    """Run a check; what it says is shown as it comes, or at its end where it failed."""
    say(f"\n== {name}: {' '.join(command)}\n" if shown else "")
    start = time.perf_counter()
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=ROOT,
        env={**os.environ, **surroundings},
        check=False,
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
    )
    result = Result(name, done.returncode == 0, time.perf_counter() - start)
    if not result.passed and not shown:
        say(f"\n== {name}: {' '.join(command)}\n{done.stdout.decode(errors='replace')}\n")
    return result


def say(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    lane = arguments[0] if arguments else ""
    if lane not in LANES or len(arguments) > 1:
        say(__doc__ or "")
        return 2
    start, surroundings = time.perf_counter(), ALWAYS | LANES[lane].surroundings
    with ThreadPoolExecutor(1) as executor:
        others = [executor.submit(run, name, command, surroundings) for name, command in beside(lane).items()]
        last = run("tests", tests(lane), surroundings, shown=True)
        results = [*(other.result() for other in others), last]
    say("\n== summary\n")
    for result in results:
        say(f"{'passed' if result.passed else 'FAILED'}  {result.name:<8} {result.seconds:6.1f} s\n")
    say(f"all together {time.perf_counter() - start:10.1f} s\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
