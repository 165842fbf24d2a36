"""Who takes part: for each rule our own optimizers first, then the published ones, then torch's fused AdamW.

Settings make the work comparable: what is measured is arithmetic of the same kind on the same tensors, not defaults.

LAMB        Weight decay within the update and a trust ratio for every tensor. Nobody clips gradients together, which
            would be one more pass over them (timm's default). pytorch_optimizer has no bias correction: a little less.
LARS        Momentum 0.9, weight decay, a trust ratio for every tensor; pytorch_optimizer leaves vectors out of it.
Adafactor   A given step size, factored squares, no momentum, updates clipped to an RMS of 1; RMS(p) is computed by all,
            and multiplies the step size but in timm, which computes it and leaves it. Matrices are factored alike in
            gpt2 and bert_large. Convolutions are not: ours and optax factor the two largest axes, from 128 on; timm
            the first two, from 17 on; torch and transformers the last two, 3 x 3 windows included: there the work of
            resnet50 differs.
AdamW, SGD  The same arithmetic as torch's.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: The first eight weights, looked at before and after: whoever does not move them has not done the work.
PROBE = 8


@dataclass(frozen=True)
class Rule:
    title: str
    #: Bytes that each float32 parameter must move, if tensors are larger than the caches.
    floor: int
    why: str


RULES = {
    "lamb": Rule("LAMB", 40, "read p, g, m, v and write m, v; then, the ratio known, read p, m, v and write p"),
    "lars": Rule("LARS", 28, "read p, g for the norms; then read p, g, m and write p, m"),
    "adafactor": Rule("Adafactor", 24, "read g, p for rows, columns and RMS(p); g for RMS(u); then g, p and write p"),
    "adamw": Rule("AdamW", 28, "read p, g, m, v and write p, m, v"),
    "sgd": Rule("SGD with momentum", 20, "read p, g, m and write p, m"),
}


class Model:
    """Real parameter shapes, random numbers, and gradients that all contestants share."""

    def __init__(self, name: str) -> None:
        known = json.loads((Path(__file__).parent / "shapes.json").read_text(encoding="utf-8"))
        if name not in known:
            raise ValueError(f"no model {name!r}: there are {', '.join(known)}")
        self.name, self.about = name, known[name]["about"]
        self.shapes = [tuple(shape) for shape in known[name]["shapes"]]
        self.elements = sum(int(np.prod(shape)) for shape in self.shapes)
        self.grads = self._tensors(seed=1, scale=1e-2)

    def params(self) -> list[Tensor]:
        """The same first weights in new memory, for one contestant alone."""
        return self._tensors(seed=0, scale=2e-2)

    def _tensors(self, seed: int, scale: float) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed)
        return [torch.empty(shape).normal_(0, scale, generator=random) for shape in self.shapes]


@dataclass
class Ready:
    """A contestant with its parameters and gradients in memory."""

    step: Callable[[], None]
    #: A few of its weights.
    probe: Callable[[], Any]
    #: The engine of the last step, where there is a choice.
    engine: Callable[[], str] = lambda: ""
    #: Called before each step, and not timed.
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Contestant:
    name: str
    #: Whose comparison it is in.
    rule: str
    #: Raises if it cannot run here; the second argument is the engine for ours.
    make: Callable[[Model, str], Ready]
    #: Copies of the parameters in memory, the parameters themselves included.
    copies: int
    #: The rule that it follows itself, where that is another: its floor is that one's.
    follows: str = ""

    @property
    def floor(self) -> int:
        return RULES[self.follows or self.rule].floor


# ---- how to step: torch, numpy, jax


def torch_contestant(build: Callable[[list[nn.Parameter]], Any], model: Model, *, writes_grads: bool = False) -> Ready:
    """Whoever writes into gradients gets its own, made good again before each step, outside of the time."""
    params = [nn.Parameter(p) for p in model.params()]
    grads = [g.clone() for g in model.grads] if writes_grads else model.grads
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer = build(params)
    ready = Ready(
        optimizer.step,
        probe=lambda: params[0].detach().flatten()[:PROBE].tolist(),
        engine=lambda: str(getattr(optimizer, "engine", "")),
    )
    if writes_grads:
        ready.prepare = lambda: torch._foreach_copy_(grads, model.grads)
    return ready


def numpy_contestant(optimizer: Any, model: Model) -> Ready:
    names = [f"tensor.{i}" for i in range(len(model.shapes))]
    params = {name: np.array(p.numpy()) for name, p in zip(names, model.params(), strict=True)}
    grads = {name: g.numpy() for name, g in zip(names, model.grads, strict=True)}
    return Ready(
        lambda: optimizer.step(params, grads),
        probe=lambda: params[names[0]].flat[:PROBE].tolist(),
        engine=lambda: str(getattr(optimizer, "engine", "")),
    )


def optax_contestant(build: Callable[[Any], Any], model: Model) -> Ready:
    """One compiled function for update and apply_updates, which may overwrite parameters and state."""
    import jax
    import optax

    transform = build(optax)
    cpu = jax.devices("cpu")[0]
    grads = [jax.dlpack.from_dlpack(g) for g in model.grads]  # the same memory
    params = [jax.device_put(p.numpy(), cpu, may_alias=False) for p in model.params()]
    kept = [params, jax.jit(transform.init)(params)]
    del params

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def advance(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step() -> None:
        kept[:] = jax.block_until_ready(advance(*kept, grads))

    return Ready(step, probe=lambda: np.asarray(kept[0][0]).flat[:PROBE].tolist())


# ---- what to step with


def with_engine(optimizer: Callable[..., Any], engine: str) -> Callable[..., Any]:
    """Ours with the engine asked for, where this front end has engines."""
    init = optimizer.__init__  # type: ignore[misc]
    known = {*inspect.signature(optimizer).parameters, *inspect.signature(init).parameters}
    return functools.partial(optimizer, engine=engine) if "engine" in known else optimizer


def ours(rule: str, kind: str, copies: int, **options: Any) -> Iterable[Contestant]:
    def on_torch(model: Model, engine: str) -> Ready:
        import thalweg.torch

        made = with_engine(getattr(thalweg.torch, kind), engine)
        return torch_contestant(lambda params: made(params, **options), model)

    def on_numpy(model: Model, engine: str) -> Ready:
        import thalweg.numpy

        return numpy_contestant(with_engine(getattr(thalweg.numpy, kind), engine)(**options), model)

    shown = f"{kind}(trust=False)" if options.get("trust") is False else kind
    yield Contestant(f"thalweg.torch {shown}", rule, on_torch, copies)
    yield Contestant(f"thalweg.numpy {shown}", rule, on_numpy, copies)


def peer(
    rule: str, name: str, build: Callable[[list[nn.Parameter]], Any], copies: int, *, writes_grads: bool = False
) -> Contestant:
    def make(model: Model, engine: str) -> Ready:
        return torch_contestant(build, model, writes_grads=writes_grads)

    return Contestant(name, rule, make, copies + writes_grads)


def compiled(rule: str, name: str, build: Callable[[Any], Any], copies: int) -> Contestant:
    return Contestant(f"{name}, jax.jit", rule, lambda model, engine: optax_contestant(build, model), copies)


def timm_optimizer(name: str) -> Any:
    """From its own file, since the package as a whole needs torchvision."""
    folders = list(getattr(importlib.util.find_spec("timm"), "submodule_search_locations", None) or ())
    for package, inside in (("timm", ""), ("timm.optim", "optim")):
        if package not in sys.modules:
            sys.modules[package] = module = types.ModuleType(package)
            module.__path__ = [str(Path(folder) / inside) for folder in folders]
            module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
    return getattr(importlib.import_module(f"timm.optim.{name.lower()}"), name)


def collected_optimizer(name: str) -> Any:
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)


def transformers_adafactor() -> Any:
    from transformers.optimization import Adafactor

    return Adafactor


def adamw(rule: str) -> Contestant:
    """The control, in every comparison."""
    made = peer(rule, "torch.optim.AdamW(fused=True)", lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), 3)
    return replace(made, follows="adamw")


LAMB = dict(lr=1e-3, weight_decay=0.01)
LARS = dict(lr=0.1, weight_decay=1e-4)
RATE = dict(lr=1e-3)
ADAMW = dict(lr=1e-3, trust=False, eps=1e-8, weight_decay=0.01)
SGD = dict(lr=1e-3, trust=False, momentum_mode="lr_outside")

CONTESTANTS = [
    *ours("lamb", "LAMB", 3, **LAMB),
    peer("lamb", "timm Lamb", lambda ps: timm_optimizer("Lamb")(ps, **LAMB, max_grad_norm=None), 3),
    *(
        peer(
            "lamb",
            f"pytorch_optimizer Lamb(foreach={foreach})",
            lambda ps, foreach=foreach: collected_optimizer("Lamb")(ps, **LAMB, weight_decouple=False, foreach=foreach),
            3,
        )
        for foreach in (True, False)
    ),
    compiled("lamb", "optax.lamb", lambda optax: optax.lamb(1e-3, weight_decay=0.01), 3),
    adamw("lamb"),
    *ours("lars", "LARS", 2, **LARS),
    peer("lars", "timm Lars", lambda ps: timm_optimizer("Lars")(ps, **LARS, momentum=0.9), 2, writes_grads=True),
    *(
        peer(
            "lars",
            f"pytorch_optimizer LARS(foreach={foreach})",
            lambda ps, foreach=foreach: collected_optimizer("LARS")(ps, **LARS, foreach=foreach),
            2,
            writes_grads=True,
        )
        for foreach in (True, False)
    ),
    compiled("lars", "optax.lars", lambda optax: optax.lars(0.1, weight_decay=1e-4), 2),
    adamw("lars"),
    *ours("adafactor", "Adafactor", 1, **RATE),
    *(
        peer(
            "adafactor",
            f"torch.optim.Adafactor(foreach={foreach})",
            lambda ps, foreach=foreach: torch.optim.Adafactor(ps, **RATE, foreach=foreach),
            1,
        )
        for foreach in (False, True)
    ),
    peer("adafactor", "timm Adafactor", lambda ps: timm_optimizer("Adafactor")(ps, **RATE), 1),
    peer(
        "adafactor",
        "transformers Adafactor",
        lambda ps: transformers_adafactor()(ps, **RATE, relative_step=False, scale_parameter=True),
        1,
    ),
    compiled("adafactor", "optax.adafactor", lambda optax: optax.adafactor(1e-3), 1),
    adamw("adafactor"),
    *ours("adamw", "LAMB", 3, **ADAMW),
    adamw("adamw"),
    *ours("sgd", "LARS", 2, **SGD),
    peer(
        "sgd",
        "torch.optim.SGD(momentum=0.9, fused=True)",
        lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, fused=True),
        2,
    ),
    adamw("sgd"),
]
