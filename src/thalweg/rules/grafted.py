"""Grafting (Agarwal et al. 2020, arXiv:2002.11803): the direction of one rule, with the size of another's step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Shape, Squares
from thalweg.rules.around import GRAFTED, Around
from thalweg.rules.blocks import is_zero, ratio_unless
from thalweg.rules.cautious import check_norms_free
from thalweg.rules.checks import require
from thalweg.rules.entries import Entry
from thalweg.rules.options import option
from thalweg.rules.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Grafted(Around):
    """Each tensor moves along the step of the rule, as far as another rule would move it. Decay stays the rule's."""

    graft: Rule | None = option(
        None,
        "Another rule, such as `thalweg.rules.AdamW()`: each tensor moves along the step of this rule, as far as that "
        "one would move it with the same `lr`, decay apart.",
    )

    EXAMPLE = "graft=thalweg.rules.AdamW()"
    HAS_SUMS = True

    def check(self) -> None:
        fits = isinstance(self.graft, Rule) and not self.graft.needs_whole
        require(
            fits,
            f"graft must be a rule that goes element by element, such as thalweg.rules.AdamW(), got {self.graft!r}",
        )
        other_of(self).validate()
        check_norms_free(self, "graft")

    def extra_entries(self, shape: Shape) -> dict[str, Entry]:
        return {f"{GRAFTED}{key}": entry for key, entry in other_of(self).entries(shape).items()}

    def kind(self, shape: Shape) -> Hashable:
        return super().kind(shape), other_of(self).kind(shape)

    def change_update(self, xp, update, g, s, p, *, t, lr, lr_scale):
        rule, given = other_of(self), {"t": t, "lr": lr, "lr_scale": lr_scale}
        grafted = {key.removeprefix(GRAFTED): entry for key, entry in s.items() if key.startswith(GRAFTED)}
        measured = rule.update(xp, g, grafted, p, **given)
        decay, other_decay = self.decay_share(xp, update, **given), rule.decay_share(xp, measured, **given)
        step = update.delta if is_zero(decay) else update.delta + decay * p
        other = measured.delta if is_zero(other_decay) else measured.delta + other_decay * p
        axes = self.own_axes(xp.shape(p))
        squares, sizes = xp.sums(Squares(step, axes), Squares(other, axes))
        step = step * ratio_unless(xp, squares <= 0, xp.sqrt(sizes), xp.sqrt(squares), 0.0)
        state = {**update.state, **{f"{GRAFTED}{key}": entry for key, entry in measured.state.items()}}
        return update._replace(delta=step if is_zero(decay) else step - decay * p, state=state)


def other_of(rule: Any) -> Any:
    """The rule that tells sizes."""
    return replace(rule.graft, stacked_axes=rule.stacked_axes)
