"""What users write into state: counts of steps as plain numbers are understood, all else is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.check.problem import train, values, weights  # noqa: E402
from thalweg.errors import StateError  # noqa: E402

every_engine = pytest.mark.parametrize("engine", ["auto", "reference", "foreach"])


def begin(name: str, engine: str = "auto", steps: int = 3, **options: Any) -> tuple[Any, Any]:
    params = weights([(4, 3), (2, 3)])
    optimizer = getattr(thalweg.torch, name)(params, lr=0.1, engine=engine, **options)
    train(optimizer, params, steps)
    return params, optimizer


def refused(params: Any, optimizer: Any, words: str) -> None:
    """Fail unless a step is refused with these words, and changes no parameter."""
    before = values(params)
    with pytest.raises(StateError, match=words):
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


@every_engine
def test_a_count_is_understood_before_the_first_step_where_it_is_all_of_the_state(engine: str) -> None:
    params, optimizer = begin("SGD", engine, steps=0)
    for p in params:
        optimizer.state[p]["step"] = 0
    train(optimizer, params, 1)
    assert all(map(torch.equal, params, begin("SGD", engine, steps=1)[0]))


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


@every_engine
@pytest.mark.parametrize("count", [-1, 2.5, float("nan"), float("inf"), True, "3", None, torch.zeros(2)], ids=repr)
def test_what_is_no_count_is_refused_and_nothing_changes(engine: str, count: Any) -> None:
    params, optimizer = begin("AdamW", engine)
    optimizer.state[params[1]]["step"] = count
    refused(params, optimizer, r"state\['step'\] of '1' must be a whole number >= 0, or a tensor of one")
    assert optimizer.state[params[0]]["step"] == 3
    assert optimizer.state[params[1]]["step"] is count


def test_a_count_of_a_parameter_without_a_gradient() -> None:
    params, optimizer = begin("AdamW")
    optimizer.state[params[1]]["step"], params[1].grad = 0, None
    train(optimizer, params[:1], 3)
    assert isinstance(optimizer.state[params[1]]["step"], torch.Tensor)
    train(optimizer, params, 1)
    assert [int(optimizer.state[p]["step"]) for p in params] == [7, 1]


def test_a_count_is_saved_and_loaded() -> None:
    params, optimizer = begin("LAMB")
    optimizer.state[params[0]]["step"] = 1
    assert thalweg.torch.export_state(optimizer)["state"]["0"]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert [float(optimizer.state[p]["step"]) for p in params] == [1.0, 3.0]


@every_engine
def test_state_of_one_number_for_several_elements_is_refused(engine: str) -> None:
    """As expand() makes it: a step writes it in place."""
    params, optimizer = begin("AdamW", engine)
    optimizer.state[params[1]]["exp_avg"] = torch.ones(1).expand(2, 3)
    refused(params, optimizer, r"'exp_avg' of '1' has one number in memory .*assign a clone")
