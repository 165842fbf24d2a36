"""Rules equal the optimizers of other libraries, under the settings that the docs name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from published_runs import PUBLISHED, SHAPES, error, optax_peer, ours, peer, problem, torch_peer
from tolerances import BFLOAT16_PRODUCTS, FLOAT64, OPTAX_ADAFACTOR

import thalweg.numpy
from thalweg.numpy import Adafactor, Muon

pytestmark = pytest.mark.slow

MATRICES = [(24, 40), (40, 24), (16, 16), (1, 30)]
#: Of the fourth parameter nothing is decayed.
MASK = [True, True, True, False, True]
UNDECAYED = dict(weight_decay=0.1, overrides=[("p3", dict(weight_decay=0.0))])
MANUAL = dict(lr=0.01, relative_step=False)
#: Steps of optax count from 0.
FALLING, FALLING_FROM_0 = (lambda t: 0.1 / t), (lambda count: 0.1 / (count + 1))


class Peer(NamedTuple):
    """What both are given in every row: options of ours, and arguments of what is published."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    tolerance: float = FLOAT64
    shapes: list[tuple[int, ...]] = SHAPES
    #: Whether the function of this name in thalweg.optax takes the same arguments.
    in_jax: bool = False


PEERS = {
    "Adafactor = optax.adafactor": Peer(
        dict(lr=0.01, variant="optax"), dict(learning_rate=0.01), tolerance=OPTAX_ADAFACTOR
    ),
    # torch takes the eps of the first parameter's dtype
    "Adafactor = torch.optim.Adafactor": Peer(dict(variant="torch", eps=(float(np.finfo(np.float64).eps), 1e-3)), {}),
    "Adafactor = transformers.optimization.Adafactor": Peer(dict(variant="hf"), {}),
    # timm factors sizes above 16, and scales by RMS(p) only beside the relative step
    "Adafactor = timm.optim.adafactor.Adafactor": Peer(dict(min_dim_size_to_factor=17, scale_parameter="relative"), {}),
    "LAMB = optax.lamb": Peer(dict(lr=0.01, variant="optax"), dict(learning_rate=0.01)),
    "LAMB = timm.optim.lamb.Lamb": Peer(dict(lr=0.01, variant="apex"), dict(lr=0.01)),
    "LAMB = torch.optim.AdamW": Peer(dict(lr=0.01, trust=False, exempt=None), dict(lr=0.01)),
    "LARS = optax.lars": Peer(dict(lr=5.0, variant="optax"), dict(learning_rate=5.0)),
    "LARS = timm.optim.lars.Lars": Peer(dict(lr=lambda t: 0.01 / t, variant="timm"), dict(lr=0.01)),
    "LARS = torch.optim.SGD": Peer(dict(lr=0.01, trust=False), dict(lr=0.01, momentum=0.9)),
    "AdamW = torch.optim.AdamW": Peer(dict(lr=lambda t: 0.01 / t), dict(lr=0.01)),
    "AdamW = torch.optim.Adam": Peer(dict(lr=lambda t: 0.01 / t, decoupled=False), dict(lr=0.01)),
    "AdamW = timm.optim.adamw.AdamWLegacy": Peer(dict(lr=0.05, weight_decay=0.1), dict(lr=0.05, weight_decay=0.1)),
    "AdamW = optax.adamw": Peer(dict(lr=0.01), dict(learning_rate=0.01), in_jax=True),
    "SGD = torch.optim.SGD": Peer(dict(lr=lambda t: 0.01 / t), dict(lr=0.01)),
    "SGD = optax.sgd": Peer(dict(lr=0.01), dict(learning_rate=0.01), in_jax=True),
    "Muon = optax.contrib.muon": Peer(dict(lr=0.02, variant="optax"), dict(learning_rate=0.02), shapes=MATRICES),
}
#: By description what both are given beside: the same, or ours and theirs.
ROWS: dict[str, dict[str, Any]] = {
    "Adafactor = optax.adafactor": {
        "defaults": {},
        "lr=None is a step of 1": (dict(lr=None), dict(learning_rate=None)),
        "schedule": (dict(lr=FALLING), dict(learning_rate=FALLING_FROM_0)),
        "factored": dict(min_dim_size_to_factor=16),
        "factored whatever the size": dict(min_dim_size_to_factor=1),
        "not factored": dict(factored=False),
        "decay_rate": (dict(beta2_decay=0.6), dict(decay_rate=0.6)),
        "absolute steps": (dict(scale_parameter=False), dict(multiply_by_parameter_scale=False)),
        "clip 2": (dict(clip_threshold=2.0), dict(clipping_threshold=2.0)),
        "no clip": (dict(clip_threshold=None), dict(clipping_threshold=None)),
        "momentum": (dict(momentum=0.9), dict(momentum=0.9, dtype_momentum="float64")),
        "weight decay": (dict(weight_decay=0.01), dict(weight_decay_rate=0.01)),
        "decay schedule": (dict(weight_decay=FALLING), dict(weight_decay_rate=FALLING_FROM_0)),
        "weight decay mask": (UNDECAYED, dict(weight_decay_rate=0.1, weight_decay_mask=MASK)),
        "eps": (dict(eps=(1e-4, 1e-3)), dict(eps=1e-4)),
    },
    "Adafactor = torch.optim.Adafactor": {
        "defaults": {},
        "lr as the cap of the relative step": dict(lr=0.3),
        "beta2_decay": dict(beta2_decay=-0.5),
        "weight decay": dict(weight_decay=0.1),
        "d": (dict(clip_threshold=2.5), dict(d=2.5)),
        "eps": dict(eps=(1e-2, 0.5)),
        "maximize": dict(maximize=True),
    },
    "Adafactor = transformers.optimization.Adafactor": {
        "relative step": {},
        "warmup_init": dict(warmup_init=True),
        "manual": (dict(lr=0.01), MANUAL),
        "absolute": (dict(lr=0.01, scale_parameter=False), dict(MANUAL, scale_parameter=False)),
        "beta1": (dict(momentum=0.9), dict(beta1=0.9)),
        "weight decay": dict(weight_decay=0.1),
        "beta2_decay": (dict(beta2_decay=-0.6), dict(decay_rate=-0.6)),
        "numbers": dict(clip_threshold=0.7, eps=(1e-8, 0.1)),
    },
    "Adafactor = timm.optim.adafactor.Adafactor": {
        "relative step": {},
        "manual": dict(lr=0.01),
        "momentum": (dict(lr=0.01, momentum=0.9), dict(lr=0.01, betas=(0.9, 0.999))),
        "weight decay": dict(lr=0.01, weight_decay=0.1),
        "warmup_init": dict(warmup_init=True),
    },
    "LAMB = optax.lamb": {
        "defaults": {},
        "betas": (dict(betas=(0.8, 0.95)), dict(b1=0.8, b2=0.95)),
        "eps": dict(eps=1e-2),
        "eps_root": dict(eps_root=1e-2),
        "weight decay": dict(weight_decay=0.1),
        "mask": (UNDECAYED, dict(weight_decay=0.1, mask=MASK)),
        "schedule": (dict(lr=FALLING), dict(learning_rate=FALLING_FROM_0)),
    },
    "LAMB = timm.optim.lamb.Lamb": {
        "defaults": {},
        "no decay, no adaptation": dict(weight_decay=0.0),
        "always_adapt": dict(weight_decay=0.0, always_adapt=True),
        "no bias correction": dict(bias_correction=False),
        "no averaging": dict(grad_averaging=False),
        "no global clip": dict(max_grad_norm=None),
        "global clip 30": dict(max_grad_norm=30.0),
        "trust_clip": (dict(trust_clip=(0.0, 1.0)), dict(trust_clip=True)),
        "decoupled": (dict(weight_decay_mode="decoupled"), dict(decoupled_decay=True)),
        "numbers": dict(betas=(0.8, 0.9), eps=1e-3),
        "nvlamb": (dict(variant="nvlamb", weight_decay=0.0), dict(always_adapt=True, weight_decay=0.0)),
        "lambc": (dict(variant="lambc"), dict(always_adapt=True, trust_clip=True)),
    },
    "LAMB = torch.optim.AdamW": {
        "without trust": dict(eps=1e-8, weight_decay=0.1),
    },
    "LARS = optax.lars": {
        "defaults": {},
        "weight decay": dict(weight_decay=0.1),
        "weight decay mask": (UNDECAYED, dict(weight_decay=0.1, weight_decay_mask=MASK)),
        "trust ratio mask": (dict(overrides=[("p3", dict(trust=False))]), dict(trust_ratio_mask=MASK)),
        "numbers": dict(trust_coefficient=0.02, eps=0.5),
        "momentum": dict(momentum=0.5),
        "nesterov": dict(nesterov=True),
        "schedule": (dict(lr=lambda t: 10.0 / t), dict(learning_rate=lambda count: 10.0 / (count + 1))),
    },
    "LARS = timm.optim.lars.Lars": {
        "weight decay": dict(weight_decay=0.1),
        "no decay, no adaptation": {},
        "always_adapt": dict(always_adapt=True),
        "momentum": dict(weight_decay=0.1, momentum=0.9),
        "nesterov": dict(weight_decay=0.1, momentum=0.9, nesterov=True),
        "LARC clipping": (dict(weight_decay=0.1, clip=True), dict(weight_decay=0.1, trust_clip=True)),
        "trust": (dict(weight_decay=0.1, trust_coefficient=0.02), dict(weight_decay=0.1, trust_coeff=0.02)),
        "eps": dict(weight_decay=0.1, eps=0.1),
        "a constant rate": (dict(lr=0.01, weight_decay=0.1), dict(weight_decay=0.1)),
    },
    "LARS = torch.optim.SGD": {
        "without trust": dict(weight_decay=0.1),
        "without trust, nesterov": dict(weight_decay=0.1, nesterov=True),
    },
    "AdamW = torch.optim.AdamW": {
        "defaults": {},
        "amsgrad": dict(amsgrad=True, betas=(0.5, 0.7)),
        "numbers": dict(eps=0.1, weight_decay=0.3),
        "maximize": dict(maximize=True),
    },
    "AdamW = torch.optim.Adam": {
        "L2": dict(weight_decay=0.1),
    },
    "AdamW = timm.optim.adamw.AdamWLegacy": {
        "cautious": (dict(cautious=True), dict(caution=True)),
    },
    "AdamW = optax.adamw": {
        "defaults": (dict(variant="optax"), {}),
        "betas": (dict(betas=(0.8, 0.9), weight_decay=0.1), dict(b1=0.8, b2=0.9, weight_decay=0.1)),
        "numbers": dict(eps=1e-3, eps_root=1e-3, weight_decay=0.1),
        "nesterov": dict(nesterov=True, weight_decay=0.0),
        "mask": (UNDECAYED, dict(weight_decay=0.1, mask=MASK)),
    },
    "SGD = torch.optim.SGD": {
        "defaults": {},
        "momentum": dict(momentum=0.9, weight_decay=0.1),
        "dampening": dict(momentum=0.9, dampening=0.5),
        "nesterov": dict(momentum=0.9, nesterov=True, weight_decay=0.1),
        "maximize": dict(momentum=0.9, maximize=True),
    },
    "SGD = optax.sgd": {
        "defaults": {},
        "momentum": dict(momentum=0.9),
        "nesterov": dict(momentum=0.9, nesterov=True),
    },
    "Muon = optax.contrib.muon": {
        "defaults": {},
        "without nesterov": (dict(nesterov=False, momentum=0.8), dict(nesterov=False, beta=0.8)),
        "consistent_rms": (dict(scaling="match_rms_adamw", rms=0.3), dict(consistent_rms=0.3)),
        "weight decay": dict(weight_decay=0.1),
        "numbers": dict(eps=0.1, ns_steps=3),
        "aol": (dict(ns_preconditioning="aol", ns_steps=4), dict(preconditioning="aol", ns_steps=4)),
    },
}


def every_row() -> Iterator[Any]:
    for who, rows in ROWS.items():
        for words, row in rows.items():
            yield pytest.param(who, PEERS[who], *(row if isinstance(row, tuple) else (row, row)), id=f"{who}, {words}")
    for rule, rows in PUBLISHED.items():
        for words, (name, options, theirs) in rows.items():
            who = f"{rule} = {name}"
            made = Peer(dict(lr=0.01), {}, in_jax=name.startswith("optax"))
            yield pytest.param(who, made, options, theirs, id=f"{who}, {words}")


@pytest.mark.parametrize(("who", "published", "options", "theirs"), [*every_row()])
def test_equals_what_is_published(who: str, published: Peer, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    rule, _, name = who.partition(" = ")
    module, _, attribute = name.rpartition(".")
    make = getattr(peer(module), attribute)
    options, theirs = {**published.ours, **options}, {**published.theirs, **theirs}
    params, grads = problem(published.shapes)
    mine = ours(getattr(thalweg.numpy, rule)(**options), params, grads)
    if module.startswith("optax"):
        theirs.setdefault("learning_rate", options["lr"])
        wanted = optax_peer(make(**theirs), params, grads)
        if published.in_jax:
            rate = theirs.pop("learning_rate")
            same = getattr(pytest.importorskip("thalweg.optax"), attribute)(rate, **theirs)
            assert error(optax_peer(same, params, grads), wanted, params) < FLOAT64
    else:
        wanted = torch_peer(lambda p: make(p, **theirs), params, grads, before=lambda own, t: follow(own, options, t))
    assert error(mine, wanted, params) < published.tolerance


def follow(optimizer: Any, options: dict[str, Any], t: int) -> None:
    """Give an optimizer of torch the rate that ours has in this step."""
    lr = options.get("lr")
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr(t) if callable(lr) else lr


MUON = {
    "defaults": ({}, {}),
    "without nesterov": (dict(nesterov=False), dict(nesterov=False)),
    "match_rms_adamw": (
        dict(scaling="match_rms_adamw", weight_decay=0.0),
        dict(adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
    ),
    "numbers": (dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3, eps=0.1, momentum=0.8),) * 2,
}


@pytest.mark.parametrize(
    ("row", "is_rounded"), [("defaults", True), *((row, False) for row in MUON)], ids=lambda value: str(value)
)
def test_muon_equals_torch(row: str, is_rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with products in float64: nothing in torch's Muon names bfloat16 but one conversion."""
    torch, (options, theirs) = peer("torch"), MUON[row]
    if not is_rounded:
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
        options = dict(options, ns_dtype=None)
    params, grads = problem(MATRICES, steps=10 if is_rounded else 30)
    wanted = torch_peer(lambda p: torch.optim.Muon(p, lr=0.02, **theirs), params, grads)
    mine = ours(Muon(lr=0.02, variant="torch", **options), params, grads)
    assert error(mine, wanted, params) < (BFLOAT16_PRODUCTS if is_rounded else FLOAT64)


def test_equals_big_vision_made_of_optax_parts() -> None:
    """big_vision's Adafactor as a chain of optax parts: capped decay, average before lr, bare decay."""
    optax = peer("optax")
    params, grads = problem()

    def capped(count: Any, exponent: Any) -> Any:
        import jax.numpy as jnp

        return jnp.minimum(0.999, 1.0 - jnp.asarray(count + 1, jnp.float32) ** -exponent)

    theirs = optax_peer(
        optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=20, decay_rate_fn=capped),
            optax.ema(0.9, debias=False, accumulator_dtype="float64"),
            optax.scale_by_learning_rate(0.01),
            optax.add_decayed_weights(-1e-3),
        ),
        params,
        grads,
    )
    optimizer = Adafactor(
        lr=0.01, variant="big_vision", min_dim_size_to_factor=20, momentum_dtype="float64", weight_decay=1e-3
    )
    assert error(ours(optimizer, params, grads), theirs, params) < OPTAX_ADAFACTOR


def test_schedules_of_optax_are_understood() -> None:
    contrib, jnp = peer("optax.contrib"), peer("jax.numpy")
    ademamix = pytest.importorskip("thalweg.optax").ademamix
    schedules: dict[str, Any] = dict(  # exact in float32 too, in which compilers may round them or not
        alpha=lambda count: jnp.minimum(5.0, count / 4), b3=lambda count: jnp.minimum(0.999, 0.875 + count / 256)
    )
    params, grads = problem()
    theirs = optax_peer(contrib.ademamix(0.01, **schedules), params, grads)
    assert error(optax_peer(ademamix(0.01, **schedules), params, grads), theirs, params) < FLOAT64
