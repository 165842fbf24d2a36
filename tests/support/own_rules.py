"""Rules of one's own, as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg import Moment, Rule, Squares, Update, average, option, ratio_unless, rules, sign
from thalweg.arrays import Scalar
from thalweg.rules import Direction, Preparation, WholeRule
from thalweg.rules.entries import Entry, Spread, Square


@dataclass(frozen=True, kw_only=True)
class Signed(Rule):
    """The sign of an average of gradients."""

    beta: float = 0.9
    weight_decay: float = 0.0
    signed: bool = True

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"exp_avg": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        m = average(s["exp_avg"], g, 1 - self.beta)
        u = sign(xp, m) if self.signed else m
        return Update((u + self.weight_decay * p) * (-lr * lr_scale), {"exp_avg": m})


@dataclass(frozen=True, kw_only=True)
class Sized(Signed):
    """One whose step depends on the number of axes and on their sizes, which it does not say of its kind."""

    def entries(self, shape: Any) -> dict[str, Any]:
        return {**super().entries(shape), **({"longest": Moment()} if len(shape) > 1 and max(shape) > 5 else {})}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        shape = xp.shape(p)
        slower = 1.0 if not shape else 0.5 if len(shape) == 1 else (shape[0] / (shape[0] + shape[1])) ** 0.5
        update = super().update(xp, g, s, p, lr=lr, lr_scale=lr_scale * slower)
        if "longest" not in s:
            return update
        longest = s["longest"] + g
        return Update(update.delta - 0.1 * lr * longest, {**update.state, "longest": longest})


@dataclass(frozen=True, kw_only=True)
class Powers(Signed):
    """One with powers of what may be negative, whose exponents stand in the rule or are options, and without sums."""

    whole: float = 3.0

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        m = average(s["exp_avg"], g, 1 - self.beta)
        u = g**2 + g**3 + m**7 + m**self.whole + (m - 4.0) ** -1 + (1.0 + p**4) ** -0.5 + 2.0**m
        return Update(u * (-lr * lr_scale), {"exp_avg": m}, True, {"rate": lr * lr_scale})


@dataclass(frozen=True, kw_only=True)
class Turned(Signed):
    """One of which no fused code can be made, because it turns matrices."""

    default_lr: ClassVar[float | None] = 0.5

    def update(self, xp: Any, g: Any, s: Any, p: Any, **rest: Any) -> Update:
        return super().update(xp, xp.swapaxes(xp.swapaxes(g, 0, -1), 0, -1), s, p, **rest)


@dataclass(frozen=True, kw_only=True)
class Layerwise(Signed):
    """One that asks for sums, which ranks have to complete, and keeps all that `thalweg check` asks for."""

    weight_decay: float = option(0.0, "p loses `lr * weight_decay` of itself in each step.", low=0)

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        m = average(s["exp_avg"], g, 1 - self.beta)
        own = self.own_axes(xp.shape(p))
        p_squares, m_squares = xp.sums(Squares(p, own), Squares(m, own))
        smaller = xp.minimum(p_squares, m_squares)
        ratio = ratio_unless(xp, smaller <= 0, xp.sqrt(p_squares), xp.sqrt(m_squares), 1.0)
        step = (m * ratio + self.weight_decay * p) * (-lr * lr_scale)
        return Update(step, {"exp_avg": m}, xp.isfinite(m_squares), {"trust_ratio": ratio})


@dataclass(frozen=True, kw_only=True)
class Remembering(Rule):
    """One that keeps numbers for each tensor: of its gradients the largest squares and an average of norms, and a share
    that needs no sum to grow."""

    weight_decay: float = 0.0

    def entries(self, shape: Any) -> dict[str, Any]:
        return dict.fromkeys(("largest", "norm", "share"), Spread(tuple(range(self.stacked_axes, len(shape)))))

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        share = average(s["share"], 1.0, 0.25)
        (squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(g))))
        step = (g * (share / (1.0 + s["norm"])) + self.weight_decay * p) * (-lr * lr_scale)
        norm, largest = average(s["norm"], xp.sqrt(squares), 0.5), xp.maximum(s["largest"], squares)
        return Update(step, {"largest": largest, "norm": norm, "share": share}, xp.isfinite(squares), {"share": share})


@dataclass(frozen=True, kw_only=True)
class Centred(WholeRule):
    """Momentum less the mean of each of its columns, which is a mean over the whole tensor's rows."""

    momentum: Any = 0.5
    FIGURES: ClassVar[tuple[str, ...]] = ("mean",)

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"momentum_buffer": Moment()}

    def kind(self, shape: Any) -> Any:
        return shape

    def prepare(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Preparation:
        m = self.momentum * s["momentum_buffer"] + g
        return Preparation((m,), {"momentum_buffer": m})

    def transform(self, xp: Any, tensors: Any, s: Any, *, due: Any = True, noise: Any = None) -> Direction:
        (x,) = tensors
        axis = self.stacked_axes
        (means,) = xp.means((x, (axis,)))
        (mean,) = xp.means((x, tuple(range(axis, len(xp.shape(x))))))
        return Direction(x - means, {"mean": mean}, {})

    def apply(self, xp: Any, made: Direction, s: Any, p: Any, state: Any, *, due: Any, lr: Any) -> Update:
        mean = made.figures["mean"]
        return Update(made.tensor * -lr, state, xp.isfinite(xp.sums((mean, None))[0]), {"mean": mean})

    def figure_shape(self, shape: Any) -> Any:
        return (*shape[: self.stacked_axes], *[1] * (len(shape) - self.stacked_axes))


@dataclass(frozen=True, kw_only=True)
class Measured(Centred):
    """The same of gradients that are divided by a maximum, a norm and a mean of their own, one after the other."""

    def prepare(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Preparation:
        g = g / (1.0 + xp.amax(xp.abs(g), None))
        g = g / (0.1 + xp.sqrt(xp.sums(Squares(g, None))[0]))
        (mean, mean_of_p) = xp.means((xp.abs(g), None), (xp.abs(p), None))
        return super().prepare(xp, g / (0.1 + mean + mean_of_p), s, p, t)


@dataclass(frozen=True, kw_only=True)
class InOnePart(Rule):
    """It needs whole tensors, and does not say which part of its step does."""

    needs_whole: ClassVar[bool] = True

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"momentum_buffer": Moment()}

    def kind(self, shape: Any) -> Any:
        return shape

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
        (square,) = xp.sums((g * g, None))
        return Update(g * -lr, {"momentum_buffer": g}, xp.isfinite(square), {})


@dataclass(frozen=True, kw_only=True)
class Margins(Rule):
    """Keeps sums of rows and columns in another way than Adafactor: no roots of means, and a momentum beside them."""

    decay: Scalar = 0.9

    def entries(self, shape: Any) -> Any:
        return {"rows": Square(over=(1,)), "columns": Square(over=(0,)), "exp_avg": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Any:
        across, down = xp.sums(Squares(g, (1,)), Squares(g, (0,)))
        rows, columns = self.decay * s["rows"] + across, self.decay * s["columns"] + down
        # a function of the emitted code has this name too
        larger = xp.maximum(g / (1.0 + rows) - g * xp.maximum(columns, 0.5), -8.0)
        (size,) = xp.sums(Squares(larger, (0, 1)))
        m = self.decay * s["exp_avg"] + larger / (1.0 + xp.sqrt(size))
        return Update(
            -lr * lr_scale * m, {"rows": rows, "columns": columns, "exp_avg": m}, xp.isfinite(size), {"s": size}
        )


@dataclass(frozen=True, kw_only=True)
class Rounds(Rule):
    """Two rounds of sums. The first pass keeps more than the second, whose sum is of what the last one needs."""

    def entries(self, shape: Any) -> Any:
        return {"exp_avg": Moment(), "exp_avg_slow": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Any:
        m, own = 0.9 * s["exp_avg"] + 0.1 * g, self.own_axes(xp.shape(p))
        ahead, aside = m + 0.1 * p, m - 0.5 * g
        first, second = xp.sums(Squares(ahead, own), Squares(aside, own))
        mixed = ahead / (1.0 + xp.sqrt(first)) + aside / (1.0 + xp.sqrt(second))
        slow = 0.99 * s["exp_avg_slow"] + 0.01 * mixed
        u = slow + mixed
        (size,) = xp.sums(Squares(u, own))
        step = u * (-lr * lr_scale / (1.0 + xp.sqrt(size)))
        return Update(step, {"exp_avg": m, "exp_avg_slow": slow}, xp.isfinite(size), {"s": size})


class Trailing(rules.LAMB):
    """LAMB that keeps the mean norm of its steps, each of which its last pass alone knows."""

    def entries(self, shape: Any) -> dict[str, Entry]:
        return {**super().entries(shape), "size": Spread(tuple(range(self.stacked_axes, len(shape))))}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, **given: Any) -> Any:
        update = super().update(xp, g, s, p, t=t, **given)
        (squares,) = xp.sums(Squares(update.delta, self.own_axes(xp.shape(p))))
        return update._replace(state={**update.state, "size": average(s["size"], xp.sqrt(squares), 1 / t)})


@dataclass(frozen=True, kw_only=True)
class Outer(Rule):
    """Sums of absolute gradients by row and of squares by column, over the last two axes, and a mean of new rows.

    Unlike Adafactor, it averages what it has just computed for rows, divides an element by a row, needs the sum of the
    columns of a whole tensor, and decays rows by the largest of both.
    """

    beta: Scalar = 0.9
    weight_decay: Scalar = 0.0

    def kind(self, shape: Any) -> Any:
        return len(shape)

    def entries(self, shape: Any) -> dict[str, Entry]:
        last = len(shape) - 1
        if last - self.stacked_axes < 1:
            return {"exp_avg": Moment()}
        return {"by_row": Square(over=(last,)), "by_column": Square(over=(last - 1,)), "exp_avg": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Any:
        last, own = len(xp.shape(p)) - 1, self.own_axes(xp.shape(p))
        (p_squares,) = xp.sums(Squares(p, own))
        if "by_row" not in s:
            m = average(s["exp_avg"], g, 1 - self.beta)
            return Update(m * (-lr * lr_scale), {"exp_avg": m}, xp.isfinite(p_squares), {})
        rows, columns = xp.sums((xp.abs(g), (last,)), Squares(g, (last - 1,)))
        by_row = self.beta * s["by_row"] + rows
        by_column = xp.maximum(self.beta * s["by_column"], columns)
        mean, (total,) = xp.means((by_row, (last - 1,)))[0], xp.sums((by_column, own))
        u = g / (1.0 + by_row) * (mean / (1.0 + by_column)) + self.weight_decay * p / (1.0 + p_squares)
        m = average(s["exp_avg"], u, 1 - self.beta)
        state = {"by_row": by_row, "by_column": by_column, "exp_avg": m}
        return Update(m * (-lr * lr_scale), state, xp.isfinite(total), {"total": total})


@dataclass(frozen=True, kw_only=True)
class Doubled(rules.Adafactor):
    """Adafactor whose squares count twice."""

    def whitened(self, xp: Any, g: Any, row_var: Any, col_var: Any, mean: Any) -> Any:
        return super().whitened(xp, g, 2 * row_var, col_var, mean)


@dataclass(frozen=True, kw_only=True)
class Narrowed(rules.Adafactor):
    """Adafactor with smaller steps where there are few rows, which Adafactor's kinds of shapes do not tell."""

    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Update:
        update = super().update(xp, g, s, p, **given)
        shape = xp.shape(p)
        return update._replace(delta=update.delta * (0.5 if shape and shape[0] < 5 else 1.0))


@dataclass(frozen=True, kw_only=True)
class Pushed(rules.LARS):
    """LARS with an option more."""

    push: Scalar = 0.5

    def update(self, *args: Any, **given: Any) -> Update:
        update = super().update(*args, **given)
        return update._replace(delta=update.delta + self.push)
