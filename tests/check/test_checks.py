"""Every check catches a faulty optimizer and passes a good one."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from check_faulty import FAULTS

from thalweg.check import Verdict, check
from thalweg.check.problem import assert_same
from thalweg.check.registry import Failed, checks_of
from thalweg.check.run import run_check
from thalweg.check.subject import Subject, subject_of

CHECKS = checks_of("torch")
FACTS = {"odd": True, "temporaries": 16.0}
#: What torch.optim.AdamW does otherwise than these checks ask for.
NOT_ADAMW = {
    "loading-twice": "the tensors of a state dict that it loads become its own",
    "float16-small-gradients": "squares are averaged in float16 and vanish",
    "lr-of-a-group-out-of-range": "options of groups are not looked at",
}
#: Checks of what neither of the two has, and who has it.
OTHERS = {"momentum-out-of-range": ("SGD", {}), "scale-invariant": ("Lion", {"scale_invariant": True})}


@functools.cache
def good(name: str) -> Subject:
    return subject_of(name, facts=FACTS)


def verdict(name: str, subject: Subject) -> Verdict:
    return run_check(CHECKS[name], subject)


def test_every_check_has_a_faulty_optimizer() -> None:
    assert set(FAULTS) == set(CHECKS)


def each_check() -> list[Any]:
    marks = {"compiles": pytest.mark.nightly}
    gpu = {name: pytest.mark.gpu for name, each in CHECKS.items() if each.group == "devices"}
    return [pytest.param(name, marks={**marks, **gpu}.get(name, ())) for name in CHECKS]


@pytest.mark.slow
@pytest.mark.parametrize("name", each_check())
def test_a_check_catches_its_fault(name: str) -> None:
    found = verdict(name, subject_of(FAULTS[name]))
    assert found.outcome == "failed", found.seen
    assert found.seen


@pytest.mark.slow
@pytest.mark.parametrize("name", each_check())
def test_a_check_passes_good_ones(name: str) -> None:
    if name in OTHERS:
        rule, facts = OTHERS[name]
        assert verdict(name, subject_of(f"thalweg.torch.{rule}", facts=facts)).outcome == "passed"
        return
    theirs = verdict(name, good("torch.optim.AdamW"))
    assert theirs.outcome == ("failed" if name in NOT_ADAMW else "passed"), theirs.seen
    if name in NOT_ADAMW:
        assert verdict(name, good("thalweg.torch.LAMB")).outcome == "passed"


@pytest.mark.parametrize("rule", ["Kron", "Muon"])
def test_products_of_matrices_are_not_lowered_by_autocast(rule: str) -> None:
    assert not (found := check(f"thalweg.torch.{rule}", only="autocast-ignored").failed), found


class Opaque:
    """An object that equals itself alone."""


EQUAL: list[tuple[Any, Any]] = [
    ({"a": [torch.ones(2), 1, None]}, {"a": (torch.ones(2), 1, None)}),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
    (float("nan"), float("nan")),
    ({"schedule": Opaque()}, {"schedule": Opaque()}),
    ({1: "a"}, {1: "a"}),
]
OTHER: list[tuple[Any, Any, str]] = [
    (torch.tensor(1.0), 1.0, r"is float32 \(\), not 1.0 \(float\)"),
    (1.0, torch.tensor(1.0), r"is 1.0 \(float\), not float32 \(\)"),
    (1, 1.0, r"is 1 \(int\), not 1.0 \(float\)"),
    (True, 1, r"is True \(bool\), not 1 \(int\)"),
    (None, 0.0, r"is None \(NoneType\), not 0.0 \(float\)"),
    (0.5, None, r"not None"),
    ([], None, r"is \[\] \(list\), not None"),
    ([], {}, r"is \[\] \(list\), not {} \(dict\)"),
    ([1, 2], 1, r"is \[1, 2\] \(list\), not 1 \(int\)"),
    ([1, 2], [1], "has 2 parts, not 1"),
    ((), (1,), "has 0 parts, not 1"),
    ({"a": {}}, {}, "a is on one side only"),
    ({1: 2.0}, {"1": 2.0}, "1 is on one side only"),
    ("bf16", "fp16", "is 'bf16', not 'fp16'"),
    (Opaque(), None, "Opaque"),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), "is float32 .*not float64"),
    (torch.ones(2), torch.ones(1, 2), r"is float32 \(2,\), not float32 \(1, 2\)"),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0]), "differs"),
    (torch.tensor([True]), torch.tensor([False]), "differs"),
]


@pytest.mark.parametrize("within", [lambda x: x, lambda x: {"state": [x]}], ids=["alone", "within"])
class TestSame:
    @pytest.mark.parametrize(("found", "wanted"), EQUAL)
    def test_equal(self, found: Any, wanted: Any, within: Any) -> None:
        assert_same(within(found), within(wanted), "here")

    @pytest.mark.parametrize(("found", "wanted", "message"), OTHER)
    def test_other(self, found: Any, wanted: Any, message: str, within: Any) -> None:
        with pytest.raises(Failed, match=f"^here.*{message}"):
            assert_same(within(found), within(wanted), "here")
