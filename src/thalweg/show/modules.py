"""Modules of the user's: imported as ``python -m`` would find them, and blamed where they fail."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import operator
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thalweg
from thalweg.errors import CommandError
from thalweg.show.arguments import suggest

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


def import_attribute(reference: str, what: str, example: str, is_one: Callable[[Any], bool]) -> tuple[Any, Any]:
    """What ``module:attribute`` names, and its module. what: what it should be; is_one: whether a value is such."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise CommandError(f"{reference!r} is not a {what}: write module:attribute, such as {example}")
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise CommandError(f"{name!r} is not a module name: write it as for an import, such as {example}")
    module = import_user_module(name)
    try:
        return operator.attrgetter(attribute)(module), module
    except AttributeError:
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        known = [key for key, value in public.items() if is_one(value)]
        hint = suggest(attribute, known) if known else f"it has no {what} at all"
        raise CommandError(f"module {name!r} has no {attribute!r}: {hint}") from None


def digest(*parts: bytes) -> str:
    """A short text that differs for other bytes."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()[:12]


def digest_source(module: Any) -> str:
    """The digest of a module's source, by which a race knows that runs are of another version; "" without source."""
    try:
        return digest(inspect.getsource(module).encode())
    except (OSError, TypeError):
        return ""


def locate_error(error: BaseException) -> str:
    """Where an error was raised: the last line of the user's own code, which is neither ours nor a library's."""
    library_folders = [str(Path(thalweg.__file__).parent), *(sysconfig.get_path(kind) for kind in LIBRARIES)]
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in library_folders):
            place = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def describe_failure(error: BaseException) -> str:
    """Where an error was raised, and what it is: the end of a sentence that says what failed."""
    return f"{locate_error(error)}: {describe_error(error)}"


def describe_error(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
