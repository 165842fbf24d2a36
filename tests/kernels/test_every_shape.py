"""Native code against its rule: sizes at the seams of tiles, tasks and threads, and every kind of factoring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lanes import by_turns, one_in
from side_by_side import NARROW, agree, draw, draw_gradients, every_dtype, every_rule, needs_core, side_by_side

from thalweg.errors import OptionError
from thalweg.kernels.threads import set_num_threads
from thalweg.numpy import Adafactor

pytestmark = [needs_core, pytest.mark.slow]

#: Around vector widths, lanes, pieces, tiles, tasks and what one thread does alone.
SIZES = [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 1023, 1024, 1025, 2047, 2049]
LARGE = [16383, 16384, 16385, 32769, 65535, 65536, 65537, 200_003]

#: Shapes whose two largest axes are factored.
MATRICES = [
    *((rows, 5) for rows in (1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 191, 193)),
    *((5, columns) for columns in (63, 64, 65, 1023, 1025, 2047, 2048, 2049, 4095, 4097)),
    (5000, 3),
    (3, 5000),
    (4200, 1),
    (1, 4200),
    (1, 1),
    (130, 2050),
    (2050, 130),
    (300, 300),
]
#: Axes before, between and behind the two that are factored, and all at once.
TENSORS = [
    *[(3, 40, 50), (70, 3, 90), (40, 50, 3), (2, 40, 3, 50), (40, 2, 50, 3), (2, 40, 50, 3), (2, 33, 2, 65, 3)],
    *[(64, 32, 3, 3), (32, 64, 5, 5), (96, 3, 7, 7), (3, 3, 32, 64), (8, 8, 8, 8), (20, 20, 2, 2, 2), (130, 129, 2)],
    *[(70, 300, 7), (16, 600, 4), (1, 40, 50), (40, 1, 50), (40, 50, 1), (70, 1, 70), (129, 128, 127), (17, 2, 1025)],
]
#: With the last two axes factored.
LAST = [(40, 3, 5), (5, 40, 3), (3, 130, 70), (300, 2, 2), (2, 3, 70, 2050), (64, 32, 3, 3), (70, 2, 1)]
#: So many elements behind the columns, in axes that are too short to be factored: 2, 3, ... 125, 126, 128.
BEHIND = [
    (2,),
    (3,),
    (4,),
    (7,),
    (3, 5),
    (4, 4),
    (3, 3, 7),
    (8, 8),
    (5, 13),
    (4, 5, 5),
    (5, 5, 5),
    (2, 9, 7),
    (8, 4, 4),
]


def named(shapes: list[Any]) -> dict[str, tuple[int, ...]]:
    return {str(shape): shape if isinstance(shape, tuple) else (shape,) for shape in shapes}


@pytest.fixture
def several_threads() -> Any:
    set_num_threads(3)
    yield
    set_num_threads(None)


@by_turns()
@every_rule
@every_dtype
@pytest.mark.usefixtures("several_threads")
def test_vectors_of_every_size(rule: str, dtype: str) -> None:
    shapes = named(SIZES + LARGE)
    grads = draw_gradients(shapes, dtype, 2)
    options = dict(momentum=0.9) if rule == "Adafactor" else {}
    agree(rule, draw(shapes, dtype), grads, weight_decay=0.1, **options, lockstep=dtype in NARROW)


#: Of each list the small ones, and all of them at night: the largest take seconds.
FACTORED = {
    "matrices": [shape for shape in MATRICES if np.prod(shape) < 30_000],
    "all matrices": MATRICES,
    "axes around": [shape for shape in TENSORS if np.prod(shape) < 30_000],
    "all axes around": TENSORS,
    "the last two axes": LAST,
}


@by_turns()
@pytest.mark.parametrize(
    "options",
    [{}, dict(eps=(0.3, 1e-3), eps_mode="clamp"), dict(momentum=0.9, weight_decay=0.1, clip_threshold=0.5)],
    ids=["defaults", "clamp", "momentum"],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "shapes", [pytest.param(name, marks=pytest.mark.nightly if "all" in name else ()) for name in FACTORED]
)
@pytest.mark.usefixtures("several_threads")
def test_factored(options: dict, dtype: str, shapes: str) -> None:
    given = named(FACTORED[shapes])
    more = dict(factor_dims="last2") if shapes == "the last two axes" else {}
    grads = draw_gradients(given, dtype, 2)
    agree("Adafactor", draw(given, dtype), grads, lr=0.05, min_dim_size_to_factor=1, **options, **more)


@by_turns()
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_factored_in_sixteen_bits(dtype: str, rounding: str) -> None:
    shapes = named([(65, 2050), (96, 3, 7, 7), (33, 2, 40, 3), (5000, 3)])
    grads = draw_gradients(shapes, dtype, 2)
    agree("Adafactor", draw(shapes, dtype), grads, min_dim_size_to_factor=1, rounding=rounding, lockstep=True)


@pytest.mark.parametrize("behind", one_in(6, [(own,) for own in BEHIND]), ids=str)
def test_every_number_of_elements_behind_the_columns(behind: tuple[int, ...]) -> None:
    shapes = {"even": (40, 20, *behind), "with axes around": (2, 33, 3, 17, *behind), "wide": (14, 160, *behind)}
    for dtype in ("float32", "float64"):
        params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 2)
        optimizer = Adafactor(min_dim_size_to_factor=1)
        optimizer.step(draw(shapes, dtype), grads[0])
        assert optimizer.state["even"]["row_var"].shape == (40, 1, *behind)
        agree("Adafactor", params, grads, min_dim_size_to_factor=1, weight_decay=0.1, momentum=0.9)


def test_more_behind_than_there_is_room_for_is_stepped_by_the_rule() -> None:
    shapes = {"b": (7,), "w": (12, 11, 5, 5, 6)}
    params, grads = draw(shapes, "float32"), draw_gradients(shapes, "float32", 1)
    both = side_by_side("Adafactor", params, grads, engine="auto", min_dim_size_to_factor=1, lr=0.05)
    assert both.fused.engine == "fused + reference"
    both.agree()
    with pytest.raises(OptionError, match=r"parameter 'w': .* has 150 elements behind axis 1"):
        Adafactor(lr=0.05, min_dim_size_to_factor=1, engine="fused").step(params, grads[0])


def test_empty_tensors_that_would_be_factored() -> None:
    shapes = {"no rows": (0, 4), "no columns": (4, 0), "nothing": (3, 0, 5), "w": (5, 6)}
    params, grads = draw(shapes, "float32"), draw_gradients(shapes, "float32", 2)
    agree("Adafactor", params, grads, engine="auto", min_dim_size_to_factor=0, lr=0.05)
