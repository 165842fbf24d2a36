"""Options on the command line: ``NAME=VALUE`` for all that have it, ``OWNER.NAME=VALUE`` for one."""

from __future__ import annotations

import ast
import json
from typing import Any, NamedTuple

from thalweg.errors import CommandError
from thalweg.show.dtypes import spelt_dtype

#: How other languages write what Python writes otherwise.
WORDS = {"true": True, "false": False, "null": None, "none": None}


class Given(NamedTuple):
    """An option as it was given; the owner is "" where it is for all."""

    owner: str
    name: str
    value: Any


def parsed_option(text: str) -> Given:
    """An option as the command line has it. The owner's name may have dots itself; dtypes may be called bf16.

    >>> parsed_option("kron.max_size_dense=2048")
    Given(owner='kron', name='max_size_dense', value=2048)
    >>> parsed_option("betas=[0.9, 0.95]")
    Given(owner='', name='betas', value=(0.9, 0.95))
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    owner, dot, name = name.rpartition(".")
    if not equals or not name.isidentifier() or not value or (dot and not owner):
        raise CommandError(f"--option {text!r} must be NAME=VALUE, such as weight_decay=0.01")
    found = literal(value)
    return Given(owner, name, spelt_dtype(found) if name.endswith("dtype") else found)


def literal(text: str) -> Any:
    """A value as Python or JSON writes it, lists as tuples; whatever is neither is text.

    >>> [literal(text) for text in ("0.01", "true", "None", "[0.9, null]", "bfloat16", "'2'")]
    [0.01, True, None, (0.9, None), 'bfloat16', '2']
    """
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for read in (ast.literal_eval, json.loads):
        try:
            return frozen(read(text))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value
