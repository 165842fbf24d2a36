"""Run the kernels' tests on a native core built with the address and undefined-behaviour sanitizers of GCC.

python tools/sanitize.py [ARGUMENTS OF PYTEST]    build in build/sanitize, prove that mistakes are caught, run the tests
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "sanitize"
CXX = os.environ.get("CXX", "g++")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
#: Mistakes, and what the sanitizers must say of each.
MISTAKES = r"""
#include <cstdlib>
extern "C" void overflow(int n) { static_cast<volatile char*>(std::malloc(n))[n] = 1; }
extern "C" int shift(int n) { return 1 << n; }
"""
EXPECTED = {"overflow": "heap-buffer-overflow", "shift": "shift exponent 40 is too large"}


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment() -> dict[str, str]:
    # the sanitizer must be in the process before Python is, and looks for exceptions of libstdc++ when it starts
    libraries = [output(CXX, f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so.6")]
    if not all(map(os.path.isabs, libraries)):
        raise SystemExit(f"sanitize: {CXX} has no libasan; install GCC's sanitizers (on Debian they come with g++)")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python itself does not free everything at exit
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python's own allocator hands out parts of large blocks, whose ends the sanitizer cannot see
        "PYTHONMALLOC": "malloc",
        **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


def check_mistakes_are_caught() -> None:
    source, library = OUT / "mistakes.cpp", OUT / "mistakes.so"
    source.write_text(MISTAKES)
    subprocess.run([CXX, *FLAGS.split(), "-shared", "-fPIC", source, "-o", library], check=True)
    for mistake, expected in EXPECTED.items():
        call = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).{mistake}(40)"]
        result = subprocess.run(call, env=environment(), capture_output=True, text=True, check=False)
        if result.returncode == 0 or expected not in result.stderr:
            raise SystemExit(f"sanitize: the sanitizers did not catch {mistake!r}:\n{result.stderr}")


def build() -> Path:
    """The native core, through the same build as always but for the flags."""
    settings = {
        "wheel.cmake": "true",
        "build-dir": str(OUT / "core"),
        "cmake.build-type": "Debug",
        "cmake.define.CMAKE_CXX_FLAGS_DEBUG": FLAGS,
        "install.strip": "false",
    }
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    pip += [f"--config-setting={key}={value}" for key, value in settings.items()]
    subprocess.run([*pip, "--wheel-dir", OUT, "."], cwd=ROOT, env={**os.environ, "CXX": CXX}, check=True)
    return OUT / "core" / "_core.so"


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    check_mistakes_are_caught()
    env = {**environment(), "THALWEG_CPU_LIBRARY": str(build())}
    # without it, tests would pass on other engines and show nothing
    subprocess.run(
        [sys.executable, "-c", "from thalweg.kernels.cpu import library; library.load()"], env=env, check=True
    )
    # the report goes to the real stderr: pytest would keep it, and end before it could show it
    pytest = [sys.executable, "-m", "pytest", "--quiet", "--capture=sys", "-p", "no:cacheprovider"]
    raise SystemExit(subprocess.run([*pytest, *(sys.argv[1:] or ["tests/kernels"])], cwd=ROOT, env=env).returncode)
