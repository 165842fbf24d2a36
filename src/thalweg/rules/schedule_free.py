"""Schedule-free training (Defazio et al. 2024, arXiv:2405.15682): an average in place of a schedule and of momentum.

The rule steps z, the gradient is taken at y = (1 - beta) z + beta x, and x, the average of all z, is what is evaluated.
The parameter is y. The x before the last step is kept: x and z after it follow from that and from y as it is now,
whatever became of the step when it was applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.arrays import A, Scalar, Shape, Space, State, Value
from thalweg.rules.around import EVALUATED, Around
from thalweg.rules.blocks import is_zero
from thalweg.rules.cautious import check_norms_free
from thalweg.rules.checks import require
from thalweg.rules.entries import Copy, Entry
from thalweg.rules.options import option

#: What True stands for.
BETA = 0.9


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Around):
    """Averages of the steps of a rule without momentum. Give it a constant learning rate."""

    schedule_free: float | bool = option(
        False,
        "Where gradients are taken: at (1 - beta) z + beta x, for z that the rule steps and their average x. A number "
        "is beta; `True` is 0.9. Takes the place of momentum, which has to be off, and of a schedule of `lr`.",
        above=0,
        below=1,
    )
    schedule_free_warmup: int | None = option(
        None, "For so many steps `lr` rises from 0; z have weights in x that are squares of `lr`.", low=0
    )

    EXAMPLE = "schedule_free=True"
    READS_GRADIENT = False

    def check(self) -> None:
        first, *rest = getattr(self, "betas", (0.0,))
        instead = f"betas=(0, {', '.join(map(str, rest))})" if rest else "momentum=0"
        require(
            is_zero(first) and is_zero(getattr(self, "momentum", 0.0)),
            f"schedule_free takes the place of momentum: beside it, write {instead}",
        )
        require(getattr(self, "averaged", None) is None, "schedule_free keeps an average already: leave out averaged")
        check_norms_free(self, "schedule_free")

    def extra_entries(self, shape: Shape) -> dict[str, Entry]:
        return {EVALUATED: Copy()}

    def scale_rate(self, xp: Space[A], t: Scalar) -> Scalar:
        return xp.minimum(t / self.schedule_free_warmup, 1.0) if self.schedule_free_warmup else 1.0

    def change_update(self, xp, update, g, s, p, *, t, lr, lr_scale):
        beta, weight = beta_of(self), weight_of(xp, t, self.schedule_free_warmup)
        x, z_from_x = self.averages_after(xp, s, p, t - 1)
        delta = beta * weight * z_from_x + (1 - beta * (1 - weight)) * update.delta
        return update._replace(delta=delta, direction=None, state={**update.state, EVALUATED: x})

    def evaluate_at(self, xp: Space[A], s: State[A], p: A, t: Scalar) -> Value:
        return self.averages_after(xp, s, p, t)[0]

    def averages_after(self, xp: Space[A], s: State[A], p: A, t: Scalar) -> tuple[Value, Value]:
        """x after step t, and z - x, from the x before that step and y = (1 - beta) z + beta x."""
        beta, weight = beta_of(self), weight_of(xp, t, self.schedule_free_warmup)
        z_from_before = (p - s[EVALUATED]) / (1 - beta * (1 - weight))
        return s[EVALUATED] + weight * z_from_before, (1 - weight) * z_from_before


def beta_of(rule: ScheduleFree) -> Scalar:
    return BETA if rule.schedule_free is True else rule.schedule_free


def weight_of(xp: Space[A], t: Scalar, warmup: int | None) -> Scalar:
    """The weight of z after step t in the average: the square of its rate over the sum of the squares so far."""
    t = xp.maximum(t, 1)
    if not warmup:
        return 1 / t
    rising = xp.minimum(t, warmup)
    total = rising * (rising + 1) * (2 * rising + 1) / (6 * warmup**2) + (t - rising)
    return (rising / warmup) ** 2 / total
