"""Modules of the user's: imported as ``python -m`` would find them, and blamed where they fail."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import thalweg
from thalweg.errors import CommandError

#: Where Python keeps modules that are not the user's.
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")


def import_user_module(name: str) -> Any:
    """A module of the user's, from the current folder too, as ``python -m`` would find it."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise CommandError(f"there is no module {name!r} in {here} or among the installed ones") from None
        raise CommandError(f"module {name!r} cannot be imported{describe_failure(error)}") from error
    except Exception as error:
        raise CommandError(f"module {name!r} cannot be imported{describe_failure(error)}") from error
    finally:
        sys.path.remove(here)


def digest(*parts: bytes) -> str:
    """Short, and another one for other bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:12]


def digest_source(module: Any) -> str:
    """Of a module's source: when it changes, its runs are done again."""
    try:
        return digest(inspect.getsource(module).encode())
    except (OSError, TypeError):
        return ""


def locate_error(error: BaseException) -> str:
    """Where an error was raised: the last line of the user's own code, which is neither ours nor a library's."""
    not_theirs = [str(Path(thalweg.__file__).parent), *(sysconfig.get_path(kind) for kind in LIBRARIES)]
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in not_theirs):
            place = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def describe_failure(error: BaseException) -> str:
    """Where it was raised, and what it is: the end of a sentence that says what failed."""
    return f"{locate_error(error)}: {describe_error(error)}"


def describe_error(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
