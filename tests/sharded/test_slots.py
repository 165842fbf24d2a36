"""Whole tensors travel in slots: the numbers of one process, in more messages of bounded size."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from lanes import by_turns
from world import world
from world_messages import messages
from world_steps import TYPICAL, Run, cases_for, differences

from thalweg.rules.whole import slots_of

pytestmark = pytest.mark.slow


def in_slots(rule: str, slot: int = 60, **how: Any) -> Run:
    options = dict(TYPICAL.get(rule, {}), divide_work=True, **how.pop("options", {}))
    return Run(rule, options=options, replicated=True, slot=slot, **how)


@by_turns()
@cases_for(("Muon", "Kron", "SOAP", "kron_and_others"))
@pytest.mark.parametrize(
    ("size", "layout"), [(2, "first axis"), (4, "two axes"), (4, "copies of shards"), (2, "plain"), (4, "meshes")]
)
@pytest.mark.parametrize("options", [{}, dict(on_nonfinite="skip"), dict(message_dtype=None)], ids=str)
def test_the_numbers_of_one_process(rule: str, size: int, layout: str, options: dict[str, Any]) -> None:
    assert world(size).run(differences, in_slots(rule, options=options), layout) == [[]] * size


def test_messages() -> None:
    """Of six tensors each of two ranks owns some: there and back for every slot."""
    names = ("matrix", "even", "cube", "row", "column", "kernel")
    for slot, most in ((10**6, 1), (1, 3)):
        heard = world(2).run(messages, in_slots("Muon", slot, names=names, rates=(1.0, 1.0)), "first axis")
        assert heard[0][1] == heard[1][1]
        assert most <= heard[0][1]["alltoall_base"] / 2 <= 2 * most - 1


def test_slots() -> None:
    """No owner gets more than fits, unless one tensor is larger; all owners begin together."""
    tensors = [(0, 5), (1, 9), (0, 5), (0, 6), (1, 1), (0, 4), (0, 4)]
    assert slots_of(tensors, 10) == [[0, 1, 2, 4], [3, 5], [6]]
    assert slots_of(tensors, 1) == [[0, 1], [2, 4], [3], [5], [6]]
    assert slots_of([], 10) == []


def test_ranks_tell_their_layouts_once() -> None:
    """Tensors that have gradients by turns stay known."""
    absent: dict[int, tuple[str, ...]] = {0: ("even",), 1: ("matrix",), 2: ("even",), 3: ("matrix",)}
    run = in_slots("Muon", 10**6, names=("matrix", "even"), rates=(1.0,) * 4, absent=absent)
    for first, second, *others in world(2).run(messages, run, "first axis"):
        assert all(set(step) > {"alltoall_base"} for step in (first, second))
        assert others == [{"alltoall_base": 2}] * 2
