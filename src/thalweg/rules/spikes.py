"""Spikes: norms far above those of the steps before, by which a step is skipped or made smaller.

Mean and deviation of a window, and half of it before anything is judged: OLMo 2 (arXiv:2501.00656). Quantile: AutoClip
(Seetharaman et al. 2020, arXiv:2007.14469). By tensor, moving averages as in ZClip (Kumar et al. 2025,
arXiv:2504.02507).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State, Truth
from thalweg.rules.around import SPIKE_COUNT, SPIKE_MEAN, SPIKE_SQUARE, Around
from thalweg.rules.blocks import average, ratio_unless
from thalweg.rules.checks import require
from thalweg.rules.entries import Entry, Spread
from thalweg.rules.options import check_options, option

#: How many times the limit a spike enters the history as, at most.
GROWTH = 2.0


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """What a spike is, and what is done about it."""

    action: Literal["skip", "clip", "scale"] = option(
        "skip",
        "`'skip'` leaves parameters, state and the count of steps as they are, `'clip'` brings the norm down to the "
        "limit, `'scale'` to the mean of the window.",
    )
    window: int = option(128, "How many norms are kept. Nothing is judged before there are half as many.", low=2)
    z: float = option(6.0, "The limit is the mean of the window and so many standard deviations.", above=0)
    quantile: float | None = option(None, "The limit is this quantile of the window instead.", above=0, below=1)
    of: Literal["gradient", "update"] = option(
        "gradient", "Whose norm is judged. `'update'` is for `tensor_spikes`: a step is known tensor by tensor alone."
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def kept_shape(self) -> Shape:
        """Of what is kept: how many spikes there were, and the norms of the window, the last one first; 0: none."""
        return (self.window + 1,)


class Judgement(NamedTuple):
    """Of one norm, an array of one element as are the others."""

    norm: Any
    is_spike: Truth
    #: Whether a step with a spike is skipped.
    skips: bool
    #: Infinite where nothing is judged yet.
    limit: Any
    #: What multiplies the gradient, unless the step is skipped.
    scale: Any
    #: What is kept for the next step.
    kept: Any

    @property
    def figures(self) -> dict[str, Any]:
        """For users to look at."""
        return {"joint_norm": self.norm, "joint_limit": self.limit, "spikes": self.kept[:1]}


def judge(xp: Space[A], spikes: Spikes, norm: A, kept: A) -> Judgement:
    """Whether a norm, an array of one element, is a spike beside those that are kept.

    A spike enters the history as at most twice the limit. As it is, it would raise the limit for a whole window; and
    without it, a rise that lasts would be taken for spikes for ever.
    """
    count, norms = xp.cut(kept, 0, (1, spikes.window))
    known = xp.where(norms > 0, 1.0, 0.0 * norms)
    number, total = xp.sums((known, (0,)), (norms, (0,)))
    mean = total / xp.maximum(number, 1.0)
    if spikes.quantile is None:
        (squares,) = xp.sums((known * (norms - mean) ** 2, (0,)))
        limit = mean + spikes.z * xp.sqrt(squares / xp.maximum(number - 1, 1.0))
    else:
        place = (1 - spikes.quantile) * (number - 1)  # from the largest, between two norms
        row = xp.reshape(norms, (1, spikes.window))
        falling = xp.reshape(xp.arrange(row, row, 1), (spikes.window,))
        distance = xp.abs(xp.astype(xp.positions(norms)[0], xp.dtype(norms)) - place)
        (limit,) = xp.sums((falling * xp.maximum(1 - distance, 0.0), (0,)))
    limit = xp.where(number >= max(2, spikes.window // 2), limit, float("inf"))
    is_spike = norm > limit
    target = limit if spikes.action == "clip" else mean
    scale = xp.where(is_spike, target / norm, 1.0)
    entering = xp.where(is_spike, xp.minimum(norm, GROWTH * limit), norm)
    shifted = xp.join([entering, *xp.cut(norms, 0, (spikes.window - 1, 1))[:1]], 0)
    norms = xp.where(xp.isfinite(norm) & (norm > 0), shifted, norms)
    return Judgement(
        norm,
        is_spike,
        spikes.action == "skip",
        limit,
        scale,
        xp.join([xp.where(is_spike, count + 1, count), norms], 0),
    )


# ---- tensor by tensor, around a rule


@dataclass(frozen=True, kw_only=True)
class Spiked(Around):
    """The same for each tensor by itself, with averages in the place of a window."""

    tensor_spikes: bool | Spikes = option(
        False,
        "As `spikes`, for each tensor by the norm of its own gradient, or with `thalweg.Spikes(of='update')` of its "
        "step. The mean and the deviation are moving averages over about a window.",
    )

    EXAMPLE = "tensor_spikes=True"
    HAS_SUMS = True

    def check(self) -> None:
        spikes = self.tensor_spikes
        require(
            isinstance(spikes, bool | Spikes),
            f"tensor_spikes must be True, False or thalweg.Spikes(action='clip', window=128), got {spikes!r}",
        )
        require(
            spikes_of(self).quantile is None,
            "tensor_spikes keeps averages of norms, which have no quantile: use z, or spikes in its place",
        )
        require(
            spikes_of(self).action != "skip" or not self.has_factors,
            "tensor_spikes cannot skip the step of one tensor where there are factors: use action='clip', or spikes",
        )

    def extra_entries(self, shape: Shape) -> dict[str, Entry]:
        over = tuple(range(self.stacked_axes, len(shape)))
        return dict.fromkeys((SPIKE_MEAN, SPIKE_SQUARE, SPIKE_COUNT), Spread(over))

    def change_gradient(self, xp, g, s, p, *, t):
        spikes = spikes_of(self)
        if spikes.of == "update" or spikes.action == "skip":
            return g
        return g * judge_tensor(xp, spikes, norm_of(self, xp, g), s, t).scale

    def change_update(self, xp, update, g, s, p, *, t, lr, lr_scale):
        spikes, delta, state = spikes_of(self), update.delta, dict(update.state)
        norm = norm_of(self, xp, g if spikes.of == "gradient" else delta)
        judgement = judge_tensor(xp, spikes, norm, s, t)
        if spikes.action == "skip":
            delta = xp.where(judgement.is_spike, 0.0, delta)
            state = {key: xp.where(judgement.is_spike, s[key], entry) for key, entry in state.items()}
        elif spikes.of == "update":
            delta = delta * judgement.scale
        state |= judgement.kept
        stats = {"judged_norm": norm, "norm_limit": judgement.limit, "tensor_spikes": state[SPIKE_COUNT]}
        direction = None if spikes.action == "skip" else update.direction
        return update._replace(delta=delta, state=state, stats={**update.stats, **stats}, direction=direction)


def spikes_of(rule: Spiked) -> Spikes:
    return rule.tensor_spikes if isinstance(rule.tensor_spikes, Spikes) else Spikes()


def norm_of(rule: Spiked, xp: Space[A], x: A) -> Scalar:
    (squares,) = xp.sums(Squares(x, rule.own_axes(xp.shape(x))))
    return xp.sqrt(squares)


def judge_tensor(xp: Space[A], spikes: Spikes, norm: Scalar, s: State[A], t: Scalar) -> Judgement:
    """As ``judge``, by the averages of norms and of their squares before step t."""
    mean, square = s[SPIKE_MEAN], s[SPIKE_SQUARE]
    limit = mean + spikes.z * xp.sqrt(xp.maximum(square - mean * mean, 0.0))
    # a tensor that never had a gradient has no limit either
    limit = xp.where(t > max(2, spikes.window // 2), xp.where(limit > 0, limit, float("inf")), float("inf"))
    is_spike = norm > limit
    scale = ratio_unless(xp, norm <= limit, limit if spikes.action == "clip" else mean, norm, 1.0)
    entering = xp.where(is_spike, xp.minimum(norm, GROWTH * limit), norm)
    is_known, weight = xp.isfinite(norm), xp.maximum(1 / t, 1 / spikes.window)
    kept = {
        SPIKE_MEAN: xp.where(is_known, average(mean, entering, weight), mean),
        SPIKE_SQUARE: xp.where(is_known, average(square, entering * entering, weight), square),
        SPIKE_COUNT: xp.where(is_spike, s[SPIKE_COUNT] + 1, s[SPIKE_COUNT]),
    }
    return Judgement(norm, is_spike, spikes.action == "skip", limit, scale, kept)
