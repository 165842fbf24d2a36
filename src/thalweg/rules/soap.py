"""SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigenbases of Shampoo's preconditioner.

For each axis of a tensor the inner products of the gradient's slices are averaged, and *bases* follow the eigenvectors
of these averages. Gradients are turned into the bases, and there Adam's second moment is kept and divided by.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State, Value
from thalweg.dtypes import DTYPES
from thalweg.rules.blocks import average, is_zero, one_minus_power
from thalweg.rules.entries import Count, Entry, Factor, Moment
from thalweg.rules.factors import along, average_gram, cut_stack, join_stacks, merge_axes, transposed, unfold
from thalweg.rules.grid import Grid
from thalweg.rules.options import BETAS, PRECISION, Mask, option
from thalweg.rules.rule import Update
from thalweg.rules.whole import Direction, Preparation, WholeRule

#: Times the root of their number, the share of the largest eigenvalue below which others are rounding errors: those of
#: float32, so that a run is the same in every precision.
UNSEEN = 4 * DTYPES["float32"].rounding


@dataclass(frozen=True, kw_only=True)
class SOAP(WholeRule):
    """Adam of gradients that are turned into the eigenbases of their average products along each axis."""

    betas: tuple[Scalar, Scalar] = option(
        (0.95, 0.95), "Decay rates of the first and the second moment.", low=0, below=1, elsewhere=BETAS
    )
    shampoo_beta: Scalar | None = option(
        None, "Decay of the averages of products that bases follow. `None`: that of the second moment.", low=0, below=1
    )
    eps: Scalar = option(1e-8, "Added to the root of the second moment.", low=0, elsewhere="epsilon")
    weight_decay: Scalar = option(
        0.01, "Decoupled decay: after each step but the first, p shrinks by `lr * weight_decay` of itself.", low=0
    )
    bias_correction: bool = option(
        True, "Correct the bias of averages that start at zero, as Adam does.", elsewhere="correct_bias"
    )
    precondition_frequency: int = option(10, "The number of steps between two refreshes of the bases.", low=1)
    max_precond_dim: int | None = option(
        10000,
        "Axes larger than this have no basis. `None`: no limit.",
        low=0,
        elsewhere="max_precondition_dim",
    )
    one_sided: bool = option(False, "Only the shortest axis of a tensor has a basis, which costs less.")
    block_size: int | None = option(
        None,
        "Cut axes with bases into blocks of this size, the last of which may be smaller. Each block has bases of its "
        "own.",
        low=1,
        elsewhere={"partition_grads_into_blocks": "block_size, a number, or None"},
    )
    merge: Literal["matrix", "squeeze"] | None = option(
        None,
        "How to treat tensors of more than two axes: as the most square matrix (`'matrix'`), without axes of size 1 "
        "(`'squeeze'`), or as they are (`None`).",
        elsewhere="merge_dims",
    )
    precondition_1d: bool = option(False, "Vectors have a basis too. Without it they are stepped as by AdamW.")
    precond_precision: Literal["tf32", "float32"] = option("float32", f"{PRECISION} Bases are made in float32.")

    default_lr = 3e-3
    typical_lr = 0.01
    has_factors = True
    learns_always: ClassVar[bool] = True
    is_decay_apart = True
    #: The sums of squares of the direction, and of the gradient.
    FIGURES = ("direction", "gradient")
    OPTAX = {
        **{"*": "", "b1": "betas[0]", "b2": "betas[1]"},
        "weight_decay_mask": Mask("weight_decay"),
    }

    def treatment(self, shape: Shape) -> str:
        grid = self.grid(shape)
        turned = [str(grid.sides[axis]) for axis in self.turned_axes(grid.sizes)]
        words = f"eigenbases of {' and '.join(turned)}" if turned else "elementwise"
        return words if grid.blocks == 1 else f"{grid.blocks} blocks, {words}"

    def kind(self, shape: Shape) -> Hashable:
        return shape

    # ---- how a parameter is seen

    def turned_axes(self, sizes: Shape) -> list[int]:
        """The axes that have a basis."""
        if len(sizes) == 1 and not self.precondition_1d:
            return []
        most = math.inf if self.max_precond_dim is None else self.max_precond_dim
        tried = [sizes.index(min(sizes))] if self.one_sided else range(len(sizes))
        return [axis for axis in tried if 1 < sizes[axis] <= most]

    def grid(self, shape: Shape) -> Grid:
        """The blocks of a parameter of this shape. Axes without a basis are not cut."""
        sizes = merge_axes(shape[self.stacked_axes :], self.merge)
        turned = self.turned_axes(sizes)
        return Grid.make(sizes, [axis in turned for axis in range(len(sizes))], self.block_size)

    # ---- the rule

    def entries(self, shape: Shape) -> dict[str, Entry]:
        grid = self.grid(shape)
        entries: dict[str, Entry] = {"exp_avg": Moment(), "exp_avg_sq": Factor(grid.sizes, 0.0)}
        for axis in self.turned_axes(grid.sizes):
            entries[f"GG_{axis}"] = grid.factor(axis, 0.0)
            entries[f"Q_{axis}"] = grid.factor(axis, 1.0)
        return {**entries, "basis_age": Count()}  # steps since bases were made or refreshed

    def prepare(self, xp, g, s, p, t) -> Preparation:
        """The first moment, and the gradient. The first step makes bases, and leaves all else as it is."""
        (b1, b2), age, most = self.betas, s["basis_age"], self.precondition_frequency
        m = xp.where(t > 1, average(s["exp_avg"], g, 1 - b1), s["exp_avg"])
        state = {"exp_avg": m, "basis_age": xp.where(age >= most, 1.0, age + 1.0)}
        if self.bias_correction:
            steps = xp.maximum(t - 1, 1)
            m = m * (xp.sqrt(one_minus_power(xp, b2, steps)) / one_minus_power(xp, b1, steps))
        # 2: bases are made, 1: they are refreshed, 0: they stay
        return Preparation((m, g), state, xp.where(age <= 0, 2.0, xp.where(age >= most, 1.0, 0.0)))

    def transform(self, xp, tensors, s, *, due=1.0, noise=None) -> Direction:
        """Adam's step within the bases, turned back; the second moment; and products and bases for the next step."""
        shape = xp.shape(tensors[0])
        grid, batch = self.grid(shape), math.prod(shape[: self.stacked_axes])
        m, g, v = (xp.reshape(x, (batch, *grid.sizes)) for x in (*tensors, s["exp_avg_sq"]))
        axes, gradients = self.turned_axes(grid.sizes), grid.cut(xp, g)
        within = xp.in_precision(self.precond_precision)
        products, bases = ([self.cut_sides(xp, s, key, axis, shape) for axis in axes] for key in ("GG", "Q"))
        stepped = [
            self.step_blocks(within, *blocks, [x[i] for x in products], [q[i] for q in bases], axes)
            for i, blocks in enumerate(zip(grid.cut(xp, m), gradients, grid.cut(xp, v), strict=True))
        ]
        directions, squares, new_products = zip(*stepped, strict=True)
        h = grid.join(xp, directions)
        new = {"exp_avg_sq": xp.reshape(grid.join(xp, squares), xp.shape(s["exp_avg_sq"]))}
        for axis, axis_products in zip(axes, zip(*new_products, strict=True), strict=True):
            new[f"Q_{axis}"] = s[f"Q_{axis}"]
            new[f"GG_{axis}"] = self.join_sides(xp, s, "GG", axis, shape, axis_products)

        def refresh_all() -> list[Any]:
            entries = dict(new)
            for _, changed in self.refresh(xp, [new], [shape]):
                entries |= changed
            return list(entries.values())

        def make_first() -> list[Any]:
            entries = {**new, "exp_avg_sq": s["exp_avg_sq"]}
            for axis in axes:
                first_bases = [first_basis(xp.in_precision("float32"), x, axis) for x in gradients]
                entries[f"Q_{axis}"] = self.join_sides(xp, s, "Q", axis, shape, first_bases)
            return list(entries.values())

        values = xp.cond(due > 0, lambda: xp.cond(due <= 1, refresh_all, make_first), lambda: list(new.values()))
        tensor_axes = tuple(range(1, 1 + len(grid.sizes)))
        figures = dict(zip(self.FIGURES, xp.sums(Squares(h, tensor_axes), Squares(g, tensor_axes)), strict=True))
        return Direction(xp.reshape(h, shape), figures, dict(zip(new, values, strict=True)))

    def step_blocks(
        self, xp: Space[A], m: A, g: A, v: A, products: list[A], bases: list[A], axes: list[int]
    ) -> tuple[A, A, list[A]]:
        """Of a stack of blocks the direction, the second moment and the products."""
        turned = turn(xp, bases, axes, g)
        v = average(v, turned * turned, 1 - self.betas[1])
        h = turn_back(xp, bases, axes, turn(xp, bases, axes, m) / (xp.sqrt(v) + self.eps))
        beta = self.betas[1] if self.shampoo_beta is None else self.shampoo_beta
        return h, v, [average_gram(xp, old, g, axis, 1 - beta) for axis, old in zip(axes, products, strict=True)]

    def cut_sides(self, xp: Space[A], s: State[A], key: str, axis: int, shape: Shape) -> list[A]:
        """The products ("GG") or bases ("Q") of an axis, for each stack of blocks."""
        return self.grid(shape).cut_factor(xp, s[f"{key}_{axis}"], axis, math.prod(shape[: self.stacked_axes]))

    def join_sides(self, xp: Space[A], s: State[A], key: str, axis: int, shape: Shape, sides: Sequence[A]) -> Value:
        return xp.reshape(self.grid(shape).join_factor(xp, sides, axis), xp.shape(s[f"{key}_{axis}"]))

    def refresh(self, xp, states, shapes, most=math.inf) -> Iterator[tuple[int, State[Any]]]:
        """One step of power iteration of each basis, and second moments in the order of the new bases' columns.

        Columns come in the order of falling eigenvalues. Bases of one size are refreshed together, whatever tensors
        they are of.
        """
        by_size: dict[Hashable, list[Side]] = defaultdict(list)
        #: Of an axis of a tensor, for each stack of blocks: the new bases, and the eigenvalues that give the order.
        new_bases: dict[tuple[int, int], list[Any]] = {}
        eigenvalues_of: dict[tuple[int, int], list[Any]] = {}
        for tensor, (s, shape) in enumerate(zip(states, shapes, strict=True)):
            sizes = [xp.shape(block) for block in self.grid(shape).cut(xp, self.to_batch(xp, s["exp_avg_sq"], shape))]
            for axis in self.turned_axes(self.grid(shape).sizes):
                pairs = zip(*(self.cut_sides(xp, s, key, axis, shape) for key in ("Q", "GG")), strict=True)
                new_bases[tensor, axis], eigenvalues_of[tensor, axis] = [None] * len(sizes), [None] * len(sizes)
                for block, (q, x) in enumerate(pairs):
                    # products without full rank, whatever the gradients are: at least so many are in them
                    gradients = (1 + self.precondition_frequency) * math.prod(sizes[block][1:])
                    side = Side(tensor, axis, block, q, x, xp.shape(q)[1] ** 2 > gradients)
                    by_size[xp.shape(q)[1:], side.is_short].append(side)
        for sides in by_size.values():
            at_once = max(1, int(min(len(sides), most // max(math.prod(xp.shape(side.basis)) for side in sides))))
            for members in (sides[i : i + at_once] for i in range(0, len(sides), at_once)):
                counts = tuple(xp.shape(side.basis)[0] for side in members)
                refreshed = refresh_bases(xp.in_precision("float32"), members)
                for side, basis, values in zip(members, *(cut_stack(xp, x, counts) for x in refreshed), strict=True):
                    bases = new_bases[side.tensor, side.axis]
                    bases[side.block], eigenvalues_of[side.tensor, side.axis][side.block] = basis, values
                    if all(basis is not None for basis in bases):
                        s, shape = states[side.tensor], shapes[side.tensor]
                        del new_bases[side.tensor, side.axis]
                        yield side.tensor, {f"Q_{side.axis}": self.join_sides(xp, s, "Q", side.axis, shape, bases)}
        for tensor, (s, shape) in enumerate(zip(states, shapes, strict=True)):
            grid, axes = self.grid(shape), self.turned_axes(self.grid(shape).sizes)
            blocks = list(grid.cut(xp, self.to_batch(xp, s["exp_avg_sq"], shape)))
            for axis in axes:
                for i, values in enumerate(eigenvalues_of[tensor, axis]):
                    blocks[i] = xp.arrange(blocks[i], values, 1 + axis)
            if axes:
                yield tensor, {"exp_avg_sq": xp.reshape(grid.join(xp, blocks), xp.shape(s["exp_avg_sq"]))}

    def to_batch(self, xp: Space[A], x: A, shape: Shape) -> A:
        """An array of a parameter of this shape as a batch of tensors with the axes that have bases."""
        return xp.reshape(x, (math.prod(shape[: self.stacked_axes]), *self.grid(shape).sizes))

    def apply(self, xp, direction, s, p, state, *, due, lr) -> Update:
        h = direction.tensor
        if not is_zero(self.weight_decay):
            decay = self.weight_decay  # of what the step has left
            h = xp.cond(due <= 1, lambda: direction.tensor * (1 - lr * decay) + decay * p, lambda: direction.tensor)
        squares = [xp.sums((direction.figures[key], None))[0] for key in self.FIGURES]
        stats = self.show_figures(xp, direction.figures, due)
        return Update(h * -lr, state, xp.isfinite(squares[0] + squares[1]), stats)

    def show_figures(self, xp, figures, due) -> dict[str, Scalar]:
        norms = {"update_norm": xp.sqrt(figures["direction"]), "grad_norm": xp.sqrt(figures["gradient"])}
        return {**norms, "refreshed": due > 0}

    def goes_in_parts(self) -> bool:
        return True

    def decay_share(self, xp, update, *, t, lr, lr_scale) -> Scalar:
        share = super().decay_share(xp, update, t=t, lr=lr, lr_scale=lr_scale)
        return share if is_zero(share) else xp.where(t > 1, share, 0.0)

    # ---- what it costs to be whole

    def figure_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape[: self.stacked_axes]), *[1] * len(self.grid(shape).sizes))

    def cost(self, shape: Shape) -> int:
        """Products of the tensor with every basis and with itself, and refreshes."""
        grid = self.grid(shape)
        sides = [grid.sides[axis] for axis in self.turned_axes(grid.sizes)]
        return math.prod(shape) * (1 + 4 * sum(sides)) + grid.blocks * sum(n**3 for n in sides)

    def whole_tensors(self) -> int:
        """The first moment, and the gradient."""
        return 2


def turn(xp: Space[A], bases: list[A], axes: list[int], x: A) -> A:
    """x in the coordinates of the bases."""
    for q, axis in zip(bases, axes, strict=True):
        x = along(xp, transposed(xp, q), x, axis)
    return x


def turn_back(xp: Space[A], bases: list[A], axes: list[int], x: A) -> A:
    """What was turned into the bases, in the tensor's own coordinates."""
    for q, axis in zip(bases, axes, strict=True):
        x = along(xp, q, x, axis)
    return x


class Side(NamedTuple):
    """The bases for one axis of a stack of blocks, and the products whose eigenvectors they follow."""

    tensor: int
    axis: int
    block: int
    basis: Any
    products: Any
    #: Whether there were too few gradients for products of full rank.
    is_short: bool


def refresh_bases(xp: Any, sides: Sequence[Side]) -> tuple[Any, Any]:
    """Bases of one size after one step of power iteration, and the eigenvalues by which their columns are ordered."""
    q, products = join_stacks(xp, [side.basis for side in sides]), join_stacks(xp, [side.products for side in sides])
    power = xp.matmul(products, q)
    values, least = eigenvalues(xp, q, power)
    power = xp.arrange(power, values, 2)
    basis = xp.orthonormal(power)
    if sides[0].is_short:
        basis = keep_unseen(xp, basis, power, xp.arrange(q, values, 2), least)
    return with_sign(xp, basis), values


def keep_unseen(xp: Space[A], basis: A, power: A, before: A, least: A) -> Value:
    """The basis, with the columns that it had before in place of those that are rounding errors of ``power``."""
    (lengths,) = xp.sums((basis * power, (1,)))
    is_seen = xp.abs(lengths) > least
    seen = xp.where(is_seen, basis, 0.0)
    rest = before - xp.matmul(seen, xp.matmul(transposed(xp, seen), before))
    return xp.orthonormal(xp.where(is_seen, basis, rest))


def first_basis(xp: Space[A], g: A, axis: int) -> Value:
    """Eigenvectors of the products of a gradient's slices along an axis, in the order of falling eigenvalues.

    Any basis of the directions that the gradient does not have has eigenvectors, and every library finds another one.
    Here it is that in which the places of the entries are a diagonal matrix, so that bases depend on the gradient
    alone: rows without a gradient keep the axes that they have. What is not finite is taken for 0.
    """
    x = unfold(xp, xp.where(xp.isfinite(g), g, 0.0), axis)
    largest = xp.amax(xp.abs(x), (1, 2))
    x = x / xp.where(largest > 0, largest, 1.0)  # products neither overflow nor vanish
    q = xp.eigenvectors(xp.matmul(x, transposed(xp, x)))
    # products have lost digits of small eigenvalues: what x itself has off their diagonal says how q is to turn
    turned = xp.matmul(transposed(xp, x), q)
    values, least = eigenvalues(xp, turned, turned)
    batch, n = xp.shape(values)
    row, column, identity = xp.reshape(values, (batch, 1, n)), xp.reshape(values, (batch, n, 1)), xp.identity(n, q)
    are_apart = xp.abs(row - column) > least
    angles = xp.matmul(transposed(xp, turned), turned) / xp.where(are_apart, row - column, 1.0)
    q = xp.orthonormal(xp.matmul(q, xp.where(are_apart, angles, identity)))
    weights = place_weights(xp, q)
    unseen_by_place = xp.matmul(transposed(xp, q), weights * q)
    by_place = xp.where(xp.maximum(row, column) > 0, (1 + weights) * identity, unseen_by_place)
    return with_sign(xp, xp.matmul(q, xp.eigenvectors(by_place)))


def eigenvalues(xp: Space[A], q: A, power: A) -> tuple[Value, Value]:
    """The eigenvalue of each column by ``power``, which is products @ q: 0 up to a rounding error; and that error."""
    (values,) = xp.sums((q * power, (1,)))
    batch, _, n = xp.shape(values)
    least = UNSEEN * math.sqrt(n) * xp.amax(values, (2,))
    return xp.reshape(xp.where(values > least, values, 0.0), (batch, n)), least


def with_sign(xp: Space[A], q: A) -> Value:
    """q with columns turned so that their entries, weighted by place, have a sum above 0. No step depends on it."""
    (total,) = xp.sums((place_weights(xp, q) * q, (1,)))
    return q * xp.where(total < 0, -1.0, 1.0)


def place_weights(xp: Space[A], like: A) -> Value:
    """A falling number in (0, 1] for each row, (n, 1); roots, so that few sums of them are equal."""
    n = xp.shape(like)[-1]
    places, _ = xp.positions(xp.full((n, 1), 1.0, like))
    return xp.sqrt((n - xp.astype(places, xp.dtype(like))) / n)
