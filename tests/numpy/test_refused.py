"""What cannot be stepped is refused in one sentence, by name, with what would be right; and nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bits, refused, two_cases

from thalweg.errors import OptimError, OptionError, ParameterError
from thalweg.numpy import LAMB, LARS

NAME = "encoder.0.weight"


def ones(shape: tuple[int, ...] = (3, 4)) -> Any:
    return np.ones(shape, "float32")


def frozen() -> Any:
    x = ones()
    x.flags.writeable = False
    return x


def torch() -> Any:
    # one of its parts is asked for: without torch, "torch" itself would be the folder of that name beside this file
    return pytest.importorskip("torch.nn") and pytest.importorskip("torch")


def jax_ones() -> Any:
    return pytest.importorskip("jax.numpy").ones((3, 4))


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "int32": (lambda: ones().astype("int32"), "dtype int32: it must be float32, float64, float16 or bfloat16"),
    "uint8": (lambda: ones().astype("uint8"), "dtype uint8"),
    "bool": (lambda: ones().astype(bool), "dtype bool"),
    "complex64": (lambda: ones().astype("complex64"), "dtype complex64"),
    "object": (lambda: ones().astype(object), "dtype object"),
    "text": (lambda: ones().astype(str), "dtype <U"),
    "longdouble": (lambda: ones().astype("longdouble"), "dtype (float128|float64|longdouble)"),
    "foreign byte order": (
        lambda: ones().astype(">f4" if np.little_endian else "<f4"),
        "byte order of this machine; convert it",
    ),
    "list": (lambda: ones().tolist(), "must be a numpy array, got list"),
    "number": (lambda: 1.0, "must be a numpy array, got float"),
    "text alone": (lambda: "weights", "must be a numpy array, got str"),
    "masked": (lambda: np.ma.masked_array(ones(), mask=False), "must be a numpy array, got MaskedArray"),
    "tensor of torch": (lambda: torch().ones(3, 4), "got Tensor; thalweg.torch steps tensors of torch"),
    "array of jax": (jax_ones, "thalweg.optax arrays of JAX"),
}
if np.dtype("longdouble") == np.dtype("float64"):
    del KINDS["longdouble"]

WEIGHTS = {
    **KINDS,
    "numpy scalar": (lambda: np.float32(1), "must be a numpy array, got float32"),
    "none": (lambda: None, "must be a numpy array, got NoneType"),
    "read-only": (frozen, "read-only, and a step changes it in place"),
    "strided": (lambda: ones((6, 4))[::2], r"not contiguous.*ascontiguousarray"),
    "broadcast": (lambda: np.broadcast_to(np.float32(1), (3, 4)), "read-only"),
    "reversed": (lambda: ones()[::-1], "not contiguous"),
    "a column": (lambda: ones((3, 4, 2))[..., 0], "not contiguous"),
}
GRADIENTS = {
    **KINDS,
    "transposed": (lambda: ones((4, 3)), r"shape \(4, 3\), and its parameter \(3, 4\): they must be equal"),
    "flat": (lambda: ones((12,)), r"shape \(12,\), and its parameter \(3, 4\): they must be equal"),
    "one that would broadcast": (lambda: ones((4,)), r"shape \(4,\), and its parameter \(3, 4\)"),
    "a single element": (lambda: ones((1, 1)), r"shape \(1, 1\), and its parameter \(3, 4\)"),
    "empty": (lambda: ones((0,)), r"shape \(0,\), and its parameter \(3, 4\)"),
}
ARRAYS = [("parameter", kind, *WEIGHTS[kind]) for kind in WEIGHTS]
ARRAYS += [("gradient", kind, *GRADIENTS[kind]) for kind in GRADIENTS]


@pytest.mark.parametrize(("place", "make", "said"), [pytest.param(p, m, s, id=f"{p} {k}") for p, k, m, s in ARRAYS])
def test_such_an_array(place: str, make: Callable[[], Any], said: str) -> None:
    """And of a whole model nothing is changed, neither what is before it nor what is behind."""
    pair = (make(), ones()) if place == "parameter" else (ones(), make())
    told = "^parameter " if place == "parameter" else "^the gradient of "
    optimizer, (weights, gradient), before, behind = LARS(0.1), pair, ones(), ones()
    kept = [x for x in (*pair, before, behind) if isinstance(x, np.ndarray)]
    with refused(ParameterError, f"{told}'{NAME}'.*{said}", optimizer, *kept):
        optimizer.update(NAME, weights, gradient)
    for _ in range(2):  # also of one that has been stepped
        with refused(ParameterError, f"{told}'{NAME}'.*{said}", optimizer, *kept):
            optimizer.step({"a": before, NAME: weights, "z": behind}, {"a": ones(), NAME: gradient, "z": ones()})
        with refused(ParameterError, f"{told}1.*{said}", optimizer, *kept):
            optimizer.step([before, weights, behind], [ones(), gradient, ones()])
        optimizer.step({"a": before, "z": behind}, {"a": ones(), "z": ones()})


def linear() -> Any:
    return torch().nn.Linear(2, 2)


def saved_with(tensor: Any) -> dict[str, Any]:
    return {**LAMB(0.1).state_dict(), "state": {"w": {"step": 1, "exp_avg": tensor, "exp_avg_sq": tensor}}}


BY_NAME = "two mappings by name or two sequences"
IN_STEP = r"^params and grads must be two mappings by name or two sequences, got .*"
AS_LR = r"^lr must be .*; pass parameters to step\(params, grads\), not to the constructor.*"
IN_STATE = "the state of 'w' must be arrays of floating point: 'exp_avg' is tensor"
#: Mistakes of a first attempt, and what is said of them.
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor as a model": (lambda: LAMB(0.1).step(torch().ones(3), torch().ones(3)), f"{IN_STEP}thalweg.torch"),
    "a tensor as gradients": (lambda: LAMB(0.1).step({"w": ones()}, torch().ones(3)), f"{IN_STEP}thalweg.torch"),
    "an array of jax as a model": (lambda: LAMB(0.1).step(jax_ones(), jax_ones()), f"{IN_STEP}thalweg.optax"),
    "a module": (lambda: LAMB(0.1).step(linear(), []), f"{IN_STEP}thalweg.torch"),
    "a generator": (lambda: LAMB(0.1).step(linear().parameters(), []), f"{IN_STEP}generator"),
    "a gradient of an unknown name": (
        lambda: LARS(0.1).step({"a": ones()}, {"b": ones()}),
        "gradient for 'b' and no parameter",
    ),
    "too many gradients": (lambda: LARS(0.1).step([ones()], [ones(), ones()]), "1 parameters and 2 gradients"),
    "a mapping and a list": (lambda: LARS(0.1).step({"a": ones()}, [ones()]), BY_NAME),
    "a list and a mapping": (lambda: LARS(0.1).step([ones()], {0: ones()}), BY_NAME),
    "arrays as a model": (lambda: LARS(0.1).step(ones(), ones()), BY_NAME),
    "iterators as a model": (lambda: LARS(0.1).step(iter([ones()]), iter([ones()])), BY_NAME),
    "text as a model": (lambda: LARS(0.1).step("ab", "cd"), BY_NAME),
    "no gradients": (lambda: LARS(0.1).step([ones()], None), BY_NAME),
    "a number with a fraction as a name": (
        lambda: LARS(0.1).step({1.5: ones()}, {1.5: ones()}),
        "name must be a string or a whole number",
    ),
    "arrays as lr": (lambda: LAMB([ones()]), AS_LR),
    "a mapping as lr": (lambda: LAMB({"w": ones()}), AS_LR),
    "an iterator as lr": (lambda: LAMB(iter([ones()])), AS_LR),
    "an array as lr": (lambda: LAMB(ones()), AS_LR),
    "parameters of torch as lr": (lambda: LAMB(linear().parameters()), f"{AS_LR}thalweg.torch"),
    "a module as lr": (lambda: LAMB(linear()), f"{AS_LR}thalweg.torch"),
    "a negative lr": (lambda: LAMB(-1.0), "^lr must be (?!.*step)"),
    "text as lr": (lambda: LAMB("0.1"), "^lr must be (?!.*step)"),  # type: ignore[arg-type]
    "a tensor in a state": (
        lambda: LAMB(0.1).load_state_dict(saved_with(torch().ones(3, requires_grad=True))),
        IN_STATE,
    ),
    "a narrow tensor in a state": (
        lambda: LAMB(0.1).load_state_dict(saved_with(torch().ones(3, dtype=torch().bfloat16))),
        IN_STATE,
    ),
    "no path to save to": (lambda: LAMB(0.1).save(None), "path must be .*optimizer.npz.*None"),  # type: ignore[arg-type]
    "a number to load from": (lambda: LAMB(0.1).load(3), "path must be .*optimizer.npz.*3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS)
def test_such_a_call_is_told_in_one_line(call: str) -> None:
    wrong, said = CALLS[call]
    with pytest.raises(OptimError, match=said) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def test_the_memory_of_a_tensor_can_be_stepped() -> None:
    memory = torch().ones(3)
    LAMB(lr=0.1).update("w", memory.numpy(), np.ones(3, "float32"))
    assert (memory < 1).all()


@two_cases
def test_a_parameter_that_changed_its_shape(make: Make) -> None:
    optimizer, weights = make(), ones()
    optimizer.update(NAME, weights, ones())
    for shape in ((4, 3), (12,), (3, 4, 1), (3, 5), ()):
        other = ones(shape)
        said = rf"{NAME}.*{re.escape(str(shape))} and had \(3, 4\)"
        with refused(ParameterError, said, optimizer, other, weights):
            optimizer.update(NAME, other, ones(shape))
    twin_optimizer, twin = make(), ones()
    for _ in range(2):
        twin_optimizer.update(NAME, twin, ones())
    optimizer.update(NAME, weights, ones())
    assert bits(weights) == bits(twin)


def test_more_stacked_axes_than_axes() -> None:
    optimizer, weights = LARS(0.1, stacked_axes=2), ones((3,))
    said = rf"stacked_axes=2, but parameter '{NAME}' has shape \(3,\): it must be at most 1"
    with refused(OptionError, said, optimizer, weights):
        optimizer.update(NAME, weights, ones((3,)))


def test_every_refusal_is_a_value_error_of_one_family() -> None:
    with pytest.raises(OptimError) as caught:
        LARS(0.1).update(NAME, [1.0], [1.0])  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
