"""Grafting (Agarwal et al. 2020, arXiv:2002.11803): the direction of one rule, with the size of another's step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Scalar, Shape, Squares
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
        size_rule(self).validate()
        check_norms_free(self, "graft")

    def extra_entries(self, shape: Shape) -> dict[str, Entry]:
        return {f"{GRAFTED}{key}": entry for key, entry in size_rule(self).entries(shape).items()}

    def kind(self, shape: Shape) -> Hashable:
        return super().kind(shape), size_rule(self).kind(shape)

    def for_shape(self, shape: Shape) -> Rule:
        return replace(super().for_shape(shape), graft=size_rule(self).for_shape(shape))  # type: ignore[call-arg]

    def validate_lr(self, lr: Scalar | None) -> None:
        super().validate_lr(lr)
        other = size_rule(self)
        require(
            lr is not None or other.lr_optional,
            f"graft={type(other).__name__}() needs a learning rate: give lr a number, such as 1e-3",
        )

    def change_update(self, xp, update, g, s, p, *, t, lr, lr_scale):
        other, rates = size_rule(self), {"t": t, "lr": lr, "lr_scale": lr_scale}
        other_state = {key.removeprefix(GRAFTED): entry for key, entry in s.items() if key.startswith(GRAFTED)}
        other_update = other.update(xp, g, other_state, p, **rates)
        decay, other_decay = self.decay_share(xp, update, **rates), other.decay_share(xp, other_update, **rates)
        step = update.delta if is_zero(decay) else update.delta + decay * p
        other_step = other_update.delta if is_zero(other_decay) else other_update.delta + other_decay * p
        axes = self.own_axes(xp.shape(p))
        squares, other_squares = xp.sums(Squares(step, axes), Squares(other_step, axes))
        step = step * ratio_unless(xp, squares <= 0, xp.sqrt(other_squares), xp.sqrt(squares), 0.0)
        state = {**update.state, **{f"{GRAFTED}{key}": entry for key, entry in other_update.state.items()}}
        return update._replace(delta=step if is_zero(decay) else step - decay * p, state=state)


def size_rule(rule: Any) -> Any:
    """The rule that tells how far each tensor moves, with the stacked axes of the one that tells where."""
    return replace(rule.graft, stacked_axes=rule.stacked_axes)
