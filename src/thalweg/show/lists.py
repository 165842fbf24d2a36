"""Lists on the command line: names and numbers between commas."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from thalweg.errors import CommandError


def chosen(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """The names in a list such as ``lamb,kron``, as they are spelt in ``known``; all of them for None.

    >>> chosen("lamb, kron", ["LARS", "LAMB", "Kron"], "optimizer")
    ['LAMB', 'Kron']
    """
    if text is None:
        return list(known)
    by_key = {name.lower(): name for name in known}
    found: list[str] = []
    for word in words(text, what):
        if word.lower() not in by_key:
            raise CommandError(f"there is no {what} {word!r}: {suggestion(word, known)}")
        if by_key[word.lower()] not in found:
            found.append(by_key[word.lower()])
    return found


def counts(text: str, what: str) -> list[int]:
    """Whole numbers from 1 on, each once."""
    found: list[int] = []
    for word in words(text, what):
        if not word.isdecimal() or int(word) < 1:
            raise CommandError(f"{what} must be whole numbers from 1 on, such as 128,512, got {word!r}")
        if int(word) not in found:
            found.append(int(word))
    return found


def words(text: str, what: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise CommandError(f"{what}: nothing is left of {text!r}")
    return found


def suggestion(word: str, known: Iterable[str]) -> str:
    """What to say to whoever typed a name that is not there."""
    by_key = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_key, n=1)
    return f"did you mean {by_key[close[0]]!r}?" if close else f"there are {', '.join(by_key.values())}"
