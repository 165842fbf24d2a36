"""Every check catches a faulty optimizer and passes a good one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from check_faulty import FAULTS
from offered import ON_GPU, assert_keeps

from thalweg.check import check, expect
from thalweg.check.plugin import checks_of, names_of

CHECKS = [names_of(each)[0] for each in checks_of("torch")]
#: What torch.optim.AdamW does otherwise than these checks ask for.
NOT_ADAMW = {
    "loading-twice": "the tensors of a state dict that it loads become its own",
    "float16-small-gradients": "squares are averaged in float16 and vanish",
    "lr-of-a-group-out-of-range": "options of groups are not looked at",
}
#: Checks of what neither of the two has, and who has it.
OTHERS = {"momentum-out-of-range": "SGD"}


def test_every_check_has_a_faulty_optimizer() -> None:
    assert set(FAULTS) == set(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu if name in ON_GPU else ()) for name in CHECKS]
)
def test_a_check_catches_its_fault(name: str) -> None:
    (verdict,) = check(FAULTS[name], only=name).verdicts
    assert verdict.outcome == "failed"
    assert verdict.seen


@pytest.mark.slow
def test_checks_pass_a_good_optimizer() -> None:
    report = check("torch.optim.AdamW")
    assert {each.check for each in report.failed} == set(NOT_ADAMW)
    left_out = set(OTHERS) | (set() if torch.cuda.is_available() else ON_GPU)
    assert {each.check for each in report.verdicts if each.outcome == "not offered"} == left_out
    assert_keeps(check("thalweg.torch.LAMB", only=",".join(NOT_ADAMW)), ())
    for name, rule in OTHERS.items():
        assert_keeps(check(f"thalweg.torch.{rule}", only=name), ())


@pytest.mark.parametrize("rule", ["Kron", "Muon"])
def test_products_of_matrices_are_not_lowered_by_autocast(rule: str) -> None:
    assert_keeps(check(f"thalweg.torch.{rule}", only="autocast-ignored"), ())


class Opaque:
    """An object that equals itself alone."""


#: What is compared, and what is said where it is not the same.
COMPARED: list[tuple[Any, Any, str]] = [
    ({"a": [torch.ones(2), 1, None]}, {"a": (torch.ones(2), 1, None)}, ""),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), ""),
    (float("nan"), float("nan"), ""),
    ({"schedule": Opaque()}, {"schedule": Opaque()}, ""),
    (torch.tensor(1.0), 1.0, r"is float32 \(\), not 1.0 \(float\)"),
    (1, 1.0, r"is 1 \(int\), not 1.0 \(float\)"),
    (True, 1, r"is True \(bool\), not 1 \(int\)"),
    (None, 0.0, r"is None \(NoneType\), not 0.0 \(float\)"),
    ([], {}, r"is \[\] \(list\), not {} \(dict\)"),
    ([1, 2], [1], "has 2 parts, not 1"),
    ({"a": {}}, {}, "a is on one side only"),
    ("bf16", "fp16", "is 'bf16', not 'fp16'"),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), "is float32 .*not float64"),
    (torch.ones(2), torch.ones(1, 2), r"is float32 \(2,\), not float32 \(1, 2\)"),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0]), "differs"),
]


@pytest.mark.parametrize(("found", "wanted", "message"), COMPARED)
def test_what_is_the_same(found: Any, wanted: Any, message: str) -> None:
    for one, other in ((found, wanted), ({"state": [found]}, {"state": [wanted]})):
        with pytest.raises(pytest.fail.Exception, match=f"^here.*{message}") if message else nullcontext():
            expect.same(one, other, "here")
