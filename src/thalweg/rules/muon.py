"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).

Momentum, seen as a matrix, is *orthogonalized*: all of its singular values are moved near 1 by a few steps of a
Newton-Schulz iteration, which takes matrix products alone and bears the rounding of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from thalweg.arrays import A, Scalar, Shape, Space, State, Truth
from thalweg.errors import ParameterError
from thalweg.rules.blocks import average, is_zero, one_minus_power
from thalweg.rules.checks import check_choice, check_count, check_flag, check_fraction, check_number, require
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.rule import Noise, Rule, Update
from thalweg.rules.whole import Made, Shown, WholeRule

#: a, b and c of a step X <- a X + (b A + c A^2) X with A = X X^T.
Triple: TypeAlias = tuple[float, float, float]

PUBLISHED: Triple = (3.4445, -4.7750, 2.0315)
#: More steps than anybody needs.
MOST_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Muon(WholeRule):
    """step = U V^T, about, for momentum of the singular value decomposition U S V^T."""

    momentum: Scalar = 0.95
    nesterov: bool = True
    #: "ema": momentum is an average of gradients. "sum": the heavy ball's sum, larger by 1 / (1 - momentum).
    momentum_mode: Literal["ema", "sum"] = "ema"
    #: Divide the average by the weight that its terms have come to, as Adam does.
    bias_correction: bool = False
    #: Decoupled: parameters shrink by lr * weight_decay.
    weight_decay: Scalar = 0.0
    #: What a step is multiplied by, for a matrix of m rows and n columns. "original": sqrt(max(1, m / n)).
    #: "match_rms_adamw": rms * sqrt(max(m, n)). "optax": sqrt(max(1, n / m)), for kernels of shape (in, out).
    scaling: Literal["original", "match_rms_adamw", "optax"] | None = "original"
    #: The RMS of a step at lr=1 under scaling="match_rms_adamw".
    rms: Scalar = 0.2
    #: Take each parameter for so many matrices of equal size, side by side along an axis of it as a matrix:
    #: 0 for rows, 1 for columns.
    split: int = 1
    split_axis: Literal[0, 1] = 0
    #: Steps of the Newton-Schulz iteration, and its coefficients: one triple, or one for each step, of which the last
    #: serves all steps that are left.
    ns_steps: int = 5
    ns_coefficients: Triple | tuple[Triple, ...] = PUBLISHED
    #: The dtype of the matrix products; None: as parameters are computed, in float32 or float64.
    ns_dtype: Literal["bfloat16", "float32"] | None = "bfloat16"
    #: What keeps the norm that momentum is divided by away from 0: its floor, or something added to it ("add").
    eps: Scalar = 1e-7
    eps_mode: Literal["floor", "add"] = "floor"
    #: What to do about parameters that are no matrices: refuse them, or take each for a matrix of one row.
    vectors: Literal["refuse", "row"] = "refuse"

    default_lr: ClassVar[float | None] = 0.02

    #: After them torch has adjust_lr_fn, where None is the original scaling, and none of them here.
    TORCH: ClassVar[tuple[str, ...]] = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps")
    FIGURES: ClassVar[tuple[str, ...]] = ("norm",)
    IN_PARTS: ClassVar[bool] = True
    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "torch": {"weight_decay": 0.1},
        "original": {"eps_mode": "add"},
        "moonlight": {"momentum_mode": "sum", "eps_mode": "add", "weight_decay": 0.1, "scaling": "match_rms_adamw"},
        "optax": {"bias_correction": True, "scaling": "optax", "ns_dtype": None, "eps": 1e-8, "eps_mode": "add"},
    }

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **Rule.ELSEWHERE,
        "adjust_lr_fn": "scaling",
        "adjust_lr": "scaling",
        "b1": "momentum",
        "beta": "momentum",
        "beta1": "momentum",
        "mu": "momentum",
        "betas": "momentum, which is one number",
        "consistent_rms": "rms, with scaling='match_rms_adamw'",
        "ns_coeffs": "ns_coefficients",
        "num_ns_steps": "ns_steps",
        "num_heads": "split",
        "split_sizes": "split, the number of equal blocks",
        "split_qkv": "split=3",
    }

    def validate(self) -> None:
        super().validate()
        check_fraction("momentum", self.momentum)
        for name in ("weight_decay", "eps"):
            check_number(name, getattr(self, name), low=0.0)
        check_number("rms", self.rms, low=0.0, open_low=True)
        for name in ("nesterov", "bias_correction"):
            check_flag(name, getattr(self, name))
        check_choice("momentum_mode", self.momentum_mode, "ema", "sum")
        check_choice("scaling", self.scaling, "original", "match_rms_adamw", "optax", None)
        check_choice("split_axis", self.split_axis, 0, 1)
        check_choice("ns_dtype", self.ns_dtype, "bfloat16", "float32", None)
        check_choice("eps_mode", self.eps_mode, "floor", "add")
        check_choice("vectors", self.vectors, "refuse", "row")
        for name in ("split", "ns_steps"):
            check_count(name, getattr(self, name))
            require(getattr(self, name) >= 1, f"{name} must be a whole number >= 1, got {getattr(self, name)!r}")
        require(self.ns_steps < MOST_STEPS, f"ns_steps must be less than {MOST_STEPS}, got {self.ns_steps}")
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

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        idle = super().idle(lr)
        if is_zero(self.momentum):
            names = ("nesterov", "momentum_mode", "bias_correction", "momentum_dtype")
            idle |= dict.fromkeys(names, "a momentum above 0")
        if self.scaling != "match_rms_adamw":
            idle["rms"] = "scaling='match_rms_adamw'"
        if self.split == 1:
            idle["split_axis"] = "a split above 1"
        return idle

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
        sizes = self.matrix(shape)
        if sizes[self.split_axis] % self.split:
            along = ("rows", "columns")[self.split_axis]
            raise ParameterError(
                f"parameter {name!r} has shape {shape}: as a matrix it has {sizes[self.split_axis]} {along}, which "
                f"split={self.split} does not divide; set split for it in overrides"
            )

    def matrix(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a parameter of this shape: its first axis, and all others."""
        own = shape[self.stacked_axes :]
        return (own[0], math.prod(own[1:])) if len(own) > 1 else (1, math.prod(own))

    def block(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of what is orthogonalized."""
        rows, columns = self.matrix(shape)
        return (rows // self.split, columns) if self.split_axis == 0 else (rows, columns // self.split)

    def blocks(self, shape: Shape) -> int:
        """How many matrices a parameter is taken for."""
        return math.prod(shape[: self.stacked_axes]) * self.split

    def scale(self, shape: Shape) -> Scalar:
        """What an orthogonal step of a parameter of this shape is multiplied by."""
        rows, columns = self.block(shape)
        if self.scaling == "match_rms_adamw":
            return self.rms * math.sqrt(max(rows, columns))
        ratio = {"original": rows / max(1, columns), "optax": columns / max(1, rows), None: 1.0}[self.scaling]
        return math.sqrt(max(1.0, ratio))

    def treatment(self, shape: Shape) -> str:
        (rows, columns), count = self.block(shape), self.blocks(shape)
        return f"matrix {rows} x {columns}" if count == 1 else f"{count} matrices {rows} x {columns}"

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        """An orthogonal matrix of n columns and fewer rows has an RMS of n ** -1/2; here n is taken to be 1024."""
        return (lr or 0.0) * (self.rms if self.scaling == "match_rms_adamw" else 1 / 32)

    def kind(self, shape: Shape) -> Hashable:
        return shape

    # ---- the rule

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}

    def shown(self, xp: Space[A], g: A, s: State[A], p: A, t: Scalar) -> Shown:
        """What is orthogonalized: momentum, or a mixture of it with the gradient."""
        b = self.momentum
        if "momentum_buffer" not in s:
            return Shown((self.rounded(xp, g),), {})
        if self.momentum_mode == "sum":
            m = b * s["momentum_buffer"] + g
            x = g + b * m if self.nesterov else m
        else:
            m = average(s["momentum_buffer"], g, 1 - b)
            now, later = (one_minus_power(xp, b, t + i) if self.bias_correction else 1.0 for i in (0, 1))
            x = b * (m / later) + (1 - b) * (g / now) if self.nesterov else m / now
        return Shown((self.rounded(xp, x),), {"momentum_buffer": m})

    def made(
        self, xp: Space[A], tensors: tuple[A, ...], s: State[A], *, due: Truth = True, noise: Noise[A] | None = None
    ) -> Made:
        """What is shown, orthogonalized block by block."""
        (x,) = tensors
        shape = xp.shape(x)
        rows, (m, n), count = self.matrix(shape)[0], self.block(shape), self.blocks(shape)
        if self.split_axis == 1 and self.split > 1:
            x = xp.swapaxes(xp.reshape(x, (count // self.split, rows, self.split, n)), 1, 2)
        x, norm = self.normalized(xp, xp.reshape(x, (count, m, n)))
        x = self.orthogonalized(xp, x)
        if self.split_axis == 1 and self.split > 1:
            x = xp.swapaxes(xp.reshape(x, (count // self.split, self.split, rows, n)), 1, 2)
        return Made(xp.reshape(x, shape), {"norm": norm}, {})

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

    def taken(self, xp: Space[A], made: Made, s: State[A], p: A, state: State[A], *, due: Truth, lr: Scalar) -> Update:
        delta = xp.astype(made.tensor, xp.dtype(p)) * (-lr * self.scale(xp.shape(p)))
        if not is_zero(self.weight_decay):
            delta = delta - (lr * self.weight_decay) * p
        norm = made.figures["norm"]
        return Update(delta, state, xp.isfinite(xp.sums((norm, None))[0]), {"norm": norm})

    # ---- what it costs to be whole

    def figure_shape(self, shape: Shape) -> Shape:
        return (self.blocks(shape), 1, 1)

    def cost(self, shape: Shape) -> int:
        less, more = sorted(self.block(shape))
        return self.blocks(shape) * self.ns_steps * less * less * (2 * more + less)

    def dtype_shown(self, arithmetic: str) -> str:
        return self.ns_dtype or arithmetic
