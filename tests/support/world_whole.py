"""Rules that need whole tensors, over ranks: rules of one's own, and what is sent to owners and kept of figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from world_layouts import layout as laid_out  # noqa: E402
from world_steps import Run  # noqa: E402
from world_steps import stepped as run_of  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import RuleError  # noqa: E402
from thalweg.rules import Direction, Preparation, Rule, Update, WholeRule  # noqa: E402
from thalweg.rules.entries import Moment  # noqa: E402
from thalweg.torch.sharding import collectives  # noqa: E402

SHAPES = [(6, 4), (6, 4), (4, 6), (6, 4), (3, 2, 2)]


def parameters(dtype: Any = torch.float32, shapes: Any = SHAPES) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def stepped(optimizer: Any, params: list[Any], steps: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.step()
    return [p.detach().double().numpy() for p in params]


@dataclass(frozen=True, kw_only=True)
class Centred(WholeRule):
    """Momentum less the mean of each of its columns, which is a mean over the whole tensor's rows."""

    momentum: Any = 0.5
    FIGURES: ClassVar[tuple[str, ...]] = ("mean",)

    def validate(self) -> None:
        super().validate()

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
class InOnePart(Rule):
    """It needs whole tensors, and does not say which part of its step does."""

    needs_whole: ClassVar[bool] = True

    def validate(self) -> None:
        super().validate()

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"momentum_buffer": Moment()}

    def kind(self, shape: Any) -> Any:
        return shape

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
        (square,) = xp.sums((g * g, None))
        return Update(g * -lr, {"momentum_buffer": g}, xp.isfinite(square), {})


def sharded_errors(rule: Any) -> list[str]:
    """How a rule of one's own differs from one process over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    kind = thalweg.torch.optimizer(rule)
    mesh = init_device_mesh("cpu", (2,))
    whole, params = parameters(torch.float64), []
    for index, p in enumerate(parameters(torch.float64)):
        params.append(torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(index % 2)])))
    stepped(kind(whole, lr=0.1), whole, 2)
    optimizer = kind(params, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for p in params:
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = distribute_tensor(g, mesh, p.placements)
        try:
            optimizer.step()
        except RuleError as error:
            return [str(error)]
    gathered = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
    pairs = zip(gathered, whole, strict=True)
    return [str(i) for i, (p, q) in enumerate(pairs) if not torch.allclose(p, q, rtol=1e-12, atol=1e-12)]


def dtypes_sent(run: Run, layout: str) -> list[str]:
    """Of all messages to owners and from them, on this rank."""
    sent, send = [], collectives.exchange

    def watched(*pieces: Any, dtype: Any, **rest: Any) -> Any:
        sent.append(str(dtype))
        return send(*pieces, dtype=dtype, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "exchange", watched)
        run_of(run, laid_out(layout))
    return sent


def norms(run: Run, layout: str) -> dict[str, list[float]]:
    found = run_of(run, laid_out(layout)).optimizer.stats()
    return {name: own["norm"].reshape(-1).tolist() for name, own in found.items()}
