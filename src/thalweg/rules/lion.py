"""Lion (Chen and others 2023, arXiv:2302.06675): the sign of an average of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.rules.blocks import average, sign
from thalweg.rules.checks import check_fraction, check_number, check_pair
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.rule import Noise, Rule, Update


@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """Every weight moves by lr, against the sign of an average of its gradients; decay is apart from it."""

    #: How much the sign, and then the memory, keep of earlier gradients.
    betas: tuple[Scalar, Scalar] = (0.9, 0.99)
    weight_decay: Scalar = 0.0

    default_lr: ClassVar[float | None] = 1e-4

    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"timm": {}, "optax": {"weight_decay": 1e-3}}

    ELSEWHERE: ClassVar[Mapping[str, str]] = {**Rule.ELSEWHERE, "b1": "betas=(b1, b2)", "b2": "betas=(b1, b2)"}

    OPTAX: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "b1": ("betas[0]", 0.9),
        "b2": ("betas[1]", 0.99),
        "mu_dtype": ("momentum_dtype", None),
        "weight_decay": ("weight_decay", 1e-3),
        "mask": ("", None),
    }

    def validate(self) -> None:
        super().validate()
        for index, beta in enumerate(check_pair("betas", self.betas)):
            check_fraction(f"betas[{index}]", beta)
        check_number("weight_decay", self.weight_decay, low=0.0)

    @property
    def looks_at_shapes(self) -> bool:
        return False

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {"exp_avg": Moment()}

    def update(
        self,
        xp: Space[A],
        g: A,
        s: State[A],
        p: A,
        *,
        t: Scalar,
        lr: Scalar | None,
        lr_scale: Scalar = 1.0,
        noise: Noise[A] | None = None,
    ) -> Update:
        assert lr is not None
        b1, b2 = self.betas
        u = sign(xp, average(s["exp_avg"], g, 1 - b1)) + self.weight_decay * p
        (g_squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(p))))
        state = {"exp_avg": average(s["exp_avg"], g, 1 - b2)}
        return Update(u * (-lr * lr_scale), state, xp.isfinite(g_squares), {"grad_norm": xp.sqrt(g_squares)})
