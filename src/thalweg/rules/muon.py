"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).

Momentum, seen as a matrix, is *orthogonalized*: all of its singular values are moved near 1 by a few steps of a
Newton-Schulz iteration, which takes matrix products alone and bears the rounding of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.errors import ParameterError
from thalweg.rules.blocks import average, is_zero, one_minus_power, where_shrinking
from thalweg.rules.checks import check_count, check_number, require
from thalweg.rules.entries import Entry, Moment, PerSlice
from thalweg.rules.grid import from_stack, to_stack
from thalweg.rules.options import Mask, option
from thalweg.rules.orthogonal import (
    COEFFICIENTS,
    Triple,
    count_gram,
    divide_lines,
    iterate_gram,
    iterate_plain,
    rounded,
)
from thalweg.rules.rule import Update
from thalweg.rules.whole import Direction, Preparation, WholeRule

PUBLISHED: Triple = (3.4445, -4.7750, 2.0315)
#: More steps than are ever needed.
MOST_STEPS = 100
#: The key of running means of squares of lines, rows or columns, and what is added to their roots.
MEANS = "line_squares"
LEAST = 1e-8


@dataclass(frozen=True, kw_only=True)
class Muon(WholeRule):
    """step = U V^T, about, for momentum of the singular value decomposition U S V^T."""

    momentum: Scalar = option(
        0.95,
        "Decay of momentum; 0 keeps none.",
        low=0,
        below=1,
        stores="momentum_dtype",
        elsewhere=dict.fromkeys(("b1", "beta", "beta1", "mu"), "") | {"betas": "momentum, which is one number"},
    )
    nesterov: bool = option(
        True, "Nesterov momentum: mix the gradient into momentum before orthogonalization.", needs="momentum"
    )
    momentum_mode: Literal["ema", "sum"] = option(
        "ema",
        "`'ema'`: an average of gradients. `'sum'`: the heavy ball's sum, larger by 1 / (1 - momentum). Steps are the "
        "same, unless `eps` matters.",
        needs="momentum",
    )
    bias_correction: bool = option(
        False,
        "Correct the bias of averages that start at zero, as Adam does.",
        needs="momentum",
        requires={True: "momentum_mode = 'ema': a sum has no weights to correct"},
    )
    weight_decay: Scalar = option(
        0.0, "Decoupled decay: p shrinks by `lr * weight_decay` of itself, whatever the scale.", low=0
    )
    cautious_decay: bool = option(
        False,
        "Decay only the elements that the step does not move away from 0 (Chen et al. 2025, arXiv:2510.12402).",
        needs="weight_decay",
        elsewhere="cautious_wd cautious_weight_decay",
    )
    scaling: Literal["original", "spectral_unclamped", "match_rms_adamw", "optax"] | None = option(
        "original",
        "The scale for m rows and n columns. `'original'`: sqrt(max(1, m / n)), or sqrt(max(1, n / m)) if "
        "`transposed`. `'spectral_unclamped'`: the same without max. `'match_rms_adamw'`: rms sqrt(max(m, n)). "
        "`'optax'`: sqrt(max(1, n / m)), for kernels of shape (in, out). `None`: 1.",
        elsewhere="adjust_lr_fn adjust_lr",
    )
    rms: Scalar = option(
        0.2,
        "The RMS of a step at `lr=1`.",
        above=0,
        needs="scaling = 'match_rms_adamw'",
        elsewhere={"consistent_rms": "rms, with scaling='match_rms_adamw'"},
    )
    split: int | tuple[int, ...] = option(
        1,
        "Treat each parameter as this many matrices of equal size, or as matrices of these sizes (a tuple).",
        elsewhere={"num_heads": "", "split_sizes": "split, a tuple of sizes", "split_qkv": "split=3"},
    )
    split_axis: Literal[0, 1] = option(0, "Split along rows (0) or along columns (1).", needs="split > 1")
    transposed: bool = option(
        False,
        "The first axis is the input, not the output. `scaling='original'`, `'spectral_unclamped'` and `normalize` "
        "look at it.",
    )
    ns_steps: int = option(
        5, "The number of steps of the iteration.", low=1, below=MOST_STEPS, elsewhere="num_ns_steps"
    )
    ns_coefficients: Triple | tuple[Triple, ...] | Literal["polar_express", "quintic", "cubic"] = option(
        PUBLISHED,
        "(a, b, c); or one such triple for each step, of which the last serves all remaining steps; or the name of "
        "[published ones](muon.md#coefficients).",
        elsewhere="ns_coeffs",
    )
    ns_method: Literal["plain", "gram", "auto"] = option(
        "plain",
        "How the iteration is computed. `'plain'`: on the matrix X. `'gram'`: on X Xᵀ, which takes fewer "
        "multiplications for the same polynomial if X is not square. `'auto'`: `'gram'` if one side is "
        "at least twice the other.",
    )
    ns_preconditioning: Literal["frobenius", "aol"] = option(
        "frobenius",
        "How a matrix is scaled before the iteration. `'frobenius'`: divided by its norm. `'aol'`: then row by row, "
        "which brings singular values closer to 1 and saves a step (Prach, Lampert 2022, arXiv:2208.03160).",
        elsewhere="preconditioning",
    )
    ns_dtype: Literal["bfloat16", "float32"] | None = option(
        "bfloat16",
        "The dtype of the products, which accumulate in float32. `None`: the dtype of the arithmetic, float32 or "
        "float64. With `'bfloat16'`, `ns_method='gram'` multiplies in float16.",
    )
    eps: Scalar = option(1e-7, "The smallest norm that a matrix is divided by.", low=0)
    eps_mode: Literal["floor", "add"] = option(
        "floor", "`'floor'`: divide by max(norm, eps). `'add'`: divide by norm + eps."
    )
    normalize: Literal["rows"] | None = option(
        None,
        "NorMuon (Li et al. 2025, arXiv:2510.05491): divide each row of the orthogonal step (each column if "
        "`transposed`) by the root of a running mean of its squares, and keep the norm of the whole.",
        elsewhere={"normuon": "normalize='rows'"},
    )
    normalize_beta: Scalar = option(
        0.95,
        "Decay of these means.",
        low=0,
        below=1,
        needs="normalize",
        elsewhere="beta2 muon_beta2",
    )
    vectors: Literal["refuse", "row"] = option(
        "refuse",
        "What to do with parameters that are not matrices: `'refuse'` them, or treat each as a matrix of one `'row'`.",
    )

    default_lr = 0.02
    typical_lr = 0.03
    is_decay_apart = True
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
            label = "split" if size is self.split else f"each size of split={self.split!r}"
            check_count(label, size)
            require(size >= 1, f"{label} must be a whole number >= 1, got {size!r}")
        wanted = f"ns_coefficients must be three numbers, or three for each step, got {self.ns_coefficients!r}"
        is_named = isinstance(self.ns_coefficients, str)
        require(is_named or (isinstance(self.ns_coefficients, tuple) and len(self.ns_coefficients) > 0), wanted)
        for triple in self.triples:
            require(isinstance(triple, tuple) and len(triple) == 3, wanted)
            for number in triple:
                check_number("each of ns_coefficients", number)

    @property
    def triples(self) -> tuple[Any, ...]:
        """The coefficients, step by step, as far as they are given."""
        if isinstance(self.ns_coefficients, str):
            return COEFFICIENTS[self.ns_coefficients]
        given: tuple[Any, ...] = self.ns_coefficients
        return (given,) if not isinstance(given[0], tuple) else given

    # ---- how a parameter is seen

    def check_shape(self, name: object, shape: Shape) -> None:
        super().check_shape(name, shape)
        if self.vectors == "refuse" and len(shape) < self.stacked_axes + 2:
            reason = " each of its tensors is no matrix" if self.stacked_axes else " it is no matrix"
            raise ParameterError(
                f"parameter {name!r} has shape {shape}:{reason}, and Muon orthogonalizes matrices. Give it to an "
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
        """Rows and columns of a parameter of this shape: its first axis, and the product of all others."""
        sizes = shape[self.stacked_axes :]
        return (sizes[0], math.prod(sizes[1:])) if len(sizes) > 1 else (1, math.prod(sizes))

    def blocks(self, shape: Shape) -> list[tuple[int, int]]:
        """Rows and columns of each matrix that a tensor is taken for; a stack has several tensors."""
        rows, columns = self.matrix(shape)
        size = (rows, columns)[self.split_axis]
        sizes = self.split if isinstance(self.split, tuple) else (size // self.split,) * self.split
        return [(part, columns) if self.split_axis == 0 else (rows, part) for part in sizes]

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
        if self.scaling == "spectral_unclamped":
            ratio = max(1, rows) / max(1, columns)
            return 1 / ratio if self.transposed else ratio
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
        entries: dict[str, Entry] = {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}
        return entries if self.normalize is None else {**entries, MEANS: PerSlice((sum(self.count_lines(shape)),))}

    def count_lines(self, shape: Shape) -> list[int]:
        """How many rows (columns, if transposed) each block has: ``normalize`` divides each by its own number."""
        return [block[1 if self.transposed else 0] for block in self.blocks(shape)]

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
        """The prepared tensor, orthogonalized block by block."""
        (x,) = tensors
        shape = xp.shape(x)
        blocks, stack = self.blocks(shape), self.tensors(shape)
        if len(set(blocks)) > 1:
            return self.transform_unequal(xp, x, s, blocks, stack)
        (m, n), split = blocks[0], len(blocks)
        runs = ((split, m), (1, n)) if self.split_axis == 0 else ((1, m), (split, n))
        x, norm = self.divide_by_norm(xp, to_stack(xp, xp.reshape(x, (stack, *self.matrix(shape))), runs))
        x, state = self.orthogonalize(xp, x), {}
        if self.normalize is not None:
            x, means = self.normalize_lines(xp, x, s[MEANS])
            state = {MEANS: xp.reshape(means, xp.shape(s[MEANS]))}
        return Direction(xp.reshape(from_stack(xp, x, runs), shape), {"norm": norm}, state)

    def normalize_lines(self, xp: Space[A], x: A, means: A) -> tuple[A, A]:
        """Matrices with each line divided by the root of the new mean of its squares, and these means.

        The norm of a matrix stays.
        """
        count, rows, columns = xp.shape(x)
        axis, means_shape = (1, (count, 1, columns)) if self.transposed else (2, (count, rows, 1))
        wide = xp.astype(x, xp.dtype(means))
        (squares,) = xp.means(Squares(wide, (axis,)))
        means = average(xp.reshape(means, means_shape), squares, 1 - self.normalize_beta)
        divided = wide / (xp.sqrt(means) + LEAST)
        before, after = xp.sums(Squares(wide, (1, 2)), Squares(divided, (1, 2)))
        return self.rounded(xp, divided * (xp.sqrt(before) / (xp.sqrt(after) + LEAST))), means

    def transform_unequal(
        self, xp: Space[A], x: A, s: State[A], blocks: list[tuple[int, int]], stack: int
    ) -> Direction:
        """Blocks of several sizes, each multiplied by what its scale is to that of the first one."""
        shape, parts, norms = xp.shape(x), [], []
        lines, means = self.count_lines(shape), []
        old_means = None
        if self.normalize is not None:
            old_means = xp.cut(xp.reshape(s[MEANS], (stack, sum(lines))), 1, tuple(lines))
        sizes, axis = tuple(block[self.split_axis] for block in blocks), 1 + self.split_axis
        cut = xp.cut(xp.reshape(x, (stack, *self.matrix(shape))), axis, sizes)
        for i, (part, block) in enumerate(zip(cut, blocks, strict=True)):
            unit, norm = self.divide_by_norm(xp, part)
            unit, ratio = self.orthogonalize(xp, unit), self.squared_scale(*block) / self.squared_scale(*blocks[0])
            if old_means is not None:
                unit, mean = self.normalize_lines(xp, unit, old_means[i])
                means.append(xp.reshape(mean, (stack, lines[i])))
            parts.append(unit if ratio == 1 else self.rounded(xp, unit * math.sqrt(ratio)))
            norms.append(norm)
        norm = xp.reshape(xp.join(norms, 1), (stack * len(blocks), 1, 1))
        state = {MEANS: xp.reshape(xp.join(means, 1), xp.shape(s[MEANS]))} if means else {}
        return Direction(xp.reshape(xp.join(parts, axis), shape), {"norm": norm}, state)

    def divide_by_norm(self, xp: Space[A], x: A) -> tuple[A, A]:
        """Matrices divided by their norms, so that no singular value is above 1, and these norms."""
        norm = xp.matrix_norm(x)
        below = xp.maximum(norm, self.eps) if self.eps_mode == "floor" else norm + self.eps
        return xp.divided(x, self.rounded(xp, below), self.dtype_of_products(*xp.shape(x)[1:])), norm

    def orthogonalize(self, xp: Space[A], x: A) -> A:
        """Matrices (k, m, n) with singular values between 0 and 1, after the Newton-Schulz iteration."""
        steps = [self.triples[min(step, len(self.triples) - 1)] for step in range(self.ns_steps)]
        shape = xp.shape(x)[1:]
        if self.ns_preconditioning == "aol":
            x = divide_lines(xp, x, self.dtype_of_products(*shape))
        if self.iterates_gram(*shape):
            return iterate_gram(xp, x, steps, self.dtype_of_products(*shape), self.ns_dtype)
        return iterate_plain(xp, x, steps, self.ns_dtype)

    def dtype_of_products(self, rows: int, columns: int) -> str | None:
        """``ns_dtype``, but float16 for bfloat16 in the Gram iteration, which needs its digits."""
        return "float16" if self.ns_dtype == "bfloat16" and self.iterates_gram(rows, columns) else self.ns_dtype

    def iterates_gram(self, rows: int, columns: int) -> bool:
        """Whether matrices of this shape take the Gram iteration, however parameters are batched and sharded."""
        is_long = max(rows, columns) >= 2 * min(rows, columns)
        return self.ns_method == "gram" or (self.ns_method == "auto" and is_long)

    def rounded(self, xp: Space[A], x: A) -> A:
        return rounded(xp, x, self.ns_dtype)

    def apply(self, xp, direction, s, p, state, *, due, lr) -> Update:
        delta = xp.astype(direction.tensor, xp.dtype(p)) * (-lr * self.scale(xp.shape(p)))
        if not is_zero(self.weight_decay):
            decay = (lr * self.weight_decay) * p
            delta = delta - (where_shrinking(xp, delta, p, decay) if self.cautious_decay else decay)
        norm = direction.figures["norm"]
        return Update(delta, state, xp.isfinite(xp.sums((norm, None))[0]), {"norm": norm})

    # ---- what it costs to be whole

    def figure_shape(self, shape: Shape) -> Shape:
        return (self.tensors(shape) * len(self.blocks(shape)), 1, 1)

    def cost(self, shape: Shape) -> int:
        return self.tensors(shape) * sum(self.count_products(*sorted(block)) for block in self.blocks(shape))

    def count_products(self, less: int, more: int) -> int:
        """Multiplications within the products of one matrix."""
        first = less * less * more if self.ns_preconditioning == "aol" else 0
        if self.iterates_gram(less, more):
            return first + count_gram(self.ns_steps, less, more)
        return first + self.ns_steps * less * less * (2 * more + less)

    def whole_dtype(self, arithmetic: str) -> str:
        return self.ns_dtype or arithmetic

    def count_temporaries(self) -> int:
        return 10 if self.normalize is None else 18
