"""One row for each rule: what its options are tried with, what is refused, what it can do.

Tests that hold for every rule are made from this table, so that a new rule is tested by its row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thalweg import rules
from thalweg.rules import Annealed, Rule, mars
from thalweg.rules.ademamix import AdEMAMix
from thalweg.rules.lion import Lion
from thalweg.rules.options import alternatives, choices_of, hints_of, options_of


@dataclass(frozen=True)
class Case:
    rule: type[Rule]
    #: A learning rate with which steps are of moderate size.
    lr: float | None
    #: Options to try, under a description.
    options: dict[str, dict[str, Any]]
    #: Values that an option refuses by itself, whose name is said then.
    out_of_range: dict[str, list[Any]] = field(default_factory=dict)
    #: Other options that are refused, each with a part of what is said about it.
    misfits: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    #: Published optimizers, by import name, that it equals: (name, our options, theirs) under a description.
    published: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.rule.__name__

    @property
    def refused(self) -> list[tuple[dict[str, Any], str]]:
        """All options that are refused, each with a part of what is said about it."""
        hints = {name: hint for name, hint in hints_of(self.rule).items() if name in options_of(self.rule)}
        named = [name for name, hint in hints.items() if hint is bool or any(map(choices_of, alternatives(hint)))]
        wrong = {**{name: ["no such choice"] for name in named}, **OUT_OF_RANGE, **self.out_of_range}
        return [*self.misfits, *(({name: x}, name) for name, values in wrong.items() for x in values)]


SHAPES = [(), (1,), (7,), (1, 5), (6, 1), (6, 4), (4, 6), (9, 9), (3, 4, 5), (2, 3, 3, 2)]

#: What every rule refuses: values of the wrong type, or out of the range of their options.
OUT_OF_RANGE: dict[str, list[Any]] = dict(
    weight_decay=[-0.1, float("nan"), float("inf"), "0.1", True, None], stacked_axes=[-1, 0.5]
)

SGD = Case(
    rules.SGD,
    lr=0.1,
    options={
        "defaults": {},
        "momentum": dict(momentum=0.9, weight_decay=0.1),
        "dampening": dict(momentum=0.9, dampening=0.5),
        "nesterov": dict(momentum=0.9, nesterov=True),
    },
    out_of_range=dict(momentum=[1.0]),
    misfits=[
        (dict(momentum=0.9, dampening=1.5), "dampening must be a finite number >= 0 and <= 1, got 1.5"),
        (dict(momentum=0.9, dampening=0.5, nesterov=True), "nesterov=True needs dampening=0"),
    ],
)

ADAMW = Case(
    rules.AdamW,
    lr=0.02,
    options={
        "defaults": {},
        "amsgrad": dict(amsgrad=True, betas=(0.5, 0.7)),
        "nesterov": dict(nesterov=True, weight_decay=0.1),
        "l2": dict(decoupled=False, weight_decay=0.1),
        "eps_root": dict(eps_root=1e-3, eps=1e-3),
    },
    out_of_range=dict(betas=[(1.0, 0.9), 0.9], eps=[-1.0]),
)

LARS = Case(
    rules.LARS,
    lr=5.0,
    options={
        "defaults": {},
        "weight decay": dict(weight_decay=0.1),
        "nesterov": dict(nesterov=True),
        "no momentum": dict(momentum=0.0),
        "combined norms": dict(norm_mode="combined", weight_decay=0.1, eps=0.1),
        "lr outside": dict(momentum_mode="lr_outside"),
        "LARC": dict(clip=True, trust_coefficient=2.0),
        "only with decay": dict(always_adapt=False, weight_decay=0.1),
        "norms kept": dict(keep_norms=True, weight_decay=0.1),
        "SGD": dict(trust=False),
        "eta for zeros": dict(zero_ratio="eta"),
    },
    out_of_range=dict(momentum=[1.0], trust_coefficient=[0.0], eps=[-1e-08]),
)

LAMB = Case(
    rules.LAMB,
    lr=0.02,
    options={
        "defaults": {},
        "weight decay": dict(weight_decay=0.1),
        "decoupled": dict(weight_decay=0.1, weight_decay_mode="decoupled"),
        "l2": dict(weight_decay=0.1, weight_decay_mode="l2"),
        "no bias correction": dict(bias_correction=False),
        "no averaging": dict(grad_averaging=False),
        "bounded": dict(trust_clip=(0.01, 10.0), phi=(0.0, 3.0)),
        "only with decay": dict(always_adapt=False),
        "norms kept": dict(keep_norms=True, weight_decay=0.1),
        "norms kept, decoupled": dict(keep_norms=True, weight_decay=0.1, weight_decay_mode="decoupled"),
        "AdamW": dict(trust=False, weight_decay=0.1),
        "eps_root": dict(eps_root=1e-3, betas=(0.5, 0.7)),
        "no memory": dict(betas=(0.0, 0.0)),
    },
    out_of_range=dict(
        betas=[(1.0, 0.9), (0.9, -0.1), 0.9, (0.9, 0.99, 0.999)], eps=[-1.0], trust_clip=[(2.0, 1.0)], phi=[(-1.0, 1.0)]
    ),
)

ADAFACTOR = Case(
    rules.Adafactor,
    lr=0.05,
    options={
        "defaults": {},
        "factored": dict(min_dim_size_to_factor=2),
        "last two axes": dict(min_dim_size_to_factor=2, factor_dims="last2"),
        "matrices only": dict(min_dim_size_to_factor=2, only_2d=True),
        "momentum": dict(min_dim_size_to_factor=2, momentum=0.9),
        "momentum before lr": dict(momentum=0.9, momentum_mode="before_lr"),
        "weight decay": dict(weight_decay=0.1),
        "decay by lr": dict(weight_decay=0.1, weight_decay_mode="lr"),
        "independent decay": dict(weight_decay=0.01, weight_decay_mode="independent"),
        "clamped": dict(min_dim_size_to_factor=2, eps=(1e-3, 1e-3), eps_mode="clamp"),
        "no clip": dict(clip_threshold=None, beta2_cap=0.5),
        "relative with cap": dict(relative_step=True, scale_parameter=False),
        "offset": dict(decay_offset=3),
    },
    out_of_range=dict(
        eps=[1e-30, (-1.0, 0.001)],
        clip_threshold=[0.0],
        momentum=[1.5],
        beta2_cap=[1.0],
        decay_offset=[-1],
        min_dim_size_to_factor=[1.5],
    ),
    misfits=[
        (dict(beta2_decay=0), "beta2_decay must not be 0"),
        (
            dict(eps=(0.0, 0.001), eps_mode="clamp"),
            "eps[0] under eps_mode='clamp' must be a finite number > 0, got 0.0",
        ),
    ],
)

KRON = Case(
    rules.Kron,
    lr=0.02,
    options={
        "defaults": {},
        "both sides dense": dict(max_skew=None),
        "quad": dict(geometry="quad", max_skew=None),
        "triangular": dict(geometry="eq", max_skew=None),
        "polyak": dict(**rules.Kron.VARIANTS["polyak"], weight_decay=0.1),
        "kron_torch": dict(rules.Kron.VARIANTS["kron_torch"]),
        "expected damping": dict(damping_mode="expected", damping=0.1, max_skew=None),
        "now and then": dict(precond_update_probability=0.4),
        "annealed": dict(precond_update_probability=Annealed(high=0.8, low=0.1, decay=0.3, flat=2)),
        "a factor for each axis": dict(merge=None, max_skew=None),
        "squeezed": dict(merge="squeeze", max_skew=None),
        "diagonal": dict(max_size_dense=0),
        "blocks": dict(block_size=4, max_skew=None, merge=None),
        "normalized gradients": dict(normalize_grads=True),
        "a first scale that is given": dict(init_scale=1.0),
        "no momentum": dict(momentum=0.0, clip=None),
        "decay of the gradient": dict(weight_decay=0.1, weight_decay_mode="gradient"),
    },
    out_of_range=dict(
        precond_lr=[-0.1],
        momentum=[1.0],
        clip=[0.0],
        eps=[-1.0],
        precond_update_probability=[1.5],
        max_size_dense=[-1],
        max_skew=[0.0],
        block_size=[0, 2.5],
        lipschitz_beta=[1.0],
    ),
    misfits=[
        (dict(momentum_mode="polyak"), "whiten='momentum' needs momentum_mode='ema'"),
        (dict(geometry="eq", damping_mode="expected"), "geometry='eq' needs damping_mode='noise'"),
    ],
)

#: Products in full precision, because one rounding to bfloat16 more or less is seen in every later one.
EXACT: dict[str, Any] = dict(ns_dtype=None, vectors="row")

MUON = Case(
    rules.Muon,
    lr=0.02,
    options={
        "defaults": EXACT,
        "weight decay": dict(EXACT, weight_decay=0.1),
        "cautious decay": dict(EXACT, weight_decay=0.3, cautious_decay=True),
        "without nesterov": dict(EXACT, nesterov=False),
        "no momentum": dict(EXACT, momentum=0.0),
        "sum": dict(EXACT, momentum_mode="sum"),
        "bias correction": dict(EXACT, bias_correction=True),
        "match-RMS-AdamW": dict(EXACT, scaling="match_rms_adamw", rms=0.3),
        "optax": dict(rules.Muon.VARIANTS["optax"], vectors="row"),
        "unscaled": dict(EXACT, scaling=None, eps_mode="add", eps=0.1),
        "transposed": dict(EXACT, transposed=True),
        "Gram iteration": dict(EXACT, ns_method="gram"),
        "rows normalized": dict(EXACT, normalize="rows"),
        "columns normalized": dict(EXACT, normalize="rows", transposed=True, normalize_beta=0.8, weight_decay=0.1),
        "coefficients by step": dict(EXACT, ns_coefficients=((3.0, -4.0, 2.0), (2.0, -1.5, 0.5)), ns_steps=3),
    },
    out_of_range=dict(
        momentum=[1.0],
        eps=[-1.0],
        rms=[0.0],
        split=[0, ()],
        ns_steps=[0, 100],
        ns_coefficients=[(3.0, -4.0), "septic", (), ((3.0, -4.0, 2.0), (1.0,))],
    ),
    misfits=[
        (dict(split=(2, 0)), "each size of split=(2, 0) must be a whole number >= 1, got 0"),
        (dict(split=(2, 1.5)), "each size of split=(2, 1.5) must be a whole number >= 0, got 1.5"),
        (dict(ns_coefficients=(3.0, "b", 2.0)), "each of ns_coefficients must be a finite number"),
        (dict(bias_correction=True, momentum_mode="sum"), "bias_correction=True needs momentum_mode='ema'"),
    ],
)

LION = Case(
    Lion,
    lr=0.01,
    options={"defaults": {}, "weight decay": dict(weight_decay=0.1, betas=(0.5, 0.7))},
    out_of_range=dict(betas=[(0.9, 1.0)]),
    published={
        "optax": ("optax.lion", dict(variant="optax"), {}),
        "optax numbers": (
            "optax.lion",
            dict(betas=(0.8, 0.95), weight_decay=0.1),
            dict(b1=0.8, b2=0.95, weight_decay=0.1),
        ),
        "timm": ("timm.optim.lion.Lion", dict(variant="timm"), {}),
        "timm decay": ("timm.optim.lion.Lion", dict(weight_decay=0.1), dict(weight_decay=0.1)),
    },
)

ADEMAMIX = Case(
    AdEMAMix,
    lr=0.01,
    options={
        "defaults": {},
        "warm-ups": dict(alpha_warmup=4, beta3_warmup=3.5, weight_decay=0.1),
        "numbers": dict(betas=(0.5, 0.7, 0.99), alpha=2.0, eps=1e-3, eps_root=1e-3),
        "no memory": dict(betas=(0.0, 0.7, 0.9), beta3_warmup=3),
    },
    out_of_range=dict(betas=[(0.9, 0.999), (0.9, 0.999, 1.0)], alpha=[-1.0], alpha_warmup=[0], beta3_warmup=[-1]),
    misfits=[(dict(betas=(0.9, 0.999, 0.0), beta3_warmup=9), "beta3_warmup needs a betas[2] above 0")],
    published={
        "optax": ("optax.contrib.ademamix", dict(variant="optax"), {}),
        "optax numbers": (
            "optax.contrib.ademamix",
            dict(betas=(0.8, 0.95, 0.99), alpha=3.0, eps=1e-3, eps_root=1e-4, weight_decay=0.1),
            dict(b1=0.8, b2=0.95, b3=0.99, alpha=3.0, eps=1e-3, eps_root=1e-4, weight_decay=0.1),
        ),
        "pytorch_optimizer": ("pytorch_optimizer.AdEMAMix", {}, {}),
        "pytorch_optimizer warm-ups": (
            "pytorch_optimizer.AdEMAMix",
            dict(alpha_warmup=20, beta3_warmup=20, weight_decay=0.1),
            dict(t_alpha_beta3=20, weight_decay=0.1, weight_decouple=True),
        ),
    },
)


def added_early(b2: float) -> dict[str, Any]:
    """pytorch_optimizer adds eps, and 1e-15 under the root, before it corrects the bias of the second moment."""
    return dict(eps=lambda t: 1e-8 / (1 - b2**t) ** 0.5, eps_root=lambda t: 1e-15 / (1 - b2**t))


#: With amsgrad it keeps four entries, for which kernels for GPUs have no room.
MARS = Case(
    mars.MARS,
    lr=0.01,
    options={
        "defaults": {},
        "betas": dict(betas=(0.5, 0.7), weight_decay=0.1),
        "strong": dict(gamma=0.5, eps=1e-3, eps_root=1e-3),
        "no correction": dict(gamma=0.0, nesterov=True),
        "l2": dict(decoupled=False, weight_decay=0.1),
    },
    out_of_range=dict(gamma=[-0.1]),
    published={
        "pytorch_optimizer": ("pytorch_optimizer.MARS", added_early(0.99), dict(optimize_1d=True)),
        "pytorch_optimizer numbers": (
            "pytorch_optimizer.MARS",
            dict(added_early(0.95), betas=(0.9, 0.95), gamma=0.5, weight_decay=0.1),
            dict(betas=(0.9, 0.95), gamma=0.5, weight_decay=0.1, optimize_1d=True),
        ),
        "pytorch_optimizer amsgrad": (
            "pytorch_optimizer.MARS",
            dict(added_early(0.99), amsgrad=True),
            dict(ams_bound=True, optimize_1d=True),
        ),
    },
)

SOAP = Case(
    rules.SOAP,
    lr=0.01,
    options={
        "defaults": {},
        "one side": dict(one_sided=True),
        "in every step": dict(precondition_frequency=1),
        "now and then": dict(precondition_frequency=3, weight_decay=0.1),
        "betas": dict(betas=(0.5, 0.7), shampoo_beta=0.8, eps=1e-3),
        "no bias correction": dict(bias_correction=False, weight_decay=0.0),
        "as matrices": dict(merge="matrix"),
        "squeezed": dict(merge="squeeze", max_precond_dim=4),
        "blocks": dict(block_size=3, precondition_frequency=2),
    },
    out_of_range=dict(
        betas=[(1.0, 0.9)],
        shampoo_beta=[1.0],
        eps=[-1.0],
        precondition_frequency=[0],
        max_precond_dim=[-1],
        block_size=[0],
    ),
)

#: Rules that step parameters of any shape as they come.
CASES = [SGD, ADAMW, LARS, LAMB, ADAFACTOR, KRON, SOAP, LION, ADEMAMIX, MARS]
#: All rules.
EVERY = [*CASES, MUON]
#: (case, description, options) for every set of options of every rule.
OPTIONS = [(case, description, options) for case in EVERY for description, options in case.options.items()]
OPTION_IDS = [f"{case.name}-{description}" for case, description, _ in OPTIONS]

#: Every rule of which fused code is made, under its name: what it computes with each option.
FUSED_CASES = {case.name: case for case in CASES if not case.rule.needs_whole}
#: Those that differ in passes and in state, for all else that engines do.
FUSED_RULES = {case.name: case for case in (LARS, LAMB, ADAFACTOR)}
