"""Build the package as it is released, look inside, and use it where there is nothing but numpy.

Built are an sdist, a wheel from the source tree and a wheel from that sdist. The native core of the first is tested at
every vector level. Both wheels and, without a compiler, the sdist are installed in empty environments under
build/wheels, and tools/smoke.py runs in each.

python tools/wheels.py          all of it
python tools/wheels.py --tree   what is built from the source tree, without building from the sdist
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
#: Here what does not compile is an error: nothing falls back to a wheel without the native core.
NATIVE = "--config-setting=wheel.cmake=true"
CORE = "thalweg/kernels/cpu/_core" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
FALLBACK = "WITHOUT its native CPU core"


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command printed; all of it is shown if it fails."""
    result = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\n{result.stdout}")
    return result.stdout


def same(found: set[str], expected: set[str], where: str) -> None:
    missing, stray = sorted(expected - found), sorted(found - expected)
    assert not missing, f"{where} lacks {missing}"
    assert not stray, f"{where} has what it should not: {stray}"


def only(folder: str, pattern: str) -> Path:
    (path,) = (OUT / folder).glob(pattern)
    return path


def sources() -> set[str]:
    """The files under version control; what is new must be added to it before it can be released."""
    git = ["git", "-c", "safe.directory=*", "ls-files"]
    if not (ROOT / ".git").exists():  # a copy: all that is there and not ignored
        run("git", "init", "--quiet", "--bare", OUT / "git")
        git = ["git", f"--git-dir={OUT / 'git'}", "--work-tree=.", "ls-files", "--others", "--exclude-standard"]
    return set(run(*git).splitlines())


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist() -> str:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", OUT / "sdist", ".")
    path = only("sdist", "*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    same(names, sources() | {"PKG-INFO"}, "the sdist")
    return path.name


def check_wheel(wheel: Path) -> str:
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none"), wheel.name
    assert platform != "any", wheel.name
    names = set(contents(wheel))
    package = {name.removeprefix("src/") for name in sources() if name.startswith("src/") and not name.endswith(".cpp")}
    same({name for name in names if ".dist-info/" not in name}, package | {CORE}, wheel.name)
    return wheel.name


def wheel_from_tree() -> str:
    run(sys.executable, "-m", "build", "--wheel", NATIVE, "--outdir", OUT / "tree", ".")
    return check_wheel(only("tree", "*.whl"))


def wheel_from_sdist() -> str:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", NATIVE, "--wheel-dir", OUT / "again", only("sdist", "*.tar.gz"))
    wheel = only("again", "*.whl")
    first, second = contents(only("tree", "*.whl")), contents(wheel)
    same(set(second), set(first), "the wheel from the sdist")
    differ = [name for name in first if first[name] != second[name] and name != CORE and not name.endswith("/RECORD")]
    assert not differ, f"the two wheels differ in {differ}"
    return check_wheel(wheel)


def take_core() -> Path:
    """The native core of the wheel, as a file."""
    library = OUT / "core" / Path(CORE).name
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(contents(only("tree", "*.whl"))[CORE])
    return library


def vector_levels() -> str:
    """The same bits at every vector level that this machine has: the core that tests are built with has one of them."""
    env = {**os.environ, "THALWEG_CPU_LIBRARY": str(take_core()), "OMP_NUM_THREADS": "1"}
    tests = [f"tests/kernels/test_{name}.py" for name in ("same_bits", "conversions", "stochastic_rounding", "kron")]
    pytest = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses", str(os.cpu_count() or 1)]
    said = run(*pytest, "-m", "not nightly and not gpu", *tests, env=env).splitlines()[-1]
    assert "passed" in said, said
    return said


def exports() -> str:
    """The C ABI, and nothing of the standard library, is visible to other libraries in the process."""
    if shutil.which("nm") is None or sys.platform != "linux":
        return "not checked: needs nm"
    names = [line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", take_core()).splitlines()]
    foreign = [name for name in names if not name.startswith("thalweg_")]
    assert names, "the library exports nothing"
    assert not foreign, f"the library exports {foreign}"
    return f"{len(names)} symbols"


def install(name: str, package: Path, *, compiler: bool = True) -> str:
    """Install a package beside numpy alone, and step the optimizers there."""
    folder = OUT / f"env-{name}"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--constraint", "constraints.txt"]
    run(*pip, "numpy")
    env = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX", "THALWEG_CPU_LIBRARY")}
    if not compiler:
        env["PATH"] = str(folder / "bin")  # neither a compiler nor CMake nor Ninja; the last two come from PyPI
    log = run(*pip, "--verbose", package, env=env)
    assert (FALLBACK in log) != compiler, log
    expected = "native" if compiler else "pure"
    return run(python, "-I", ROOT / "tools" / "smoke.py", expected, env=env, cwd=folder).splitlines()[-1]


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--tree"]):
        sys.stdout.write(__doc__ or "")
        return 2
    shutil.rmtree(OUT, ignore_errors=True)
    steps: dict[str, Callable[[], str]] = {
        "sdist": sdist,
        "wheel from the tree": wheel_from_tree,
        "wheel from the sdist": wheel_from_sdist,
        "exports": exports,
        "vector levels": vector_levels,
        "install: tree": lambda: install("tree", only("tree", "*.whl")),
        "install: sdist": lambda: install("sdist", only("again", "*.whl")),
        "install: no compiler": lambda: install("bare", only("sdist", "*.tar.gz"), compiler=False),
    }
    if arguments:
        for name in ("wheel from the sdist", "install: sdist", "install: no compiler"):
            del steps[name]
    failed = False
    sys.stdout.write("== wheels\n")
    for name, step in steps.items():
        start = time.perf_counter()
        try:
            said = step()
        except Exception as error:
            said, failed = f"{type(error).__name__}: {error}", True
        seconds = time.perf_counter() - start
        sys.stdout.write(f"{'FAILED' if failed else 'passed'}  {name:<20} {seconds:6.1f} s  {said}\n")
        sys.stdout.flush()
        if failed:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
