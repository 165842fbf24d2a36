"""Plain loops in float64 of what may be around a rule: the rule's own step, and a formula after it by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thalweg import Moment, average, option, rules
from thalweg.rules import Around, Rule
from thalweg.rules.lion import Lion
from thalweg.spaces import numpy as xp

STEPS, SEED = 6, 7
#: Products in full precision, because one rounding to bfloat16 more or less is seen in every later one.
EXACT: dict[str, Any] = dict(ns_dtype=None, vectors="row")
#: By name: the rule with options that make all of it matter, and a rate with which it moves.
RULES: Mapping[str, tuple[Rule, float]] = {
    "SGD": (rules.SGD(momentum=0.9, weight_decay=0.1), 0.1),
    "AdamW": (rules.AdamW(weight_decay=0.1), 0.05),
    "Adam": (rules.AdamW(weight_decay=0.1, decoupled=False), 0.05),
    "AdEMAMix": (rules.RULES["AdEMAMix"](weight_decay=0.1), 0.01),  # type: ignore[call-arg]
    "MARS": (rules.RULES["MARS"](weight_decay=0.1), 0.05),  # type: ignore[call-arg]
    "LARS": (rules.LARS(weight_decay=0.1), 5.0),
    "LAMB": (rules.LAMB(weight_decay=0.1, exempt=None), 0.05),
    "LAMB, decoupled": (rules.LAMB(weight_decay=0.1, weight_decay_mode="decoupled", exempt=None), 0.05),
    "Adafactor": (rules.Adafactor(weight_decay=0.1, min_dim_size_to_factor=2), 0.05),
    "Adafactor, momentum": (rules.Adafactor(weight_decay=0.1, momentum=0.9, weight_decay_mode="lr"), 0.05),
    "Lion": (Lion(weight_decay=0.1), 0.02),
    "Muon": (rules.Muon(weight_decay=0.1, **EXACT), 0.05),
    "Kron": (rules.Kron(weight_decay=0.1, damping_mode="expected"), 0.05),
    "Kron, polyak": (rules.Kron(weight_decay=0.1, damping_mode="expected", **rules.Kron.VARIANTS["polyak"]), 0.05),
    "SOAP": (rules.SOAP(weight_decay=0.1, precondition_frequency=2), 0.05),
}
SHAPE = (6, 4)


def draw(step: int, shape: tuple[int, ...] = SHAPE) -> Any:
    """Parameters (step 0), or gradients of a step, of which signs change now and then."""
    return np.random.default_rng((SEED, step)).normal(size=shape) + (0.5 if step else 0.0)


def take_steps(rule: Rule, lr: float, after: Callable[..., Any], shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """The parameter, and what ``after`` keeps, after some steps.

    after(t, p, g, step, decay, kept): the new parameter. step: of the rule without decay that is apart from it.
    """
    p, kept, rule = draw(0, shape), dict[str, Any](), rule.for_storage(None)
    state = rule.init(xp, p)
    for t in range(1, STEPS + 1):
        g = draw(t, shape)
        update = rule.update(xp, g, state, p, t=t, lr=lr)
        decay = decay_by_hand(rule, update, t, lr) * p
        p, state = after(t, p, g, update.delta + decay, decay, kept), update.state
    return {"p": p, **kept}


def decay_by_hand(rule: Any, update: Any, t: int, lr: float) -> float:
    """The share of p that decay takes: as the pages of the docs have it."""
    if isinstance(rule, rules.SGD | rules.LARS):
        return 0.0
    if isinstance(rule, rules.Adafactor):
        return rule.weight_decay * (lr if rule.weight_decay_mode == "lr" else update.stats["step_size"])
    if isinstance(rule, rules.SOAP) and t == 1:
        return 0.0
    mode = getattr(rule, "weight_decay_mode", "decoupled" if getattr(rule, "decoupled", True) else "l2")
    return lr * rule.weight_decay if mode == "decoupled" else 0.0


# ---- formulas


def cautious(mode: Any) -> Callable[..., Any]:
    def after(t: int, p: Any, g: Any, step: Any, decay: Any, kept: Any) -> Any:
        if mode in (True, "both"):
            mask = (step * g < 0).astype(float)
            masked = step * mask / max(mask.mean(), 1e-3)
        else:
            masked = step
        if mode in ("decay", "both"):
            decay = decay * (step * p <= 0)
        return p + masked - decay

    return after


def averaged(decay: float, start: int = 0, *, warmup: bool = False) -> Callable[..., Any]:
    def after(t: int, p: Any, g: Any, step: Any, shrinks: Any, kept: Any) -> Any:
        new, own = p + step - shrinks, min(decay, (1 + t) / (10 + t)) if warmup else decay
        own = own if t > start else 0.0
        kept["average"] = own * kept.get("average", p) + (1 - own) * new
        return new

    return after


def mean_from(start: int) -> Callable[..., Any]:
    def after(t: int, p: Any, g: Any, step: Any, decay: Any, kept: Any) -> Any:
        new = p + step - decay
        last = [*kept.get("last", []), new] if t > start else []
        kept.update(last=last, average=np.mean(last, axis=0) if last else new)
        return new

    return after


def schedule_free(beta: float, warmup: int = 0) -> Callable[..., Any]:
    """With x, y and z as the paper has them; p is y."""
    total = 0.0

    def after(t: int, y: Any, g: Any, step: Any, decay: Any, kept: Any) -> Any:
        nonlocal total
        total = 0.0 if t == 1 else total
        rate = min(t / warmup, 1.0) if warmup else 1.0
        total += rate**2
        weight = rate**2 / total
        z = kept.get("z", y) + rate * (step - decay)
        x = (1 - weight) * kept.get("x", y) + weight * z
        kept.update(z=z, x=x)
        return (1 - beta) * z + beta * x

    return after


def grafted(other: Rule, lr: float, shape: tuple[int, ...] = SHAPE) -> Callable[..., Any]:
    state = other.init(xp, draw(0, shape))

    def after(t: int, p: Any, g: Any, step: Any, decay: Any, kept: Any) -> Any:
        nonlocal state
        update = other.update(xp, g, state, p, t=t, lr=lr)
        state = update.state
        size = np.linalg.norm(update.delta + decay_by_hand(other, update, t, lr) * p)
        length = np.linalg.norm(step)
        return p + (step * (size / length) if length else step) - decay

    return after


def without_momentum(rule: Any) -> Any:
    changes: dict[str, Any] = {"betas": (0.0, *rule.betas[1:])} if hasattr(rule, "betas") else {}
    if isinstance(rule, rules.Kron):
        changes["whiten"] = "gradient"
    if isinstance(rule, rules.Adafactor):
        return replace(rule, momentum=None, momentum_mode="after_lr")
    return replace(rule, **({"momentum": 0.0} if hasattr(rule, "momentum") else {}), **changes)


#: Under a description: what is given to an optimizer, and the same by hand for a rule and a rate.
AROUND: Mapping[str, tuple[Mapping[str, Any], Callable[[Any, float], Any]]] = {
    "cautious": (dict(cautious=True), lambda rule, lr: cautious(True)),
    "cautious decay": (dict(cautious="decay"), lambda rule, lr: cautious("decay")),
    "both": (dict(cautious="both"), lambda rule, lr: cautious("both")),
    "averaged": (dict(averaged=0.7), lambda rule, lr: averaged(0.7)),
    "warm-up": (
        dict(averaged=0.7, averaged_warmup=True, averaged_from=1),
        lambda rule, lr: averaged(0.7, 1, warmup=True),
    ),
    "mean": (dict(averaged="mean", averaged_from=2), lambda rule, lr: mean_from(2)),
    "schedule-free": (dict(schedule_free=0.8), lambda rule, lr: schedule_free(0.8)),
    "grafted": (dict(graft=rules.AdamW(weight_decay=0.3)), lambda rule, lr: grafted(rules.AdamW(weight_decay=0.3), lr)),
}
#: Rules whose decay is apart from their step.
APART = ("AdamW", "AdEMAMix", "MARS", "LAMB, decoupled", "Adafactor", "Adafactor, momentum", "Lion")
APART += ("Muon", "Kron", "SOAP")


#: Without momentum, there is no mode of it.
REFUSED = [("Kron, polyak", "schedule-free")]


def pairs(*names: str) -> list[tuple[str, str]]:
    """(rule, what is around it) for all that go together; names: of rules, all without any."""
    return [
        (name, what)
        for name in names or RULES
        for what in AROUND
        if (name in APART or what not in ("cautious decay", "both")) and (name, what) not in REFUSED
    ]


def case_of(name: str, what: str) -> tuple[Rule, float, dict[str, Any], dict[str, Any]]:
    """The rule, its rate, the options of both, and the numbers after some steps."""
    (rule, lr), (options, by_hand) = RULES[name], AROUND[what]
    rule = without_momentum(rule) if what == "schedule-free" else rule
    own = {key: value for key, value in vars(rule).items() if value != vars(type(rule)())[key]}
    return rule, lr, {**own, **options}, take_steps(rule, lr, by_hand(rule, lr))


# ---- one's own


@dataclass(frozen=True, kw_only=True)
class Damped(Around):
    """Steps that turn against the average of former ones are halved."""

    memory: float = option(0.9, "Decay of the average.", low=0, below=1)

    def extra_entries(self, shape: Any) -> Any:
        return {"mean_step": Moment()}

    def change_update(self, xp: Any, update: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any) -> Any:
        mean = average(s["mean_step"], update.delta, 1 - self.memory)
        delta = xp.where(update.delta * mean < 0, 0.5, 1.0) * update.delta
        return update._replace(delta=delta, state={**update.state, "mean_step": mean})


def damped(memory: float) -> Any:
    def after(t: int, p: Any, g: Any, step: Any, decay: Any, kept: Any) -> Any:
        delta = step - decay
        kept["mean"] = memory * kept.get("mean", 0.0) + (1 - memory) * delta
        return p + np.where(delta * kept["mean"] < 0, 0.5, 1.0) * delta

    return after
