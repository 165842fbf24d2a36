"""Ranks that were given different things get one clear error each, at once, and nothing is half-changed."""

from __future__ import annotations

import pytest
from world import world
from world_faults import (
    disagreement_on_a_grid,
    disagreements,
    later_disagreement,
    parameters_of_its_own,
    refusal_of_fsdp1,
)

pytestmark = pytest.mark.slow

SECOND = "parameter 'second' in group 0, of shape (6,) and dtype torch.float64, placed as S(0) over 2 ranks"
FAULTS = {
    "shape": f"rank 0 has {SECOND}, and rank 1 has {SECOND.replace('(6,)', '(8,)')};",
    "dtype": f"rank 0 has {SECOND}, and rank 1 has {SECOND.replace('float64', 'float32')};",
    "placement": "placed as S(0) over 2 ranks, and rank 1 has parameter 'third' in group 0, of shape (4, 4) and dtype "
    "torch.float64, placed as S(1) over 2 ranks;",
    "name": f"rank 0 has {SECOND}, and rank 1 has {SECOND.replace('second', 'other')};",
    "one less": "rank 0 has parameter 'third' in group 0, of shape (4, 4) and dtype torch.float64, placed as S(0) "
    "over 2 ranks, and rank 1 has nothing more;",
    "one more": "rank 0 has nothing more, and rank 1 has parameter 'fourth' in group 0,",
    "order": "rank 0 has parameter 'first' in group 0,",
    "gradient": f"rank 0 has {SECOND}, and rank 1 has {SECOND}, without a gradient;",
    "lr": "rank 0 has lr=0.1 in group 0, and rank 1 has lr=0.2 in group 0;",
    "option": "rank 0 has trust=True in group 0, and rank 1 has trust=False in group 0;",
    "guard": "rank 0 has on_nonfinite='propagate' in group 0, and rank 1 has on_nonfinite='skip' in group 0;",
    "overrides": "rank 0 has no overrides, and rank 1 has overrides of 'sec*': weight_decay=0.0;",
    "rule": "rank 0 has the rule LAMB, and rank 1 has the rule LARS;",
    "rule of a mixture": "rank 0 has the rule Kron, and rank 1 has the rule AdamW;",
}


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_every_rank_says_what_differs(odd_rank: int) -> None:
    first, second = world(2).run(disagreements, list(FAULTS), odd_rank)
    for fault, words in FAULTS.items():
        assert first[fault][0] == second[fault][0]
        for said, untouched in (first[fault], second[fault]):
            assert said.startswith("ranks differ in what they step: rank 0 has ")
            assert said.endswith("all ranks need the same parameters, in the same order, and the same options")
            assert words in said or odd_rank == 0
            assert untouched


def test_ranks_that_share_no_group_with_the_odd_one_hear_of_it() -> None:
    (said,) = set(world(4).run(disagreement_on_a_grid, 3))
    assert "parameter 'both' in group 0, of shape (8, 6)" in said


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("group", "parameter 'new' in group 1, of shape (4,)"),
        ("loaded", "weight_decay=0.5 in group 0"),
        ("option", "weight_decay=0.25 in group 0, and rank 1 has weight_decay=0.5 in group 0"),
        ("gradients", "without a gradient"),
        ("cleared", "weight_decay=0.25 in group 0, and rank 1 has weight_decay=0.5 in group 0"),
    ],
)
def test_changes_are_noticed(fault: str, words: str) -> None:
    for before, after in world(2).run(later_disagreement, fault):
        assert before == ""
        assert words in after


def test_parameters_that_a_rank_has_alone_are_its_own_affair() -> None:
    assert world(2).run(parameters_of_its_own) == ["", ""]


# ---- FullyShardedDataParallel flattens parameters into one: layer-wise norms are gone, and we say what to use


@pytest.mark.parametrize("whole_names", [False, True])
def test_fsdp1_itself_is_refused(whole_names: bool) -> None:
    for said in world(2).run(refusal_of_fsdp1, whole_names):
        assert "use torch.distributed.fsdp.fully_shard (FSDP2) instead" in said
