"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).

Momentum, seen as a matrix, is *orthogonalized*: all of its singular values are moved near 1 by a few steps of a
Newton-Schulz iteration, which takes matrix products alone and bears the rounding of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from thalweg.arrays import A, Scalar, Shape, Space
from thalweg.errors import ParameterError
from thalweg.rules.blocks import average, is_zero, one_minus_power
from thalweg.rules.checks import check_count, check_number, require
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.options import Mask, option
from thalweg.rules.rule import Update
from thalweg.rules.whole import Direction, Preparation, WholeRule

#: a, b and c of a step X <- a X + (b A + c A^2) X with A = X X^T.
Triple: TypeAlias = tuple[float, float, float]

PUBLISHED: Triple = (3.4445, -4.7750, 2.0315)
#: More steps than anybody needs.
MOST_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Muon(WholeRule):
    """step = U V^T, about, for momentum of the singular value decomposition U S V^T."""

    momentum: Scalar = option(
        0.95,
        "Memory of momentum; 0 keeps none.",
        low=0,
        below=1,
        stores="momentum_dtype",
        elsewhere=dict.fromkeys(("b1", "beta", "beta1", "mu"), "") | {"betas": "momentum, which is one number"},
    )
    nesterov: bool = option(True, "Mix the gradient into momentum before it is orthogonalized.", needs="momentum")
    momentum_mode: Literal["ema", "sum"] = option(
        "ema",
        "`'ema'`: an average of gradients. `'sum'`: the heavy ball's sum, larger by 1 / (1 - momentum). Steps are the "
        "same, unless `eps` matters.",
        needs="momentum",
    )
    bias_correction: bool = option(
        False,
        "Divide averages by the weight that their terms have come to, as Adam does. Not of a `'sum'`.",
        needs="momentum",
    )
    weight_decay: Scalar = option(0.0, "Decoupled, times `lr` and not times the scale.", low=0)
    scaling: Literal["original", "match_rms_adamw", "optax"] | None = option(
        "original",
        "The scale for m rows and n columns. `'original'`: sqrt(max(1, m / n)), or sqrt(max(1, n / m)) if "
        "`transposed`. `'match_rms_adamw'`: rms sqrt(max(m, n)). `'optax'`: sqrt(max(1, n / m)), for kernels of shape "
        "(in, out). `None`: 1.",
        elsewhere="adjust_lr_fn adjust_lr",
    )
    rms: Scalar = option(
        0.2,
        "The RMS of a step at lr = 1.",
        above=0,
        needs="scaling = 'match_rms_adamw'",
        elsewhere={"consistent_rms": "rms, with scaling='match_rms_adamw'"},
    )
    split: int | tuple[int, ...] = option(
        1,
        "Take each parameter for so many matrices of equal size, or for matrices of these sizes (a tuple).",
        elsewhere={"num_heads": "", "split_sizes": "split, a tuple of sizes", "split_qkv": "split=3"},
    )
    split_axis: Literal[0, 1] = option(
        0, "Side by side along rows (0) or along columns (1) of a parameter as a matrix.", needs="split > 1"
    )
    transposed: bool = option(
        False, "The first axis is the input, not the output. `scaling='original'` alone looks at it."
    )
    ns_steps: int = option(5, "Steps of the iteration.", low=1, below=MOST_STEPS, elsewhere="num_ns_steps")
    ns_coefficients: Triple | tuple[Triple, ...] = option(
        PUBLISHED,
        "a, b and c; or a tuple of such triples, one for each step, of which the last serves all steps that are left.",
        elsewhere="ns_coeffs",
    )
    ns_dtype: Literal["bfloat16", "float32"] | None = option(
        "bfloat16",
        "The dtype of the products; sums within them are of float32. `'float32'`, or `None`: as parameters are "
        "computed (float64 for float64).",
    )
    eps: Scalar = option(1e-7, "What keeps the norm away from 0.", low=0)
    eps_mode: Literal["floor", "add"] = option(
        "floor", "The least norm that is divided by, or what is added to it (`'add'`)."
    )
    vectors: Literal["refuse", "row"] = option(
        "refuse", "Parameters that are no matrices: refuse them, or take each for a matrix of one `'row'`."
    )

    default_lr = 0.02
    #: After them torch has adjust_lr_fn, where None is the original scaling, and none of them here.
    TORCH = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps")
    FIGURES = ("norm",)
    IN_PARTS = True
    VARIANTS = {
        "torch": {"weight_decay": 0.1},
        "original": {"eps_mode": "add"},
        "moonlight": {"momentum_mode": "sum", "eps_mode": "add", "weight_decay": 0.1, "scaling": "match_rms_adamw"},
        "optax": {"bias_correction": True, "scaling": "optax", "ns_dtype": None, "eps": 1e-8, "eps_mode": "add"},
    }

    OPTAX = {
        **{"ns_coeffs": "ns_coefficients", "ns_steps": "ns_steps", "beta": "momentum", "eps": "eps"},
        **{"weight_decay": "weight_decay", "weight_decay_mask": Mask("weight_decay"), "mu_dtype": "momentum_dtype"},
        **{"*": "", "nesterov": "nesterov", "consistent_rms": ("rms", None)},
    }

    def validate(self) -> None:
        super().validate()
        sizes: tuple[Any, ...] = self.split if isinstance(self.split, tuple) and self.split else (self.split,)
        for size in sizes:
            said = "split" if size is self.split else f"each size of split={self.split!r}"
            check_count(said, size)
            require(size >= 1, f"{said} must be a whole number >= 1, got {size!r}")
        wanted = f"ns_coefficients must be three numbers, or three for each step, got {self.ns_coefficients!r}"
        require(isinstance(self.ns_coefficients, tuple) and len(self.ns_coefficients) > 0, wanted)
        for triple in self.triples:
            require(isinstance(triple, tuple) and len(triple) == 3, wanted)
            for number in triple:
                check_number("each of ns_coefficients", number)
        require(
            not (self.bias_correction and self.momentum_mode == "sum"),
            "bias_correction=True needs momentum_mode='ema': a sum has no weights to correct",
        )

    @property
    def triples(self) -> tuple[Any, ...]:
        """The coefficients, step by step, as far as they are given."""
        given: tuple[Any, ...] = self.ns_coefficients
        return (given,) if not isinstance(given[0], tuple) else given

    # ---- how a parameter is seen

    def check_shape(self, name: object, shape: Shape) -> None:
        super().check_shape(name, shape)
        if self.vectors == "refuse" and len(shape) < self.stacked_axes + 2:
            each = " each of its tensors is no matrix" if self.stacked_axes else " it is no matrix"
            raise ParameterError(
                f"parameter {name!r} has shape {shape}:{each}, and Muon orthogonalizes matrices. Give it to an "
                "optimizer of its own, such as AdamW, or set vectors='row', which takes it for a matrix of one row"
            )
        size, along = self.matrix(shape)[self.split_axis], ("rows", "columns")[self.split_axis]
        as_matrix = f"parameter {name!r} has shape {shape}: as a matrix it has {size} {along}"
        if isinstance(self.split, tuple) and sum(self.split) != size:
            raise ParameterError(
                f"{as_matrix}, and the sizes of split={self.split} add up to {sum(self.split)}; set split for it in "
                "overrides"
            )
        if not isinstance(self.split, tuple) and size % self.split:
            raise ParameterError(
                f"{as_matrix}, which split={self.split} does not divide; set split for it in overrides"
            )

    def matrix(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a parameter of this shape: its first axis, and all others."""
        own = shape[self.stacked_axes :]
        return (own[0], math.prod(own[1:])) if len(own) > 1 else (1, math.prod(own))

    def blocks(self, shape: Shape) -> list[tuple[int, int]]:
        """Rows and columns of each matrix that a tensor is taken for; a stack has several tensors."""
        rows, columns = self.matrix(shape)
        size = (rows, columns)[self.split_axis]
        sizes = self.split if isinstance(self.split, tuple) else (size // self.split,) * self.split
        return [(own, columns) if self.split_axis == 0 else (rows, own) for own in sizes]

    def tensors(self, shape: Shape) -> int:
        """How many tensors a parameter is a stack of."""
        return math.prod(shape[: self.stacked_axes])

    def scale(self, shape: Shape) -> Scalar:
        """What an orthogonal step of a parameter of this shape is multiplied by, in its first block."""
        root = math.sqrt(self.squared_scale(*self.blocks(shape)[0]))
        return self.rms * root if self.scaling == "match_rms_adamw" else root

    def squared_scale(self, rows: int, columns: int) -> float:
        """The square of what an orthogonal matrix is multiplied by, beside ``rms``."""
        if self.scaling == "match_rms_adamw":
            return max(rows, columns)
        turned = self.transposed or self.scaling == "optax"
        ratio = columns / max(1, rows) if turned else rows / max(1, columns)
        return 1.0 if self.scaling is None else max(1.0, ratio)

    def treatment(self, shape: Shape) -> str:
        blocks, tensors = self.blocks(shape), self.tensors(shape)
        counts = {block: tensors * blocks.count(block) for block in blocks}
        return ", ".join(f"{'matrix' if n == 1 else f'{n} matrices'} {r} x {c}" for (r, c), n in counts.items())

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        """An orthogonal matrix of n columns and fewer rows has an RMS of n ** -1/2; here n is taken to be 1024."""
        return (lr or 0.0) * (self.rms if self.scaling == "match_rms_adamw" else 1 / 32)

    def kind(self, shape: Shape) -> Hashable:
        return shape

    # ---- the rule

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}

    def prepare(self, xp, g, s, p, t) -> Preparation:
        """What is orthogonalized: momentum, or a mixture of it with the gradient."""
        b = self.momentum
        if "momentum_buffer" not in s:
            return Preparation((self.rounded(xp, g),), {})
        if self.momentum_mode == "sum":
            m = b * s["momentum_buffer"] + g
            x = g + b * m if self.nesterov else m
        else:
            m = average(s["momentum_buffer"], g, 1 - b)
            now, later = (one_minus_power(xp, b, t + i) if self.bias_correction else 1.0 for i in (0, 1))
            x = b * (m / later) + (1 - b) * (g / now) if self.nesterov else m / now
        return Preparation((self.rounded(xp, x),), {"momentum_buffer": m})

    def transform(self, xp, tensors, s, *, due=True, noise=None) -> Direction:
        """What is shown, orthogonalized block by block."""
        (x,) = tensors
        shape = xp.shape(x)
        blocks, rows, stack = self.blocks(shape), self.matrix(shape)[0], self.tensors(shape)
        if len(set(blocks)) > 1:
            return self.transform_unequal(xp, x, blocks, stack)
        (m, n), split = blocks[0], len(blocks)
        if self.split_axis == 1 and split > 1:
            x = xp.swapaxes(xp.reshape(x, (stack, rows, split, n)), 1, 2)
        x, norm = self.normalized(xp, xp.reshape(x, (stack * split, m, n)))
        x = self.orthogonalized(xp, x)
        if self.split_axis == 1 and split > 1:
            x = xp.swapaxes(xp.reshape(x, (stack, split, rows, n)), 1, 2)
        return Direction(xp.reshape(x, shape), {"norm": norm}, {})

    def transform_unequal(self, xp: Space[A], x: A, blocks: list[tuple[int, int]], stack: int) -> Direction:
        """Blocks of several sizes, each multiplied by what its scale is to that of the first one."""
        shape, parts, norms = xp.shape(x), [], []
        sizes, axis = tuple(block[self.split_axis] for block in blocks), 1 + self.split_axis
        cut = xp.cut(xp.reshape(x, (stack, *self.matrix(shape))), axis, sizes)
        for part, block in zip(cut, blocks, strict=True):
            own, norm = self.normalized(xp, part)
            own, ratio = self.orthogonalized(xp, own), self.squared_scale(*block) / self.squared_scale(*blocks[0])
            parts.append(own if ratio == 1 else self.rounded(xp, own * math.sqrt(ratio)))
            norms.append(norm)
        norm = xp.reshape(xp.join(norms, 1), (stack * len(blocks), 1, 1))
        return Direction(xp.reshape(xp.join(parts, axis), shape), {"norm": norm}, {})

    def normalized(self, xp: Space[A], x: A) -> tuple[A, A]:
        """Matrices divided by their norms, so that no singular value is above 1, and these norms."""
        norm = xp.matrix_norm(x)
        below = xp.maximum(norm, self.eps) if self.eps_mode == "floor" else norm + self.eps
        return self.rounded(xp, xp.divided(x, self.rounded(xp, below))), norm

    def orthogonalized(self, xp: Space[A], x: A) -> A:
        """Matrices (k, m, n) with singular values between 0 and 1, after the Newton-Schulz iteration.

        Inner products are those along the longer side, so that there are fewer.
        """
        triples, (_, m, n) = self.triples, xp.shape(x)
        for step in range(self.ns_steps):
            a, b, c = triples[min(step, len(triples) - 1)]
            turned = xp.swapaxes(x, 1, 2)
            gram = self.rounded(xp, xp.matmul(turned, x) if m > n else xp.matmul(x, turned))
            polynomial = self.rounded(xp, xp.matmul_add(gram, gram, gram, c, b))
            operands = (x, polynomial) if m > n else (polynomial, x)
            x = self.rounded(xp, xp.matmul_add(*operands, x, 1.0, a))
        return x

    def rounded(self, xp: Space[A], x: A) -> A:
        return x if self.ns_dtype is None else xp.rounded(x, self.ns_dtype)

    def apply(self, xp, direction, s, p, state, *, due, lr) -> Update:
        delta = xp.astype(direction.tensor, xp.dtype(p)) * (-lr * self.scale(xp.shape(p)))
        if not is_zero(self.weight_decay):
            delta = delta - (lr * self.weight_decay) * p
        norm = direction.figures["norm"]
        return Update(delta, state, xp.isfinite(xp.sums((norm, None))[0]), {"norm": norm})

    # ---- what it costs to be whole

    def figure_shape(self, shape: Shape) -> Shape:
        return (self.tensors(shape) * len(self.blocks(shape)), 1, 1)

    def cost(self, shape: Shape) -> int:
        sides = map(sorted, self.blocks(shape))
        return self.tensors(shape) * self.ns_steps * sum(less * less * (2 * more + less) for less, more in sides)

    def whole_dtype(self, arithmetic: str) -> str:
        return self.ns_dtype or arithmetic
