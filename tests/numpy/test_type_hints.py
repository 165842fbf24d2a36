"""Annotations can be asked for at run time, as documentation tools do. test_signatures.py has those of options."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from typing import Any

import pytest


def functions(module: Any) -> list[Any]:
    """Every public function of a module, and every method of its classes that the module itself wrote."""
    found = []
    for public in module.__all__:
        value = getattr(module, public)
        members = [m for _, m in inspect.getmembers(value)] if inspect.isclass(value) else [value]
        members += [m.fget for m in members if isinstance(m, property)]
        found += [f for f in members if inspect.isfunction(f) and f.__module__.startswith("thalweg.")]
    return found


@pytest.mark.parametrize("front_end", ["thalweg.numpy", "thalweg.optax"])
def test_hints_can_be_asked_for(front_end: str) -> None:
    found = functions(pytest.importorskip(front_end))
    assert len(found) > 20
    for function in found:
        assert isinstance(typing.get_type_hints(function), dict)


@pytest.mark.parametrize("extensions", ["None", "types.SimpleNamespace(Unpack=Unpack)"])
def test_hints_work_where_typing_has_no_unpack(extensions: str) -> None:
    """As on Python 3.10, without typing_extensions and with it."""
    program = (
        "import sys, types, typing\n"
        "Unpack = typing.__dict__.pop('Unpack', typing.List)\n"
        f"sys.modules['typing_extensions'] = {extensions}\n"
        "import thalweg.numpy\n"
        "assert typing.get_type_hints(thalweg.numpy.LAMB.__init__)['trust'] is bool\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
