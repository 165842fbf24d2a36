"""What the word MODEL may mean: a built-in name, files, a configuration, a list of shapes, or a factory."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError
from thalweg.plan.configurations import from_configuration
from thalweg.plan.factories import built
from thalweg.plan.headers import files_in, indexed, is_shape, read_safetensors
from thalweg.plan.models import BUILTIN, Model, Tensor, builtin, spelt
from thalweg.show.dtypes import known_dtype, listed_dtypes, spelt_dtype
from thalweg.show.lists import suggestion

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
#: A model's name on a hub: its owner's name and its own.
ON_A_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def resolve(text: str, dtype: str | None = None, frozen: Sequence[str] = ()) -> Model:
    """The model that is meant. ``dtype``: that of its parameters, whatever the source says.

    frozen: patterns of the names of parameters that are not trained, such as ``*.embed*``.

    >>> resolve("llama-1b").parameters
    1235814400
    """
    return prepared(found(text), dtype, frozen)


def prepared(model: Model, dtype: str | None = None, frozen: Sequence[str] = ()) -> Model:
    """A model with parameters of a dtype that can be trained in, but for those that are frozen."""
    model = model.freezing(frozen)
    if dtype is not None:
        return model.stored_as(known_dtype(dtype))
    for tensor in model.tensors:
        if tensor.dtype not in DTYPES:
            raise CommandError(
                f"{model.name}: the tensor {tensor.name!r} has dtype {tensor.dtype}, which cannot be trained: set "
                "another with --dtype, or mark the tensor as not trained with --frozen"
            )
    return model


def found(text: str) -> Model:
    if spelt(text) in BUILTIN:
        return builtin(text)
    path = Path(text)
    if path.is_dir():
        return in_folder(path)
    if path.is_file():
        return in_file(path)
    if ":" in text and not text.endswith((".safetensors", ".json")):
        return built(text)
    if is_on_a_hub(text):
        raise CommandError(told_of_hubs(text))
    if path.suffix or len(path.parts) > 1:
        raise CommandError(f"there is no file or folder {text}")
    hint = suggestion(text, BUILTIN)
    stop = "" if hint.endswith("?") else "."
    raise CommandError(
        f"there is no model {text!r}: {hint}{stop} MODEL may also be a .safetensors file, a folder of them, a "
        "config.json, a JSON of shapes, or module:factory"
    )


def is_on_a_hub(text: str) -> bool:
    """Whether it looks like a model's name on a hub, and not like a path that is misspelt."""
    path = Path(text)
    known = (*PICKLES, ".safetensors", ".json")
    return ON_A_HUB.fullmatch(text) is not None and path.suffix not in known and not path.parent.is_dir()


def told_of_hubs(text: str) -> str:
    """What to give instead of a name on a hub, as commands to type."""
    name = text.partition("/")[2]
    ways = f"`hf download {text} config.json --local-dir {name}`, then `thalweg plan {name}`"
    if spelt(name) in BUILTIN:
        ways = f"it is built in, `thalweg plan {spelt(name)}`; or {ways}"
    return (
        f"there is no file or folder {text}, and plan downloads nothing. If it is a model on a hub: {ways}. Other "
        "models: `thalweg plan config.json`, `thalweg plan model.safetensors`, `thalweg plan "
        "model.safetensors.index.json`, `thalweg plan mymodel:build` (a function that returns it), or one of "
        f"{', '.join(BUILTIN)}"
    )


def in_folder(folder: Path) -> Model:
    if files := files_in(folder):
        return read_safetensors(files, str(folder))
    if (folder / "config.json").is_file():
        return in_file(folder / "config.json")
    raise CommandError(f"there are no .safetensors files and no config.json in {folder}")


def in_file(path: Path) -> Model:
    if path.suffix == ".safetensors":
        return read_safetensors([path], str(path))
    if path.suffix in PICKLES:
        raise CommandError(f"{path} may be a pickle, which plan does not open: save the model as safetensors")
    if path.suffix != ".json":
        raise CommandError(f"{path} must be a .safetensors or a .json file")
    if path.name.endswith(".safetensors.index.json"):
        return read_safetensors(list(indexed(path)), str(path.parent))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not valid JSON: {error}") from None
    if isinstance(content, dict) and ("model_type" in content or "architectures" in content):
        return from_configuration(str(path), content)
    return from_shapes(path, content)


def from_shapes(path: Path, content: Any) -> Model:
    """A JSON of shapes: a list of them, or by name, each a list or a mapping with a shape and a dtype."""
    if isinstance(content, list):
        content = {f"tensor.{index}": shape for index, shape in enumerate(content)}
    if not isinstance(content, dict) or not content:
        raise CommandError(f'{path} must hold shapes, such as {{"weight": [768, 768]}} or [[768, 768], [768]]')
    tensors = tuple(from_entry(path, name, entry) for name, entry in content.items())
    return Model(str(path), "shapes", tensors, says_dtype=any(isinstance(e, dict) for e in content.values()))


def from_entry(path: Path, name: str, entry: Any) -> Tensor:
    shape, dtype = entry, "float32"
    if isinstance(entry, dict):
        shape, dtype = entry.get("shape"), spelt_dtype(str(entry.get("dtype", "float32")))
    if not is_shape(shape):
        raise CommandError(f"{path}: {name!r} must have a shape, a list of whole numbers >= 0, got {shape!r:.60}")
    if dtype not in DTYPES:
        raise CommandError(f"{path}: {name!r} has dtype {dtype!r}: {listed_dtypes()}")
    return Tensor(name, tuple(shape), dtype)
