"""Incidents of public trainers, rebuilt from their causes: small faulty optimizers, and what the audit says of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.rules import AdamW, Muon  # noqa: E402

Parameter, Model = torch.nn.Parameter, torch.nn.Module


def make_model(*shapes: tuple[int, ...], dtype: Any = None) -> Any:
    """Parameters "0", "1", ... with gradients."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in shapes or [(16, 8), (8,)]]
    model = torch.nn.ParameterList(params)
    renew_gradients(model)
    return model


def renew_gradients(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)


def audited(
    optimizer: Any, model: Any, *, steps: int = 0, before: Callable[[], Any] = lambda: None, **options: Any
) -> Any:
    """The audit of the step after some others. before: what happens between these and that."""
    for _ in range(steps):
        optimizer.step()
        renew_gradients(model)
    before()
    with thalweg.torch.audit(optimizer, model, **options) as audit:
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
    return audit


class Simple(torch.optim.Optimizer):
    """An optimizer whose class no table has: ``direction`` says how a parameter moves, and what is kept for it."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, self.state[p], group))

    def direction(self, p: Any, state: Any, group: Any) -> Any:
        raise NotImplementedError

    def momentum(self, p: Any, state: Any, decay: float = 0.95) -> Any:
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        return buffer.mul_(decay).add_(p.grad, alpha=1 - decay)


def orthogonal(x: Any) -> Any:
    """As the page has it, by five steps in float32."""
    x = x.flatten(1)
    is_tall = x.shape[0] > x.shape[1]
    x = (x.T if is_tall else x) / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


PAGE = Muon(momentum=0.95, nesterov=False, ns_dtype="float32", eps=0.0)

#: By name: a function that yields the audit; and the words that it must have.
INCIDENTS: dict[str, tuple[Callable[[], Any], str]] = {}


def incident(words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def keep(run: Callable[[], Any]) -> Callable[[], Any]:
        INCIDENTS[run.__name__] = run, words
        return run

    return keep


@incident("as SGD with momentum=0.95, dampening=0.95 would")
def a_muon_that_trained_by_sgd() -> Any:
    class MuonWithAux(Simple):
        def direction(self, p: Any, state: Any, group: Any) -> Any:
            return self.momentum(p, state)  # and the orthogonalization is never called

    model = make_model((16, 8))
    return audited(MuonWithAux(model.parameters()), model, steps=2, rule=PAGE)


@incident("its update was divided by its own norm")
def a_clipping_of_every_update() -> Any:
    class ClippedMuon(Simple):
        def direction(self, p: Any, state: Any, group: Any) -> Any:
            update = orthogonal(self.momentum(p, state)) * 2**0.5
            return update / update.norm()

    model = make_model((16, 8))
    return audited(ClippedMuon(model.parameters()), model, rule=PAGE)


@incident("in no group, and never stepped: 1")
def groups_thrown_away() -> Any:
    model = make_model()
    groups = [{"params": [p], "weight_decay": 0.1 * p.ndim} for p in model.parameters()]
    return audited(torch.optim.AdamW(groups[:1]), model)


@incident("were equal, as if tied, and the step has set them apart")
def a_tied_embedding_on_two_replicas() -> Any:
    model = make_model((16, 8), (16, 8))
    with torch.no_grad():
        model[1].copy_(model[0])
        model[1].grad = model[0].grad.clone()
    pair = [torch.optim.AdamW([model[0]]), torch.optim.SGD([model[1]], lr=0.1)]
    return audited(pair, model)


@incident("tied parameters in groups [0, 1]")
def a_tied_embedding_stepped_twice() -> Any:
    model = make_model((16, 8))
    twin = Parameter(model[0].data)
    twin.grad = model[0].grad.clone()
    return audited(torch.optim.SGD([{"params": [model[0]]}, {"params": [twin]}], lr=0.1), model)


@incident("before step 3 its state exp_avg, exp_avg_sq is all zero")
def saved_state_partly_zeros() -> Any:
    model = make_model((16, 8), (16, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def load() -> None:
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[model[1]][key].zero_()

    return audited(optimizer, model, steps=2, before=load)


@incident("others of their shape by AdamW, lr 0.02, decay 0.01: 2")
def matrices_with_the_rate_of_vectors() -> Any:
    model = make_model((16, 8), (16, 8), (16, 8), (8,))
    groups = [{"params": [*model][:2], "lr": 0.02}, {"params": [*model][2:], "lr": 3e-4}]
    return audited(torch.optim.AdamW(groups), model)


@incident("has 8 bits in its name, and keeps its state in float32")
def eight_bits_that_were_float32() -> Any:
    class AdamW8bit(torch.optim.AdamW):
        pass

    model = make_model()
    return audited(AdamW8bit(model.parameters()), model)


@incident("decay is missing")
def a_decay_that_is_printed_and_never_applied() -> Any:
    class Printed(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            kept = [group["weight_decay"] for group in self.param_groups]
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            super().step()
            for group, decay in zip(self.param_groups, kept, strict=True):
                group["weight_decay"] = decay

    model = make_model()
    return audited(Printed(model.parameters(), weight_decay=0.1), model, steps=2)


@incident("decay is missing")
def a_decay_that_products_in_16_bits_would_hide() -> Any:
    model = make_model((64, 64))
    with torch.no_grad():
        model[0].mul_(0.02)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
    return audited(optimizer, model, rule=Muon(weight_decay=0.1))


@incident("lost in rounding to bfloat16: 1")
def weights_whose_steps_round_to_nothing() -> Any:
    model = make_model(dtype=torch.bfloat16)
    return audited(thalweg.torch.AdamW(model.parameters(), lr=1e-5), model)


@incident("not finite in 8 of 128 elements, 8 of them where the gradient is 0, and the page's step is finite")
def nan_at_a_zero_gradient() -> Any:
    class NormalizedMuon(Simple):
        def direction(self, p: Any, state: Any, group: Any) -> Any:
            update = orthogonal(self.momentum(p, state))
            return update / update.norm(dim=1, keepdim=True) * 2**0.5

    model = make_model((16, 8))
    model[0].grad[3] = 0
    return audited(NormalizedMuon(model.parameters()), model, rule=Muon(nesterov=False, normalize="rows"))


@incident("its state 'line_squares' is 2 times that of the page")
def second_moment_after_scaling() -> Any:
    class NorMuon(Simple):
        def direction(self, p: Any, state: Any, group: Any) -> Any:
            update = orthogonal(self.momentum(p, state))
            scaled = update * 2**0.5  # before its squares are averaged
            squares = state.setdefault("line_squares", torch.zeros(p.shape[0], 1))
            squares.lerp_(scaled.square().mean(1, keepdim=True), 0.05)
            update = scaled / squares.sqrt()
            return update * scaled.norm() / update.norm()

    model = make_model((16, 8))
    return audited(NorMuon(model.parameters()), model, rule=Muon(nesterov=False, normalize="rows", ns_dtype="float32"))


@incident("as with scaling='optax'; it has 'original'")
def a_transposed_fan_in_on_a_convolution() -> Any:
    class ConvMuon(Simple):
        def direction(self, p: Any, state: Any, group: Any) -> Any:
            rows, columns = p.shape[0], p[0].numel()
            return (orthogonal(self.momentum(p, state)) * max(1, columns / rows) ** 0.5).reshape(p.shape)

    model = make_model((16, 4, 3, 3))
    return audited(ConvMuon(model.parameters()), model, rule=PAGE)


@incident("decay is coupled: added to the gradient")
def a_fused_adamw_with_the_decay_of_adam() -> Any:
    class FusedAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["decoupled_weight_decay"] = False
            super().step()
            for group in self.param_groups:
                group["decoupled_weight_decay"] = True

    model = make_model()
    return audited(FusedAdamW(model.parameters(), weight_decay=0.1), model, steps=2)


@incident("with weight_decay=0.5 of group 1; its own is 0.1")
def decay_by_another_groups_value() -> Any:
    class LastGroup(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            first, last = self.param_groups
            first["weight_decay"] = last["weight_decay"]
            super().step()
            first["weight_decay"] = 0.1

    model = make_model()
    groups = [{"params": [model[0]], "weight_decay": 0.1}, {"params": [model[1]], "weight_decay": 0.5}]
    return audited(LastGroup(groups), model, steps=1)


@incident("its state momentum_buffer is in 16 bits, and it is in float32")
def state_cast_on_load() -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)

    def load() -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    return audited(optimizer, model, steps=1, before=load)


@incident("not moved: its gradient is 0, and the page moves by its state")
def an_expert_without_tokens_is_skipped() -> Any:
    class SkipsExperts(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None and not p.grad.any():
                    p.grad = None
            super().step()

    model = make_model((16, 8), (16, 8))
    return audited(SkipsExperts(model.parameters()), model, steps=2, before=lambda: model[1].grad.zero_())


@incident("the lr of group 1 is 1 of its first, and that of others is 0.5")
def a_scheduler_that_moves_one_of_two() -> Any:
    model = make_model((16, 8), (16, 8), (8,))
    pair = [torch.optim.SGD([*model][:1], lr=0.1), torch.optim.AdamW([*model][1:])]
    torch.optim.lr_scheduler.LambdaLR(pair[0], lambda t: 0.5)
    pair[1].param_groups[0]["initial_lr"] = 1e-3
    return audited(pair, model)


@incident("its gradient is not finite in 1 of 128 elements")
def an_overflow_that_nothing_caught() -> Any:
    model = make_model()
    model[0].grad[0, 0] = float("inf")
    return audited(torch.optim.AdamW(model.parameters()), model)


@incident("the joint norm of gradients is 1.000: they were clipped to it before the step")
def gradients_clipped_before_the_step() -> Any:
    model = make_model()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return audited(torch.optim.AdamW(model.parameters()), model)


@incident("with the state of '1'")
def state_of_another_tensor() -> Any:
    class Confused(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            first, second = self.param_groups[0]["params"]
            self.state[first], self.state[second] = self.state[second], self.state[first]
            super().step()
            self.state[first], self.state[second] = self.state[second], self.state[first]

    model = make_model((16, 8), (16, 8))
    return audited(Confused(model.parameters()), model, steps=2)


@incident("bias correction is missing")
def a_bias_that_is_not_corrected() -> Any:
    class Uncorrected(Simple):
        def direction(self, p: Any, state: Any, group: Any) -> Any:
            return 0.1 * p.grad / (0.001**0.5 * p.grad.abs() + 1e-8)

    model = make_model()
    return audited(Uncorrected(model.parameters()), model, rule=AdamW(weight_decay=0.0))


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_cause_is_named(name: str) -> None:
    run, words = INCIDENTS[name]
    audit = run()
    assert words in str(audit), str(audit)
