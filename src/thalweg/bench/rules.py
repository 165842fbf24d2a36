"""The rules that are compared, and how many bytes each of them must move at least."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.plan.costs import bytes_moved
from thalweg.plan.models import Model


@dataclass(frozen=True)
class Rule:
    """What it is called, and why a step moves what it does, if tensors are larger than the caches."""

    #: As in plans and pictures.
    title: str
    why: str
    #: Whether memory is what limits it; else arithmetic does.
    moves: bool = True


RULES = {
    "lamb": Rule("LAMB", "read p, g, m, v and write m, v; then, the ratio known, read p, m, v and write p"),
    "lars": Rule("LARS", "read p, g for the norms; then read p, g, m and write p, m"),
    "adafactor": Rule(
        "Adafactor",
        "matrices: read g, p for rows, columns and RMS(p), g for RMS(u), then g, p and write p; "
        "others: read g, p, v and write v, then read g, p, v and write p",
    ),
    "kron": Rule("Kron", "matrix products take longer than memory does", moves=False),
    "adamw": Rule("AdamW", "read p, g, m, v and write p, m, v"),
    "sgd": Rule("SGD", "read p, g, m and write p, m"),
}
#: What is compared where nothing else is said.
USUAL = ("lamb", "lars", "adafactor")


def floor(rule: str, model: Model) -> int | None:
    """Bytes that a step of the whole model must move; None where that says nothing about its time.

    >>> from thalweg.plan.models import builtin
    >>> gpt2 = builtin("gpt2")
    >>> [round(floor(rule, gpt2) / gpt2.parameters, 1) for rule in ("lamb", "lars", "adafactor", "adamw", "sgd")]
    [40.0, 28.0, 24.0, 28.0, 20.0]
    """
    if not RULES[rule].moves:
        return None
    return sum(bytes_moved(RULES[rule].title, tensor) for tensor in model.tensors)
