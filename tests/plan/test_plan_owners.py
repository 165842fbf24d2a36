"""Owners of whole tensors in plans: who has kernels for GPUs, what they keep and what a step of theirs needs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from thalweg.errors import CommandError
from thalweg.plan import plan
from thalweg.plan.models import Model, Tensor
from thalweg.show.arguments import Given

MATRIX = 4 * 1000 * 1000
#: Small things: norms of factors, means of squares, counts, in blocks of memory.
BESIDE = 40 * 512


def share(shape: tuple[int, ...] = (1000, 1000), many: int = 12, dtype: str = "float32", **how: Any) -> Any:
    """Of one of two ranks, unless told otherwise."""
    model = Model("many", "", tuple(Tensor(f"w{i}", shape, dtype) for i in range(many)))
    where = {"world": 2, "layout": "fsdp2", "device": "cuda", **{k: how.pop(k) for k in list(how) if k in WHERE}}
    options = [Given("Kron", name, value) for name, value in {"variant": "polyak", **how}.items()]
    return plan(model, optimizers=["Kron"], options=options, **where).costs[0].share


WHERE = ("world", "layout", "device", "engine")


# ---- what runs


def test_owners_have_kernels_wherever_one_device_has_them() -> None:
    assert share().engine == "fused"
    assert share(engine="fused", stacked_axes=1, shape=(4, 30, 20)).engine == "fused"
    assert share(engine="foreach").engine == "foreach"
    assert share(device="cpu").engine == "foreach"
    assert share(geometry="eq").engine == "foreach"
    mixed = Model("mixed", "", (Tensor("a", (8, 8)), Tensor("b", (8, 8), "float64")))
    found = plan(mixed, optimizers=["Kron"], world=2, layout="fsdp2", device="cuda").costs[0].share
    assert found.engine == "foreach + fused"


def test_who_insists_is_told_why_not() -> None:
    with pytest.raises(CommandError, match="engine 'fused' cannot run Kron for 'w0': there is no fused kernel for geo"):
        share(engine="fused", geometry="eq")


# ---- what is kept


def test_kernels_have_factors_as_they_are_stored() -> None:
    by_lists, by_kernels = (share(precond_dtype="bfloat16", engine=engine) for engine in ("foreach", "auto"))
    # two factors of each of six tensors, and their norms
    assert by_lists.state_bytes - by_kernels.state_bytes == 12 * MATRIX - (12 * MATRIX // 2 + 12 * 4)
    assert share().state_bytes - share(engine="foreach").state_bytes == 12 * 4


def test_kernels_keep_their_factors_where_steps_are_guarded() -> None:
    """So that they are where tables say; all else lets go of factors that everyone sends at every step."""
    guarded, free = share(on_nonfinite="skip"), share()
    assert guarded.state_bytes == free.state_bytes
    lists = share(on_nonfinite="skip", engine="foreach")
    assert guarded.state_bytes - lists.state_bytes == 12 * MATRIX + 12 * 4


# ---- what a step needs


def test_peak_of_lists() -> None:
    """While answers are sent: what six tensors became, twice that with factors, and what comes from the other rank."""
    wanted = 6 * MATRIX + 2 * (6 + 12) * MATRIX + (6 + 12) * MATRIX
    assert share(engine="foreach").peak_bytes == pytest.approx(wanted, abs=BESIDE)
    # refreshed factors that nobody keeps, or that are kept rounded
    for options in (dict(on_nonfinite="skip"), dict(precond_dtype="bfloat16")):
        assert share(engine="foreach", **options).peak_bytes >= wanted + 12 * MATRIX


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton")), reason="there are no kernels here"
)
def test_peak_of_kernels() -> None:
    """The same, and what kernels keep for six tensors on one device."""
    scratch = share(many=6, world=1, layout="ddp", momentum=0.0).peak_bytes
    assert scratch > 20 * MATRIX
    wanted = 6 * MATRIX + 2 * (6 + 12) * MATRIX + (6 + 12) * MATRIX
    assert share().peak_bytes == pytest.approx(wanted + scratch, abs=BESIDE)
    # without dense factors: all at once, as it came and as it became, is less than what is sent
    vectors = dict(shape=(1000 * 1000,), many=12)
    scratch = share(**{**vectors, "many": 6}, world=1, layout="ddp", momentum=0.0).peak_bytes
    wanted = 6 * MATRIX + 2 * (6 + 6) * MATRIX + (6 + 6) * MATRIX
    assert share(**vectors).peak_bytes == pytest.approx(wanted + scratch, abs=BESIDE)
