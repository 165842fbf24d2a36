"""The rules that are compared, and how many bytes each of them must move at least."""

from __future__ import annotations

from dataclasses import dataclass

#: Statistics are kept in float32 by all rules, whatever the parameters are stored in.
STATE_BYTES = 4


@dataclass(frozen=True)
class Rule:
    """How often a step must touch each number in memory, if tensors are larger than the caches."""

    title: str
    #: How many times each parameter or its gradient is read or written; None: arithmetic is the limit, not memory.
    weights: int | None
    #: How many times each number of the state is.
    state: int
    why: str

    def floor(self, itemsize: int) -> int | None:
        """Bytes for each parameter, where parameters and gradients have so many bytes each."""
        return None if self.weights is None else self.weights * itemsize + self.state * STATE_BYTES


RULES = {
    "lamb": Rule("LAMB", 4, 6, "read p, g, m, v and write m, v; then, the ratio known, read p, m, v and write p"),
    "lars": Rule("LARS", 5, 2, "read p, g for the norms; then read p, g, m and write p, m"),
    "adafactor": Rule("Adafactor", 6, 0, "read g, p for rows, columns and RMS(p); g for RMS(u); then g, p and write p"),
    "kron": Rule("Kron", None, 0, "matrix products take longer than memory does"),
    "adamw": Rule("AdamW", 3, 4, "read p, g, m, v and write p, m, v"),
    "sgd": Rule("SGD", 3, 2, "read p, g, m and write p, m"),
}
#: What is compared where nothing else is said.
USUAL = ("lamb", "lars", "adafactor")
