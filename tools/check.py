"""Run every check of the project and close with one summary.

python tools/check.py          everything
python tools/check.py --fast   without the tests marked slow
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

#: One thread each: the tests run side by side, and small matrices gain nothing from more.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def checks(fast: bool) -> dict[str, list[str]]:
    parallel = ["--numprocesses", str(os.cpu_count() or 1), "--dist", "worksteal"]
    marked = "not slow and not gpu" if fast else "not gpu"
    every = {
        "style": ["ruff", "check"],
        "format": ["ruff", "format", "--check"],
        "types": ["mypy", "--strict"],
        "imports": ["lint-imports"],
        # in one process: the examples of a page follow from one another
        "docs": ["pytest", "--quiet", "README.md", "CONTRIBUTING.md", "docs", "src"],
        "tests": ["pytest", "--quiet", *parallel, "-m", marked, "tests"],
    }
    return {name: command for name, command in every.items() if not (fast and name == "docs")}


def main(arguments: list[str]) -> int:
    results = []
    for name, command in checks("--fast" in arguments).items():
        sys.stdout.write(f"\n== {name}: {' '.join(command)}\n")
        sys.stdout.flush()
        start = time.perf_counter()
        run = [str(BIN / command[0]), *command[1:]]
        code = subprocess.run(run, cwd=ROOT, env={**os.environ, **ONE_THREAD}, check=False).returncode
        results.append((name, code == 0, time.perf_counter() - start))
    sys.stdout.write("\n== summary\n")
    for name, passed, seconds in results:
        sys.stdout.write(f"{'passed' if passed else 'FAILED'}  {name:<8} {seconds:6.1f} s\n")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
