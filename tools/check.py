"""Run the checks of the project and close with one summary.

python tools/check.py          every rule, engine and front end; properties with 25 examples, drawn by the commit's hash
python tools/check.py --all    400 examples, drawn anew, in the environment that users have
python tools/check.py --fast   without the tests marked slow, without the docs, and with few examples

Tests have every core; the other checks run one after the other beside them, and are shown where they fail. The seed of
the examples is printed: with --hypothesis-seed and the profile pytest draws the same again.
"""

from __future__ import annotations

import os
import secrets
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
    "": ("not nightly and not gpu", "day", SOON),
    "--all": ("not gpu", "all", {}),
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


def draw_seed(lane: str) -> int:
    """What examples are drawn by: a number of this call, or that of the commit; 0 in an sdist, which has no commit."""
    if lane == "--all":
        return secrets.randbits(32)
    if not (ROOT / ".git").exists():
        return 0
    git = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
    return int(subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout[:8], 16)


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
    (marked, examples, surroundings), seed = LANES[lane], draw_seed(lane)
    start, environment = time.perf_counter(), {**os.environ, **ALWAYS, **surroundings}
    tests = ["pytest", "--quiet", "--numprocesses", str(os.cpu_count() or 1), "--dist", "worksteal"]
    tests += [f"--hypothesis-profile={examples}", f"--hypothesis-seed={seed}", "-m", marked, "tests"]
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
    print(f"examples: --hypothesis-profile={examples} --hypothesis-seed={seed}")
    print(f"all together {time.perf_counter() - start:10.1f} s")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    if len(sys.argv) > 2 or not set(sys.argv[1:]) <= {*LANES}:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
