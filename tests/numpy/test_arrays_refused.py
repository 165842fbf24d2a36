"""What cannot be stepped is refused by name, with what would be right, and nothing is changed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bits, refused, two_cases

from thalweg.errors import OptimError, OptionError, ParameterError
from thalweg.numpy import LARS

NAME = "encoder.0.weight"


def ones(shape: tuple[int, ...] = (3, 4)) -> Any:
    return np.ones(shape, "float32")


def frozen() -> Any:
    x = ones()
    x.flags.writeable = False
    return x


KINDS: dict[str, tuple[Any, str]] = {
    "int32": (lambda: ones().astype("int32"), "dtype int32: it must be float32, float64, float16 or bfloat16"),
    "uint8": (lambda: ones().astype("uint8"), "dtype uint8"),
    "bool": (lambda: ones().astype(bool), "dtype bool"),
    "complex64": (lambda: ones().astype("complex64"), "dtype complex64"),
    "object": (lambda: ones().astype(object), "dtype object"),
    "text": (lambda: ones().astype(str), "dtype <U"),
    "longdouble": (lambda: ones().astype("longdouble"), "dtype (float128|float64|longdouble)"),
    "foreign byte order": (lambda: ones().astype(">f4" if np.little_endian else "<f4"), r"byte order.*newbyteorder"),
    "list": (lambda: ones().tolist(), "must be a numpy array, got list"),
    "number": (lambda: 1.0, "must be a numpy array, got float"),
    "text alone": (lambda: "weights", "must be a numpy array, got str"),
    "masked": (lambda: np.ma.masked_array(ones(), mask=False), "must be a numpy array, got numpy.ma.*MaskedArray"),
}
if np.dtype("longdouble") == np.dtype("float64"):
    del KINDS["longdouble"]

WEIGHTS = {
    **KINDS,
    "numpy scalar": (lambda: np.float32(1), "must be a numpy array, got numpy.float32"),
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


@pytest.mark.parametrize("kind", WEIGHTS)
def test_such_a_parameter(kind: str) -> None:
    make, said = WEIGHTS[kind]
    optimizer, weights, gradient = LARS(0.1), make(), ones()
    with refused(ParameterError, f"parameter '{NAME}'.*{said}", optimizer, weights, gradient):
        optimizer.update(NAME, weights, gradient)
    with refused(ParameterError, f"parameter '{NAME}'.*{said}", optimizer, weights, gradient):
        optimizer.step({NAME: weights}, {NAME: gradient})
    with refused(ParameterError, f"parameter 0.*{said}", optimizer, weights, gradient):
        optimizer.step([weights], [gradient])


@pytest.mark.parametrize("kind", GRADIENTS)
def test_such_a_gradient(kind: str) -> None:
    make, said = GRADIENTS[kind]
    optimizer, weights, gradient = LARS(0.1), ones(), make()
    with refused(ParameterError, f"gradient of '{NAME}'.*{said}", optimizer, weights, gradient):
        optimizer.update(NAME, weights, gradient)
    with refused(ParameterError, f"gradient of '{NAME}'.*{said}", optimizer, weights, gradient):
        optimizer.step({NAME: weights}, {NAME: gradient})


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
    with refused(
        OptionError,
        rf"stacked_axes=2, but parameter '{NAME}' has shape \(3,\): it must be at most 1",
        optimizer,
        weights,
    ):
        optimizer.update(NAME, weights, ones((3,)))


def test_every_refusal_is_a_value_error_of_one_family() -> None:
    with pytest.raises(OptimError) as caught:
        LARS(0.1).update(NAME, [1.0], [1.0])
    assert isinstance(caught.value, ValueError)
