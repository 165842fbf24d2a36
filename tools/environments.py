"""Test the package, installed from a wheel, in environments that have numpy, torch, jax or the command line alone.

python tools/environments.py                 all of these
python tools/environments.py numpy           those that are named
python tools/environments.py integrations    adapters and recipes beside the real packages of trainers

Each is a virtual environment of its own under .envs, kept between calls.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVS = ROOT / ".envs"


#: Combinations are run where everything is installed; in these it is about what is not.
SOME = "-m 'not nightly and not gpu'"
#: The packages of trainers warn of one another; what thalweg warns of is an error among them too. The examples of a
#: page follow from one another: one process has a whole file.
TRAINERS = "--dist loadfile -W default -W error::thalweg.UnusedOverrideWarning -W error::thalweg.ResumeWarning"
#: Of each, arguments of "pip install", a call each, in which WHEEL stands for the wheel of this tree; packages that
#: must not be importable; and arguments of pytest, a call each.
ALONE = {
    "numpy": (["WHEEL"], "torch jax ml_dtypes click matplotlib safetensors", [f"{SOME} tests"]),
    "torch": (["torch", "WHEEL[torch]"], "jax ml_dtypes", [f"{SOME} tests"]),
    "jax": (["WHEEL[jax]"], "torch", [f"{SOME} tests"]),
    "cli": (["WHEEL[cli]"], "torch jax ml_dtypes", [f"{SOME} tests/race tests/plan tests/show"]),
}
INTEGRATIONS = [
    "torch",
    "WHEEL[all] hypothesis sybil --requirement tests/integrations/packages.txt",
    "--no-deps --requirement tests/integrations/packages-alone.txt",
]
TOGETHER = {"integrations": (INTEGRATIONS, "", [f"{TRAINERS} tests/integrations", f"{TRAINERS} docs/recipes"])}
SURROUNDINGS = {"THALWEG_INTEGRATIONS": "required", "HF_HUB_OFFLINE": "1"}  # no test of trainers is left out
ENVIRONMENTS = ALONE | TOGETHER
PIP = ["-m", "pip", "--disable-pip-version-check"]


def call(*command: str, **surroundings: str) -> bool:
    """Whether a command succeeds."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **surroundings}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def build() -> str:
    """The wheel of this tree; one for all environments, so that the native core is compiled once."""
    shutil.rmtree(ENVS / "wheel", ignore_errors=True)
    command = [sys.executable, *PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(ENVS / "wheel"), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = (ENVS / "wheel").glob("*.whl")
    return str(wheel)


def passes(name: str, wheel: str) -> bool:
    """Make an environment, and run its tests."""
    print(f"\n== {name}", flush=True)
    installs, absent, tests = ENVIRONMENTS[name]
    folder, surroundings = ENVS / name, SURROUNDINGS if name in TOGETHER else {}
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, *PIP, "install", "--quiet", "--constraint", "constraints.txt"]
    missing = f"import importlib.util as u; assert not any(map(u.find_spec, {absent.split()!r}))"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    return (
        all(call(*pip, *shlex.split(packages.replace("WHEEL", wheel))) for packages in installs)
        and call(*pip, "pytest", "pytest-xdist")
        and call(*pip, "--force-reinstall", "--no-deps", wheel)  # that of an earlier call has the same version
        and call(python, "-c", missing)
        and all(call(*pytest, *shlex.split(chosen), **surroundings) for chosen in tests)
    )


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        raise SystemExit(f"there is no environment {unknown[0]!r}; there are {', '.join(ENVIRONMENTS)}")
    wheel = build()
    failed = [name for name in names or ALONE if not passes(name, wheel)]
    print(f"\nenvironments: {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
