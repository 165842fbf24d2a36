"""What comes from another framework, or in another container, is told in one sentence that says what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thalweg
from thalweg.numpy import LAMB


def told(wrong: Any) -> str:
    """What is said of a mistake: one line, of one of our errors."""
    with pytest.raises(thalweg.OptimError) as caught:
        wrong()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mistakes(tensor: Any) -> list[tuple[str, Any]]:
    """Every way in which something that is no numpy array may come in."""
    array = np.ones(3)
    return [
        ("parameter 'w'", lambda: LAMB(lr=0.1).update("w", tensor, array)),
        ("the gradient of 'w'", lambda: LAMB(lr=0.1).update("w", array, tensor)),
        ("parameter 'w'", lambda: LAMB(lr=0.1).step({"w": tensor}, {"w": tensor})),
        ("the gradient of 'w'", lambda: LAMB(lr=0.1).step({"w": array}, {"w": tensor})),
        ("parameter 0", lambda: LAMB(lr=0.1).step([tensor], [array])),
        ("the gradient of 0", lambda: LAMB(lr=0.1).step([array], [tensor])),
        ("params and grads", lambda: LAMB(lr=0.1).step(tensor, tensor)),
        ("params and grads", lambda: LAMB(lr=0.1).step({"w": array}, tensor)),
    ]


def test_tensors_of_torch_are_sent_to_the_front_end_for_torch() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(3), torch.nn.Parameter(torch.ones(3))):
        for what, wrong in mistakes(tensor):
            message = told(wrong)
            assert message.startswith(what)
            assert "needs thalweg.torch" in message
            assert ".detach().numpy()" in message
    memory = torch.ones(3)  # which can be stepped
    LAMB(lr=0.1).update("w", memory.numpy(), np.ones(3, "float32"))
    assert (memory < 1).all()


def test_modules_of_torch_are_sent_to_the_front_end_for_torch() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    for params in (model, torch.nn.ParameterList([torch.ones(2)])):
        assert "thalweg.torch" in told(lambda params=params: LAMB(lr=0.1).step(params, []))
    assert "params and grads must be two mappings" in told(lambda: LAMB(lr=0.1).step(model.parameters(), []))
    assert "generator" in told(lambda: LAMB(lr=0.1).step(model.parameters(), []))


def test_parameters_in_the_place_of_lr_are_told_where_they_go() -> None:
    array = np.ones(3)
    for params in ([array], {"w": array}, iter([array]), array):
        message = told(lambda params=params: LAMB(params))
        assert message.startswith("lr must be ")
        assert "step(params, grads)" in message
    for number in (-1.0, "0.1"):
        assert "step(" not in told(lambda number=number: LAMB(number))


def test_tensors_of_torch_in_the_place_of_lr_are_sent_to_the_front_end_for_torch() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    for params in (model.parameters(), list(model.parameters()), dict(model.named_parameters()), model):
        assert "thalweg.torch" in told(lambda params=params: LAMB(params))


def test_arrays_of_jax_are_sent_to_the_front_end_for_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for what, wrong in mistakes(jnp.ones(3)):
        message = told(wrong)
        assert message.startswith(what)
        assert "needs thalweg.optax" in message
        assert "numpy.array(x)" in message


def test_a_state_with_tensors_in_it_is_told() -> None:
    torch = pytest.importorskip("torch")
    saved = LAMB(lr=0.1).state_dict()
    for tensor in (torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)):
        entries = {"step": 1, "exp_avg": tensor, "exp_avg_sq": tensor}
        message = told(lambda entries=entries: LAMB(lr=0.1).load_state_dict({**saved, "state": {"w": entries}}))
        assert "'exp_avg' is a torch.Tensor" in message
        assert "thalweg.torch.export_state(optimizer)" in message


@pytest.mark.parametrize("method", ["save", "load"])
def test_a_path_that_is_none_is_told(method: str) -> None:
    for path in (None, 3):
        assert f"{method} needs a path" in told(lambda path=path: getattr(LAMB(lr=0.1), method)(path))
