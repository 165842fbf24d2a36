"""Run the kernels' tests on a native core built with the address and undefined-behaviour sanitizers of GCC.

python tools/sanitize.py               build in build/sanitize, prove that errors are caught, run tests/kernels
python tools/sanitize.py --self-test   only prove it
Anything else is passed to pytest.
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

#: What the sanitizers must say of each mistake in MISTAKES.
EXPECTED = {"overflow": "heap-buffer-overflow", "shift": "shift exponent 40 is too large"}
MISTAKES = r"""
#include <cstdlib>
extern "C" int overflow(int n) {
    volatile char* memory = static_cast<char*>(std::malloc(n));
    memory[n] = 1;
    std::free(const_cast<char*>(memory));
    return 0;
}
extern "C" int shift(int n) { return 1 << n; }
"""


def runtime(name: str) -> str:
    """A library of the compiler's run time, which must be in the process before Python is."""
    command = [CXX, f"-print-file-name={name}"]
    try:
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"sanitize: {' '.join(command)} failed ({error}); install g++, or set CXX to it") from None
    if not Path(path).is_absolute():
        raise SystemExit(f"sanitize: {CXX} has no {name}; install GCC's sanitizers (on Debian they come with g++)")
    return str(Path(path).resolve())


def environment() -> dict[str, str]:
    return {
        **os.environ,
        # libstdc++ too: the sanitizer looks for its exceptions when it starts, long before numpy or torch bring it
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        # Python itself does not free everything at exit
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python's own allocator hands out parts of large blocks, whose ends the sanitizer cannot see
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def self_test() -> None:
    """A check that cannot fail is worth nothing: make mistakes, and see them caught."""
    env = environment()
    source, library = OUT / "mistakes.cpp", OUT / "mistakes.so"
    source.write_text(MISTAKES)
    subprocess.run([CXX, *FLAGS.split(), "-shared", "-fPIC", source, "-o", library], check=True)
    for mistake, expected in EXPECTED.items():
        call = f"import ctypes; ctypes.CDLL({str(library)!r}).{mistake}(40)"
        result = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True, check=False)
        if result.returncode == 0 or expected not in result.stderr:
            raise SystemExit(f"sanitize: the sanitizers did not catch {mistake!r}:\n{result.stderr}")
        sys.stdout.write(f"sanitize: caught as it should be: {expected}\n")
    sys.stdout.flush()


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
    chosen = [f"--config-setting={key}={value}" for key, value in settings.items()]
    command = [*pip, *chosen, "--wheel-dir", str(OUT), "."]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CXX": CXX}, check=True)
    return OUT / "core" / "_core.so"


def main(arguments: list[str]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    self_test()
    if "--self-test" in arguments:
        return 0
    env = {**environment(), "THALWEG_CPU_LIBRARY": str(build())}
    # without it, tests would pass on other engines and show nothing
    load = "from thalweg.kernels.cpu import library; library.load()"
    subprocess.run([sys.executable, "-c", load], env=env, check=True)
    # the report goes to the real stderr: pytest would keep it, and end before it could show it
    pytest = [sys.executable, "-m", "pytest", "--quiet", "--capture=sys", "-p", "no:cacheprovider"]
    return subprocess.run([*pytest, *(arguments or ["tests/kernels"])], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
