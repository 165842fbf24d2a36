"""Kron-PSGD (Li 2015, arXiv:1512.04202; Pooladzandi, Li 2024, arXiv:2402.11858).

The gradient, seen as a matrix or a tensor of few axes, is whitened by P = Q^T Q with a Kronecker
product Q of one *factor* for each axis. Factors are dense matrices or diagonals and are learned
by descent on a Lie group. A *refresh* updates the factors; *precondition* applies them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State, Truth, Value
from thalweg.dtypes import DTYPES, NARROW
from thalweg.rules.blocks import average, clip, is_zero, one_minus_power
from thalweg.rules.entries import Count, Entry, Moment
from thalweg.rules.factors import apply, merge_axes, per_slice, square
from thalweg.rules.grid import Grid
from thalweg.rules.options import PRECISION, Mask, option
from thalweg.rules.refresh import FactorGradient, Factors, refresh_all
from thalweg.rules.rule import Noise, Update
from thalweg.rules.schedules import Annealed
from thalweg.rules.whole import Direction, Preparation, WholeRule

ANNEALED = Annealed()


class Whole(NamedTuple):
    """The arguments of :meth:`Kron.transform` for one parameter, so that several are transformed at once."""

    rule: Kron
    xp: Any
    tensors: tuple[Any, ...]
    state: State[Any]
    noise: Noise[Any] | None
    #: P of each factor, by stacks of blocks; empty: it is not known.
    whiteners: Sequence[list[Any]] = ()


def name_whiteners(whiteners: list[list[Any]]) -> State[Any]:
    return {f"{j}, {i}": p for j, stack in enumerate(whiteners) for i, p in enumerate(stack)}


@dataclass(frozen=True, kw_only=True)
class Kron(WholeRule):
    """step = P g with P whitening g; P is a Kronecker product with one factor for each axis."""

    precond_lr: Scalar = option(
        0.6,
        "The factors' learning rate, relative to the norm of their gradient.",
        low=0,
        high=1,
        elsewhere="preconditioner_lr",
    )
    momentum: Scalar = option(
        0.9, "Decay of momentum; 0 keeps none.", low=0, below=1, stores="momentum_dtype", elsewhere="b1 beta1"
    )
    momentum_mode: Literal["polyak", "ema"] = option(
        "ema",
        "`'ema'`: precondition a debiased average of gradients. `'polyak'`: heavy ball on the preconditioned gradient.",
        needs="momentum",
    )
    weight_decay: Scalar = option(0.0, "See `weight_decay_mode`.", low=0)
    weight_decay_mode: Literal["gradient", "update", "decoupled"] = option(
        "decoupled",
        "Add decay to the `'gradient'`, to the preconditioned `'update'`, or to the step (`'decoupled'`).",
    )
    normalize_grads: bool = option(
        False,
        "Divide each gradient by its norm (plus 1e-6) before anything else, so that a very large one counts no more "
        "than others.",
    )
    eps: Scalar = option(1e-8, "The smallest norm that the factors' step is divided by.", low=0)
    clip: Scalar | None = option(
        1.1,
        "The largest magnitude of an element of h, or of its RMS; `None`: no limit.",
        above=0,
        elsewhere={"update_rms_clipping": "clip, with clip_mode='rms'"},
    )
    clip_mode: Literal["value", "rms"] = option(
        "rms", "What `clip` limits: every element (`'value'`), or their RMS (`'rms'`).", needs="clip"
    )
    precond_update_probability: Scalar | Annealed = option(
        ANNEALED,
        "The fraction of steps that refresh the factors: a number, or `Annealed`.",
        low=0,
        high=1,
        elsewhere="preconditioner_update_probability",
    )
    geometry: Literal["procrustes", "quad", "eq"] = option(
        "procrustes",
        "How factors are learned: `'procrustes'`, `'quad'` or `'eq'`.",
        requires={"eq": "damping_mode = 'noise': it probes with noise"},
    )
    whiten: Literal["gradient", "momentum"] = option(
        "momentum",
        "What factors learn to whiten: the average of `momentum_mode='ema'`, or the `'gradient'`.",
        requires={
            "momentum": "momentum_mode = 'ema': polyak momentum comes after the preconditioner; add whiten='gradient', "
            "or take variant='polyak'"
        },
        elsewhere={"momentum_into_precond_update": "whiten='momentum', or 'gradient'"},
    )
    max_size_dense: int | None = option(
        8192,
        "Axes larger than this get a diagonal factor. 0: all factors are diagonal. `None`: no limit.",
        low=0,
        elsewhere="max_size_triangular",
    )
    max_skew: float | None = option(
        1.0,
        "An axis of size n in a tensor of N elements gets a diagonal factor if n² > max_skew N. `None`: no limit.",
        above=0,
    )
    block_size: int | None = option(
        None,
        "Cut axes with dense factors into blocks of this size, the last of which may be smaller. Each block has "
        "factors of its own.",
        low=1,
        elsewhere={"partition_grads_into_blocks": "block_size, a number, or None"},
    )
    merge: Literal["matrix", "squeeze"] | None = option(
        "matrix",
        "How to treat tensors of more than two axes: as the most square matrix (`'matrix'`), without axes of size 1 "
        "(`'squeeze'`), or as they are (`None`).",
        elsewhere="merge_dims",
    )
    init_scale: float | None = option(
        None,
        "Scale of the first Q; `None` takes it from the first gradient.",
        above=0,
        elsewhere="preconditioner_init_scale precond_init_scale",
    )
    damping: Scalar = option(
        1e-9, "Standard deviation of the noise added to what is whitened, which limits P to 1 / damping.", low=0
    )
    relative_damping: Scalar | None = option(
        None,
        "The same relative to the mean magnitude of what is whitened. `None`: the rounding error of the stored factors "
        "(2^-23; 2^-10 in float16, 2^-7 in bfloat16), so that directions without gradient stay above it.",
        low=0,
    )
    damping_mode: Literal["noise", "expected"] = option(
        "noise", "Draw that noise, or add its `'expected'` effect, which is deterministic."
    )
    lipschitz_beta: Scalar = option(0.9, "Decay of the running norms L; 0 uses each norm as measured.", low=0, below=1)
    precond_precision: Literal["tf32", "float32"] = option("tf32", PRECISION)

    default_lr = 1e-3
    typical_lr = 3e-3
    first_default = "polyak"
    has_factors = True
    #: The mean of squares of what is preconditioned, before it is clipped.
    FIGURES = ("square",)
    VARIANTS = {
        "polyak": {
            "precond_lr": 0.1,
            "momentum_mode": "polyak",
            "weight_decay_mode": "gradient",
            "clip": 1.0,
            "clip_mode": "value",
            "whiten": "gradient",
            "init_scale": 1.0,
        },
        "psgd": {"precond_lr": 0.1, "init_scale": 1.0},
        "kron_torch": {
            "precond_lr": 0.1,
            "weight_decay_mode": "update",
            "geometry": "eq",
            "max_skew": None,
            "init_scale": 1.0,
            "damping": 0.0,
            "relative_damping": 2.0**-11.5,
            "lipschitz_beta": 0.0,
        },
    }

    OPTAX = {"*": "", "weight_decay_mask": Mask("weight_decay")}
    ALSO_NAMED = {
        "psgd-jax": {
            **{"b1": "momentum", "mu_dtype": "momentum_dtype", "scanned_layers": "stacked_axes"},
            **{"preconditioner_lr": "precond_lr", "preconditioner_init_scale": "init_scale"},
            **{"preconditioner_update_probability": "precond_update_probability"},
            **{"max_size_triangular": "max_size_dense"},
        }
    }

    @property
    def needs_noise(self) -> bool:
        return self.damping_mode == "noise"

    @property
    def is_decay_apart(self) -> bool:
        return self.weight_decay_mode == "decoupled"

    def treatment(self, shape: Shape) -> str:
        grid = self.grid(shape)
        kinds = zip(grid.sides, self.diagonals(grid.sizes), strict=True)
        words = "factors " + ", ".join(f"diagonal {n}" if d else f"dense {n}" for n, d in kinds)
        return words if grid.blocks == 1 else f"{grid.blocks} blocks, {words}"

    def kind(self, shape: Shape) -> Hashable:
        return shape

    def for_storage(self, dtype: str | None) -> Kron:
        if self.relative_damping is not None:
            return self
        stored = DTYPES[dtype] if dtype in NARROW else DTYPES["float32"]
        return replace(self, relative_damping=stored.rounding)

    # ---- how a parameter is seen

    def sizes(self, shape: Shape) -> Shape:
        """The sizes of the factors' axes for a parameter of this shape."""
        return merge_axes(shape[self.stacked_axes :], self.merge)

    def diagonals(self, sizes: Shape) -> tuple[bool, ...]:
        """For each axis whether its factor is diagonal."""
        large = math.inf if self.max_size_dense is None else self.max_size_dense
        skewed = math.inf if self.max_skew is None else self.max_skew * math.prod(sizes)
        return tuple(len(sizes) == 1 or n <= 1 or n > large or n * n > skewed for n in sizes)

    def grid(self, shape: Shape) -> Grid:
        """The blocks of a parameter of this shape. Axes with diagonal factors are not cut, which would save nothing."""
        sizes = self.sizes(shape)
        return Grid.make(sizes, [not diagonal for diagonal in self.diagonals(sizes)], self.block_size)

    # ---- the rule

    def entries(self, shape: Shape) -> dict[str, Entry]:
        grid = self.grid(shape)
        scale = (1.0 if self.init_scale is None else self.init_scale) ** (1 / len(grid.sizes))
        entries: dict[str, Entry] = {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}
        for i, diagonal in enumerate(self.diagonals(grid.sizes)):
            entries[f"Q_{i}"] = grid.factor(i, scale, diagonal=diagonal)
            entries[f"L_{i}"] = grid.norm()  # of the factor's gradient, smoothed
        return {**entries, "refresh": Count()}  # how much of the next refresh has come together

    # ---- a step in three parts: the first and the last go element by element, the middle needs the whole tensor

    def prepare(self, xp, g, s, p, t) -> Preparation:
        """What is to be preconditioned, and what the factors learn from if it differs."""
        state: State[Any] = {}
        if self.normalize_grads:
            (squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(g))))
            g = g / (xp.sqrt(xp.where(xp.isfinite(squares), squares, math.nan)) + 1e-6)
        if self.weight_decay_mode == "gradient" and not is_zero(self.weight_decay):
            g = g + self.weight_decay * p
        x = g
        if self.momentum_mode == "ema" and "momentum_buffer" in s:
            state["momentum_buffer"] = average(s["momentum_buffer"], g, 1 - self.momentum)
            x = state["momentum_buffer"] / one_minus_power(xp, self.momentum, t)

        # due when the probabilities add up to 1, forgiving their rounding
        probability = self.precond_update_probability
        accumulated = s["refresh"] + (probability.at(xp, t) if isinstance(probability, Annealed) else probability)
        due = accumulated >= 1 - 2.0**-12
        state["refresh"] = xp.where(due, accumulated - 1.0, accumulated)
        return Preparation((x,) if x is g or self.whiten == "momentum" else (x, g), state, due)

    def transform(self, xp, tensors, s, *, due=True, noise=None, kept=None) -> Direction:
        """The first tensor preconditioned and clipped, and the factors, refreshed from the last one if due."""
        count, entries = len(self.sizes(xp.shape(tensors[0]))), list((kept or {}).values())
        whiteners = [entries[i : i + count] for i in range(0, len(entries), count)]
        whole = Whole(self, xp, tensors, s, noise, whiteners)
        if whiteners and due is False:
            return self.find_direction(whole._replace(xp=xp.in_precision(self.precond_precision)), whiteners, {})
        return self.transform_all([whole], due)[0]

    def keep(self, xp, s, shape) -> State[Any]:
        """P = Q^T Q of each factor: one product with it takes the place of two with Q."""
        xp = xp.in_precision(self.precond_precision)
        return name_whiteners([[square(xp, q) for q in factors] for factors, _ in self.unpack(xp, s, shape)])

    @staticmethod
    def transform_all(wholes: Sequence[Whole], due: Truth) -> list[Direction]:
        """Transform several parameters, whose rules differ in ``stacked_axes`` alone; all are due, or none."""
        rule = wholes[0].rule
        wholes = [whole._replace(xp=whole.xp.in_precision(rule.precond_precision)) for whole in wholes]
        xp = wholes[0].xp
        old = [whole.rule.unpack(xp, whole.state, xp.shape(whole.tensors[0])) for whole in wholes]

        def refresh() -> list[Factors[Any]]:
            gradients: list[FactorGradient] = []
            for whole, stacks in zip(wholes, old, strict=True):
                gradients.extend(whole.rule.factor_gradients(whole, stacks))
            return refresh_all(xp, rule, gradients, together=len(wholes) > 1)

        new = iter(xp.cond(due, refresh, lambda: [stack for stacks in old for stack in stacks]))
        directions = []
        for whole, old_stacks in zip(wholes, old, strict=True):
            stacks = [next(new) for _ in old_stacks]
            whiteners = [[square(whole.xp, q) for q in factors] for factors, _ in stacks]
            directions.append(whole.rule.find_direction(whole, whiteners, whole.rule.pack(whole, stacks)))
        return directions

    def factor_gradients(self, whole: Whole, old: list[Factors[Any]]) -> list[FactorGradient]:
        """The gradient of each stack of blocks, from which its factors learn."""
        xp, noise, y = whole.xp, whole.noise, self.to_batch(whole.xp, whole.tensors[-1])
        grid = self.grid(xp.shape(whole.tensors[-1]))
        drawn = grid.cut(xp, xp.reshape(noise(), xp.shape(y))) if noise is not None and self.needs_noise else []
        # each noise is taken out of the list, so that none outlives its use
        parts = zip(old, grid.cut(xp, y), whole.whiteners or [[] for _ in old], strict=True)
        return [FactorGradient(xp, *q, part, lambda: drawn.pop(0), whiteners) for q, part, whiteners in parts]

    def pack(self, whole: Whole, new: list[Factors[Any]]) -> State[Any]:
        """Factors and norms as the state has them."""
        xp, grid, state = whole.xp, self.grid(whole.xp.shape(whole.tensors[0])), {}
        for i in range(len(grid.sizes)):
            factors, norms = [q[i] for q, _ in new], [norm[i] for _, norm in new]
            state[f"Q_{i}"] = xp.reshape(grid.join_factor(xp, factors, i), xp.shape(whole.state[f"Q_{i}"]))
            state[f"L_{i}"] = xp.reshape(grid.join_norm(xp, norms), xp.shape(whole.state[f"L_{i}"]))
        return state

    def find_direction(self, whole: Whole, whiteners: list[list[Any]], state: State[Any]) -> Direction:
        """The direction, by P of each factor. whiteners: of each stack of blocks, for each of their axes."""
        xp, shape = whole.xp, whole.xp.shape(whole.tensors[0])
        grid, x = self.grid(shape), self.to_batch(xp, whole.tensors[0])
        h = grid.join(xp, [apply(xp, p, stack) for p, stack in zip(whiteners, grid.cut(xp, x), strict=True)])
        (h_square,) = xp.means(Squares(h, tuple(range(1, 1 + len(grid.sizes)))))
        h = xp.reshape(self.clip_direction(xp, h, h_square), shape)
        return Direction(h, {"square": h_square}, state, name_whiteners(whiteners))

    def clip_direction(self, xp: Space[A], h: A, h_square: Scalar) -> Value:
        """What was preconditioned, within its bounds. h_square: the mean of its squares."""
        if self.clip is None:
            return h
        if self.clip_mode == "value":
            return clip(xp, h, (-self.clip, self.clip))
        return xp.divided(h, xp.maximum(xp.sqrt(h_square) / self.clip, 1.0), None)

    def apply(self, xp, direction, s, p, state, *, due, lr) -> Update:
        """The step: the direction with decay and momentum."""
        h, h_square = direction.tensor, direction.figures["square"]
        if self.weight_decay_mode == "update" and not is_zero(self.weight_decay):
            h = h + self.weight_decay * p
        if self.momentum_mode == "polyak" and "momentum_buffer" in s:
            state["momentum_buffer"] = h = self.momentum * s["momentum_buffer"] + h
        step = h
        if self.is_decay_apart and not is_zero(self.weight_decay):
            h = h + self.weight_decay * p
        finite = xp.isfinite(xp.sums((h_square, None))[0])
        return Update(h * -lr, state, finite, self.show_figures(xp, direction.figures, due), step)

    def show_figures(self, xp, figures, due) -> dict[str, Scalar]:
        return {"update_rms": xp.sqrt(figures["square"]), "refreshed": due}

    def goes_in_parts(self) -> bool:
        prepares_average = self.momentum_mode == "ema" and not is_zero(self.momentum)
        return prepares_average and not self.normalize_grads and self.weight_decay_mode != "gradient"

    # ---- what it costs to be whole

    def figure_shape(self, shape: Shape) -> Shape:
        """One mean of squares for each slice, with as many axes as there are factors."""
        return (math.prod(shape[: self.stacked_axes]), *[1] * len(self.sizes(shape)))

    def cost(self, shape: Shape) -> int:
        """Products with every dense factor, and of the factors with one another."""
        grid = self.grid(shape)
        dense = [n for n, diagonal in zip(grid.sides, self.diagonals(grid.sizes), strict=True) if not diagonal]
        return math.prod(shape) * (1 + sum(dense)) + grid.blocks * sum(n**3 for n in dense)

    def refresh_share(self) -> float:
        probability = self.precond_update_probability
        return float(probability.low if isinstance(probability, Annealed) else probability)

    def whole_tensors(self) -> int:
        """An average to precondition, a gradient to learn from."""
        is_averaged = self.momentum_mode == "ema" and not is_zero(self.momentum)
        return 2 if is_averaged and self.whiten == "gradient" else 1

    def count_temporaries(self) -> int:
        return 14

    def to_batch(self, xp: Space[A], x: A) -> A:
        """x as a batch of tensors with an axis for each factor."""
        shape = xp.shape(x)
        return xp.reshape(x, (math.prod(shape[: self.stacked_axes]), *self.sizes(shape)))

    def unpack(self, xp: Any, s: State[Any], shape: Shape) -> list[Factors[Any]]:
        """Factors and norms of each stack of blocks; norms so that they multiply factors."""
        grid, batch = self.grid(shape), math.prod(shape[: self.stacked_axes])
        factors, norms = [], []
        for i, diagonal in enumerate(self.diagonals(grid.sizes)):
            factors.append(grid.cut_factor(xp, s[f"Q_{i}"], i, batch, diagonal=diagonal))
            numbers = grid.cut_norm(xp, s[f"L_{i}"], batch)
            norms.append([per_slice(xp, norm, q) for norm, q in zip(numbers, factors[-1], strict=True)])
        return [([q[j] for q in factors], [norm[j] for norm in norms]) for j in range(len(factors[0]))]
