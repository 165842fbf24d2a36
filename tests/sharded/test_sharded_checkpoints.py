"""A checkpoint of some ranks is resumed by any number of others, whatever the options, whenever it was made.

`thalweg check --ranks` has more layouts and forms, for every rule with the options it comes with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import world_checkpoints as checkpoints  # noqa: E402
from lanes import by_day  # noqa: E402
from world import world  # noqa: E402
from world_checkpoints import EVERY, NAMES, RULES, resume, save, soak  # noqa: E402

pytestmark = pytest.mark.slow

FINE = [[], []]
#: One of each kind of state.
KINDS = [
    "LARS, bfloat16 momentum",
    "LAMB, overrides",
    "LAMB, spikes",
    "Adafactor, some factored",
    "Kron",
]
RULE = [name for name in NAMES if name in (*RULES, "Adafactor, factored")]


@pytest.mark.parametrize(
    ("case", "before", "after", "way"),
    by_day(
        [
            ("LARS", "FSDP2", "plain", "nested"),
            ("LAMB, two groups", "plain", "FSDP2", "nested"),
            ("Adafactor, some factored", "FSDP2", "TP", "nested"),
            ("LAMB, spikes", "FSDP2", "TP", "full, flat"),
            ("Kron", "FSDP2", "TP", "offloaded"),
        ],
        (
            *(
                (case, *layouts, "nested")
                for case in NAMES
                for layouts in (("FSDP2", "plain"), ("plain", "FSDP2"), ("FSDP2", "TP"))
            ),
            *((case, "FSDP2", "TP", way) for case in KINDS for way in ("full, flat", "offloaded")),
        ),
    ),
)
def test_in_other_layouts(tmp_path: Path, case: str, before: str, after: str, way: str) -> None:
    assert world(2).run(checkpoints.resumed_at_once, tmp_path, case, before, after, way) == FINE


@pytest.mark.parametrize(
    ("case", "divided", "before", "ranks", "after", "others"),
    by_day(
        [("Kron", True, "HSDP", 4, "DDP", 2)],
        (
            *((case, False, "FSDP2", 2, "FSDP2", 4) for case in NAMES),
            *(
                (rule, True, *sizes)
                for rule in ("Muon", "Kron", "SOAP")
                for sizes in (
                    ("DDP", 4, "plain", 1),
                    ("HSDP", 4, "DDP", 2),
                    ("DDP", 2, "HSDP", 4),
                    ("HSDP", 4, "FSDP2", 2),
                )
            ),
        ),
    ),
)
def test_by_another_number_of_ranks(
    tmp_path: Path, case: str, divided: bool, before: str, ranks: int, after: str, others: int
) -> None:
    """divided: by replicas that divide the work on whole tensors."""
    made = dict(divide_work=True) if divided else {}
    world(ranks).run(save, tmp_path, case, before, **made)
    assert world(others).run(resume, tmp_path, case, after, **made) == [[]] * others


@pytest.mark.parametrize("way", ["nested", "flat", "full"])
def test_a_frozen_parameter(tmp_path: Path, way: str) -> None:
    found = world(2).run(checkpoints.resumed_at_once, tmp_path, "LAMB", "FSDP2", "TP", way, frozen=["wide.weight"])
    assert found == FINE


#: By when it is made: what ranks do, for which cases, and for which by day.
MOMENTS: dict[str, tuple[Callable[..., Any], dict[str, str], list[str], list[str]]] = {
    "by the step of a loader": (checkpoints.state_by_a_step, {}, NAMES, ["LARS", "LAMB, rate in a tensor"]),
    "by the step of a loader, TP": (checkpoints.state_by_a_step, dict(layout="TP"), NAMES, ["Kron"]),
    "when state is asked for": (checkpoints.state_when_asked, {}, NAMES, ["Muon"]),
    "before the first step": (checkpoints.from_the_beginning, {}, RULE, ["Adafactor, factored"]),
    "in the middle": (checkpoints.same_bits, {}, NAMES, ["LAMB, clipped and skipping", "MARS"]),
    "by chance": (checkpoints.same_bits, dict(dtype="bfloat16", rounding="stochastic"), RULE, ["Muon"]),
    "before a late gradient": (checkpoints.stepped_late, {}, RULE, ["SOAP"]),
    "before a late gradient, flat": (checkpoints.stepped_late, dict(way="flat"), RULE, ["Kron"]),
    "while training goes on": (checkpoints.saved_while_training, {}, RULE, ["SOAP"]),
}


@pytest.mark.parametrize(
    ("moment", "case"),
    by_day(
        ((moment, case) for moment, (*_, day) in MOMENTS.items() for case in day),
        ((moment, case) for moment, (*_, cases, _) in MOMENTS.items() for case in cases),
    ),
)
def test_moments(tmp_path: Path, moment: str, case: str) -> None:
    what, given, *_ = MOMENTS[moment]
    assert world(2).run(what, tmp_path / "checkpoint", case, **given) == FINE


@pytest.mark.parametrize(
    ("case", "size", "before", "after"),
    by_day(
        [("SOAP", 2, "FSDP2", "plain"), ("Adafactor, factored", 4, "HSDP", "FSDP2")],
        (
            *(
                (case, 2, *layouts)
                for case in NAMES
                for layouts in (("plain", "FSDP2"), ("FSDP2", "plain"), ("TP", "FSDP2"))
            ),
            ("Adafactor, factored", 4, "HSDP", "FSDP2"),
        ),
    ),
)
def test_load_state_dict_by_itself(case: str, size: int, before: str, after: str) -> None:
    assert world(size).run(checkpoints.loaded_directly, case, before, after) == [[]] * size


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("AdamW", "FSDP2", "FSDP2"),
        pytest.param("AdamW", "plain", "FSDP2", marks=pytest.mark.nightly),
        pytest.param("AdamW", "FSDP2", "plain", marks=pytest.mark.nightly),
        ("Adafactor", "plain", "FSDP2"),
    ],
)
def test_runs_of_torch_are_continued(case: str, before: str, after: str) -> None:
    assert world(2).run(checkpoints.continued, case, before, after) == FINE


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["Muon", "Kron"])
def test_a_rank_is_killed_and_the_job_resumed_by_fewer(rule: str, tmp_path: Path) -> None:
    """200 steps; after the 110th rank 3 of HSDP is gone, and two ranks of FSDP2 go on from the last checkpoint."""
    with pytest.raises(AssertionError, match="soak on 4 ranks"):
        world(4).run(soak, tmp_path, rule, "HSDP", 200, 110, divide_work=True)
    assert sorted(int(each.name) for each in tmp_path.iterdir()) == list(range(EVERY, 110, EVERY))
    assert world(2).run(soak, tmp_path, rule, "FSDP2", 200, divide_work=True) == [[]] * 2


# ---- what does not fit


MISFITS = {
    "options that need more state": (
        *("LARS", "LARS, no momentum", "nested", {}),
        "StateError: the state of 'short' does not fit its options: they need {'momentum_buffer': (3,)}, and the state "
        "has {};",
    ),
    "a narrower dtype": (
        *("LARS", "LARS, bfloat16 momentum", "nested", {}),
        "StateError: the state of 'short' does not fit: it was saved with 'momentum_buffer' in torch.float64, and "
        "read into torch.bfloat16; construct this optimizer with the saved options",
    ),
    "other overrides": (
        *("Adafactor, some factored", "Adafactor, unfactored", "full", {}),
        "StateError: the state of 'cube' does not fit its options: they need {'row_var': (4, 1, 2), 'col_var': "
        "(1, 3, 2)}, and the state has {'variance': (4, 3, 2), 'row_var': (4, 1, 2), 'col_var': (1, 3, 2)}",
    ),
    "another rule": ("LAMB", "LARS", "nested", {}, "Missing key in checkpoint state_dict: optim.state"),
    "other shapes": (
        *("LAMB", "LAMB", "nested", dict(width=12)),
        "Size mismatch between saved torch.Size([10, 6]) and current: torch.Size([12, 6])",
    ),
}


@pytest.mark.parametrize(("saved", "loading", "way", "made", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_told_on_every_rank(
    tmp_path: Path, saved: str, loading: str, way: str, made: dict[str, Any], words: str
) -> None:
    for said in world(2).run(checkpoints.misfit, tmp_path, saved, loading, way, **made):
        assert words in said


@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_what_load_state_dict_refuses_changes_nothing(layout: str) -> None:
    for said, changed in world(2).run(checkpoints.misfit_directly, "LAMB", "LARS", layout):
        assert said == "StateError: this is a state of LAMB and cannot be loaded into LARS"
        assert changed == []


def test_names_stay_with_their_parameters() -> None:
    """Loaders go by the names of the model; the order of its parameters may be another."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    import thalweg.torch

    def made(*names: str) -> tuple[torch.nn.Module, thalweg.torch.LAMB]:
        model = torch.nn.ParameterDict()
        for size, name in enumerate(sorted(names), start=2):
            model[name] = torch.nn.Parameter(torch.ones(size))
        own = [(name, model[name]) for name in names]
        for _, p in own:
            p.grad = torch.ones_like(p)
        optimizer = thalweg.torch.LAMB(own, 0.1, overrides=[("first", dict(lr_scale=0.0))])
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, again) = made("first", "second"), made("second", "first")
    set_optimizer_state_dict(other, again, get_optimizer_state_dict(model, optimizer))
    assert again.param_groups[0]["param_names"] == ["second", "first"]
    again.step()
    assert torch.equal(other["first"], torch.ones(2))
    assert not torch.equal(other["second"], torch.ones(3))
