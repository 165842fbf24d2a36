"""Use the package as users install it: its sdist and wheel, in environments of their own under .envs.

python tools/environments.py                 the tests beside numpy, torch, jax or the command line alone
python tools/environments.py numpy           in those environments that are named
python tools/environments.py integrations    adapters and recipes beside the real packages of trainers
python tools/environments.py wheel sdist     what is in both, the native core at every vector level, and a step of every
                                             optimizer beside numpy alone: of the wheel, of the sdist without a compiler
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVS = ROOT / ".envs"
DIST = ENVS / "dist"
CORE = "thalweg/kernels/cpu/_core" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
LIBRARY = DIST / Path(CORE).name
FALLBACK = "WITHOUT its native CPU core"
PYTEST = f"-m pytest -q -p no:cacheprovider -n {os.cpu_count() or 1} -m 'not gpu'"
#: The packages of trainers warn of one another; what thalweg warns of is an error among them too. The examples of a
#: page follow from one another: one process has a whole file.
TRAINERS = "--dist loadfile -W default -W error::thalweg.UnusedOverrideWarning -W error::thalweg.ResumeWarning"
#: Of each, arguments of "pip install", a call each, in which WHEEL and SDIST stand for those of this tree; packages
#: that must not be importable; and arguments of its Python, a call each.
ENVIRONMENTS = {
    "numpy": (["WHEEL"], "torch jax ml_dtypes click matplotlib safetensors", [f"{PYTEST} tests"]),
    "torch": (["torch", "WHEEL[torch]"], "jax ml_dtypes", [f"{PYTEST} tests"]),
    "jax": (["WHEEL[jax]"], "torch", [f"{PYTEST} tests"]),
    "cli": (["WHEEL[cli]"], "torch jax ml_dtypes", [f"{PYTEST} tests/race tests/plan tests/show"]),
    "integrations": (
        [
            "torch",
            "WHEEL[all] hypothesis sybil --requirement tests/integrations/packages.txt",
            "--no-deps --requirement tests/integrations/packages-alone.txt",
        ],
        "",
        [f"{PYTEST} {TRAINERS} tests/integrations", f"{PYTEST} {TRAINERS} docs/recipes"],
    ),
    "wheel": (["numpy", "WHEEL"], "torch jax pytest", ["-I tools/smoke.py native"]),
    "sdist": (["numpy", "--verbose SDIST"], "torch jax pytest", ["-I tools/smoke.py pure"]),
}
ALONE = ("numpy", "torch", "jax", "cli")


def run(*command: str | Path, shown: bool = False, **surroundings: str) -> str:
    """What a command printed, which is shown as it comes, or if it fails."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **surroundings}
    out = None if shown else subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FAILED: {' '.join(map(str, command))}\n{done.stdout or ''}")
    return done.stdout or ""


def build() -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel from it; what does not compile is an error."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--config-setting=wheel.cmake=true", "--outdir", DIST, ".")
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def look_inside(sdist: Path, wheel: Path) -> None:
    """Both have just the files under version control; one wheel serves every Python, and shows its own symbols."""
    git = ["git", "-c", "safe.directory=*", "ls-files"]
    if not (ROOT / ".git").exists():  # a copy: all that is there and not ignored
        run("git", "init", "--quiet", "--bare", DIST / "git")
        git = ["git", f"--git-dir={DIST / 'git'}", "--work-tree=.", "ls-files", "--others", "--exclude-standard"]
    files = set(run(*git).splitlines())
    package = {name.removeprefix("src/") for name in files if name.startswith("src/") and not name.endswith(".cpp")}
    with tarfile.open(sdist) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert inside == files | {"PKG-INFO"}, f"the sdist has not just its files: {inside ^ (files | {'PKG-INFO'})}"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        LIBRARY.write_bytes(archive.read(CORE))
    assert inside == package | {CORE}, f"the wheel has not just its files: {inside ^ (package | {CORE})}"
    assert wheel.stem.split("-")[2:4] == ["py3", "none"], wheel.name
    assert not wheel.stem.endswith("any"), wheel.name
    if shutil.which("nm") and sys.platform == "linux":
        names = [line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", LIBRARY).splitlines()]
        assert {name.partition("_")[0] for name in names} == {"thalweg"}, f"the library exports {names}"


def use(name: str, packages: dict[str, str]) -> None:
    """Make an environment, and run what is for it."""
    print(f"\n== {name}", flush=True)
    installs, absent, commands = ENVIRONMENTS[name]
    folder, surroundings = ENVS / name, dict[str, str]()
    if name == "integrations":  # no test of trainers is left out
        surroundings = {"THALWEG_INTEGRATIONS": "required", "HF_HUB_OFFLINE": "1"}
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--constraint", "constraints.txt"]
    if name == "sdist":  # neither a compiler nor CMake nor Ninja; the last two come from PyPI
        surroundings = {"PATH": str(folder / "bin"), "CC": "", "CXX": ""}
    for install in installs:
        for word, path in packages.items():
            install = install.replace(word, path)
        log = run(*pip, *shlex.split(install), **surroundings)
        assert (FALLBACK in log) == ("--verbose" in install), log
    if any(PYTEST in command for command in commands):
        run(*pip, "pytest", "pytest-xdist")
        run(*pip, "--force-reinstall", "--no-deps", packages["WHEEL"])  # that of an earlier call has the same version
    run(python, "-c", f"import importlib.util as u; assert not any(map(u.find_spec, {absent.split()!r}))")
    for command in commands:
        run(python, *shlex.split(command), shown=True, **surroundings)


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        raise SystemExit(f"there is no environment {unknown[0]!r}; there are {', '.join(ENVIRONMENTS)}")
    sdist, wheel = build()
    if "wheel" in names:
        shutil.rmtree(ENVS / "wheel", ignore_errors=True)
        shutil.rmtree(ENVS / "sdist", ignore_errors=True)
        look_inside(sdist, wheel)
        # the core that other tests have is built for one vector level; this one has all that this machine knows
        kernels = ("same_bits", "conversions", "stochastic_rounding")
        tests = [f"tests/kernels/test_{kernel}.py" for kernel in kernels]
        run(sys.executable, *shlex.split(PYTEST), *tests, shown=True, THALWEG_CPU_LIBRARY=str(LIBRARY))
    for name in names or ALONE:
        use(name, {"WHEEL": str(wheel), "SDIST": str(sdist)})
    print("\nenvironments: all passed")


if __name__ == "__main__":
    main(sys.argv[1:])
