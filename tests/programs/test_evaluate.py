"""A traced rule that is run round by round computes what the rule itself computes, and holds no value too long."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import SPACE  # noqa: E402

from thalweg.errors import RuleError  # noqa: E402
from thalweg.programs.evaluate import order_for, update_by  # noqa: E402
from thalweg.rules import LAMB, LARS, Adafactor, Kron, Rule, Update  # noqa: E402
from thalweg.spaces.foreach import PerTensor, TensorList  # noqa: E402
from thalweg.spaces.sharded import Part, Sharded  # noqa: E402

RULES: list[tuple[Rule, Any]] = [
    (LARS(momentum=0.9, weight_decay=0.1), 0.1),
    (LARS(trust=False), 0.1),
    (LAMB(weight_decay=0.1), 0.1),
    (LAMB(weight_decay=0.1, stacked_axes=1), 0.1),
    (LAMB(weight_decay=torch.tensor(0.1, dtype=torch.float64)), torch.tensor(0.1, dtype=torch.float64)),
    (LAMB(trust_clip=(0.0, 10.0), phi=(0.5, 2.0)), 0.1),
    (Adafactor(min_dim_size_to_factor=2, momentum=0.9, weight_decay=0.1), None),
    (Adafactor(min_dim_size_to_factor=2, stacked_axes=1, relative_step=True), 0.1),
    (Adafactor(factored=False, beta2_cap=0.99), None),
]


def drawn(shape: tuple[int, ...], seed: int) -> Any:
    made = torch.Generator().manual_seed(seed)
    return TensorList([torch.randn(shape, dtype=torch.float64, generator=made) for _ in range(2)])


def space_of(shape: tuple[int, ...]) -> Sharded:
    """Of two tensors that this rank holds as a whole."""
    return Sharded([Part(shape, (0,) * len(shape), ((),) * len(shape))] * 2)


def run(
    rule: Rule, xp: Sharded, given: dict[str, Any], shape: tuple[int, ...], watch: Callable[[], None] = lambda: None
) -> tuple[Update, int]:
    """What a rule's program answers, and in how many rounds."""
    rounds = 0

    def complete(partials: Sequence[Any]) -> Generator[Any, Any, Sequence[Any]]:
        nonlocal rounds
        rounds += 1
        watch()
        yield
        return [partial.complete(iter([figure for figure, _ in partial.asked])) for partial in partials]

    keys = [key for key in given if key not in ("p", "g", "t", "lr", "lr_scale")]
    order = order_for(rule, rule, keys, shape, with_lr=given["lr"] is not None)
    running = update_by(rule, order, xp, given, complete)
    try:
        while True:
            next(running)
    except StopIteration as end:
        return end.value, rounds


def tensors_of(value: Any) -> list[Any]:
    if isinstance(value, PerTensor):
        return list(value.values.unbind())
    return list(value.tensors) if isinstance(value, TensorList) else [torch.as_tensor(value)] * 2


@pytest.mark.parametrize(("rule", "lr"), RULES, ids=lambda case: str(case)[:50])
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 5), (2, 7)])
def test_it_computes_what_the_rule_computes(rule: Rule, lr: Any, shape: tuple[int, ...]) -> None:
    xp, p, g = space_of(shape), drawn(shape, 1), drawn(shape, 2)
    state: Any = rule.init(xp, p)  # type: ignore[arg-type]
    for t in range(1, 4):
        wanted = rule.update(xp, g, state, p, t=t, lr=lr, lr_scale=0.5)  # type: ignore[arg-type]
        given = {"p": p, "g": g, **state, "t": t, "lr": lr, "lr_scale": 0.5}
        found, needed = run(rule, xp, given, shape)
        assert needed == (2 if isinstance(rule, Adafactor) and rule.factored_axes(shape) else 1)
        assert list(found.state) == list(wanted.state)
        assert list(found.stats) == list(wanted.stats)
        for mine, theirs in [
            (found.delta, wanted.delta),
            (found.finite, wanted.finite),
            *((found.state[key], entry) for key, entry in wanted.state.items()),
            *((found.stats[key], entry) for key, entry in wanted.stats.items()),
        ]:
            for one, other in zip(tensors_of(mine), tensors_of(theirs), strict=True):
                size = other.double().abs().max()
                assert (one.double().squeeze() - other.double().squeeze()).abs().max() <= SPACE["float64"] * size
                if isinstance(rule, LAMB | LARS):  # the same operations, in the same order
                    assert torch.equal(one.squeeze(), other.squeeze())
        state, g = wanted.state, drawn(shape, t + 2)


def test_a_value_is_let_go_after_its_last_use() -> None:
    shape, seen = (4, 6), []
    xp, rule = space_of(shape), LAMB()
    given = {"p": drawn(shape, 1), "g": drawn(shape, 2), "t": 1, "lr": 0.1, "lr_scale": 1.0}
    given.update(rule.init(xp, given["p"]))  # type: ignore[arg-type]
    gradient, parameter = (weakref.ref(given[name]) for name in ("g", "p"))
    run(rule, xp, given, shape, lambda: seen.append((gradient() is None, parameter() is None)))
    assert seen == [(True, True)]  # sums of squares are made; nothing else needs them
    assert not given


def test_what_cannot_be_traced_is_told() -> None:
    kron = Kron()
    with pytest.raises(RuleError, match=r"Kron.*xp\.reshape"):
        order_for(kron, kron, tuple(kron.entries((4, 6))), (4, 6), with_lr=True)
