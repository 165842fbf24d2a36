"""Groups are the truth about what is stepped, whoever edits them between two steps."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, Case

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.errors import OptionError, ParameterError, StateError  # noqa: E402

SOME = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("SGD", "LAMB", "Kron")], ids=lambda case: case.name
)
ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])


def make(case: Case, params: Any, **options: Any) -> Any:
    # names choose random numbers, and places change here
    expected = dict(damping_mode="expected") if case.name == "Kron" else {}
    return getattr(thalweg.torch, case.name)(params, **{"lr": case.lr, **expected, **options})


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: list[Any], step: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def copies(params: list[Any]) -> list[Any]:
    return [p.detach().clone() for p in params]


SHAPES = ((6, 5), (6,), (3, 6))


@ENGINES
@SOME
@pytest.mark.parametrize("stepped_before", [0, 2])
def test_exchanged_parameters_are_stepped_as_accelerate_exchanges_them(
    case: Case, engine: str, stepped_before: int
) -> None:
    old, new, alone = parameters(*SHAPES), parameters(*SHAPES, seed=1), parameters(*SHAPES, seed=1)
    optimizer = make(case, old, engine=engine)
    optimizer.load_state_dict(optimizer.state_dict())  # AcceleratedOptimizer.__init__ does
    for step in range(stepped_before):
        give_gradients(old, step)
        optimizer.step()
    before = copies(old)
    # _prepare_fsdp2 of accelerate 1.15, and its fsdp2_switch_optimizer_parameters
    mapping = dict(zip(old, new, strict=True))
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1)
            group["params"][i].data_ptr = p  # type: ignore[method-assign]
    for group in optimizer.param_groups:
        group["params"] = [mapping[p.data_ptr] for p in group["params"]]

    other = make(case, alone, engine=engine)
    for step in range(3):
        for params in (new, alone):
            give_gradients(params, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(before, old, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(new, alone, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(new, parameters(*SHAPES, seed=1), strict=True))


@ENGINES
@SOME
def test_a_parameter_that_moves_to_another_group_has_its_options(case: Case, engine: str) -> None:
    """The list of all parameters stays the same: where one group ends and the next begins does not."""
    params, alone = parameters(*SHAPES), parameters(*SHAPES)
    optimizer = make(case, [{"params": params[:2]}, {"params": params[2:], "lr": 0.0}], engine=engine)
    give_gradients(params)
    optimizer.step()
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    other = make(case, [{"params": alone[:1]}, {"params": alone[1:]}], engine=engine)
    give_gradients(alone)
    other.step()
    other.param_groups[1]["lr"] = 0.0
    for step in (1, 2):
        give_gradients(params, step)
        give_gradients(alone, step)
        optimizer.step()
        other.step()
    assert torch.equal(params[1], alone[1]), "stepped once, before it came to the group whose lr is 0"
    assert torch.equal(params[0], alone[0])


@pytest.mark.parametrize("engine", ["auto", "foreach"])
def test_a_parameter_may_grow_if_its_state_does(engine: str) -> None:
    """As Gaussian splatting adds points: parameter and moments are concatenated with new rows."""
    p = parameters((4, 3))[0]
    optimizer = thalweg.torch.LAMB([p], lr=0.1, trust=False, engine=engine)
    give_gradients([p])
    optimizer.step()
    state = optimizer.state.pop(p)
    grown = torch.nn.Parameter(torch.cat([p.detach(), torch.ones(2, 3)]))
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key], torch.zeros(2, 3)])
    optimizer.state[grown] = state
    optimizer.param_groups[0]["params"] = [grown]
    before = grown.detach().clone()
    give_gradients([grown])
    optimizer.step()
    assert (grown != before).all()
    shrunk = torch.nn.Parameter(grown.detach()[:3].clone())
    optimizer.state[shrunk] = optimizer.state.pop(grown)
    optimizer.param_groups[0]["params"] = [shrunk]
    give_gradients([shrunk])
    with pytest.raises(StateError, match="state of '0' does not fit"):
        optimizer.step()


def test_options_by_name_follow_a_name_and_not_an_address() -> None:
    params = parameters((4, 3), (3,))
    named = [("weight", params[0]), ("bias", params[1])]
    optimizer = thalweg.torch.LAMB(named, lr=0.1, overrides=[("bias", dict(lr_scale=0.0))])
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[0]["param_names"] = ["bias", "weight"]
    before = copies(params)
    give_gradients(params, 1)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda groups, p: groups[0]["params"].append(groups[1]["params"][0]), "is also"),
        (lambda groups, p: groups[0]["params"].append("text"), "must be a tensor, got str"),
        (lambda groups, p: groups[0]["params"].append(torch.ones(2, dtype=torch.complex64)), "is complex"),
    ],
    ids=["twice", "no tensor", "complex"],
)
def test_groups_that_make_no_sense_are_refused_and_nothing_is_stepped(edit: Any, told: str) -> None:
    params = parameters(*SHAPES)
    optimizer = thalweg.torch.LAMB([{"params": params[:2]}, {"params": params[2:]}])
    give_gradients(params)
    optimizer.step()
    before = copies(params)
    edit(optimizer.param_groups, params)
    with pytest.raises(ParameterError, match=told):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_names_that_were_left_behind_count_for_nothing() -> None:
    """DeepSpeed drops frozen parameters from groups and keeps all names."""
    params = parameters(*SHAPES)
    optimizer = thalweg.torch.LAMB([(f"layer.{i}", p) for i, p in enumerate(params)])
    del optimizer.param_groups[0]["params"][1]
    give_gradients(params)
    before = copies(params)
    for _ in range(2):  # the first step of SOAP moves nothing
        optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [False, True, False]
    assert list(optimizer.stats()) == ["0", "1"]
    optimizer.load_state_dict(optimizer.state_dict())
    by_name = thalweg.torch.LAMB(
        [(f"layer.{i}", p) for i, p in enumerate(params)], overrides=[("*.1", dict(lr_scale=0.5))]
    )
    del by_name.param_groups[0]["params"][1]
    with pytest.raises(OptionError, match="need a name for every parameter"):
        by_name.step()


def test_names_that_two_parameters_have_are_refused_at_every_step() -> None:
    params = parameters((3, 2), (3, 2))
    optimizer = thalweg.torch.SGD([("first", params[0]), ("second", params[1])], lr=0.1)
    optimizer.param_groups[0]["param_names"] = ["first", "first"]
    before = copies(params)
    for step in range(2):
        give_gradients(params, step)
        with pytest.raises(ParameterError, match="two parameters are named 'first'"):
            optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_an_option_that_is_deleted_returns_to_its_default_and_not_to_none(engine: Any) -> None:
    ends = []
    for is_edited in (False, True):
        p = torch.nn.Parameter(torch.full((4, 3), 5.0))
        optimizer = thalweg.torch.Adafactor([p], lr=1.0, engine=engine)
        for t in range(3):
            if is_edited and t == 1:
                optimizer.param_groups[0]["clip_threshold"] = 1.0  # the default itself: nothing changes
            if is_edited and t == 2:
                optimizer.param_groups[0]["clip_threshold"] = None
                _ = optimizer.explain()  # reads the options of now
                del optimizer.param_groups[0]["clip_threshold"]
            p.grad = torch.full((4, 3), 10.0**t)
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])
def test_parameters_that_an_override_held_alike_come_to_differ(engine: Any) -> None:
    a, b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = thalweg.torch.SGD(
        [("a", a), ("b", b)], lr=1.0, weight_decay=0.5, engine=engine, overrides=[("b", dict(weight_decay=0.5))]
    )
    for decay in (0.5, 0.5, 0.25):
        optimizer.param_groups[0]["weight_decay"] = decay
        a.grad, b.grad = torch.zeros(4), torch.zeros(4)
        optimizer.step()
    assert (a.tolist(), b.tolist()) == ([0.1875] * 4, [0.125] * 4)
