"""Groups are the truth about what is stepped, and state about what was, whoever edits them between two steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tolerances import FLOAT64

import thalweg.torch
from thalweg.check.problem import give, train, values, weights
from thalweg.errors import OptionError, ParameterError, StateError

#: Names choose random numbers of Kron, and places change here.
RULES: dict[str, dict[str, Any]] = {"SGD": dict(lr=0.1), "LAMB": {}, "Kron": dict(damping_mode="expected")}
ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])
EVERY = pytest.mark.parametrize("rule", RULES)
SHAPES = ((6, 5), (6,), (3, 6))


def make(rule: str, params: Any, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(params, **RULES[rule], **options)


@ENGINES
@EVERY
def test_a_parameter_that_moves_to_another_group_has_its_options(rule: str, engine: str) -> None:
    """The list of all parameters stays the same: where one group ends and the next begins does not."""
    params = weights(SHAPES)
    optimizer = make(rule, [{"params": params[:2]}, {"params": params[2:], "lr": 0.0}], engine=engine)
    train(optimizer, params, 1)
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    before = values(params)
    train(optimizer, params, 2, first=1)
    assert [*map(torch.equal, params, before)] == [False, True, True]


@pytest.mark.parametrize("engine", ["auto", "foreach"])
def test_a_parameter_may_grow_if_its_state_does(engine: str) -> None:
    """As Gaussian splatting adds points: parameter and moments are concatenated with new rows."""
    (p,) = weights([(4, 3)])
    optimizer = thalweg.torch.LAMB([p], lr=0.1, trust=False, engine=engine)
    train(optimizer, [p], 1)
    state = optimizer.state.pop(p)
    grown = torch.nn.Parameter(torch.cat([p.detach(), torch.ones(2, 3)]))
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key], torch.zeros(2, 3)])
    optimizer.state[grown] = state
    optimizer.param_groups[0]["params"] = [grown]
    before = grown.detach().clone()
    assert (train(optimizer, [grown], 1)[0] != before).all()
    shrunk = torch.nn.Parameter(grown.detach()[:3].clone())
    optimizer.state[shrunk] = optimizer.state.pop(grown)
    optimizer.param_groups[0]["params"] = [shrunk]
    with pytest.raises(StateError, match="state of '0' does not fit"):
        train(optimizer, [shrunk], 1)


def test_options_by_name_follow_a_name_and_not_an_address() -> None:
    params = weights([(4, 3), (3,)])
    named = zip(("weight", "bias"), params, strict=True)
    optimizer = thalweg.torch.LAMB(named, lr=0.1, overrides=[("bias", dict(lr_scale=0.0))])
    before = train(optimizer, params, 1)
    optimizer.param_groups[0]["param_names"] = ["bias", "weight"]
    assert [*map(torch.equal, train(optimizer, params, 1, first=1), before)] == [True, False]


@pytest.mark.parametrize(
    ("added", "told"),
    [
        (lambda groups: groups[1]["params"][0], "is also"),
        (lambda groups: "text", "must be a tensor, got str"),
        (lambda groups: torch.ones(2, dtype=torch.complex64), "is complex"),
    ],
    ids=["twice", "no tensor", "complex"],
)
def test_groups_that_make_no_sense_are_refused_and_nothing_is_stepped(added: Any, told: str) -> None:
    params = weights(SHAPES)
    optimizer = thalweg.torch.LAMB([{"params": params[:2]}, {"params": params[2:]}])
    before = train(optimizer, params, 1)
    optimizer.param_groups[0]["params"].append(added(optimizer.param_groups))
    with pytest.raises(ParameterError, match=told):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_names_that_were_left_behind_count_for_nothing() -> None:
    """DeepSpeed drops frozen parameters from groups and keeps all names."""
    params = weights(SHAPES)
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer = thalweg.torch.LAMB(named)
    del optimizer.param_groups[0]["params"][1]
    before = values(params)
    assert [*map(torch.equal, train(optimizer, params, 2), before)] == [False, True, False]
    assert list(optimizer.stats()) == ["0", "1"]
    optimizer.load_state_dict(optimizer.state_dict())
    by_name = thalweg.torch.LAMB(named, overrides=[("*.1", dict(lr_scale=0.5))])
    del by_name.param_groups[0]["params"][1]
    with pytest.raises(OptionError, match="need a name for every parameter"):
        by_name.step()


def test_names_that_two_parameters_have_are_refused_at_every_step() -> None:
    params = weights([(3, 2), (3, 2)])
    optimizer = thalweg.torch.SGD(zip(("first", "second"), params, strict=True), lr=0.1)
    optimizer.param_groups[0]["param_names"] = ["first", "first"]
    before = values(params)
    for step in range(2):
        with pytest.raises(ParameterError, match="two parameters are named 'first'"):
            train(optimizer, params, 1, first=step)
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


@ENGINES
def test_parameters_that_an_override_held_alike_come_to_differ(engine: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    overrides = [("b", dict(weight_decay=0.5))]
    named = zip("ab", params, strict=True)
    optimizer = thalweg.torch.SGD(named, lr=1.0, weight_decay=0.5, engine=engine, overrides=overrides)
    for decay in (0.5, 0.5, 0.25):
        optimizer.param_groups[0]["weight_decay"] = decay
        give(params, 0, size=0.0)
        optimizer.step()
    assert [p.tolist() for p in params] == [[0.1875] * 4, [0.125] * 4]


# ---- state


@pytest.mark.parametrize("how", ["strides", "dtype"])
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Kron"])
@ENGINES
def test_replaced_state_is_read_as_what_it_is(rule: str, engine: str, how: str) -> None:
    """On a GPU: tests/gpu/test_torch_cuda.py."""
    ends = []
    for is_changed in (False, True):
        (p,) = weights([(6, 6)], torch.float64)
        optimizer = getattr(thalweg.torch, rule)([p], lr=0.1, engine=engine)
        train(optimizer, [p], 1)
        state = optimizer.state[p]
        key = next(key for key, entry in state.items() if entry.shape == (6, 6))
        state[key] = state[key].bfloat16().double()
        if is_changed:  # the same numbers in another order of memory, or in another dtype
            state[key] = state[key].t().contiguous().t() if how == "strides" else state[key].bfloat16()
        train(optimizer, [p], 1, first=1)
        ends.append(p)
    assert (ends[0] - ends[1]).abs().max() <= FLOAT64 * ends[0].abs().max()
    assert how != "dtype" or state[key].dtype == torch.bfloat16


def test_state_without_memory_is_refused_by_name() -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = thalweg.torch.AdamW(model.named_parameters(), lr=0.1)
    optimizer.make_state()
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer.param_groups[0]["params"][0] = weight
    optimizer.state[weight] = optimizer.state.pop(model.weight)
    weight.grad = torch.ones(2, 3)
    with pytest.raises(StateError, match=r"'weight' is on cpu, and its state 'exp_avg' on meta, without memory"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2, 3))


@ENGINES
@pytest.mark.parametrize("rule", ["SGD", "AdamW", "LAMB", "Adafactor", "Muon", "Kron", "SOAP"])
def test_nothing_keeps_parameters_that_have_left(rule: str, engine: str) -> None:
    stays, *leaves = weights([(8, 4), (8, 4)])
    optimizer = getattr(thalweg.torch, rule)([{"params": [stays]}, {"params": leaves}], lr=0.1, engine=engine)
    train(optimizer, [stays, *leaves], 5)
    optimizer.stats()
    grads = [weakref.ref(p.grad) for p in (stays, *leaves)]
    optimizer.zero_grad()
    gc.collect()
    assert [gradient() for gradient in grads] == [None, None]
    gone = [weakref.ref(leaves[0]), *(weakref.ref(entry) for entry in optimizer.state[leaves[0]].values())]
    del optimizer.param_groups[1], optimizer.state[leaves[0]]
    leaves.clear()
    train(optimizer, [stays], 2, first=5)
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert optimizer.stats().keys() == {optimizer.explain().rows[0].name}


@ENGINES
def test_statistics_tell_the_rate_of_their_step_wherever_a_scheduler_has_moved_it_since(engine: str) -> None:
    params, rate = weights(SHAPES), torch.tensor(0.5)
    optimizer = thalweg.torch.AdamW(params, lr=rate, engine=engine)
    train(optimizer, params, 2)
    rate.fill_(0.25)
    assert [figures["lr"] for figures in optimizer.stats().values()] == [0.5] * len(SHAPES)


def test_parameters_exchanged_before_a_first_step_are_freed() -> None:
    params = weights(SHAPES)
    optimizer, gone = thalweg.torch.LAMB(params, lr=0.1), weakref.ref(params[0])
    optimizer.param_groups[0]["params"] = weights(SHAPES)
    params.clear()
    gc.collect()
    assert gone() is None


# ---- counts of steps: plain numbers are understood, all else is refused


def begin(name: str, engine: str = "auto", steps: int = 3, **options: Any) -> tuple[Any, Any]:
    params = weights([(4, 3), (2, 3)])
    optimizer = getattr(thalweg.torch, name)(params, lr=0.1, engine=engine, **options)
    train(optimizer, params, steps)
    return params, optimizer


def refused(params: Any, optimizer: Any, words: str, error: type[Exception] = StateError) -> None:
    """Fail unless a step is refused with these words, and changes no parameter."""
    before = values(params)
    with pytest.raises(error, match=words):
        train(optimizer, params, 1)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize(
    ("name", "engine", "count"),
    [
        *((name, "auto", 7) for name in thalweg.rules.RULES),
        *(
            ("AdamW", engine, count)
            for engine in ("auto", "reference", "foreach")
            for count in (0, 2.0, torch.tensor(7), torch.tensor([2.0]))
        ),
    ],
    ids=repr,
)
def test_a_count_is_understood_at_a_later_step(name: str, engine: str, count: Any) -> None:
    params, optimizer = begin(name, engine)
    others, expected = begin(name, engine)
    for p, q in zip(params, others, strict=True):
        optimizer.state[p]["step"] = count
        expected.state[q]["step"].fill_(float(count))
    assert all(map(torch.equal, train(optimizer, params, 2, first=3), train(expected, others, 2, first=3)))
    for p in params:
        found = optimizer.state[p]["step"]
        assert (found.dtype, found.shape, float(found)) == (torch.float32, (), float(count) + 2)


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "auto") for name in thalweg.rules.RULES), ("AdamW", "reference"), ("AdamW", "foreach")],
)
def test_a_count_without_the_rest_of_the_state_is_refused(name: str, engine: str) -> None:
    params, optimizer = begin(name, engine, steps=0, **({"momentum": 0.9} if name == "SGD" else {}))
    optimizer.state[params[1]]["step"] = 0
    refused(params, optimizer, r"the state of '1' does not fit its options.* clear_state\(\)")
    assert dict(optimizer.state) == {params[1]: {"step": 0}}
    optimizer.clear_state()
    train(optimizer, params, 1)


@ENGINES
@pytest.mark.parametrize("count", [-1, 2.5, float("nan"), float("inf"), True, "3", None, torch.zeros(2)], ids=repr)
def test_what_is_no_count_is_refused_and_nothing_changes(engine: str, count: Any) -> None:
    params, optimizer = begin("AdamW", engine)
    optimizer.state[params[1]]["step"] = count
    refused(params, optimizer, r"state\['step'\] of '1' must be a whole number >= 0, got")
    assert optimizer.state[params[0]]["step"] == 3
    assert optimizer.state[params[1]]["step"] is count


def test_a_count_is_understood_before_the_first_step_saved_and_without_a_gradient() -> None:
    params, optimizer = begin("SGD", steps=0)
    for p in params:  # it is all of the state
        optimizer.state[p]["step"] = 0
    assert thalweg.torch.export_state(optimizer)["state"]["0"]["step"] == 0
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, params, 1)
    assert all(map(torch.equal, params, begin("SGD", steps=1)[0]))
    optimizer.state[params[1]]["step"], params[1].grad = 0, None
    optimizer.make_state()
    optimizer.state[params[1]]["step"] = 0
    train(optimizer, params[:1], 3)
    train(optimizer, params, 1)
    assert [int(optimizer.state[p]["step"]) for p in params] == [5, 1]


@ENGINES
def test_state_of_one_number_for_several_elements_is_refused(engine: str) -> None:
    """As expand() makes it: a step writes it in place."""
    params, optimizer = begin("AdamW", engine)
    optimizer.state[params[1]]["exp_avg"] = torch.ones(1).expand(2, 3)
    refused(params, optimizer, r"'exp_avg' of '1' has one number in memory .*assign a clone")


def test_a_function_in_a_group_is_refused_at_the_next_step() -> None:
    """No checkpoint could hold it."""
    params, optimizer = begin("AdamW")
    optimizer.param_groups[0]["weight_decay"] = lambda t: 0.1
    refused(params, optimizer, "weight_decay cannot be a function in torch", OptionError)


@ENGINES
def test_steps_of_single_parameters_follow_groups_that_change_between_them(engine: str) -> None:
    params = weights(SHAPES)
    optimizer = thalweg.torch.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.0}], lr=0.1, engine=engine)
    give(params, 0)
    optimizer.step_parameter(params[0])
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    before = values(params)
    optimizer.step_parameter(params[1])
    groups[1]["lr"] = 0.1
    optimizer.step_parameter(params[2])
    assert [*map(torch.equal, params, before)] == [True, True, False]
