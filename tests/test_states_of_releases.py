"""States that released versions saved are loaded for ever, in every front end, and training goes on as it would have.

``tests/data/VERSION`` is what tools/states.py wrote when the version was released.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import ONE_STEP_FLOAT64

import thalweg.numpy
from thalweg.errors import ResumeWarning
from thalweg.numpy.checkpoints import read_file
from thalweg.rules import RULES

DATA = Path(__file__).parent / "data"
STATES = sorted(path for path in DATA.glob("*/*.npz") if path.name != "run.npz")
saved = pytest.mark.parametrize("path", STATES, ids=lambda path: f"{path.stem} of {path.parent.name}")


def case(path: Path) -> tuple[str, dict[str, Any]]:
    """The name of a state's rule, and all options with which it was made."""
    told = json.loads(path.with_name("options.json").read_text())[path.stem]
    return told["rule"], {key: tuple(v) if isinstance(v, list) else v for key, v in told["options"].items()}


def of_the_run(path: Path, what: str) -> dict[str, Any]:
    """Arrays of the run of this state; 0.1.0 has the same gradients for all."""
    with np.load(path.with_name("run.npz"), allow_pickle=False) as run:
        own = [key for key in run.files if key.startswith((f"{path.stem}.{what}.", f"{what}."))]
        return {key.rpartition(".")[2]: run[key] for key in own}


def check_after(path: Path, params: dict[str, Any]) -> None:
    before, after = (of_the_run(path, what) for what in ("before", "after"))
    for name, expected in after.items():
        moved = np.abs(expected - before[name]).max()
        assert moved > 0
        assert np.abs(np.asarray(params[name]) - expected).max() <= ONE_STEP_FLOAT64 * max(moved, 1), name


def test_each_release_has_states_of_its_rules_and_says_their_layout() -> None:
    assert {path.parent.name for path in STATES} == {"0.1.0", "0.2.0"}
    assert {case(path)[0] for path in STATES if path.parent.name == "0.2.0"} == {*RULES} - {"SOAP", "AdEMAMix", "MARS"}
    assert all(read_file(path)["layout"] == 1 for path in STATES)


@saved
def test_numpy_goes_on(path: Path) -> None:
    params, (rule, options) = of_the_run(path, "before"), case(path)
    optimizer = getattr(thalweg.numpy, rule)(lr=0.01, **options)
    optimizer.load(path)
    optimizer.step(params, of_the_run(path, "gradient"))
    check_after(path, params)


@pytest.mark.parametrize("name", ["LAMB", "Kron"])
def test_a_default_that_has_changed_is_told(name: str) -> None:
    optimizer = getattr(thalweg.numpy, name)(lr=0.01)
    with pytest.warns(ResumeWarning, match=f"variant='{RULES[name].first_default}'"):
        optimizer.load(DATA / "0.1.0" / f"{name}.npz")


@saved
@pytest.mark.parametrize("form", ["npz", "pt"])
def test_torch_goes_on(path: Path, form: str) -> None:
    torch = pytest.importorskip("torch")
    front_end = pytest.importorskip("thalweg.torch")
    params = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in of_the_run(path, "before").items()}
    rule, options = case(path)
    optimizer = getattr(front_end, rule)(params.items(), lr=0.01, engine="reference", **options)
    if form == "npz":
        front_end.import_state(optimizer, read_file(path))
    else:
        optimizer.load_state_dict(torch.load(path.with_suffix(".pt"), weights_only=True))
    for name, g in of_the_run(path, "gradient").items():
        params[name].grad = torch.tensor(g)
    optimizer.step()
    check_after(path, {name: p.detach().numpy() for name, p in params.items()})


@pytest.mark.slow
@saved
def test_optax_goes_on(path: Path) -> None:
    jax = pytest.importorskip("jax")
    front_end = pytest.importorskip("thalweg.optax")
    optax = pytest.importorskip("optax")
    with jax.enable_x64(True):
        params = {name: jax.numpy.asarray(p) for name, p in of_the_run(path, "before").items()}
        rule, options = case(path)
        solver = front_end.transformation(RULES[rule], learning_rate=0.01, **options)
        changed = path.parent.name == "0.1.0" and RULES[rule].first_default is not None
        with pytest.warns(ResumeWarning, match="0.1.0") if changed else contextlib.nullcontext():
            state = front_end.import_state(jax.jit(solver.init)(params), params, read_file(path))
        updates, _ = jax.jit(solver.update)(of_the_run(path, "gradient"), state, params)
        check_after(path, optax.apply_updates(params, updates))
