"""Kron's kernels compute what the rule says: mutants of it change their numbers, values of options compile nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import DEVICE
from tolerances import SPACE, TENSOR_CORES

from thalweg.boundary import advance
from thalweg.errors import RuleError
from thalweg.kernels.triton.kron import KronKernels
from thalweg.kernels.triton.kron_formulas import Options, formulas_for, numbers_of
from thalweg.programs.parts import decide_by
from thalweg.rules import Annealed, Kron, factors, refresh
from thalweg.rules.noise import tensor_id
from thalweg.settings import Handling
from thalweg.spaces import torch as space
from thalweg.storage import first_state

pytestmark = pytest.mark.gpu  # by Triton's interpreter they take minutes

TOLERANCE = SPACE["float32"] if DEVICE == "cpu" else TENSOR_CORES["float32"]


class Mirrored(Kron):
    """Goes the other way: a sign in ``taken``."""

    def apply(self, *args: Any, **named: Any) -> Any:
        update = super().apply(*args, **named)
        return update._replace(delta=-update.delta)


class Learning(Kron):
    """Factors learn from something else."""

    def prepare(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Any:
        shown = super().prepare(xp, g, s, p, t)
        return shown._replace(tensors=(shown.tensors[0], shown.tensors[-1] + 3.0 * p))


class Unclipped(Kron):
    def clipped(self, xp: Any, h: Any, h_square: Any) -> Any:
        return h


class Sooner(Kron):
    """Factors are due at half the count."""

    def prepare(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Any:
        shown = super().prepare(xp, g, s, p, t)
        accumulated = s["refresh"] + self.precond_update_probability
        due = accumulated >= 0.5
        left = xp.where(due, accumulated - 0.5, accumulated)
        return shown._replace(state={**shown.state, "refresh": left}, due=due)


class Strict(Kron):
    """Holds for not finite whatever is above a size, and shows another figure."""

    def apply(self, xp: Any, made: Any, *args: Any, **named: Any) -> Any:
        update, h_square = super().apply(xp, made, *args, **named), made.figures["square"]
        (total,) = xp.sums((h_square, None))
        return update._replace(finite=total < 1e-6, stats={**update.stats, "update_rms": 3.0 * h_square})


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= TOLERANCE * max(b.abs().max().item(), 1e-30)


def differ(found: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return any((a - b).abs().max() > 0.01 * max(b.abs().max().item(), 1e-30) for a, b in zip(found, plain, strict=True))


def stepped(
    rule: Kron, *, by_kernels: bool, on_device: bool, handling: Handling, shape: tuple[int, ...] = (5,)
) -> list[torch.Tensor]:
    """All that there is after two steps: parameter, state and figures."""
    generator = torch.Generator().manual_seed(0)
    p, *grads = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3))
    state, figures = first_state(space, rule, handling, p), []
    if not by_kernels:
        t = 1
        for g in grads:
            result = advance(space, rule, handling, p, g, state, t=t, tensor=tensor_id("w"), lr=0.1, lr_scale=0.5)
            p, state, t = result.p, result.state, t + (1 if result.finite is None else int(result.finite))
            figures += [result.stats["update_rms"].reshape(1), torch.as_tensor(result.stats["refreshed"]).reshape(1)]
        return [x.float().cpu() for x in (p, *state.values(), *figures)]
    home = DEVICE if on_device else "cpu"
    state = {**state, "refresh": state["refresh"].to(home), "step": torch.zeros((), device=home)}
    kernels = KronKernels()
    for i, g in enumerate(grads):
        beside: dict[str, Any] = dict(rule=rule, handling=handling, lr=0.1, lr_scale=0.5)
        outcome = kernels.step(["w"], [p], [g], [state], t=None if on_device else i + 1, **beside)
        figures += [outcome.stats[name].clone() for name in ("update_rms", "refreshed")]
    del state["step"]
    return [x.float().cpu() for x in (p, *state.values(), *figures)]


MUTANTS: list[tuple[type[Kron], dict[str, Any]]] = [
    (Mirrored, {}),
    (Learning, {}),
    (Unclipped, dict(clip=0.1)),
    (Unclipped, dict(clip=0.1, clip_mode="rms")),
    (Sooner, dict(precond_update_probability=0.4)),
    (Strict, {}),
]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("mutant", "options"), MUTANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_mutant_of_the_rule_steps_otherwise_and_as_it_says(
    mutant: type[Kron], options: dict[str, Any], on_device: bool
) -> None:
    handling = Handling(on_nonfinite="skip" if mutant is Strict and on_device else "propagate")
    results = [
        stepped(kind(**options).for_storage(None), by_kernels=by_kernels, on_device=on_device, handling=handling)
        for kind, by_kernels in ((mutant, True), (mutant, False), (Kron, True))
    ]
    found, expected, plain = results
    close(found, expected)
    assert differ(found, plain)


class Other(Kron):
    """Kron by another name, of which no formulas have been made."""


@pytest.mark.parametrize(
    ("where", "name", "wrong", "options"),
    [
        (refresh, "strength_of", lambda right: lambda *given: 0.3 + right(*given), {}),
        (refresh, "first_scale", lambda right: lambda *given: 2.0 * right(*given), dict(init_scale=None)),
        (refresh, "paced", lambda right: lambda *given: (2.0 * right(*given)[0], 0.5 * right(*given)[1]), {}),
        (refresh, "moved", lambda right: lambda *given: 0.5 * right(*given), {}),
        (factors, "angle", lambda right: lambda *given: 0.1 + right(*given), dict(max_skew=None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mutant_of_a_refresh_is_seen(
    where: Any, name: str, wrong: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = dict(on_device=False, handling=Handling(), shape=(6, 5) if name == "angle" else (5,))
    plain = stepped(Kron(**options).for_storage(None), by_kernels=True, **given)
    monkeypatch.setattr(where, name, wrong(getattr(where, name)))
    rule = type(name, (Other,), {})(**options).for_storage(None)
    found, expected = (stepped(rule, by_kernels=by_kernels, **given) for by_kernels in (True, False))
    close(found, expected)
    assert differ(found, plain)


def test_values_of_options_compile_nothing_anew() -> None:
    first, second = (
        formulas_for(Kron(momentum=m, weight_decay=d, clip=c, precond_update_probability=p), 2, averages=True)
        for m, d, c, p in ((0.9, 0.1, 1.0, 0.5), (0.8, 0.2, 2.0, 0.25))
    )
    assert first is second
    other = formulas_for(Kron(weight_decay=0.1, weight_decay_mode="decoupled"), 2, averages=True)
    assert other.stepped is not first.stepped
    known = {knows: formulas_for(Kron(), 2, averages=True, knows_t=knows) for knows in (True, False)}
    assert known[True].stepped is known[False].stepped, "who knows the step is no matter of elements"
    assert known[True].begin is not known[False].begin


def test_the_host_computes_what_it_knows_in_double_precision() -> None:
    rule = Kron(momentum=0.999, momentum_mode="ema", precond_update_probability=Annealed(1.0, 0.25, 0.5, 0))
    given = numbers_of(formulas_for(rule, 2, averages=True), Options.of(rule), 1, 0.1, 0.5)
    assert min(abs(number - (1 - 0.999)) for number in given.values()) < 1e-16


@pytest.mark.parametrize("probability", [0.3, 1.0, 0.0, Annealed(0.9, 0.07, 0.01, 20)], ids=str)
def test_counts_of_the_host_have_the_bits_of_the_rule(probability: Any) -> None:
    rule, p = Kron(precond_update_probability=probability, momentum=0.0), torch.zeros(2)
    state = expected = torch.zeros(())
    for t in range(1, 200):
        _, after, due = rule.prepare(space, p, {"refresh": expected}, p, t)
        is_due, left = decide_by(rule, "", {"refresh": state.item()}, t)
        state, expected = torch.tensor(left["refresh"]), after["refresh"]
        assert is_due == bool(due)
        assert torch.equal(state, expected)


class Summing(Kron):
    def apply(self, xp: Any, made: Any, *args: Any, **named: Any) -> Any:
        update, h_square = super().apply(xp, made, *args, **named), made.figures["square"]
        return update._replace(finite=xp.isfinite(xp.sums((h_square * h_square, None))[0]))


def test_what_no_kernel_computes_is_told() -> None:
    with pytest.raises(RuleError, match="the sum of h_square over slices"):
        formulas_for(Summing(), 2, averages=True)


def test_options_are_found_once_and_leave_the_rule_as_it_is() -> None:
    rule = Kron()
    before = dict(vars(rule))
    assert Options.of(rule) is Options.of(rule)
    assert Options.of(rule) is not Options.of(Kron())
    assert vars(rule) == before
