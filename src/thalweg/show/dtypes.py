"""Dtypes as people call them: one table for every command that takes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError

#: What else a dtype is called, in small letters. ``float`` is not here: it has 32 bits in torch and 64 in numpy.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "float32": ("fp32", "f32"),
    "float64": ("fp64", "f64", "double"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
}
NAMES: Mapping[str, str] = {alias: name for name in DTYPES for alias in (name, *ALIASES[name])}


def spelt_dtype(name: Any) -> Any:
    """The dtype that is meant, as it is spelt here; what is not known is left as it is.

    >>> spelt_dtype("BF16"), spelt_dtype("torch.float16"), spelt_dtype("int8")
    ('bfloat16', 'float16', 'int8')
    """
    return NAMES.get(name.strip().lower().removeprefix("torch."), name) if isinstance(name, str) else name


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
