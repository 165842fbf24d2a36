"""The native library: found, loaded and checked on first use."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

from thalweg.errors import FallbackWarning, Refused, warn
from thalweg.kernels.cpu import SUFFIX, structs
from thalweg.kernels.cpu.lines import Function

BESIDE = Path(__file__).with_name(f"_core{SUFFIX}")


class Unavailable(Refused):
    """There is no native library here; the message says why."""


def load() -> ctypes.CDLL:
    """The library. Raises Unavailable if there is none that can be used."""
    library = _attempt()
    if isinstance(library, str):
        raise Unavailable(library)
    return library


def is_here() -> bool:
    """Whether there is a library."""
    return not isinstance(_attempt(), str)


@functools.cache
def with_lock() -> ctypes.PyDLL:
    """The same library, for functions that use Python objects: they are called with the interpreter's lock held."""
    library = ctypes.PyDLL(load()._name)
    library.thalweg_describe.restype = c_int64
    library.thalweg_describe.argtypes = (
        *(ctypes.py_object, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32),
    )
    return library


@functools.cache
def warn_once(reason: str) -> None:
    warn(
        f"thalweg's native CPU core is not available ({reason}): steps on the CPU take several times as long. "
        "Install a C++ compiler, then build it with pip install --force-reinstall --no-cache-dir thalweg",
        FallbackWarning,
    )


@functools.cache
def _attempt() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = Path(os.environ.get("THALWEG_CPU_LIBRARY") or BESIDE)
    if not path.exists():
        return f"it was not built: there is no {path.name} in {path.parent}"
    try:
        library = ctypes.CDLL(str(path))
        declare(library)
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}"
    sizes = [library.thalweg_sizeof(i) for i in range(len(structs.ALL))]
    if sizes != [ctypes.sizeof(struct) for struct in structs.ALL]:
        return f"{path.name} belongs to another version of thalweg"
    wanted = os.environ.get("THALWEG_CPU_LEVEL")
    if wanted and wanted not in levels(library):
        return f"THALWEG_CPU_LEVEL must be one of {', '.join(levels(library))} on this machine, got {wanted!r}"
    if wanted:
        library.thalweg_choose_level(levels(library).index(wanted))
    return library


def declare(library: ctypes.CDLL) -> None:
    library.thalweg_sizeof.restype, library.thalweg_sizeof.argtypes = c_int64, (c_int32,)
    library.thalweg_levels.restype, library.thalweg_levels.argtypes = c_int32, ()
    library.thalweg_level.restype, library.thalweg_level.argtypes = c_char_p, (c_int32,)
    library.thalweg_choose_level.restype, library.thalweg_choose_level.argtypes = c_int32, (c_int32,)
    library.thalweg_borrow_threads.restype, library.thalweg_borrow_threads.argtypes = None, (c_void_p, c_void_p)
    library.thalweg_find.restype, library.thalweg_find.argtypes = c_int32, (c_char_p,)
    library.thalweg_layout.restype = c_int64
    library.thalweg_layout.argtypes = (c_void_p, c_void_p, c_int64, c_int32)
    library.thalweg_point.restype = None
    library.thalweg_point.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    library.thalweg_counts.restype, library.thalweg_counts.argtypes = c_int32, (c_void_p, c_int64, c_void_p)
    library.thalweg_count.restype, library.thalweg_count.argtypes = None, (c_void_p, c_int64, c_char_p)
    # its arguments are declared where it is called with the interpreter's lock
    library.thalweg_describe.restype = c_int64
    library.thalweg_run.restype = None
    library.thalweg_run.argtypes = (
        *(c_void_p, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_int64, c_void_p),
        *(c_int32, c_int32, c_int32),
    )
    library.thalweg_squares.restype = None
    library.thalweg_squares.argtypes = (c_void_p, c_int64, c_void_p, c_int32)
    library.thalweg_normal.restype = None
    library.thalweg_normal.argtypes = (c_void_p, c_int32, c_int64, c_int64, c_uint32, c_uint32, c_uint32, c_int32)


def levels(library: ctypes.CDLL) -> list[str]:
    """The vector widths that this machine can run, by name; the last is the widest."""
    return [library.thalweg_level(i).decode() for i in range(library.thalweg_levels())]


def level_used() -> str | None:
    """The vector width that steps use, by its name among ``levels``; None without a library."""
    library = _attempt()
    if isinstance(library, str):
        return None
    return os.environ.get("THALWEG_CPU_LEVEL") or levels(library)[-1]


def functions_of(functions: Sequence[Function], title: str) -> dict[str, tuple[int, int | None]]:
    """Where each emitted function is: its place in the library, or the address of what was compiled for a rule."""
    library = load()
    places = {function.name: library.thalweg_find(function.name.encode()) for function in functions}
    missing = [function for function in functions if places[function.name] < 0]
    table: dict[str, tuple[int, int | None]] = {name: (place, None) for name, place in places.items()}
    if missing:
        from thalweg.kernels.cpu.compiler import compile_functions

        addresses = compile_functions(missing, level_used() or "", title)
        table.update({name: (-1, address) for name, address in addresses.items()})
    return table


@functools.cache
def borrow_openmp(folders: tuple[str, ...]) -> bool:
    """Run on the threads of the OpenMP library that was loaded from one of these folders, so that no two pools compete.

    Whether there is one: elsewhere than on Linux, or in a forked child, whose parent's threads do not exist, the
    library uses a pool of its own.
    """
    if _forked:
        return False
    try:
        maps = Path("/proc/self/maps").read_text()
        loaded = [line.split(maxsplit=5)[5] for line in maps.splitlines() if "omp" in line and ".so" in line]
        names = [path for path in loaded if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
        openmp = ctypes.CDLL(next(path for path in names if path.startswith(folders)))
        run_all, count = (ctypes.cast(openmp[name], c_void_p) for name in ("GOMP_parallel", "omp_get_num_threads"))
    except (OSError, StopIteration, AttributeError, IndexError):
        return False
    load().thalweg_borrow_threads(run_all, count)
    return True


#: Whether this process is a fork of one that had loaded this module.
_forked: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))
