"""Our own optimizers, in every front end, with the settings that all contestants of a rule share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import (
    Contestant,
    Ready,
    Stepping,
    captured_ready,
    numpy_ready,
    optax_ready,
    torch_ready,
)
from thalweg.bench.rules import MATRIX
from thalweg.rules import RULES, Rule
from thalweg.rules.entries import Spread
from thalweg.show import registered

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: Front ends, the first that runs being the one that others are compared with.
FRONT_ENDS = ("torch", "numpy", "optax")

LAMB: dict[str, Any] = dict(lr=1e-3, weight_decay=0.01)
LARS: dict[str, Any] = dict(lr=10.0, weight_decay=1e-4)  # a thousandth of which is seen in bfloat16
ADAFACTOR: dict[str, Any] = dict(lr=1e-3)
MUON: dict[str, Any] = dict(lr=1e-3, vectors="row")  # which each model has
KRON: dict[str, Any] = dict(lr=1e-3, precond_update_probability=1.0)
ADAMW: dict[str, Any] = dict(lr=1e-3, weight_decay=0.01)
SGD: dict[str, Any] = dict(lr=1e-3, momentum=0.9)


def ours(rule: str, kind: str, copies: int, options: dict[str, Any]) -> Iterable[Contestant]:
    """One rule in the three front ends."""

    def on_torch(workload: Workload, stepping: Stepping) -> Ready:
        make = registered.torch_optimizer(kind)
        return torch_ready(lambda params: make(params, engine=stepping.engine, **options), workload, stepping)

    def on_numpy(workload: Workload, stepping: Stepping) -> Ready:
        make = registered.numpy_optimizer(kind)
        return numpy_ready(make(engine=stepping.engine, **options), workload, stepping)

    def on_optax(workload: Workload, stepping: Stepping) -> Ready:
        given = {"learning_rate" if name == "lr" else name: value for name, value in options.items()}
        return optax_ready(registered.optax_function(kind)(**given), workload, stepping)

    for front_end, make in (("torch", on_torch), ("numpy", on_numpy), ("optax", on_optax)):
        spelt = f"thalweg.{front_end} {kind.lower() if front_end == 'optax' else kind}"
        yield Contestant(spelt, rule, "thalweg", front_end, make, copies)


def captured(rule: str, kind: str, copies: int, options: dict[str, Any]) -> Contestant:
    """One rule on a GPU, where a training may capture its steps in a CUDA graph."""

    def make(workload: Workload, stepping: Stepping) -> Ready:
        build = registered.torch_optimizer(kind)
        return captured_ready(
            lambda params: build(params, engine=stepping.engine, capturable=True, **options), workload, stepping
        )

    return Contestant(f"thalweg.torch {kind}, CUDA graph", rule, "thalweg", "torch", make, copies, device="cuda")


def kron(**options: Any) -> Contestant:
    """Another Kron on a GPU: with other factors, or between two refreshes of them."""
    given = {**KRON, **options}

    def make(workload: Workload, stepping: Stepping) -> Ready:
        import thalweg.torch

        build: Any = thalweg.torch.Kron
        return torch_ready(lambda params: build(params, engine=stepping.engine, **given), workload, stepping)

    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    return Contestant(f"thalweg.torch Kron({shown})", "kron", "thalweg", "torch", make, 4, device="cuda")


OURS = [
    *ours("lamb", "LAMB", 3, LAMB),
    *ours("lars", "LARS", 2, LARS),
    *ours("adafactor", "Adafactor", 1, ADAFACTOR),
    *ours("muon", "Muon", 2, MUON),
    *ours("kron", "Kron", 4, KRON),
    *ours("adamw", "AdamW", 3, ADAMW),
    *ours("sgd", "SGD", 2, SGD),
    captured("lamb", "LAMB", 3, LAMB),
    captured("lars", "LARS", 2, LARS),
    captured("adafactor", "Adafactor", 1, ADAFACTOR),
    captured("muon", "Muon", 2, MUON),
    captured("kron", "Kron", 4, KRON),
    captured("adamw", "AdamW", 3, ADAMW),
    captured("sgd", "SGD", 2, SGD),
    kron(precond_dtype="bfloat16"),
    kron(precond_update_probability=0.0),
    kron(max_size_dense=2048),
    kron(max_size_dense=2048, precond_dtype="bfloat16"),
    kron(max_size_dense=2048, precond_update_probability=0.0),
]


def every() -> list[Contestant]:
    """Contestants for all rules, also those of the user's that were asked for; those not above with their defaults."""
    known = {contestant.rule for contestant in OURS}
    added: list[Contestant] = []
    rules: dict[str, type[Rule]] = {**RULES, **registered.OWN}
    for kind, made in rules.items():
        if (rule := kind.lower()) not in known:
            given: dict[str, Any] = dict(lr=1e-3 if made.default_lr is None else made.default_lr)
            copies = 1 + len(made().keys(MATRIX, Spread))
            added += [*ours(rule, kind, copies, given), captured(rule, kind, copies, given)]
    return [*OURS, *added]
