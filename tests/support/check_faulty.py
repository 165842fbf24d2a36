"""Faulty optimizers, each with one mistake that is seen in the wild, and the checks that must catch it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

COUNTER = itertools.count()
KEPT: list[Any] = []
SHARED: dict[Any, Any] = {}


class Adam(torch.optim.Optimizer):
    """Without frills; float32 state, which torch's load_state_dict casts and shares."""

    def __init__(
        self,
        params: Any,
        lr: Any = 0.01,
        betas: Any = (0.9, 0.99),
        momentum: float = 0.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        self.check(lr, betas, momentum, eps, weight_decay)
        own = dict(lr=lr, betas=betas, momentum=momentum, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, own)

    def check(self, lr: Any, betas: Any, momentum: float, eps: float, weight_decay: float) -> None:
        if not (lr >= 0 and all(0 <= b < 1 for b in betas) and min(momentum, eps, weight_decay) >= 0):
            raise ValueError("an option is out of range")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.before([p for _, p in ready])
        for group, p in ready:
            self.one(group, p, -p.grad if group["maximize"] else p.grad, self.state[p])
        return loss

    def before(self, params: list[Any]) -> None:
        if any(p.grad.is_sparse for p in params):
            raise RuntimeError("sparse gradients are not served")

    def one(self, group: Any, p: Any, g: Tensor, s: dict[str, Any]) -> None:
        self.write(p, group["lr"], self.direction(group, p, g, s) + group["weight_decay"] * p)

    def write(self, p: Any, lr: Any, u: Tensor) -> None:
        p.sub_((lr * u).to(p.dtype))

    def direction(self, group: Any, p: Any, g: Tensor, s: dict[str, Any]) -> Tensor:
        (b1, b2), g = group["betas"], g.to(self.dtype_of(p))
        if not s:
            s.update(t=torch.zeros(()), m=torch.zeros_like(g), v=torch.zeros_like(g))
        s["t"] += 1
        s["m"] = b1 * s["m"] + (1 - b1) * g
        s["v"] = b2 * s["v"] + (1 - b2) * g * g
        t = float(s["t"])
        return s["m"] / (1 - b1**t) / ((s["v"] / (1 - b2**t)).sqrt() + group["eps"])

    def dtype_of(self, p: Any) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else torch.float32


def faulty(**changed: Any) -> Any:
    """Adam with other methods or attributes."""
    return type("Faulty", (Adam,), changed)


def rate(change: Any) -> Any:
    """Another learning rate of a parameter."""
    return faulty(write=lambda self, p, lr, u: Adam.write(self, p, change(p, lr), u))


def gradient(change: Any) -> Any:
    """Another gradient of a parameter."""
    return faulty(one=lambda self, group, p, g, s: Adam.one(self, group, p, change(p, g), s))


def options(change: Any) -> Any:
    """Other options of a parameter."""
    return faulty(one=lambda self, group, p, g, s: Adam.one(self, change(self, group), p, g, s))


def leaving_out(which: Any) -> Any:
    """Some parameters are not stepped."""
    return faulty(one=lambda self, group, p, g, s: None if which(p) else Adam.one(self, group, p, g, s))


def remembering(option: str) -> Any:
    """What an option was in the first step is what it stays."""

    def one(self, group, p, g, s):
        value = s.pop(option, group[option])
        Adam.one(self, {**group, option: value}, p, g, s)
        s[option] = value

    return faulty(one=one)


def afterwards(change: Any) -> Any:
    """A step of a parameter, after which something is done with its group, its gradient and its state."""

    def one(self, group, p, g, s):
        Adam.one(self, group, p, g, s)
        change(group, g, s)

    return faulty(one=one)


class NoOptimizer:
    def __init__(self, params: Any, **options: Any) -> None:
        self.inside = Adam(params, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)


class ClosureWithoutGradients(Adam):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


class LosesKeys(Adam):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            del group["betas"], group["momentum"]

    def one(self, group, p, g, s):
        super().one({"betas": (0.9, 0.99), **group}, p, g, s)


class KeepsItsList(Adam):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        now = self.param_groups
        self.param_groups = [{**now[0], "params": self.mine}]
        super().step(closure)
        self.param_groups = now


class WritesGradients(Adam):
    def one(self, group, p, g, s):
        super().one(group, p, g.mul_(0.5), s)


class DecaysWithoutGradient(Adam):
    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is None):
            p.mul_(0.99)
        return super().step(closure)


#: As it is before torch has put hooks around it, which it does where the first one is constructed.
PLAIN_STEP = Adam.step


def step_without_hooks(self: Any, closure: Any = None) -> Any:
    return PLAIN_STEP(self, closure)


step_without_hooks.hooked = True  # or torch would wrap it


class StateForAll(Adam):
    def before(self, params):
        self.state["all"]["step"] = torch.ones(())


class KeepsOldData(Adam):
    def one(self, group, p, g, s):
        data = s.pop("data", p.data)
        super().one(group, data, g, s)
        s["data"] = data


def draw(p: Any, seed: int) -> Tensor:
    return 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


class GlobalRandomness(Adam):
    def write(self, p, lr, u):
        super().write(p, lr, u + torch.randn_like(p))


class StateByShape(Adam):
    def one(self, group, p, g, s):
        self.by_shape = getattr(self, "by_shape", {})
        super().one(group, p, g, self.by_shape.setdefault(tuple(p.shape), {}))


class DecaysWithoutRate(Adam):
    def write(self, p, lr, u):
        super().write(p, 1.0, lr * u + 0.01 * p)


class CountsForAll(Adam):
    count = 0

    def before(self, params):
        self.count += 1

    def direction(self, group, p, g, s):
        u = super().direction(group, p, g, s)
        return u * (1 - 0.9 ** float(s["t"])) / (1 - 0.9**self.count)


class StateElsewhere(Adam):
    def one(self, group, p, g, s):
        self.elsewhere = getattr(self, "elsewhere", {})
        super().one(group, p, g, self.elsewhere.setdefault(id(p), {}))


class Marker:
    """Nothing that torch.load knows."""


class LoadsForAll(Adam):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        known = next(iter(self.state.values()), {})
        for p in (p for group in self.param_groups for p in group["params"] if known and not self.state.get(p)):
            g = torch.zeros(p.shape)
            self.state[p] = {"t": known["t"].clone(), "m": g, "v": g.clone()}


class LosesOptions(Adam):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"]


class SavesItsOwnKeysOnly(Adam):
    def state_dict(self):
        found = super().state_dict()
        for group in found["param_groups"]:
            for key in set(group) - {"params", *self.defaults}:
                del group[key]
        return found


class LoadsAnything(Adam):
    def load_state_dict(self, state_dict):
        places = [p for group in self.param_groups for p in group["params"]]
        for place, state in state_dict["state"].items():
            self.state[places[place]] = state
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group["lr"] = 10 * given["lr"]


class NeedsItsDtype(Adam):
    def one(self, group, p, g, s):
        if s and s["m"].dtype != self.dtype_of(p):
            raise TypeError("the state has another dtype")
        super().one(group, p, g, s)


class TakesAnything(Adam):
    def __init__(self, params, **options):
        given = [p.detach().requires_grad_() for p in params if isinstance(p, Tensor)]
        super().__init__(given or [Parameter(torch.zeros(1))], **options)


class SwallowsErrors(Adam):
    def step(self, closure=None):
        try:
            return super().step(closure)
        except Exception:
            return None


class FailsHalfway(Adam):
    def before(self, params):
        pass

    def one(self, group, p, g, s):
        if g.is_sparse:
            raise RuntimeError("sparse gradients are not served")
        super().one(group, p, g, s)


class SharesANorm(Adam):
    def before(self, params):
        super().before(params)
        total = torch.stack([p.grad.norm() for p in params]).norm()
        self.share = total / (1 + total)

    def write(self, p, lr, u):
        super().write(p, lr * self.share, u)


class SharesTheNormOfParameters(SharesANorm):
    def before(self, params):
        total = torch.stack([p.norm() for p in params]).norm()
        self.share = total / (1 + total)


class CountsInPython(Adam):
    """A captured step counts once, when it is captured."""

    def direction(self, group, p, g, s):
        s["t"] = s.get("t", 0) + 1
        return g / s["t"]


ForgetsGroups = options(lambda self, group: self.defaults)
RateByGroup = options(lambda self, group: {**group, "lr": group["lr"] / len(group["params"])})
RateFalls = afterwards(lambda group, g, s: group.update(lr=0.9 * group["lr"]))
AppendsGroups = faulty(
    add_param_group=lambda self, group: self.param_groups.append(
        {**self.defaults, **group, "params": list(group["params"])}
    )
)
Normalizes = faulty(direction=lambda self, group, p, g, s: g / g.square().sum().sqrt())
HalfState = faulty(dtype_of=lambda self, p: p.dtype)
ByStorage = faulty(write=lambda self, p, lr, u: p.as_strided((p.numel(),), (1,)).sub_(lr * u.flatten()))
Unchecked = faulty(check=lambda self, *options: None)

#: The faulty optimizer that each check must catch.
FAULTS: dict[str, Any] = {
    "is-an-optimizer": NoOptimizer,
    "step-moves-parameters": leaving_out(lambda p: p.dim() == 1),
    "closure-loss": faulty(step=lambda self, closure=None: Adam.step(self, closure) and None),
    "closure-with-gradients": ClosureWithoutGradients,
    "groups-have-their-own-lr": ForgetsGroups,
    "lr-is-read-in-each-step": remembering("lr"),
    "options-are-read-in-each-step": remembering("weight_decay"),
    "defaults-fill-groups": LosesKeys,
    "options-stay-as-given": RateFalls,
    "foreign-keys": faulty(
        add_param_group=lambda self, group: Adam.add_param_group(
            self, {key: group[key] for key in group if key == "params" or key in self.defaults}
        )
    ),
    "added-group-is-stepped": KeepsItsList,
    "names-are-kept": SavesItsOwnKeysOnly,
    "parameters-from-an-iterator": faulty(
        __init__=lambda self, params, **options: Adam.__init__(self, params if list(params) else [], **options)
    ),
    "groups-from-iterators": AppendsGroups,
    "prints-nothing": faulty(before=lambda self, params: print("step")),  # noqa: T201
    "zero-grad": faulty(zero_grad=lambda self, set_to_none=True: Adam.zero_grad(self, set_to_none=False)),
    "gradients-untouched": WritesGradients,
    "no-gradient-no-step": DecaysWithoutGradient,
    "step-hooks": faulty(step=step_without_hooks),
    "pickling": faulty(before=lambda self, params: self.state.update(rule=lambda: None)),
    "deep-copies": faulty(__deepcopy__=lambda self, memo: self),
    "instances-are-apart": faulty(
        one=lambda self, group, p, g, s: Adam.one(self, group, p, g, SHARED.setdefault(tuple(p.shape), {}))
    ),
    "state-by-parameter": StateForAll,
    "autograd-sees-the-write": faulty(write=lambda self, p, lr, u: p.data.sub_(lr * u)),
    "parameters-stay-leaves": afterwards(lambda group, g, s: s["m"].requires_grad_()),
    "replaced-data": KeepsOldData,
    "replaced-parameters": KeepsItsList,
    "deterministic": faulty(write=lambda self, p, lr, u: Adam.write(self, p, lr, u + draw(p, next(COUNTER)))),
    "independent-of-the-global-seed": GlobalRandomness,
    "generators-untouched": GlobalRandomness,
    "independent-of-other-parameters": StateByShape,
    "order-of-parameters": RateFalls,
    "one-group-or-many": RateByGroup,
    "lr-zero": DecaysWithoutRate,
    "zero-gradients": Normalizes,
    "zero-parameters": rate(lambda p, lr: lr * p.norm()),
    "huge-gradients": faulty(direction=lambda self, group, p, g, s: g**3 / (g**2 + 1e-8)),
    "tiny-gradients": Normalizes,
    "descends": rate(lambda p, lr: -lr),
    "maximize": faulty(one=lambda self, group, p, g, s: Adam.one(self, group, p, -g if group["maximize"] else g, s)),
    "float64-agrees": rate(lambda p, lr: 2 * lr if p.dtype == torch.float64 else lr),
    "lr-as-a-tensor": rate(lambda p, lr: 2 * lr if isinstance(lr, Tensor) else lr),
    "weight-decay-shrinks": options(lambda self, group: {**group, "weight_decay": -group["weight_decay"]}),
    "weight-decay-by-group": ForgetsGroups,
    "late-parameters": CountsForAll,
    "resumes-to-the-bit": StateElsewhere,
    "resumes-with-weights-only": afterwards(lambda group, g, s: s.update(kind=Marker())),
    "resumes-16-bits": Adam,
    "loading-keeps-dtypes": Adam,
    "loading-twice": Adam,
    "loading-replaces": LoadsAnything,
    "loading-before-the-first-step": LoadsAnything,
    "loading-unstepped-parameters": LoadsForAll,
    "options-come-back": LosesOptions,
    "foreign-keys-come-back": SavesItsOwnKeysOnly,
    "saving-changes-nothing": faulty(state_dict=lambda self: (Adam.state_dict(self), self.state.clear())[0]),
    "other-groups-refused": LoadsAnything,
    "other-shapes-refused": Adam,
    "loads-into-other-dtypes": NeedsItsDtype,
    "state-dict-hooks": LoadsAnything,
    "distributed-state-dict": StateForAll,
    "state-does-not-grow": afterwards(lambda group, g, s: s.update({f"m{int(s['t'])}": g.clone()})),
    "gradients-are-released": afterwards(lambda group, g, s: s.update(last=g)),
    "everything-is-released": faulty(before=lambda self, params: KEPT.extend(params)),
    "dtypes-are-kept": faulty(write=lambda self, p, lr, u: setattr(p, "data", p.data.float() - lr * u)),
    "bfloat16-moves": leaving_out(lambda p: p.dtype == torch.bfloat16),
    "bfloat16-follows-float32": gradient(lambda p, g: g.abs() if p.dtype == torch.bfloat16 else g),
    "float16-small-gradients": HalfState,
    "float16-large-gradients": HalfState,
    "mixed-dtypes": torch.optim.Adafactor,
    "float64-is-not-rounded": faulty(write=lambda self, p, lr, u: p.copy_((p - lr * u).float())),
    "default-dtype-ignored": faulty(dtype_of=lambda self, p: torch.get_default_dtype()),
    "complex-parameters": faulty(direction=lambda self, group, p, g, s: g.real),
    "transposed": ByStorage,
    "channels-last": ByStorage,
    "gaps-between-elements": ByStorage,
    "views-stay-inside": faulty(write=lambda self, p, lr, u: p.as_strided(p.shape, p.stride(), 0).sub_(lr * u)),
    "written-in-place": faulty(write=lambda self, p, lr, u: setattr(p, "data", p.data - lr * u)),
    "gradients-with-other-strides": gradient(lambda p, g: g.as_strided((g.numel(),), (1,)).view(p.shape)),
    "expanded-gradients": WritesGradients,
    "empty-parameters": rate(lambda p, lr: lr * (24 / p.numel())),
    "scalars": faulty(write=lambda self, p, lr, u: [row.sub_(lr * step) for row, step in zip(p, u, strict=True)]),
    "thin-shapes": faulty(direction=lambda self, group, p, g, s: g / g.std()),
    "frozen-parameters": DecaysWithoutGradient,
    "sparse-gradients": SwallowsErrors,
    "twice-in-two-groups": AppendsGroups,
    "no-parameters": TakesAnything,
    "no-tensors": TakesAnything,
    "sets-of-parameters": AppendsGroups,
    "no-leaves": TakesAnything,
    "lr-out-of-range": Unchecked,
    "weight-decay-out-of-range": Unchecked,
    "betas-out-of-range": Unchecked,
    "momentum-out-of-range": Unchecked,
    "eps-out-of-range": Unchecked,
    "lr-of-a-group-out-of-range": Adam,
    "torch-error-inputs": Unchecked,
    "misspelt-option": faulty(__init__=lambda self, params, lr=0.01, **options: Adam.__init__(self, params, lr)),
    "bad-group-is-not-added": AppendsGroups,
    "failing-closure": SwallowsErrors,
    "failed-step-changes-nothing": FailsHalfway,
    "nan-stays-local": SharesANorm,
    "infinity-stays-local": SharesANorm,
    "nan-is-not-hidden": gradient(lambda p, g: g.nan_to_num(0.3)),
    "frozen-nan": SharesTheNormOfParameters,
    "schedulers": remembering("lr"),
    "schedulers-with-lr-as-a-tensor": faulty(
        before=lambda self, params: [group.update(lr=float(group["lr"])) for group in self.param_groups]
    ),
    "schedulers-resume": LosesOptions,
    "one-cycle": LosesKeys,
    "grad-scaler": type("Faulty", (SharesANorm,), {"_step_supports_amp_scaling": True}),
    "autocast-ignored": torch.optim.Adafactor,
    "deterministic-algorithms": faulty(
        write=lambda self, p, lr, u: p.put_(torch.arange(p.numel()), (p - lr * u).contiguous())
    ),
    "in-backward": RateByGroup,
    "compiles": rate(lambda p, lr: -lr if torch.compiler.is_compiling() else lr),
    "gpu-steps-as-cpu": rate(lambda p, lr: 2 * lr if p.is_cuda else lr),
    "state-moves-to-another-device": StateElsewhere,
    "cuda-graphs": CountsInPython,
}
