"""The average of the parameters over the steps of training (Polyak, Juditsky 1992; an EMA as in Kingma, Ba 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thalweg.arrays import A, Scalar, Shape, Space, State, Value
from thalweg.rules.around import AVERAGE, Around
from thalweg.rules.blocks import average
from thalweg.rules.checks import require
from thalweg.rules.entries import Copy, Entry
from thalweg.rules.options import option


@dataclass(frozen=True, kw_only=True)
class Averaged(Around):
    """An average of the parameters as each step finds them.

    So it is of the weights that really were, whatever became of a step when it was applied: rounded, scaled by what
    follows in a chain, clamped by the caller. The state has the average of the parameters before its last step.
    """

    averaged: Scalar | Literal["mean"] | None = option(
        None,
        "The decay of a moving average of the parameters, such as 0.9999; it begins with the parameters before the "
        "first step. `'mean'`: the mean of the parameters after all steps.",
        above=0,
        below=1,
    )
    averaged_warmup: bool = option(
        False,
        "The decay of step t is at most (1 + t) / (10 + t), so that the first parameters are soon forgotten.",
    )
    averaged_from: int | None = option(None, "Up to this step the average is the parameter itself.", low=0)

    EXAMPLE = "averaged=0.9999"
    READS_GRADIENT = False

    def check(self) -> None:
        require(
            not (self.averaged_warmup and isinstance(self.averaged, str)),
            "averaged_warmup=True is for a decay, such as averaged=0.9999: averaged='mean' has none",
        )

    def extra_entries(self, shape: Shape) -> dict[str, Entry]:
        return {AVERAGE: Copy()}

    def change_update(self, xp, update, g, s, p, *, t, lr, lr_scale):
        return update._replace(state={**update.state, AVERAGE: self.evaluate_at(xp, s, p, t - 1)})

    def evaluate_at(self, xp: Space[A], s: State[A], p: A, t: Scalar) -> Value:
        return average(s[AVERAGE], p, weight_of(self, xp, t))


def weight_of(rule: Averaged, xp: Space[A], t: Scalar) -> Scalar:
    """The weight of the parameter after step t in the average."""
    if isinstance(rule.averaged, str):
        return 1 / xp.maximum(t - (rule.averaged_from or 0), 1)
    decay: Scalar = rule.averaged
    weight = 1 - decay
    if rule.averaged_warmup:
        weight = xp.maximum(weight, 9 / (10 + t))
    return xp.where(t > rule.averaged_from, weight, 1.0) if rule.averaged_from else weight
