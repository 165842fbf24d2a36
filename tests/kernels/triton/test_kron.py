"""Kron's kernels for GPUs against its rule, state included: interpreted on the CPU, or on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from on_device import DEVICE, PRODUCTS, assert_near

from thalweg.boundary import advance
from thalweg.kernels.triton.kron import KronKernels, reason_unserved
from thalweg.kernels.triton.products import Device
from thalweg.rules import Annealed, Kron
from thalweg.rules.noise import tensor_id
from thalweg.settings import Handling
from thalweg.spaces import torch as space
from thalweg.storage import first_state

pytestmark = pytest.mark.slow  # programs are interpreted


class Both:
    """Some parameters of one shape, stepped by the kernels and by the rule."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        count: int = 1,
        dtype: str = "float32",
        handling: Handling | None = None,
        counts_on_device: bool = False,
        misplaced: int = 0,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        self.handling = handling or Handling()
        self.rule = Kron(**options).for_storage(self.handling.precond_dtype)
        self.shape, self.dtype, self.misplaced = shape, getattr(torch, dtype), misplaced
        self.generator = torch.Generator().manual_seed(0)
        self.names = [f"w{i}" for i in range(count)]
        self.params = [self.draw() for _ in self.names]
        self.states = [first_state(space, self.rule, self.handling, p) for p in self.params]
        self.expected = [p.clone() for p in self.params]
        self.expected_states = [{key: entry.clone() for key, entry in s.items()} for s in self.states]
        self.taken = [0] * count
        home = DEVICE if counts_on_device else "cpu"
        for s, expected in zip(self.states, self.expected_states, strict=True):
            s["step"], s["refresh"] = torch.zeros((), device=home), s["refresh"].to(home)
            expected["refresh"] = expected["refresh"].cpu()
        self.t = None if counts_on_device else 0
        self.kernels = KronKernels(device)

    def draw(self, size: float = 1.0) -> torch.Tensor:
        x = (torch.randn(self.shape, generator=self.generator) * size).to(self.dtype)
        home = torch.empty(x.numel() + self.misplaced, dtype=self.dtype, device=DEVICE)[self.misplaced :]
        return home.view(self.shape).copy_(x)

    def step(self, grads: list[torch.Tensor] | None = None, *, size: float = 1.0, **beside: Any) -> Any:
        grads = grads or [self.draw(size) for _ in self.names]
        before = [g.clone() for g in grads]
        self.t = None if self.t is None else self.t + 1
        beside = {"lr": 0.02, "lr_scale": 0.5, **beside}
        outcome = self.kernels.step(
            self.names, self.params, grads, self.states, rule=self.rule, handling=self.handling, t=self.t, **beside
        )
        for i, name in enumerate(self.names):
            result = advance(
                space,
                self.rule,
                self.handling,
                self.expected[i],
                grads[i],
                self.expected_states[i],
                t=self.taken[i] + 1,
                tensor=tensor_id(name),
                **beside,
            )
            self.expected[i], self.expected_states[i] = result.p, result.state
            self.taken[i] += 1 if result.finite is None else int(result.finite)
            stepped = result.finite if outcome.finite is None else outcome.finite[i]
            assert (stepped is None) == (result.finite is None)
            assert stepped is None or bool(stepped) == bool(result.finite)
            rms = outcome.stats["update_rms"][i].cpu().reshape(-1)
            torch.testing.assert_close(
                rms, result.stats["update_rms"].cpu().reshape(-1), rtol=self.tolerance, atol=1e-30, equal_nan=True
            )
            assert bool(outcome.stats["refreshed"][i].reshape(-1)[0]) == bool(result.stats["refreshed"])
        assert all(torch.equal(g, own) or g.isnan().any() for g, own in zip(grads, before, strict=True))
        return outcome

    def go_on_alike(self) -> None:
        """From the numbers of the rule, so that roundings do not add up."""
        for p, expected, s, theirs in zip(self.params, self.expected, self.states, self.expected_states, strict=True):
            p.copy_(expected)
            for key, entry in theirs.items():
                s[key].copy_(entry)

    @property
    def tolerance(self) -> float:
        return PRODUCTS[self.handling.precond_dtype or "float32"]

    def everything(self, place: int = 0) -> list[torch.Tensor]:
        """A copy of a parameter and its state."""
        return [self.params[place].clone(), *(entry.clone() for entry in self.states[place].values())]

    def check(self) -> None:
        """Parameters and all of the state are those of the rule."""
        for i, s in enumerate(self.states):
            assert s["step"].item() == self.taken[i]
            assert_near("p", self.params[i], self.expected[i], self.tolerance)
            for key, entry in self.expected_states[i].items():
                assert_near(key, s[key], entry, self.tolerance)


DENSE: dict[str, Any] = dict(max_skew=None)


def held(**options: Any) -> dict[str, Any]:
    return dict(handling=Handling(**options))


#: (shape, options) of steps that are compared with the rule. Options by themselves: tests/engines.
ROWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((8, 3), dict(block_size=2, clip=0.3)),
    ((70, 40), dict(count=2)),
    ((2, 2, 40), dict(count=2, stacked_axes=2)),
    ((8, 8), dict(block_size=4, misplaced=1)),
    ((40, 24), dict(size=1e-15)),
    ((24,), dict(steps=7, precond_update_probability=Annealed(0.8, 0.1, 0.3, 2), counts_on_device=True)),
]


@pytest.mark.parametrize(("shape", "options"), ROWS, ids=str)
def test_numbers_are_those_of_the_rule(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    given = {"steps": 2, "size": 1.0, **options}
    steps, size = given.pop("steps"), given.pop("size")
    both = Both(shape, **given)
    for _ in range(steps):
        both.step(size=size)
    both.check()


@pytest.mark.gpu
def test_parameters_of_one_batch_may_be_due_at_different_steps() -> None:
    # of a shape for which no two columns are as large as each other in the 11 digits of tensor cores: bounds of norms
    # begin with the largest one
    both = Both((24, 22), count=2, precond_update_probability=0.5)
    for s in (both.states[1], both.expected_states[1]):
        s["refresh"].fill_(0.5)
    for refreshed in ([0, 1], [1, 0], [0, 1]):
        assert both.step().stats["refreshed"].tolist() == refreshed
        both.check()
        both.go_on_alike()


@pytest.mark.gpu
def test_scaled_and_negated_gradients_and_rates_on_the_device() -> None:
    both = Both((36, 64), handling=Handling(maximize=True), momentum=0.5)
    for rate, scale in ((0.1, 0.5), (0.01, 3.0)):
        beside = {"lr": torch.tensor(rate, device=DEVICE), "grad_scale": torch.tensor(scale, device=DEVICE)}
        both.step(**beside)
    both.check()


@pytest.mark.gpu
def test_gradients_of_zero_teach_nothing() -> None:
    both = Both((40, 24), count=2, whiten="gradient")
    both.step()
    before = [s["Q_1"].clone() for s in both.states]
    both.step([torch.zeros_like(both.params[0]), both.draw()])
    assert torch.equal(both.states[0]["Q_1"], before[0])
    assert not torch.equal(both.states[1]["Q_1"], before[1])
    both.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 40), dict(stacked_axes=1)),
        ((2, 12, 10), dict(stacked_axes=1)),
        ((2, 24, 20), dict(stacked_axes=1)),
        ((2, 12, 10), dict(stacked_axes=1, **Kron.VARIANTS["polyak"])),
        ((5, 4), dict(block_size=4, max_skew=None)),
    ],
    ids=str,
)
def test_a_parameter_that_is_not_finite_is_left_as_it_was(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """All of its slices and blocks are stepped or none."""
    both = Both(shape, count=2, counts_on_device=True, **held(on_nonfinite="skip"), **options)
    both.step()
    before = both.everything(1)
    bad = [both.draw(), both.draw()]
    bad[1].view(-1)[5] = float("nan")
    assert both.step(bad).finite.tolist() == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(both.everything(1), before, strict=True))
    both.step()
    both.check()


@pytest.mark.gpu
def test_what_float16_cannot_hold_is_not_finite() -> None:
    both = Both((24, 20), dtype="float16", handling=Handling(on_nonfinite="skip"), counts_on_device=True)
    assert both.step(lr=1e7).finite.tolist() == [False]
    both.step()
    both.check()


@pytest.mark.gpu
def test_a_bad_gradient_does_not_spoil_the_factors() -> None:
    both = Both((24, 20))
    bad = both.draw()
    bad[0, 0] = float("nan")
    both.step()
    factor = both.states[0]["Q_1"].clone()
    both.step([bad])
    assert torch.equal(both.states[0]["Q_1"], factor)
    assert both.params[0].isnan().any()
    both.check()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_what_is_not_allowed_changes_nothing(policy: Any) -> None:
    both = Both((24, 20), handling=Handling(on_nonfinite=policy), counts_on_device=True)
    both.step()
    before = both.everything()
    grads = [both.draw()]
    given = dict(rule=both.rule, handling=both.handling, t=None, lr=0.1)
    both.kernels.step(both.names, both.params, grads, both.states, **given, allowed=torch.tensor(False, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(both.everything(), before, strict=True))
    both.step()
    both.check()


@pytest.mark.gpu
def test_parameters_share_scratch_memory_by_turns() -> None:
    """The same numbers, whether all matrices have their own or each waits for the one before."""
    results = []
    for limit in (2**30, 1):
        small = Device(8, 2**16, 0, DEVICE == "cuda", least_scratch=limit)
        both = Both((40, 24), count=3, device=small)
        both.step()
        both.check()
        batch = both.kernels.batches[tuple(both.names)][1]
        assert batch.chunk == (3 if limit > 1 else 1)
        results.append(both.params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_long_rows_are_summed_in_parts() -> None:
    both = Both((300, 40), device=Device(8, 2**18, 2**30, DEVICE == "cuda", long=64))
    both.step()
    assert both.kernels.batches["w0",][1].layout.dense[1].parts > 1
    both.check()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, dict(max_skew=None, geometry="quad")], ids=str)
def test_how_tiles_are_fetched_does_not_matter(options: dict[str, Any]) -> None:
    results = []
    for describes in (False, True):
        device = Device(8, 2**18, 2**30, cuts=DEVICE == "cuda", describes=describes)
        both = Both((70, 40), device=device, **options)
        both.step()
        both.check()
        assert both.kernels.batches["w0",][1].layout.wide.described == describes
        results.append(both.everything())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_shapes_of_one_optimizer_share_scratch_memory_and_options_may_change() -> None:
    large, small = Both((70, 40)), Both((24,))
    small.names = ["other"]
    large.kernels = small.kernels
    for rate in (0.1, 0.2):
        for both in (small, large):
            both.rule = replace(both.rule, precond_lr=rate)
            both.step()
    small.check()
    large.check()
    assert len(small.kernels.scratch) == 1


@pytest.mark.gpu
def test_tensors_that_have_moved_are_found() -> None:
    both = Both((24, 20))
    both.step()
    both.params = [p.clone() for p in both.params]
    both.states = [{key: entry.clone() for key, entry in s.items()} for s in both.states]
    both.step()
    both.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "handling", "shape", "words"),
    [
        (dict(geometry="eq"), {}, (4, 4), "geometry='eq'"),
        (dict(damping_mode="expected"), {}, (4, 4), "damping_mode='expected'"),
        ({}, dict(on_nonfinite="raise"), (4, 4), "on_nonfinite='raise'"),
        ({}, dict(precond_dtype="float16"), (4, 4), "factors stored in float16"),
        (dict(merge=None), {}, (4, 4, 4), "3 factors"),
        ({}, {}, (0, 4), "no elements"),
        ({}, {}, (2**16, 2**15), "32-bit positions"),
        (dict(block_size=4), {}, (1024, 1024), "it is 65536 matrices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_said(
    options: dict[str, Any], handling: dict[str, Any], shape: tuple[int, ...], words: str
) -> None:
    held = Handling(**handling)
    assert words in reason_unserved(Kron(**options), held, shape, held.precond_dtype or "float32")
    assert reason_unserved(Kron(), Handling(), (4, 4), "float32") == ""
