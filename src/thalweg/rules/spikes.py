"""Spikes: norms far above those of the steps before, by which a step is skipped or made smaller.

Mean and deviation of a window, and half of it before anything is judged: OLMo 2 (arXiv:2501.00656). Quantile: AutoClip
(Seetharaman et al. 2020, arXiv:2007.14469).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from thalweg.arrays import A, Shape, Space, Truth
from thalweg.errors import warn
from thalweg.rules.options import check_options, option

#: How many times the limit a spike enters the history as, at most.
GROWTH = 2.0
#: Gradients look clipped where at least so many norms, and this share of a window, are equal to the largest, up to a
#: relative difference: in bfloat16, the factor of clipping has eight digits.
FEWEST_EQUAL, EQUAL_SHARE, TOLERANCE = 8, 0.25, 2.0**-7


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

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def kept_shape(self) -> Shape:
        """Of what is kept: how many spikes there were, and the norms of the window, the last one first; 0: none."""
        return (self.window + 1,)


class SpikeCheck(NamedTuple):
    """What is decided about a step by its norm. Arrays have one element, but for ``kept``."""

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


def judge(xp: Space[A], spikes: Spikes, norm: A, history: A) -> SpikeCheck:
    """Whether a norm, an array of one element, is a spike beside those that are kept.

    A spike enters the history as at most twice the limit. As it is, it would raise the limit for a whole window; and
    without it, a rise that lasts would be taken for spikes for ever.
    """
    count, norms = xp.cut(history, 0, (1, spikes.window))
    is_there = xp.where(norms > 0, 1.0, 0.0 * norms)
    number, total = xp.sums((is_there, (0,)), (norms, (0,)))
    mean = total / xp.maximum(number, 1.0)
    if spikes.quantile is None:
        (squares,) = xp.sums((is_there * (norms - mean) ** 2, (0,)))
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
    return SpikeCheck(
        norm,
        is_spike,
        spikes.action == "skip",
        limit,
        scale,
        xp.join([xp.where(is_spike, count + 1, count), norms], 0),
    )


def warn_if_clipped(history: Sequence[float]) -> bool:
    """Warn if norms look as if gradients were clipped before they came: then no spike is seen. Whether it warned.

    history: what :func:`judge` keeps. Nothing is said before a window is full.
    """
    _, *norms = history
    largest = max(norms)
    equal = sum(norm >= largest * (1 - TOLERANCE) for norm in norms)
    if min(norms) == 0 or equal < max(FEWEST_EQUAL, EQUAL_SHARE * len(norms)):
        return False
    warn(
        f"spikes: of the last {len(norms)} norms of the gradient none was above {largest:.4g}, and {equal} were equal "
        "to it. Gradients that are clipped before a step show no spikes: leave that out, and clip here, by "
        f"max_grad_norm={largest:.2g} of the optimizer"
    )
    return True
