"""Incidents of public trainers, rebuilt from their causes: small faulty optimizers, and what the audit says of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thalweg.torch
from thalweg.rules import AdamW, Muon, Rule

AdamWOfTorch: Any = torch.optim.AdamW
PAGE = Muon(momentum=0.95, nesterov=False, ns_dtype="float32", eps=0.0)
#: By name: a function that makes the audit of a model; the words that it must have; and shapes of the model's tensors.
INCIDENTS: dict[str, tuple[Callable[[Any], Any], str, tuple[tuple[int, ...], ...]]] = {}


def incident(words: str, *shapes: tuple[int, ...]) -> Callable[[Callable[[Any], Any]], None]:
    return lambda run: INCIDENTS.update({run.__name__: (run, words, shapes or ((16, 8), (8,)))})


def renew_gradients(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)


def audited(optimizer: Any, model: Any, steps: int = 0, before: Callable[[], Any] = list, **options: Any) -> Any:
    """The audit of the step after some others. before: what happens between these and that."""
    for _ in range(steps):
        optimizer.step()
        renew_gradients(model)
    before()
    with thalweg.torch.audit(optimizer, model, **options) as audit:
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
    return audit


def moving_along(direction: Callable[[Any, Any], Any], rule: Rule, model: Any, steps: int = 0) -> Any:
    """The audit of a class that no table has. direction: of a step, by the parameter and its state."""

    class Simple(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(0.02 * direction(p, self.state[p]))

    return audited(Simple(model.parameters(), {"lr": 0.02}), model, steps, rule=rule)


def faulty_adamw(params: Any, before: Callable[[Any], Any], after: Callable[[Any], Any] = id, **options: Any) -> Any:
    """An AdamW that does something else before and after each step. Both are given the optimizer."""

    class Faulty(AdamWOfTorch):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            before(self)
            super().step()
            after(self)

    return Faulty(params, **options)


def stepped_with(model: Any, groups: Any, steps: int = 0, **hidden: Any) -> Any:
    """The audit of an AdamW whose first group has other options within a step than before and after it."""
    shown = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    hide, show = (lambda one, given=given: one.param_groups[0].update(given) for given in (hidden, shown))
    return audited(faulty_adamw(groups, hide, show, weight_decay=0.1), model, steps)


def momentum(p: Any, state: Any) -> Any:
    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
    return buffer.mul_(0.95).add_(p.grad, alpha=0.05)


def orthogonal(x: Any) -> Any:
    """As the page has it, by five steps in float32."""
    x = x.flatten(1)
    is_tall = x.shape[0] > x.shape[1]
    x = (x.T if is_tall else x) / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


@incident("as SGD with momentum=0.95, dampening=0.95 would", (16, 8))
def a_muon_that_trained_by_sgd(model: Any) -> Any:
    return moving_along(momentum, PAGE, model, 2)  # and the orthogonalization is never called


@incident("its update was divided by its own norm", (16, 8))
def a_clipping_of_every_update(model: Any) -> Any:
    return moving_along(lambda p, state: orthogonal(p.grad) / orthogonal(p.grad).norm(), PAGE, model)


@incident("1: in no group, and never stepped")
def groups_thrown_away(model: Any) -> Any:
    groups = [{"params": [p], "weight_decay": 0.1 * p.ndim} for p in model.parameters()]
    return audited(AdamWOfTorch(groups[:1]), model)


@incident("was equal to 0 on rank 0, and the step has set them apart", (16, 8), (16, 8))
def a_tied_embedding_on_two_replicas(model: Any) -> Any:
    model[1].data.copy_(model[0].data)
    model[1].grad = model[0].grad.clone()
    return audited([AdamWOfTorch([model[0]]), torch.optim.SGD([model[1]], lr=0.1)], model)


@incident("0 of group 0 and a tensor of group 1: one tensor, or tied ones, stepped more than once", (16, 8))
def a_tied_embedding_stepped_twice(model: Any) -> Any:
    twin = torch.nn.Parameter(model[0].data)
    twin.grad = model[0].grad.clone()
    return audited(torch.optim.SGD([{"params": [model[0]]}, {"params": [twin]}], lr=0.1), model)


@incident("1: before step 3 its state exp_avg, exp_avg_sq is all zero", (16, 8), (16, 8))
def saved_state_partly_zeros(model: Any) -> Any:
    optimizer = AdamWOfTorch(model.parameters())

    def load() -> None:
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[model[1]][key].zero_()

    return audited(optimizer, model, 2, load)


@incident(
    "of one shape, and stepped by AdamW, lr 0.02, decay 0.01; by AdamW, lr 0.0003, decay 0.01",
    (16, 8),
    (16, 8),
    (16, 8),
    (8,),
)
def matrices_with_the_rate_of_vectors(model: Any) -> Any:
    return audited(AdamWOfTorch([{"params": [*model][:2], "lr": 0.02}, {"params": [*model][2:], "lr": 3e-4}]), model)


@incident("has 8 bits in its name, and keeps its state in float32")
def eight_bits_that_were_float32(model: Any) -> Any:
    return audited(type("AdamW8bit", (AdamWOfTorch,), {})(model.parameters()), model)


@incident("decay is missing")
def a_decay_that_is_printed_and_never_applied(model: Any) -> Any:
    return stepped_with(model, model.parameters(), steps=2, weight_decay=0.0)


@incident("decay is missing", (64, 64))
def a_decay_that_products_in_16_bits_would_hide(model: Any) -> Any:
    model[0].data.mul_(0.02)
    return audited(torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0), model, rule=Muon(weight_decay=0.1))


@incident("lost in rounding to bfloat16: 1")
def weights_whose_steps_round_to_nothing(model: Any) -> Any:
    model.bfloat16()
    renew_gradients(model)
    return audited(thalweg.torch.AdamW(model.parameters(), lr=1e-5), model)


@incident("not finite in 8 of 128 elements, 8 of them where the gradient is 0, and the page's step is finite", (16, 8))
def nan_at_a_zero_gradient(model: Any) -> Any:
    def by_rows(p: Any, state: Any) -> Any:
        update = orthogonal(momentum(p, state))
        return update / update.norm(dim=1, keepdim=True) * 2**0.5

    model[0].grad[3] = 0
    return moving_along(by_rows, Muon(nesterov=False, normalize="rows"), model)


@incident("its state 'line_squares' moved 2 times as far as the page", (16, 8))
def second_moment_after_scaling(model: Any) -> Any:
    def by_rows(p: Any, state: Any) -> Any:
        scaled = orthogonal(momentum(p, state)) * 2**0.5  # before its squares are averaged
        squares = state.setdefault("line_squares", torch.zeros(p.shape[0], 1))
        update = scaled / squares.lerp_(scaled.square().mean(1, keepdim=True), 0.05).sqrt()
        return update * scaled.norm() / update.norm()

    return moving_along(by_rows, Muon(nesterov=False, normalize="rows", ns_dtype="float32"), model)


@incident("as with scaling='optax'; it has 'original'", (16, 4, 3, 3))
def a_transposed_fan_in_on_a_convolution(model: Any) -> Any:
    scale = (4 * 3 * 3 / 16) ** 0.5
    return moving_along(lambda p, state: (orthogonal(momentum(p, state)) * scale).reshape(p.shape), PAGE, model)


@incident("as with decoupled=False; it has True")
def a_fused_adamw_with_the_decay_of_adam(model: Any) -> Any:
    return stepped_with(model, model.parameters(), steps=2, decoupled_weight_decay=False)


@incident("with weight_decay=0.5 of group 1; its own is 0.1")
def decay_by_another_groups_value(model: Any) -> Any:
    groups = [{"params": [model[0]]}, {"params": [model[1]], "weight_decay": 0.5}]
    return stepped_with(model, groups, weight_decay=0.5)


@incident("its state momentum_buffer is in 16 bits, and it is in float32")
def state_cast_on_load(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)

    def load() -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    return audited(optimizer, model, 1, load)


@incident("not moved: its gradient is 0, and the page moves by its state", (16, 8), (16, 8))
def an_expert_without_tokens_is_skipped(model: Any) -> Any:
    def skip(optimizer: Any) -> None:
        for p in model:
            p.grad = p.grad if p.grad.any() else None

    return audited(faulty_adamw(model.parameters(), skip), model, 2, lambda: model[1].grad.zero_())


@incident(
    "group 1 is at 1: of its first lr, and others are at 0.5: it does not follow their scheduler",
    (16, 8),
    (16, 8),
    (8,),
)
def a_scheduler_that_moves_one_of_two(model: Any) -> Any:
    pair = [torch.optim.SGD([*model][:1], lr=0.1), AdamWOfTorch([*model][1:])]
    torch.optim.lr_scheduler.LambdaLR(pair[0], lambda t: 0.5)
    pair[1].param_groups[0]["initial_lr"] = 1e-3
    return audited(pair, model)


@incident("its gradient is not finite in 1 of 128 elements")
def an_overflow_that_nothing_caught(model: Any) -> Any:
    model[0].grad[0, 0] = float("inf")
    return audited(AdamWOfTorch(model.parameters()), model)


@incident("the joint norm of gradients is 1.000: they were clipped to it before the step")
def gradients_clipped_before_the_step(model: Any) -> Any:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return audited(AdamWOfTorch(model.parameters()), model)


@incident("with the state of '1'", (16, 8), (16, 8))
def state_of_another_tensor(model: Any) -> Any:
    def swap(optimizer: Any) -> None:
        state = optimizer.state
        state[model[0]], state[model[1]] = state[model[1]], state[model[0]]

    return audited(faulty_adamw(model.parameters(), swap, swap), model, 2)


@incident("bias correction is missing", (16, 8))
def a_bias_that_is_not_corrected(model: Any) -> Any:
    return moving_along(
        lambda p, state: 0.1 * p.grad / (0.001**0.5 * p.grad.abs() + 1e-8), AdamW(weight_decay=0), model
    )


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_cause_is_named(name: str) -> None:
    run, words, shapes = INCIDENTS[name]
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.randn(shape) for shape in shapes])
    renew_gradients(model)
    audit = str(run(model))
    assert words in audit, audit
