"""Dtypes as people call them: one table for every command that takes one."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.dtypes import ALIASES, DTYPES, spelt_dtype
from thalweg.errors import CommandError

__all__ = ["known_dtype", "listed_dtypes", "spelt_dtype"]


def known_dtype(name: str, known: Sequence[str] = tuple(DTYPES)) -> str:
    """The dtype that is meant, one of those that are known."""
    found: str = spelt_dtype(name)
    if found not in known:
        raise CommandError(f"there is no dtype {name!r}: {listed_dtypes(known)}")
    return found


def listed_dtypes(known: Sequence[str] = tuple(DTYPES)) -> str:
    """What there is, for whoever typed something else.

    >>> listed_dtypes(["bfloat16", "float16"])
    'there are bfloat16 (or bf16), float16 (or fp16, f16, half)'
    """
    each = (f"{name} (or {', '.join(ALIASES[name])})" for name in known)
    return f"there are {', '.join(each)}"
