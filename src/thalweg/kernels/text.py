"""What emitters of C++ and of Triton write alike."""

from __future__ import annotations

import re
from collections.abc import Iterable

from thalweg.programs.graph import Value

#: Operations that both languages have.
ARITHMETIC = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}"}


def indented(lines: Iterable[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def block(lines: Iterable[str], by: int) -> str:
    return "\n".join(indented(lines, by))


def summand(value: Value, x: str) -> str:
    """What is added up for a reduction of x."""
    return f"{x} * {x}" if value.is_squared else x


def functions_in(texts: Iterable[str]) -> set[str]:
    """The functions that these call: a rule may call a value the same."""
    return {name for text in texts for name in re.findall(r"(?<![\w.])[a-z]\w*(?=[<(])", text)}
