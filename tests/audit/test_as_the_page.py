"""An audit is silent where a step is that of its page, says what it could not see, and leaves everything as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from published_runs import peer

import thalweg.torch
from thalweg.audit import AS_PAGE, AuditError
from thalweg.rules import SGD, AdamW, Muon, Spikes


def make_model(dtype: Any = None, *, bias: bool = True) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16, bias=bias), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=bias)
    return torch.nn.Sequential(*layers).to(dtype)


def backward(model: Any, t: int = 0) -> None:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(t)).to(next(model.parameters()).dtype)
    model.zero_grad()
    model(x).square().mean().backward()


def audited(optimizer: Any, model: Any, steps: int = 1, **options: Any) -> Any:
    """The audit of the last of some steps."""
    for t in range(steps - 1):
        backward(model, t)
        optimizer.step()
    with thalweg.torch.audit(optimizer, model, **options) as audit:
        backward(model, steps)
        optimizer.step()
    return audit


#: Optimizers of other libraries, and several of their options that the table knows.
PEERS: dict[str, list[dict[str, Any]]] = {
    "torch.optim.SGD": [
        dict(lr=0.1),
        dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        dict(lr=0.1, momentum=0.9, dampening=0.5, maximize=True, foreach=False),
    ],
    "torch.optim.Adam": [{}, dict(weight_decay=0.1, amsgrad=True), dict(weight_decay=0.1, decoupled_weight_decay=True)],
    "torch.optim.AdamW": [{}, dict(weight_decay=0.1, foreach=False), dict(fused=True, betas=(0.5, 0.9), eps=1e-3)],
    "torch.optim.Adafactor": [{}, dict(lr=0.1, weight_decay=0.1, d=2.0, beta2_decay=-0.5)],
    "torch.optim.Muon": [{}, dict(nesterov=False, weight_decay=0.0), dict(adjust_lr_fn="match_rms_adamw", ns_steps=3)],
    "timm.optim.lamb.Lamb": [{}, dict(weight_decay=0.1, decoupled_decay=True, trust_clip=True, max_grad_norm=0.1)],
    "timm.optim.lars.Lars": [dict(momentum=0.9, weight_decay=0.1, nesterov=True), dict(always_adapt=True)],
    "transformers.optimization.Adafactor": [
        {},
        dict(lr=0.01, relative_step=False, beta1=0.9, weight_decay=0.1),
        dict(lr=0.01, relative_step=False, scale_parameter=False),
    ],
    "schedulefree.AdamWScheduleFree": [dict(weight_decay=0.1), dict(warmup_steps=2, betas=(0.8, 0.9), foreach=False)],
}
ROWS = [(name, options) for name, rows in PEERS.items() for options in rows]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "options"), ROWS, ids=[f"{name} {options}" for name, options in ROWS])
def test_other_libraries(name: str, options: dict[str, Any], dtype: str) -> None:
    module, _, kind = name.rpartition(".")
    for steps in (1, 2, 4):
        model = make_model(getattr(torch, dtype), bias="Muon" not in kind)
        optimizer = getattr(peer(module), kind)(model.parameters(), **options)
        if "schedulefree" in name:
            optimizer.train()
        audit = audited(optimizer, model, steps)
        audit.check()
        assert {line.verdict for line in audit.lines} == {AS_PAGE}


def test_momentum_of_torchs_muon_in_bfloat16() -> None:
    """Without Nesterov's, torch 2.13 orthogonalizes its buffer where it is, which divides it by its norm."""
    model = make_model(torch.bfloat16, bias=False)
    audit = audited(torch.optim.Muon(model.parameters(), nesterov=False), model)
    assert audit.faults[0].startswith("0.weight: its state 'momentum_buffer' moved ")
    assert "times as far as the page" in audit.faults[0]


def test_a_class_that_no_table_has() -> None:
    class OurAdamW(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99).sub_(0.1 * p.grad / (p.grad.abs() + 1e-8))
                self.state[p]["exp_avg"] = 0.1 * p.grad

    model = make_model()
    optimizer = OurAdamW(model.parameters(), {"lr": 0.1})
    with pytest.raises(AuditError, match="OurAdamW is in no table: say its page"):
        audited(optimizer, model)
    audited(OurAdamW(model.parameters(), {"lr": 0.1}), model, rule=AdamW(weight_decay=0.1)).check()
    with pytest.raises(AuditError, match="keeps exp_avg_sq, which the state of OurAdamW has not: audit its first step"):
        audited(optimizer, model, rule=AdamW())


def test_a_step_of_nothing_is_no_fault() -> None:
    p = torch.nn.Parameter(torch.zeros(0, 4))
    p.grad = torch.zeros(0, 4)
    optimizer = thalweg.torch.AdamW([p], lr=0.1)
    with thalweg.torch.audit(optimizer) as audit:
        optimizer.step()
    audit.check()
    assert not audit.lines


def test_what_an_audit_cannot_see() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AuditError, match="no steps were taken"), thalweg.torch.audit(optimizer):
        pass
    with pytest.raises(AuditError, match="no parameter had a gradient"), thalweg.torch.audit(optimizer):
        optimizer.step()
    backward(model)
    with pytest.raises(AuditError, match="2 steps were taken"), thalweg.torch.audit(optimizer):
        [optimizer.step() for _ in range(2)]
    twice = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with (
        pytest.raises(AuditError, match="2 steps were taken within, counted by calls"),
        thalweg.torch.audit(twice, rule=SGD()),
    ):
        twice.step(lambda: backward(model) or torch.tensor(1.0))
    with pytest.raises(ZeroDivisionError), thalweg.torch.audit(optimizer):
        raise ZeroDivisionError
    with pytest.raises(AuditError, match="int is no optimizer"):
        thalweg.torch.audit(3)
    with pytest.raises(AuditError, match="seen no step yet"):
        thalweg.torch.audit(optimizer).check()


def test_nothing_is_left_behind() -> None:
    models = make_model(), make_model()
    for model, is_audited in zip(models, (True, False), strict=True):
        optimizer = thalweg.torch.AdamW(model.named_parameters())
        before = torch.get_rng_state()
        kept = copy.deepcopy(vars(optimizer)["_optimizer_step_pre_hooks"])
        audited(optimizer, model, 2) if is_audited else [backward(model, t) or optimizer.step() for t in (0, 2)]
        assert (torch.get_rng_state() == before).all()
        assert vars(optimizer)["_optimizer_step_pre_hooks"] == kept
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert (p == q).all()


def test_a_sample_has_the_smallest_and_the_largest_of_each_kind() -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(n, 4)) for n in (3, 1, 2, 50)])
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with thalweg.torch.audit(optimizer, model, memory=480) as audit:
        optimizer.step()
    assert [line.name for line in audit.lines] == ["0", "1"]
    assert "2 of 4 tensors" in str(audit)


def test_wrappers_and_several_optimizers() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.optimizer = inner

    model = make_model()
    mixture = thalweg.torch.muon_adamw(model, lr=0.01)
    with thalweg.torch.audit([Wrapper(mixture)], model) as audit:
        backward(model)
        mixture.step()
    audit.check()
    assert {line.page.partition(":")[0] for line in audit.lines} == {"Muon", "AdamW"}


@pytest.mark.parametrize("fused", [False, True], ids=["before the step", "within it"])
def test_a_grad_scaler(*, fused: bool) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with thalweg.torch.audit(optimizer, model) as audit:
        scaler.scale(model(torch.ones(5, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    audit.check()


def test_the_page_may_be_said_for_each_parameter() -> None:
    model = make_model()
    pages = {1: AdamW(weight_decay=0.0), 2: Muon(nesterov=False)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = audited(optimizer, model, rule=lambda name, p: pages[p.ndim])
    assert [line.page for line in audit.lines][:2] == ["Muon: matrix 16 x 8", "AdamW"]
    assert all("as SGD would" in finding for finding in audit.findings)


def test_under_inference_mode_and_around_a_skipped_step() -> None:
    model = make_model()
    optimizer = thalweg.torch.AdamW(model.named_parameters(), spikes=Spikes(window=2, z=0.1))
    for t in range(3):
        backward(model, t)
        optimizer.step()
    model[0].weight.grad.mul_(1e6)
    skipped = optimizer.skipped
    with torch.inference_mode(), thalweg.torch.audit(optimizer, model) as audit:
        optimizer.step()
    assert optimizer.skipped == skipped + 1
    audit.check()


def test_random_numbers_are_those_of_the_optimizers_own_names() -> None:
    model = make_model()
    audit = audited(thalweg.torch.Kron(model.parameters(), lr=0.01, damping=0.5), model)
    audit.check()
    assert audit.lines[0].name == "0.weight"
