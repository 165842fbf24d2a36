"""A rule of one's own: a frozen dataclass anywhere, of which every front end makes an optimizer."""

from __future__ import annotations

import abc
import copy
import importlib
import inspect
import math
import pickle
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agree import agree, draw, draw_gradients
from own_rules import Signed, Turned

import thalweg.numpy
from thalweg import Rule, Update
from thalweg.errors import OptionError, StateError
from thalweg.plan import plan
from thalweg.rules import RULES
from thalweg.show.arguments import Given

# ---- classes


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_a_class_shows_the_options_of_its_rule(front_end: str) -> None:
    module = pytest.importorskip(f"thalweg.{front_end}")
    made = module.optimizer(Signed)
    assert made is module.optimizer(Signed) is pickle.loads(pickle.dumps(made))
    assert (made.__name__, made.__doc__) == ("Signed", "The sign of an average of gradients.")
    shown = inspect.signature(made).parameters
    assert {"beta": 0.9, "signed": True, "maximize": False}.items() <= {k: p.default for k, p in shown.items()}.items()
    assert shown["signed"].annotation is bool
    assert shown["lr"].default is inspect.Parameter.empty
    assert inspect.signature(module.optimizer(Turned)).parameters["lr"].default == 0.5


def test_classes_of_ours_are_made_by_the_same_call() -> None:
    for name, rule in RULES.items():
        assert thalweg.numpy.optimizer(rule) is getattr(thalweg.numpy, name)


def test_a_learning_rate_is_needed_where_the_rule_has_none() -> None:
    with pytest.raises(OptionError, match="Signed needs a learning rate: give lr a number"):
        thalweg.numpy.optimizer(Signed)()
    assert thalweg.numpy.optimizer(Turned)().lr == 0.5


def test_options_are_checked_as_ours_are() -> None:
    with pytest.raises(OptionError, match="Signed has no option 'betta': did you mean 'beta'"):
        thalweg.numpy.optimizer(Signed)(0.1, betta=0.5)
    with pytest.raises(OptionError, match="signed cannot be a function of the step"):
        thalweg.numpy.optimizer(Signed)(0.1, signed=lambda t: True)


@dataclass(frozen=True, kw_only=True)
class BySize(Rule):
    """Plain descent, in steps a quarter as long for tensors of more than ten numbers."""

    share: float = 1.0

    def for_shape(self, shape: Any) -> Any:
        return replace(self, share=self.share / 4) if math.prod(shape) > 10 else self

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        return Update(g * (-lr * lr_scale * self.share), {})


# ---- steps


@pytest.mark.parametrize("engine", ["torch lists", "torch native", "optax update"])
def test_a_rule_of_which_no_fused_code_can_be_made_steps_as_the_reference(engine: str) -> None:
    options: dict[str, Any] = dict(lr=0.1, weight_decay=0.1, signed=False)
    overrides = [("b", dict(beta=0.5, lr_scale=0.25))]
    agree(engine, Turned, {"w": (3, 4), "b": (5,)}, "float64", overrides=overrides, **options)


def test_its_state_in_jax_is_pickled_and_goes_to_another_front_end() -> None:
    optax = pytest.importorskip("thalweg.optax")
    params = {"w": np.ones((3, 4))}
    solver = optax.transformation(Signed, learning_rate=0.1)
    _, state = solver.update(params, solver.init(params), params)
    again = pickle.loads(pickle.dumps(state))
    assert type(again) is type(state)
    exported = optax.export_state(again, params)
    assert (exported["optimizer"], exported["version"]) == ("Signed", 1)
    other = thalweg.numpy.optimizer(Signed)(0.1)
    other.load_state_dict(exported)
    assert (other.state["w"]["exp_avg"] == np.asarray(state.exp_avg["w"])).all()


BY_SIZE = {"small": (2, 3), "large": (20, 3), "last": (3, 2)}


@pytest.mark.parametrize("engine", ["numpy native", "torch lists", "optax update"])
def test_options_by_size(engine: str) -> None:
    """``for_shape`` is asked for each shape, and not for the first of those that have as many axes."""
    params, ones = ({name: np.full(shape, x) for name, shape in BY_SIZE.items()} for x in (0.0, 1.0))
    thalweg.numpy.optimizer(BySize)(0.5, engine="reference").step(params, ones)
    assert [set(p.flat) for p in params.values()] == [{-0.5}, {-0.125}, {-0.5}]
    agree(engine, BySize, BY_SIZE, lr=0.5)


@pytest.mark.parametrize("engine", ["foreach", "auto"])
def test_an_option_that_changes_is_followed_for_each_size(engine: str) -> None:
    torch = pytest.importorskip("torch")
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in BY_SIZE.items()}
    optimizer = pytest.importorskip("thalweg.torch").optimizer(BySize)(params.items(), 0.25, engine=engine)
    for share in (1.0, 3.0):
        optimizer.param_groups[0]["share"] = share
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [set(p.flatten().tolist()) for p in params.values()] == [{-1.0}, {-0.25}, {-1.0}]


# ---- copies and checkpoints


def test_copies_and_pickles_find_the_class_again() -> None:
    made = thalweg.numpy.optimizer(Signed)
    assert pickle.loads(pickle.dumps(made)) is made
    optimizer = made(0.1, beta=0.5)
    optimizer.step({"p": np.ones(2)}, {"p": np.ones(2)})
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(other) is made
        assert other.stats().keys() == optimizer.stats().keys()

    class Derived(made, abc.ABC):  # type: ignore[misc, valid-type]
        """Which may be abstract."""

    with pytest.raises((pickle.PicklingError, AttributeError), match="Derived"):  # not one that is local to a function
        pickle.dumps(Derived)


def of_version(version: int) -> type[Rule]:
    """As if the author had set it in the source."""
    kind: Any = dataclass(frozen=True, kw_only=True)(type("Signed", (Signed,), {"version": version}))
    return kind


def stepped(front_end: str, kind: type[Rule]) -> Any:
    """An optimizer after a step."""
    made, p = pytest.importorskip(f"thalweg.{front_end}").optimizer(kind), np.ones(2)
    if front_end == "numpy":
        optimizer = made(0.1)
        optimizer.step({"p": p}, {"p": p})
    else:
        torch = pytest.importorskip("torch")
        parameter = torch.nn.Parameter(torch.from_numpy(p))
        parameter.grad = torch.ones_like(parameter)
        optimizer = made([parameter], 0.1)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_a_state_of_another_version_or_rule_is_refused_and_one_without_is_of_the_first(front_end: str) -> None:
    first, second, other = (stepped(front_end, kind) for kind in (of_version(1), of_version(2), RULES["LARS"]))
    before = str(first.state_dict())
    for saved, words in ((second, "version 2 of Signed and cannot be loaded into version 1"), (other, "state of LARS")):
        with pytest.raises(StateError, match=words):
            first.load_state_dict(saved.state_dict())
        assert str(first.state_dict()) == before
    stepped(front_end, of_version(2)).load_state_dict(second.state_dict())
    saved = other.state_dict()
    for place in saved.get("param_groups", [saved]):
        assert place.pop("rule_version" if front_end == "torch" else "version") == 1
    stepped(front_end, RULES["LARS"]).load_state_dict(saved)


# ---- the command line, which takes a class, or ``module:MyRule`` of the current folder too


@pytest.mark.parametrize("rule", [Signed, Turned])
def test_plan_takes_a_class_and_a_rank_has_its_share(rule: type[Rule]) -> None:
    module, elements = pytest.importorskip("torch").nn.Linear(40, 60), 60 * 40 + 60
    (cost,), (rank,) = (plan(module, optimizers=[rule], world=world).optimizers for world in (1, 2))
    assert (cost.state_bytes, rank.state_bytes) == (4 * elements + 4 * 2, 4 * elements // 2 + 4 * 2)
    assert cost.moved_bytes >= 20 * elements  # reads p, g and m, and writes p and m
    assert [row.state_bytes for row in cost.explanation.rows] == [4 * 2400 + 4, 4 * 60 + 4]
    assert rule.__name__ not in [each.optimizer for each in plan(module).optimizers]  # nobody else asked for it


def test_a_rule_that_is_called_like_one_of_the_package_has_its_module_in_front() -> None:
    rule = type("LAMB", (Signed,), {"__module__": "mine"})
    options = [Given("lamb", "momentum_dtype", "bfloat16"), Given("mine:LAMB", "signed", False)]
    model = pytest.importorskip("torch").nn.Linear(40, 60)
    costs = plan(model, optimizers=["lamb", rule, rule], options=options).optimizers
    assert [cost.optimizer for cost in costs] == ["LAMB", "mine:LAMB"]


@pytest.fixture
def spelt(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder that has a rule."""
    pytest.importorskip("click")
    source = inspect.getsource(Signed).replace("class Signed", "class Spelt")
    head = "from dataclasses import dataclass\nfrom typing import Any\nfrom thalweg import *\n\n\n"
    (tmp_path / "spelt_rules.py").write_text(head + source)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("spelt")
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("plan gpt2 --optimizers spelt_rules:Spelt,lamb --option spelt_rules:Spelt.beta=0.5 --json", 0, "Spelt"),
        ("race --optimizers spelt_rules:Spelt --steps 2 --seeds 1 --option lr=0.1 --json", 0, "spelt_rules.Spelt"),
        (
            "plan gpt2 --optimizers spelt_rules:Spelled",
            2,
            "module 'spelt_rules' has no 'Spelled': did you mean 'Spelt'?",
        ),
        ("plan gpt2 --optimizers spelt_rules:Moment", 2, "it must be a rule, or a function that takes a model"),
    ],
)
def test_verbs_take_a_rule_of_the_current_folder(
    line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if line.startswith("plan"):
        pytest.importorskip("torch")
    from thalweg.cli import run

    assert run(line.split()) == code
    shown = capsys.readouterr()
    assert message in (shown.err if code else shown.out)


# ---- whole tensors


@pytest.fixture(scope="module")
def shampoo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The rule that the docs write down, in a file of a user's."""
    page = (Path(__file__).parents[1] / "docs" / "own_rule.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Shampoo" in block)
    assert code.count("\n") < 60
    file = tmp_path_factory.mktemp("own") / "shampoo_of_the_docs.py"
    file.write_text(f"from dataclasses import dataclass\nimport thalweg\nfrom thalweg import Update\n{code}")
    sys.path.insert(0, str(file.parent))
    yield importlib.import_module(file.stem).Shampoo
    sys.path.remove(str(file.parent))


def step_as_published(p: np.ndarray, grads: Sequence[np.ndarray], eps: float, lr: float, every: int) -> np.ndarray:
    """Shampoo (Gupta et al. 2018), Algorithm 1, for a matrix or a vector."""

    def inverse_root(x: np.ndarray, power: int) -> np.ndarray:
        values, q = np.linalg.eigh(x)
        return (q * values ** (-1 / power)) @ q.T

    p = p.reshape(len(p), -1)
    left, right = (eps * np.eye(n) for n in p.shape)
    for t, g in enumerate(grads):
        g = g.reshape(p.shape)
        left, right = left + g @ g.T, right + g.T @ g
        if t % every == 0:
            has_right = p.shape[1] > 1
            before = inverse_root(left, 4 if has_right else 2)
            after = inverse_root(right, 4) if has_right else np.eye(1)
        p = p - lr * before @ g @ after
    return p


SHAMPOO: dict[str, Any] = dict(a=(6, 4), b=(6, 4), wide=(3, 7), filter=(3, 2, 2, 2), vector=(5,))


@pytest.mark.parametrize("every", [1, 3])
def test_shampoo_of_the_docs_is_the_published_one(shampoo: Any, every: int) -> None:
    params = draw(SHAMPOO, "float64")
    first, steps = {name: p.copy() for name, p in params.items()}, draw_gradients(SHAMPOO, "float64", 4)
    optimizer = thalweg.numpy.optimizer(shampoo)(0.1, eps=0.1, refresh_every=every)
    for grads in steps:
        optimizer.step(params, grads)
    for name, shape in SHAMPOO.items():
        published = step_as_published(first[name], [grads[name] for grads in steps], 0.1, 0.1, every).reshape(shape)
        # eigenvalues from 0.1 to some 300, in float64
        np.testing.assert_allclose(params[name], published, rtol=0, atol=1e-11)


@pytest.mark.parametrize("engine", ["torch reference", "torch lists", "torch native", "optax update"])
def test_shampoo_of_the_docs_is_stepped_by_every_front_end(shampoo: Any, engine: str) -> None:
    agree(engine, shampoo, SHAMPOO, "float64", lr=0.1, eps=0.1, refresh_every=2)
