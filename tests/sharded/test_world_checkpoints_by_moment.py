"""Checkpoints before the first step, in the middle of training, and while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import world_checkpoint_faults as faults  # noqa: E402
from lanes import by_turns, once, one_in  # noqa: E402
from world import world  # noqa: E402
from world_checkpoints import NAMES, RULES, resume, save  # noqa: E402

pytestmark = pytest.mark.slow

EVERY = pytest.mark.parametrize("case", NAMES)
RULE = pytest.mark.parametrize("case", [name for name in NAMES if name in (*RULES, "Adafactor, factored")])
FINE = [[], []]


@by_turns("layout")
@EVERY
@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_the_step_that_loaders_make_moves_nothing(case: str, layout: str) -> None:
    assert world(2).run(faults.state_by_a_step, case, layout) == FINE


@once(1)
@EVERY
def test_state_before_the_first_step(case: str) -> None:
    assert world(2).run(faults.state_when_asked, case, "FSDP2") == FINE


@once(2)
@RULE
def test_saved_before_the_first_step(tmp_path: Path, case: str) -> None:
    world(2).run(faults.save_before_steps, tmp_path / "checkpoint", case, "TP")
    assert world(2).run(faults.from_the_beginning, tmp_path / "checkpoint", case, "FSDP2") == FINE


@pytest.mark.parametrize("case", one_in(6, NAMES, first=1))
def test_to_the_last_bit_on_the_same_ranks(tmp_path: Path, case: str) -> None:
    assert world(2).run(faults.same_bits, tmp_path / "checkpoint", case, "FSDP2", "float32") == FINE


@once(4)
@RULE
def test_chances_of_rounding_come_back(tmp_path: Path, case: str) -> None:
    found = world(2).run(faults.same_bits, tmp_path / "checkpoint", case, "FSDP2", "bfloat16", rounding="stochastic")
    assert found == FINE


@by_turns("way", first=5)
@pytest.mark.parametrize("way", ["nested", "flat"])
@RULE
def test_a_parameter_without_a_gradient_so_far(tmp_path: Path, case: str, way: str) -> None:
    assert world(2).run(faults.stepped_late, tmp_path / "checkpoint", case, "FSDP2", way) == FINE


@pytest.mark.parametrize("way", ["nested", "flat", "full"])
def test_a_frozen_parameter(tmp_path: Path, way: str) -> None:
    world(2).run(save, tmp_path, "LAMB", "FSDP2", way, frozen=["wide.weight"])
    assert world(2).run(resume, tmp_path, "LAMB", "TP", way, frozen=["wide.weight"]) == FINE


@once(6)
@RULE
def test_saved_while_training_goes_on(tmp_path: Path, case: str) -> None:
    assert world(2).run(faults.saved_while_training, tmp_path / "checkpoint", case, "FSDP2") == FINE


@by_turns("before", first=7)
@pytest.mark.parametrize(("before", "after"), [("plain", "FSDP2"), ("FSDP2", "plain"), ("TP", "FSDP2")])
@EVERY
def test_load_state_dict_by_itself(case: str, before: str, after: str) -> None:
    assert world(2).run(faults.loaded_directly, case, before, after) == FINE


def test_load_state_dict_from_another_mesh() -> None:
    assert world(4).run(faults.loaded_directly, "Adafactor, factored", "HSDP", "FSDP2") == [[]] * 4


@pytest.mark.parametrize(
    ("saved", "loading", "way", "words"),
    [
        (
            "LARS",
            "LARS, no momentum",
            "nested",
            "StateError: the state of 'short' does not fit: the saved entries are {}, and its options need "
            "{'momentum_buffer': (3,)}",
        ),
        (
            "LARS",
            "LARS, bfloat16 momentum",
            "nested",
            "StateError: the state of 'short' does not fit: it was saved with 'momentum_buffer' in torch.float64, and "
            "read into torch.bfloat16; construct this optimizer with the saved options",
        ),
        (
            "Adafactor, some factored",
            "Adafactor, unfactored",
            "full",
            "StateError: the state of 'cube' does not fit: the saved entries are {'variance': (4, 3, 2), "
            "'row_var': (4, 1, 2), 'col_var': (1, 3, 2)}, and its options need {'row_var': "
            "(4, 1, 2), 'col_var': (1, 3, 2)}",
        ),
        ("LAMB", "LARS", "nested", "Missing key in checkpoint state_dict: optim.state"),
    ],
    ids=["options that need more state", "a narrower dtype", "other overrides", "another rule"],
)
def test_what_does_not_fit_is_told_on_every_rank(
    tmp_path: Path, saved: str, loading: str, way: str, words: str
) -> None:
    world(2).run(save, tmp_path, saved, "FSDP2", way)
    for said in world(2).run(faults.misfit, tmp_path, loading, "FSDP2", way):
        assert words in said


def test_other_shapes_are_told_on_every_rank(tmp_path: Path) -> None:
    world(2).run(save, tmp_path, "LAMB", "FSDP2")
    for said in world(2).run(faults.misfit, tmp_path, "LAMB", "FSDP2", "nested", width=12):
        assert "Size mismatch between saved torch.Size([10, 6]) and current: torch.Size([12, 6])" in said


@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_what_load_state_dict_refuses_changes_nothing(layout: str) -> None:
    for said, changed in world(2).run(faults.misfit_directly, "LAMB", "LARS", layout):
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
