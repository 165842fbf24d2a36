"""Run the checks of the project and close with one summary.

python tools/check.py          what a change can break
python tools/check.py --all    with the tests marked nightly too
python tools/check.py --fast   without the tests marked slow, and without the docs

Tests have every core; the other checks run one after the other beside them, and are shown where they fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
#: One thread each: the tests run side by side, and small matrices gain nothing from more. And compiled Python is kept,
#: whatever the machine is used to: dozens of processes import the package, and two collect the same tests.
ALWAYS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
#: jax compiles what is run once without optimization, by a code generator that takes a seventh of the time; and
#: Triton's interpreter does not look for overflows of integers. With --all, both are as users have them.
SOON = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    "THALWEG_TESTS_SOON": "1",
}
#: The tests of each lane, with how many examples a property is tried (a profile), and in which environment.
LANES = {
    "--fast": ("not slow and not nightly and not gpu", "few", SOON),
    "": ("not nightly and not gpu", "few", SOON),
    "--all": ("not gpu", "thalweg", {}),
}
CHECKS = {
    "style": "ruff check",
    "format": "ruff format --check",
    "sizes": "python tools/size.py",
    "types": "mypy --strict",
    "imports": "lint-imports",
    # in one process: the examples of a page follow from one another
    "docs": "pytest --quiet README.md CONTRIBUTING.md docs src",
}


def run(name: str, command: list[str], environment: dict[str, str], *, shown: bool = False) -> tuple[str, bool, float]:
    """Run a check: its name, whether it passed, its seconds. What it says is shown as it comes, or where it failed."""
    header, start = f"\n== {name}: {' '.join(command)}\n", time.perf_counter()
    if shown:
        print(header, flush=True)
    out = None if shown else subprocess.PIPE
    command = [str(BIN / command[0]), *command[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode and not shown:
        print(header, done.stdout.decode(errors="replace"), flush=True)
    return name, done.returncode == 0, time.perf_counter() - start


def main(lane: str = "") -> int:
    marked, examples, surroundings = LANES[lane]
    start, environment = time.perf_counter(), {**os.environ, **ALWAYS, **surroundings}
    tests = ["pytest", "--quiet", "--numprocesses", str(os.cpu_count() or 1), "--dist", "worksteal"]
    tests += [f"--hypothesis-profile={examples}", "-m", marked, "tests"]
    with ThreadPoolExecutor(1) as executor:
        checks = [
            executor.submit(run, name, command.split(), environment)
            for name, command in CHECKS.items()
            if not (lane == "--fast" and name == "docs")
        ]
        last = run("tests", tests, environment, shown=True)
        results = [*(check.result() for check in checks), last]
    print("\n== summary")
    for name, passed, seconds in results:
        print(f"{'passed' if passed else 'FAILED'}  {name:<8} {seconds:6.1f} s")
    print(f"all together {time.perf_counter() - start:10.1f} s")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    if len(sys.argv) > 2 or not set(sys.argv[1:]) <= {*LANES}:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
