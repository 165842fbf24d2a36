"""Options as users of torch write them, and warnings that concern every parameter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import thalweg.numpy  # noqa: E402
import thalweg.torch  # noqa: E402
from thalweg.errors import OptionError  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "bfloat16", "torch.bfloat16"], ids=str)
def test_a_dtype_is_understood_however_it_is_written(dtype: object) -> None:
    pytest.importorskip("ml_dtypes")  # numpy has no bfloat16 of its own
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = thalweg.torch.AdamW([p], state_dtype=dtype)
    p.grad = torch.ones(3, 2)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.param_groups[0]["state_dtype"] == "bfloat16"
    assert thalweg.numpy.AdamW(state_dtype=dtype).options["state_dtype"] == "bfloat16"


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match="state_dtype must be one of"):
        thalweg.torch.AdamW([torch.nn.Parameter(torch.ones(2))], state_dtype=torch.int32)


def test_a_warm_up_from_zero_is_one_line_for_all() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    told = thalweg.torch.AdamW(model.named_parameters(), lr=0.0).explain().warnings
    assert told == ["all 4 parameters: its learning rate is 0"]
    some = thalweg.torch.AdamW(model.named_parameters(), overrides=[("*.bias", dict(lr_scale=0.0))]).explain()
    assert some.warnings == ["0.bias: its learning rate is 0", "1.bias: its learning rate is 0"]
