"""Cautious steps (Liang et al. 2024, arXiv:2411.16085) and cautious decay (Chen et al. 2025, arXiv:2510.12402)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thalweg.rules.around import Around
from thalweg.rules.blocks import is_zero, where_shrinking
from thalweg.rules.checks import require
from thalweg.rules.options import option

#: The smallest share that a step is divided by.
LEAST_SHARE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Cautious(Around):
    """Only what agrees with the gradient is stepped; decay is left out of it, or has a mask of its own."""

    cautious: bool | Literal["decay", "both"] = option(
        False,
        "`True`: elements of a step that go against their gradient are left out, and the others are divided by their "
        "share of the tensor, at least 1e-3. `'decay'`: decay only the elements that the step does not move away from "
        "0. `'both'`: both.",
    )

    EXAMPLE = "cautious=True"
    HAS_SUMS = True

    def check(self) -> None:
        require(
            self.cautious is True or self.is_decay_apart,
            f"cautious={self.cautious!r} needs decay that is apart from the step (decoupled), which "
            f"{type(self).__name__} has not with these options: use cautious=True, or decoupled decay",
        )
        require(
            not (self.cautious in ("decay", "both") and getattr(self, "cautious_decay", False)),
            f"cautious={self.cautious!r} and cautious_decay=True are the same: leave out cautious_decay",
        )
        check_norms_free(self, f"cautious={self.cautious!r}")

    def idle(self, lr):
        idle = super().idle(lr)
        if self.cautious == "decay" and is_zero(getattr(self, "weight_decay", 0.0)):
            idle["cautious"] = "a weight_decay above 0"
        return idle

    def change_update(self, xp, update, g, s, p, *, t, lr, lr_scale):
        decay = self.decay_share(xp, update, t=t, lr=lr, lr_scale=lr_scale)
        step = update.delta if is_zero(decay) else update.delta + decay * p
        masked = step
        if self.cautious in (True, "both"):
            direction = -step if update.direction is None else update.direction
            agrees = xp.where(direction * g > 0, 1.0, 0.0 * g)  # in the precision of g, which a lone number has not
            (share,) = xp.means((agrees, self.own_axes(xp.shape(p))))
            masked = step * (agrees / xp.maximum(share, LEAST_SHARE))
        if not is_zero(decay):
            decayed = decay * p
            if self.cautious in ("decay", "both"):
                decayed = where_shrinking(xp, step, p, decayed)
            masked = masked - decayed
        return update._replace(delta=masked, direction=None)


def check_norms_free(rule: Around, what: str) -> None:
    """Refuse what would undo ``keep_norms``."""
    require(
        not getattr(rule, "keep_norms", False),
        f"{what} changes the step after keep_norms=True has fixed its norm: leave out one of them",
    )
