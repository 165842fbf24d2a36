"""Arguments by position mean what they mean in torch, or are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tolerances import BFLOAT16_PRODUCTS, FLOAT64

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.rules import RULES  # noqa: E402

AS_IN_TORCH = [
    ("SGD", (0.1, 0.9, 0.1, 0.01), {}),
    ("SGD", (0.1, 0.9, 0, 0.01, True), {}),
    ("AdamW", (1e-3, (0.8, 0.95)), {}),
    ("AdamW", (1e-3, (0.8, 0.95), 1e-6, 0.1, True), {}),
    ("Adafactor", (1e-2, -0.7), {"variant": "torch", "eps": (2.0**-52, 1e-3)}),
    ("Muon", (0.02, 0.1, 0.9, False, (3.0, -4.0, 2.0), 1e-6, 3), {}),
]


def start() -> Any:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def train(maker: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    p = torch.nn.Parameter(start())
    optimizer = maker([p], *arguments, **options)
    for _ in range(3):
        p.grad = p.detach().cos() - 0.5
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize(("name", "arguments", "beside"), AS_IN_TORCH)
def test_arguments_by_position_are_those_of_torch(
    name: str, arguments: tuple[Any, ...], beside: dict[str, Any]
) -> None:
    lr, *others = arguments
    by_name = dict(zip(RULES[name].TORCH, others, strict=False))
    ours = getattr(thalweg.torch, name)
    by_position = train(ours, arguments, beside)
    assert torch.equal(by_position, train(ours, (lr,), {**by_name, **beside}))
    theirs = train(getattr(torch.optim, name), arguments, {})
    bound = BFLOAT16_PRODUCTS if name == "Muon" else FLOAT64
    assert (by_position - theirs).abs().max() <= bound * (theirs - start()).abs().max()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("LAMB", ((0.9, 0.95),), "LAMB takes params, lr by position, and 3 were given: give all other options by name"),
        ("Adafactor", (-0.8, (None, 1e-3)), "Adafactor takes params, lr, beta2_decay by position"),
        ("Muon", (0.1, 0.9, True, (3.0, -4.0, 2.0), 1e-7, 5, None), "eps, ns_steps by position, and 9 were given"),
        ("SGD", (0.9, 0, 0, False, True), "SGD takes params, lr, momentum, dampening, weight_decay, nesterov by"),
    ],
)
def test_what_torch_has_not_or_means_otherwise_is_refused(name: str, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        getattr(thalweg.torch, name)([torch.nn.Parameter(torch.ones(2, 2))], 0.1, *arguments)


def test_an_option_is_given_once() -> None:
    with pytest.raises(TypeError, match="SGD got momentum twice, by position and by name"):
        thalweg.torch.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, 0.9, momentum=0.8)


def test_what_is_given_by_position_is_checked_and_remembered() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(thalweg.OptionError, match="momentum must be"):
        thalweg.torch.SGD([p], 0.1, 1.5)
    optimizer = pickle.loads(pickle.dumps(thalweg.torch.SGD([p], 0.1, 0.9)))
    assert optimizer.param_groups[0]["momentum"] == 0.9
