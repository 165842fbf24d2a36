"""Runs of published optimizers that ours continue: one row for each source, and the drive that both go through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from published_runs import peer

from thalweg.rules.noise import normal, tensor_id

torch = pytest.importorskip("torch")

from thalweg.spaces import torch as xp  # noqa: E402

#: Steps of the source, and steps in all.
BEFORE, IN_ALL = 5, 10
SHAPES = {"p0": (20, 18), "p1": (18, 24), "p2": (18, 17, 3, 2), "p3": (17,)}
SMALL = {"p0": (12, 10), "p1": (7, 16), "p2": (5, 4, 6), "p3": (9,)}
MATRICES = {"p0": (20, 18), "p1": (18, 24), "p2": (16, 16), "p3": (1, 9)}


@dataclass(frozen=True)
class Source:
    """A published optimizer and ours that equals it."""

    module: str
    kind: str
    #: What it is constructed with, and ours.
    theirs: Mapping[str, Any]
    rule: str
    ours: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    lr: float | None = 0.02
    #: Whether it computes in float32 whatever its parameters are.
    wide: bool = False

    @property
    def name(self) -> str:
        return f"{self.module.partition('.')[0]}.{self.kind}"


class FusedLAMB(torch.optim.Optimizer):
    """apex's FusedLAMB from its published equations, with its defaults and its state: steps are counted by group."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01, max_grad_norm: float = 1.0) -> None:
        own = dict(bias_correction=True, betas=(0.9, 0.999), eps=1e-6, grad_averaging=True)
        super().__init__(params, dict(own, lr=lr, weight_decay=weight_decay, max_grad_norm=max_grad_norm))

    @torch.no_grad()
    def step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            group["step"] = t = group.get("step", 0) + 1
            (b1, b2), decay = group["betas"], group["weight_decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                g = p.grad / max(1.0, norm / group["max_grad_norm"])
                m = state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                v = state["exp_avg_sq"].mul_(b2).add_(g * g, alpha=1 - b2)
                u = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + decay * p
                ratio = p.norm() / u.norm() if decay != 0 else 1.0
                p.sub_(group["lr"] * ratio * u)


def vector(name: str, p: Any) -> bool:
    return p.ndim < 2


SGD = dict(momentum=0.9, dampening=0.5, weight_decay=0.1)
ADAM = dict(betas=(0.8, 0.9), weight_decay=0.1, amsgrad=True)
HF = dict(weight_decay=0.1, relative_step=False, beta1=0.9)
KRON = dict(variant="kron_torch", precond_update_probability=1.0, weight_decay=0.1)
UNDAMPED = dict(KRON, relative_damping=0.0, merge=None)
PYTORCH_OPTIMIZER = "pytorch_optimizer.optimizer"
SOURCES = [
    Source("torch.optim", "SGD", SGD, "SGD", SGD),
    Source(
        "torch.optim",
        "SGD",
        dict(momentum=0.9, weight_decay=0.1),
        "LARS",
        dict(weight_decay=0.1, trust=False, momentum_mode="lr_outside"),
    ),
    Source("torch.optim", "Adam", ADAM, "AdamW", dict(ADAM, decoupled=False)),
    Source("torch.optim", "AdamW", ADAM, "AdamW", ADAM),
    Source(
        "torch.optim",
        "AdamW",
        dict(weight_decay=0.1),
        "LAMB",
        dict(weight_decay=0.1, eps=1e-8, trust=False, exempt=None),
    ),
    Source(
        "torch.optim",
        "Adafactor",
        dict(weight_decay=0.1, eps=(2.0**-23, 1e-3)),
        "Adafactor",
        dict(variant="torch", weight_decay=0.1),
    ),
    Source("torch.optim", "Muon", {}, "Muon", dict(variant="torch", ns_dtype=None), MATRICES),
    Source(
        "transformers.optimization",
        "Adafactor",
        HF,
        "Adafactor",
        dict(variant="hf", weight_decay=0.1, momentum=0.9),
        wide=True,
    ),
    Source(
        "transformers.optimization",
        "Adafactor",
        dict(weight_decay=0.1),
        "Adafactor",
        dict(variant="hf", weight_decay=0.1),
        lr=None,
        wide=True,
    ),
    Source(
        "timm.optim.adafactor",
        "Adafactor",
        dict(weight_decay=0.1, betas=(0.9, 0.0)),
        "Adafactor",
        dict(scale_parameter=False, weight_decay=0.1, momentum=0.9, min_dim_size_to_factor=17),
        wide=True,
    ),
    Source(
        "timm.optim.adafactor_bv",
        "AdafactorBigVision",
        dict(weight_decay=0.1, clipping_threshold=1.0),
        "Adafactor",
        dict(
            variant="big_vision",
            weight_decay=0.1,
            weight_decay_mode="lr",
            min_dim_size_to_factor=16,
            clip_threshold=1.0,
            momentum_dtype=None,
        ),
    ),
    Source("timm.optim.lamb", "Lamb", {}, "LAMB", dict(variant="apex")),
    Source(
        "timm.optim.lars",
        "Lars",
        dict(momentum=0.9, weight_decay=0.1, nesterov=True),
        "LARS",
        dict(variant="timm", momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    Source(
        "timm.optim.kron",
        "Kron",
        dict(weight_decay=0.1, preconditioner_update_probability=1.0),
        "Kron",
        UNDAMPED,
        SMALL,
    ),
    Source(
        "timm.optim.lion",
        "Lion",
        dict(weight_decay=0.1, betas=(0.8, 0.9)),
        "Lion",
        dict(weight_decay=0.1, betas=(0.8, 0.9)),
    ),
    Source("apex", "FusedLAMB", {}, "LAMB", dict(variant="apex")),
    Source(
        "kron_torch.kron",
        "Kron",
        dict(weight_decay=0.1, preconditioner_update_probability=1.0),
        "Kron",
        dict(KRON, overrides=[(vector, dict(weight_decay=0.0))]),
        SMALL,
    ),
    Source(
        PYTORCH_OPTIMIZER,
        "AdaFactor",
        dict(weight_decay=0.1, relative_step=False),
        "Adafactor",
        dict(variant="hf", momentum=0.9, beta2_cap=0.999, weight_decay=0.1),
    ),
    Source(
        PYTORCH_OPTIMIZER,
        "Lamb",
        dict(weight_decay=0.1, adam_debias=True, eps=1e-20),
        "LAMB",
        dict(
            weight_decay=0.1, weight_decay_mode="decoupled", bias_correction=False, phi=(0, 10), eps=1e-20, exempt=None
        ),
    ),
    Source(
        PYTORCH_OPTIMIZER,
        "LARS",
        dict(weight_decay=0.1),
        "LARS",
        dict(weight_decay=0.1, momentum_mode="lr_outside", exempt="vectors"),
    ),
    Source(
        PYTORCH_OPTIMIZER,
        "Kron",
        dict(weight_decay=0.1, pre_conditioner_update_probability=1.0, balance_prob=0.0),
        "Kron",
        dict(UNDAMPED, overrides=[(vector, dict(weight_decay=0.0))]),
        SMALL,
    ),
    Source(
        PYTORCH_OPTIMIZER,
        "SOAP",
        dict(weight_decay=0.1, precondition_frequency=3),
        "SOAP",
        dict(weight_decay=0.1, precondition_frequency=3),
        SMALL,
    ),
]


def parameters(source: Source, dtype: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(getattr(torch, dtype)))
        for name, shape in source.shapes.items()
    }


def two_groups(source: Source, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first two parameters, and the others at half of the rate."""
    named = list(params.items())
    slower = {} if source.lr is None else {"lr": source.lr / 2}
    return [{"params": named[:2]}, {"params": named[2:], **slower}]


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


def run(
    params: Mapping[str, Any], optimizer: Any, scheduler: Any, first: int, last: int, clock: list[int], given: str = ""
) -> None:
    """Steps from the first to before the last, with gradients that depend on the step alone. given: their dtype."""
    for t in range(first, last):
        clock[0] = t + 1
        generator = torch.Generator().manual_seed(t)
        for p in params.values():
            g = torch.randn(p.shape, generator=generator) * (1 + t % 3)
            p.grad = g.to(getattr(torch, given) if given else p.dtype).to(p.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@contextlib.contextmanager
def nothing_random(source: Source, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Within: published Krons draw our noise, for the step that the clock shows, and solve in full precision.

    kron-torch, besides, does not let its damping leak into the update. torch's Muon multiplies matrices in the
    precision of its parameters: sums of products in bfloat16 depend on the kind of CPU. Others are left as they are.
    """
    clock = [0]
    if source.name == "torch.Muon":
        with monkeypatch.context() as patch:  # nothing in it names bfloat16 but one conversion
            patch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
            yield clock
        return
    if source.rule != "Kron":
        yield clock
        return
    names, calls, drawn = list(source.shapes), [0], torch.randn

    def noise_like(x: Any, **beside: Any) -> Any:
        name = names[calls[0] % len(names)]
        calls[0] += 1
        return normal(xp, x, seed=0, tensor=tensor_id(name), t=clock[0])

    def noise(*shape: Any, **beside: Any) -> Any:
        asked = len(shape) == 1 and "device" in beside  # as timm asks, and nobody else here
        return noise_like(torch.empty(shape[0], dtype=getattr(torch, dtype))) if asked else drawn(*shape, **beside)

    def solve(x: Any, a: Any) -> Any:
        return torch.linalg.solve_triangular(a, x.reshape(-1, x.size(-1)), upper=True, left=False).reshape_as(x)

    module = peer({PYTORCH_OPTIMIZER: f"{PYTORCH_OPTIMIZER}.psgd"}.get(source.module, source.module))
    monkeypatch.setattr(torch, "randn_like", noise_like)
    monkeypatch.setattr(torch, "randn", noise)
    own_solve = "solve_triangular_right" if source.module == PYTORCH_OPTIMIZER else "_solve_triangular_right"
    monkeypatch.setattr(module, own_solve, solve)
    if source.name == "kron_torch.Kron":
        calculate = module._calc_A_and_conjB
        monkeypatch.setattr(module, "_calc_A_and_conjB", lambda expr, g, q: calculate(expr, g.clone(), q))
    with torch.compiler.set_stance("force_eager"):
        yield clock


def constructed(source: Source, params: Any, dtype: str) -> Any:
    """The published optimizer, with all that it stores in the precision of our arithmetic."""
    wide = torch.float64 if dtype == "float64" else torch.float32
    kept = {"Kron": "precond_dtype", "AdafactorBigVision": "momentum_dtype", "AdaFactor": "momentum_dtype"}
    key = "precondition_dtype" if source.name == "pytorch_optimizer.Kron" else kept.get(source.kind)
    kind: Any = FusedLAMB if source.module == "apex" else getattr(peer(source.module), source.kind)
    made = kind(params, **{"lr": source.lr, **source.theirs, **({key: wide} if key else {})})
    if hasattr(made, "rng"):
        made.rng.random = lambda: 1.0  # never balance: that leaves the preconditioner as it is
    return made
