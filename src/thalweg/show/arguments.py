"""What people write on the command line: lists, options, dtypes and files."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from thalweg.dtypes import ALIASES, DTYPES, spelt_dtype
from thalweg.errors import CommandError
from thalweg.given import hint_for

#: How other languages write what Python writes otherwise.
WORDS = {"true": True, "false": False, "null": None, "none": None}


def split_words(text: str, what: str) -> list[str]:
    """The words between commas. what: the option that takes them."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise CommandError(f"{what}: nothing is left of {text!r}")
    return words


def suggest(word: str, known: Iterable[str]) -> str:
    """A suggestion for a name that does not exist."""
    by_key = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_key, n=1)
    return f"did you mean {by_key[close[0]]!r}?" if close else f"there are {', '.join([*by_key.values()][:40])}"


class Given(NamedTuple):
    """An option as it was given; the owner is "" where it is for all."""

    owner: str
    name: str
    value: Any

    @property
    def spelt(self) -> str:
        return f"{self.owner.lower()}.{self.name}" if self.owner else self.name


def check_options(options: Iterable[Given], known: Mapping[str, Iterable[str]]) -> None:
    """Refuse options for an optimizer that is not here, and those that none here has. known: by optimizer, its options.

    >>> check_options([Given("", "eps", 1)], {"SGD": ["momentum"]})
    Traceback (most recent call last):
    thalweg.errors.CommandError: no optimizer here has an option 'eps': there are momentum
    """
    names = sorted({name for accepted in known.values() for name in accepted})
    for option in options:
        owner, name, _ = option
        if owner and owner not in known:
            raise CommandError(
                f"the option {option.spelt} is for {owner}, which is not among the optimizers: {', '.join(known)}"
            )
        if not owner and name not in names:
            hint = hint_for("", name, names, cutoff=0.6) or f"there are {', '.join(names) or 'none'}"
            raise CommandError(f"no optimizer here has an option {name!r}: {hint}")


def parse_option(text: str) -> Given:
    """An option as the command line has it. The owner's name may have dots itself; dtypes may be called bf16.

    >>> parse_option("kron.max_size_dense=2048")
    Given(owner='kron', name='max_size_dense', value=2048)
    >>> parse_option("betas=[0.9, 0.95]")
    Given(owner='', name='betas', value=(0.9, 0.95))
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    owner, dot, name = name.rpartition(".")
    if not equals or not name.isidentifier() or not value or (dot and not owner):
        raise CommandError(f"--option {text!r} must be NAME=VALUE, such as weight_decay=0.01")
    literal = parse_literal(value)
    return Given(owner, name, spelt_dtype(literal) if name.endswith("dtype") else literal)


def parse_literal(text: str) -> Any:
    """A value as Python writes it, lists as tuples, and also ``true`` and ``null``; whatever is none is text.

    >>> [parse_literal(text) for text in ("0.01", "true", "None", "[0.9, None]", "bfloat16", "'2'")]
    [0.01, True, None, (0.9, None), 'bfloat16', '2']
    """
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return freeze(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def freeze(value: Any) -> Any:
    """Lists as tuples, within lists too."""
    return tuple(map(freeze, value)) if isinstance(value, list) else value


def parse_dtype(name: str) -> str:
    """The name of a dtype, also of one that is called bf16."""
    dtype: str = spelt_dtype(name)
    if dtype not in DTYPES:
        known = ", ".join(f"{known} (or {', '.join(ALIASES[known])})" for known in DTYPES)
        raise CommandError(f"there is no dtype {name!r}: there are {known}")
    return dtype


def check_file(path: Path) -> None:
    """Refuse what is not a plain file: a pipe or a device would be read for ever."""
    if not path.is_file():
        raise CommandError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
