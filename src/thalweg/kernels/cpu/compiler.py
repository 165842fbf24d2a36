"""Native code that the package does not bring: compiled at its first use, if the machine has a compiler, and kept.

What was compiled lies in the user's cache folder, under a name that says what it was made from (the source, the
compiler, the flags) and what it is (a digest of the file). A file that is not what its name says is not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from thalweg.errors import RuleError
from thalweg.kernels.cpu import SUFFIX
from thalweg.kernels.cpu.emit import library_source
from thalweg.kernels.cpu.lines import Function


class Uncompiled(RuleError):
    """Native code of a rule was not compiled: there is no compiler, no folder for it, or it does not compile."""


HEADERS = Path(__file__).with_name("native")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fvisibility=hidden", *(() if sys.platform == "win32" else ("-fPIC",)))
#: What is looked for, after $CXX. GCC does not align vectors of AVX on the stacks of Windows.
COMPILERS = ("clang++",) if sys.platform == "win32" else ("c++", "g++", "clang++")
LIMIT = 300  # seconds


def cache_folder() -> Path:
    """Where compiled code is kept: THALWEG_CACHE, or the folder that the platform has for caches."""
    if folder := os.environ.get("THALWEG_CACHE"):
        return Path(folder)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thalweg"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "thalweg"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thalweg"


@functools.cache
def compiler() -> tuple[str, str] | None:
    """The C++ compiler of this machine, and what it says of its version."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        path = shutil.which(name)
        if path is None:
            continue
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30)
            return path, answer.stdout.splitlines()[0]
    return None


def flags_for(level: str) -> list[str]:
    """The flags of a vector level with which the package's own code is compiled too: the same bits on every one."""
    by_level = dict(line.split(": ", 1) for line in (HEADERS / "flags.txt").read_text(encoding="utf-8").splitlines())
    return [flag for key in ("always", level) for flag in by_level.get(key, "").split()]


def source_of(functions: Sequence[Function]) -> str:
    text = library_source({function.name: function for function in functions})
    return f"{text}\nEXPORTED const Functions* thalweg_functions() {{ return EMITTED; }}\n"


def compile_functions(functions: Sequence[Function], level: str, title: str) -> dict[str, int]:
    """The addresses of functions that the package itself does not have, by name; title: for whom, in errors."""
    headers = [HEADERS / name for name in ("abi.h", "tiles.h", "body.h")]
    library = compile_source(source_of(functions), headers, flags_for(level), f"native code for {title}")
    library.thalweg_functions.restype = ctypes.c_void_p
    first, size = library.thalweg_functions(), 2 * ctypes.sizeof(ctypes.c_void_p)
    return {function.name: first + index * size for index, function in enumerate(functions)}


def compile_source(source: str, headers: Sequence[Path], more_flags: Sequence[str], title: str) -> ctypes.CDLL:
    """A library of this source, compiled now or before. headers: those that it includes. title: what it is, in errors.

    Raises Uncompiled.
    """
    available = compiler()
    if available is None:
        raise Uncompiled(f"{title} must be compiled, and no C++ compiler was found: install g++ or clang, or set CXX")
    path, version = available
    flags = (*FLAGS, *more_flags)
    included = "".join(header.read_text(encoding="utf-8") for header in headers)
    made_from = "\n".join([source, included, version, " ".join(flags), platform.machine()])
    key = hashlib.sha256(made_from.encode()).hexdigest()[:24]
    try:
        return load_library(find_kept(key) or build(key, source, path, flags, title))
    except OSError as error:
        raise Uncompiled(f"{title} cannot be kept or loaded: {error}") from error


_loaded: dict[Path, ctypes.CDLL] = {}


def load_library(path: Path) -> ctypes.CDLL:
    if path not in _loaded:  # never let go: tables point into it
        _loaded[path] = ctypes.CDLL(str(path))
    return _loaded[path]


def find_kept(key: str) -> Path | None:
    """The library that was compiled under this key before, if its file is unchanged."""
    folder = cache_folder()
    if not is_own(folder):
        return None
    for path in sorted(folder.glob(f"{key}-*{SUFFIX}")):
        if is_own(path) and path.stem == f"{key}-{digest_of(path)}":
            return path
    return None


def is_own(path: Path) -> bool:
    """Whether this user owns it and no other user may write to it."""
    try:
        status = path.stat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def build(key: str, source: str, path: str, flags: Sequence[str], title: str) -> Path:
    """Compile in a folder of one's own, and move the result into its place: others see all of it or nothing."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_own(folder):
        raise Uncompiled(
            f"{title} is not kept in {folder}, which others may write to: make it your own "
            "(chmod go-w), or set THALWEG_CACHE to a folder that is"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as work:
        text, library = Path(work) / "rule.cpp", Path(work) / f"rule{SUFFIX}"
        text.write_text(source, encoding="utf-8")
        try:
            process = subprocess.run(
                [path, *flags, f"-I{HEADERS}", str(text), "-o", str(library)],
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise Uncompiled(f"{title}: {path} needed more than {LIMIT} seconds") from None
        if process.returncode != 0:
            raise Uncompiled(f"{title} does not compile: {process.stderr.strip()[:500]}")
        library.chmod(0o700)
        final = folder / f"{key}-{digest_of(library)}{SUFFIX}"
        try:
            library.replace(final)
        except PermissionError:  # Windows replaces no file that a process has loaded
            if find_kept(key) is None:
                raise
    return final
