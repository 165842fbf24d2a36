"""Test the package in environments that have numpy only, torch only, jax only, and the command line only.

python tools/environments.py          all of them
python tools/environments.py numpy    those that are named

Each is a virtual environment of its own under .envs, kept between calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDINARY = "not nightly and not gpu"
#: What is installed beside numpy and pytest, which packages must not be importable, and what is tested there.
ENVIRONMENTS = {
    "numpy": ([], ["torch", "jax", "ml_dtypes", "click", "matplotlib", "safetensors"], ["tests"]),
    "torch": (["torch"], ["jax", "ml_dtypes"], ["tests"]),
    "jax": (["jax"], ["torch"], ["tests"]),
    "cli": (
        ["cli"],
        ["torch", "jax", "ml_dtypes"],
        ["tests/race", "tests/plan", "tests/show"],
    ),
}


def build() -> Path:
    """One wheel for all of them: the native core is compiled once."""
    folder = ROOT / ".envs" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), "."], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def prepare(name: str, wheel: Path, extras: list[str]) -> Path:
    """An environment with the package, installed as users install it: not editable."""
    folder = ROOT / ".envs" / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--constraint",
        "constraints.txt",
    ]
    if "torch" in extras:
        subprocess.run([*pip, "torch"], cwd=ROOT, check=True)
    package = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    subprocess.run([*pip, package, "pytest", "pytest-xdist"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", package], cwd=ROOT, check=True)
    return python


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        sys.stdout.write(f"there is no environment {unknown[0]!r}; there are {', '.join(ENVIRONMENTS)}\n")
        return 2
    failed = []
    wheel = build()
    for name in names or ENVIRONMENTS:
        extras, absent, tested = ENVIRONMENTS[name]
        sys.stdout.write(f"\n== {name} only\n")
        sys.stdout.flush()
        python = prepare(name, wheel, extras)
        missing = f"import importlib.util as u; assert not any(map(u.find_spec, {absent!r}))"
        steps = [
            [str(python), "-c", missing],
            # combinations have been run where everything is installed; here it is about what is not
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "-m", ORDINARY, *tested],
        ]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for step in steps:
            if subprocess.run(step, cwd=ROOT, env=environment, check=False).returncode != 0:
                failed.append(name)
    sys.stdout.write(f"\nenvironments: {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
