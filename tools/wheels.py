"""Build the sdist, and the wheel from it, as they are released; look inside, and use them beside numpy alone.

The native core of the wheel is tested at every vector level. The wheel, and the sdist where there is no compiler, are
installed in empty environments under build/wheels, and tools/smoke.py runs in each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "wheels"
CORE = "thalweg/kernels/cpu/_core" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
LIBRARY = OUT / Path(CORE).name
FALLBACK = "WITHOUT its native CPU core"


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command printed; all of it is shown if it fails."""
    result = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
    return result.stdout


def has_just(names: set[str], expected: set[str], where: Path) -> str:
    assert names == expected, f"{where.name} lacks {expected - names}, and has {names - expected}"
    return f"{where.name}, {len(names)} files"


def sources() -> set[str]:
    """The files under version control; what is new must be added to it before it can be released."""
    git = ["git", "-c", "safe.directory=*", "ls-files"]
    if not (ROOT / ".git").exists():  # a copy: all that is there and not ignored
        run("git", "init", "--quiet", "--bare", OUT / "git")
        git = ["git", f"--git-dir={OUT / 'git'}", "--work-tree=.", "ls-files", "--others", "--exclude-standard"]
    return set(run(*git).splitlines())


def only(pattern: str) -> Path:
    (path,) = OUT.glob(pattern)
    return path


def build() -> str:
    # what does not compile is an error: nothing falls back to a wheel without the native core
    run(sys.executable, "-m", "build", "--config-setting=wheel.cmake=true", "--outdir", OUT, ".")
    return only("*.whl").name


def sdist() -> str:
    with tarfile.open(only("*.tar.gz")) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return has_just(names, sources() | {"PKG-INFO"}, only("*.tar.gz"))


def wheel() -> str:
    """It has the package and its native core, and nothing else; one serves every Python of a platform."""
    path = only("*.whl")
    _, _, python, abi, platform = path.stem.split("-")
    assert (python, abi) == ("py3", "none"), path.name
    assert platform != "any", path.name
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        LIBRARY.write_bytes(archive.read(CORE))
    package = {name.removeprefix("src/") for name in sources() if name.startswith("src/") and not name.endswith(".cpp")}
    return has_just(names, package | {CORE}, path)


def vector_levels() -> str:
    """The same bits at every vector level that this machine has: the core that tests are built with has one of them."""
    env = {**os.environ, "THALWEG_CPU_LIBRARY": str(LIBRARY), "OMP_NUM_THREADS": "1"}
    tests = [f"tests/kernels/test_{name}.py" for name in ("same_bits", "conversions", "stochastic_rounding", "kron")]
    pytest = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses", str(os.cpu_count() or 1)]
    last_line = run(*pytest, "-m", "not nightly and not gpu", *tests, env=env).splitlines()[-1]
    assert "passed" in last_line, last_line
    return last_line


def exports() -> str:
    """The C ABI, and nothing of the standard library, is visible to other libraries in the process."""
    if shutil.which("nm") is None or sys.platform != "linux":
        return "not checked: needs nm"
    names = [line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", LIBRARY).splitlines()]
    foreign = [name for name in names if not name.startswith("thalweg_")]
    assert names, "the library exports nothing"
    assert not foreign, f"the library exports {foreign}"
    return f"{len(names)} symbols"


def install(package: Path, *, compiler: bool) -> str:
    """Install a package beside numpy alone, and step the optimizers there."""
    folder = OUT / ("env" if compiler else "env-bare")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--constraint", "constraints.txt"]
    run(*pip, "numpy")
    env = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX", "THALWEG_CPU_LIBRARY")}
    if not compiler:
        env["PATH"] = str(folder / "bin")  # neither a compiler nor CMake nor Ninja; the last two come from PyPI
    log = run(*pip, "--verbose", package, env=env)
    assert (FALLBACK in log) != compiler, log
    smoke = [python, "-I", ROOT / "tools" / "smoke.py", "native" if compiler else "pure"]
    return run(*smoke, env=env, cwd=folder).splitlines()[-1]


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    steps: dict[str, Callable[[], str]] = {
        "build": build,
        "sdist": sdist,
        "wheel": wheel,
        "exports": exports,
        "vector levels": vector_levels,
        "install": lambda: install(only("*.whl"), compiler=True),
        "install, no compiler": lambda: install(only("*.tar.gz"), compiler=False),
    }
    for name, step in steps.items():
        start = time.perf_counter()
        told = step()
        print(f"passed  {name:<20} {time.perf_counter() - start:6.1f} s  {told}", flush=True)


if __name__ == "__main__":
    main()
