"""States that lie, given to front ends that load or continue them: written as JSON, arrays by shape, dtype and value.

An array of a shape that lies takes no memory here, since it is one number seen many times; who copies it takes it all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import torch
from hostile_files import Kind, as_json, optimizer

import thalweg.optax
import thalweg.torch
from thalweg.errors import StateError

SHAPES = {"a": (3, 2), "b": (4,)}
LEAF = ("chain", "0", "fields", "mu", "a")
GROUP = ("param_groups", "0")
#: Of an array that numpy's front end is given: it copies what it is given, before it can know parameters.
MOST_ELEMENTS = 2**20
#: Large enough to be kept in eight bits.
LARGE = {"c": (64, 64)}
NOTHING = dict(shape=[0], dtype="float32", value=1)
#: Arrays that would take a gigabyte, or that are of no use.
WIDE = [dict(shape=[2**27], dtype="float64", value=1), dict(shape=[2**14, 2**14], dtype="float32", value=1)]
WIDE += [dict(shape=[3, 2], dtype="int8", value=1), dict(shape=[3, 2], dtype="bool", value=1)]


def plain(value: Any) -> Any:
    """A state as JSON can have it."""
    if hasattr(value, "_fields"):
        return {"kind": type(value).__name__, "fields": plain(value._asdict())}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {"chain": [plain(each) for each in value]} if isinstance(value, tuple) else list(map(plain, value))
    if hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": dtype, "value": 1}
    return value


def of_numpy(shape: Any, dtype: str, value: Any) -> Any:
    return np.broadcast_to(np.asarray(value, dtype), shape)


def in_memory(shape: Any, dtype: str, value: Any) -> Any:
    """An array that is to be copied: as large as one that somebody has in memory may be."""
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError("nobody has such an array")
    return of_numpy(shape, dtype, value)


def of_torch(shape: Any, dtype: str, value: Any) -> Any:
    return torch.tensor(value, dtype=getattr(torch, dtype)).expand(shape)


def state_in(content: Any, array: Callable[..., Any]) -> Any:
    """The state that JSON tells of."""
    if isinstance(content, list):
        return [state_in(each, array) for each in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {"shape", "dtype", "value"}:
        return array(**content)
    if content.keys() == {"chain"}:
        return tuple(state_in(each, array) for each in content["chain"])
    if content.keys() == {"kind", "fields"}:
        return getattr(optax, content["kind"])(**state_in(content["fields"], array))
    return {int(key) if key.isdigit() else key: state_in(each, array) for key, each in content.items()}


def reader(array: Callable[..., Any], load: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        try:
            state = state_in(json.loads(path.read_bytes()), array)
        except Exception as error:  # no state at all
            raise StateError(str(error) or "not a state") from error
        return load(state)

    return read


def parameters(**more: tuple[int, ...]) -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in {**SHAPES, **more}.items()]


def coded(named: Any) -> Any:
    return thalweg.torch.LAMB(named, lr=0.1, state_dtype="int8")


def stepped(make: Callable[..., Any], *, shapes: Any = None, **options: Any) -> Any:
    """The state of an optimizer of torch after a step."""
    named = parameters(**shapes or {})
    made = make(named, **options)
    for _, p in named:
        p.grad = torch.ones_like(p)
    made.step()
    return made.state_dict()


def peer_state() -> Any:
    """Of optax.adamw after a step, as a checkpoint of numpy arrays has it."""
    params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    theirs = optax.adamw(0.1)
    return theirs.update(params, theirs.init(params), params)[1]


def bombs_of_states(kinds: dict[str, Kind]) -> dict[str, tuple[bytes, str]]:
    """Small states that would take much, or whose errors once were not ours, each with what is to be said of it."""

    def changed(name: str, *path: str, to: Any) -> bytes:
        whole = json.loads(json.dumps(kinds[name].says))
        inner = whole
        for key in path[:-1]:
            inner = inner[int(key) if isinstance(inner, list) else key]
        inner[path[-1]] = to
        return as_json(whole)

    return {
        "step/own.torch.json": (changed("own.torch.json", "state", "0", "step", to=WIDE[0]), "does not fit"),
        "wide/adamw.torch.json": (changed("adamw.torch.json", "state", "0", "exp_avg", to=WIDE[0]), "does not fit"),
        "groups/adamw.torch.json": (changed("adamw.torch.json", "param_groups", to=3), "must be mappings in a list"),
        "group/own.torch.json": (changed("own.torch.json", "param_groups", to=[3]), "must be mappings in a list"),
        "layout/own.torch.json": (changed("own.torch.json", "param_groups", "0", "layout", to="new"), "layout 'new'"),
        "names/sgd.torch.json": (
            changed("sgd.torch.json", *GROUP, "param_names", to=WIDE[0]),
            "must be lists of names",
        ),
        "option/sgd.torch.json": (changed("sgd.torch.json", *GROUP, "weight_decay", to=NOTHING), "must be one number"),
        "rule/own.torch.json": (changed("own.torch.json", *GROUP, "rule", to=10**30), "must be the name of one"),
        "leaf/adamw.optax.json": (changed("adamw.optax.json", *LEAF, to="much"), "is damaged"),
    }


def states() -> dict[str, Kind]:
    """Kinds of states, by the names of their files."""
    params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    torch_states: list[tuple[str, Any, Callable[..., Any]]] = [
        ("adamw", stepped(torch.optim.AdamW), lambda: thalweg.torch.AdamW(parameters())),
        ("sgd", stepped(torch.optim.SGD, momentum=0.9), lambda: thalweg.torch.SGD(parameters(), lr=0.1, momentum=0.9)),
        (
            "adafactor",
            stepped(torch.optim.Adafactor),
            lambda: thalweg.torch.Adafactor(parameters(), lr=0.01, variant="torch"),
        ),
    ]
    found = [
        Kind(
            f"{name}.torch.json",
            plain(saved),
            as_json,
            reader(of_torch, lambda state, make=make: thalweg.torch.import_peer(make(), state)),
            WIDE,
        )
        for name, saved, make in torch_states
    ]
    found += [
        Kind(
            "own.torch.json",
            plain(stepped(coded, shapes=LARGE)),
            as_json,
            reader(of_torch, lambda state: coded(parameters(**LARGE)).load_state_dict(state)),
            WIDE,
        ),
        Kind(
            "own.numpy.json",
            plain(optimizer().state_dict()),
            as_json,
            reader(in_memory, lambda state: optimizer().load_state_dict(state)),
        ),
        Kind(
            "adamw.optax.json",
            plain(peer_state()),
            as_json,
            reader(of_numpy, lambda state: thalweg.optax.import_peer(thalweg.optax.adamw(0.1), params, state)),
            WIDE,
        ),
    ]
    return {kind.name: kind for kind in found}
