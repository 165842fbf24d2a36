"""What the word MODEL may mean: a built-in name, files, a configuration, a list of shapes, or a factory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.plan.factories import SERVED, built
from thalweg.plan.families import FAMILIES, tensors_of
from thalweg.plan.headers import MOST_AXES, files_in, indexed, is_size, read_safetensors
from thalweg.plan.models import BUILTIN, Model, Tensor, builtin, made, spelt
from thalweg.show.lists import suggestion

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def resolve(text: str, dtype: str | None = None) -> Model:
    """The model that is meant. ``dtype``: that of its parameters, whatever the source says.

    >>> resolve("llama-1b").parameters
    1235814400
    """
    model = found(text, dtype)
    return model if dtype is None else model.stored_as(dtype)


def found(text: str, dtype: str | None) -> Model:
    if spelt(text) in BUILTIN:
        return builtin(text)
    path = Path(text)
    if path.is_dir():
        return in_folder(path, dtype)
    if path.is_file():
        return in_file(path, dtype)
    if ":" in text and not text.endswith((".safetensors", ".json")):
        return built(text)
    if path.suffix or len(path.parts) > 1:
        raise CommandError(f"there is no file or folder {text}")
    raise CommandError(
        f"there is no model {text!r}: {suggestion(text, BUILTIN)}; or give a .safetensors file, a config.json, a JSON "
        "of shapes, or module:factory"
    )


def in_folder(folder: Path, dtype: str | None) -> Model:
    if files := files_in(folder):
        return read_safetensors(files, str(folder), dtype)
    if (folder / "config.json").is_file():
        return in_file(folder / "config.json", dtype)
    raise CommandError(f"there are no .safetensors files and no config.json in {folder}")


def in_file(path: Path, dtype: str | None) -> Model:
    if path.suffix == ".safetensors":
        return read_safetensors([path], str(path), dtype)
    if path.suffix in PICKLES:
        raise CommandError(f"{path} may be a pickle, which is not opened here: save the model as safetensors")
    if path.suffix != ".json":
        raise CommandError(f"{path} is neither .safetensors nor .json")
    if path.name.endswith(".safetensors.index.json"):
        return read_safetensors(list(indexed(path)), str(path.parent), dtype)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is no JSON: {error}") from None
    if isinstance(content, dict) and ("model_type" in content or "architectures" in content):
        return from_configuration(path, content, dtype)
    return from_shapes(path, content)


def from_configuration(path: Path, content: dict[str, Any], dtype: str | None) -> Model:
    """A Hugging Face ``config.json``."""
    try:
        named = list(tensors_of(content))
    except CommandError as error:
        raise CommandError(f"{path}: {error}") from None
    family = FAMILIES.get(str(content.get("model_type")))
    said = content.get("dtype", content.get("torch_dtype"))
    model = made(str(path), f"{family.built if family else content['model_type']} of transformers", named)
    if said is None or dtype is not None:
        return model
    if said not in SERVED:
        raise CommandError(f"{path}: the dtype {said!r} cannot be trained in: say what it will be with --dtype")
    tensors = model.stored_as(said).tensors
    return Model(model.name, model.about, tensors, says_dtype=True)


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
        shape, dtype = entry.get("shape"), entry.get("dtype", "float32")
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(map(is_size, shape)):
        raise CommandError(f"{path}: {name!r} must have a shape, a list of whole numbers >= 0, got {shape!r:.60}")
    if dtype not in SERVED:
        raise CommandError(f"{path}: {name!r} has dtype {dtype!r}: it must be one of {', '.join(SERVED)}")
    return Tensor(name, tuple(shape), dtype)
