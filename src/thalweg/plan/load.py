"""From the word MODEL to a torch module without memory: a built-in name, a factory, safetensors, a configuration.

Nothing is downloaded, and no code of a checkpoint is run.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES, spelt_dtype
from thalweg.errors import CommandError
from thalweg.plan.models import BUILT_IN, arrange_parameters, build_module, find_builtin
from thalweg.show.arguments import check_file, suggest
from thalweg.show.modules import describe_error, import_attribute
from thalweg.show.units import count_words

if TYPE_CHECKING:
    from torch import nn

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
KINDS = "a folder of .safetensors files, a config.json of transformers, or module:factory"
#: As safetensors calls them: whole numbers and truth values, of which nothing is trained.
WHOLE_NUMBERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
#: Floating point that checkpoints carry along and nobody trains.
BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|inv_freq|masked_bias|position_ids)$|(^|\.)h\.\d+\.attn\.bias$")


class Model(NamedTuple):
    """A module on the meta device, and how it was found."""

    name: str
    about: str
    module: nn.Module


def load_model(text: str, dtype: str | None = None) -> Model:
    """The model that the word means. dtype: of parameters that a checkpoint has in a dtype that cannot be trained."""
    known, path = find_builtin(text), Path(text)
    if known is not None:
        return Model(known, BUILT_IN[known][0], build_module(known))
    if path.is_dir() and (files := list(find_safetensors(path))):
        return load_safetensors(text, files, dtype)
    if path.is_dir() and (path / "config.json").is_file():
        return load_configuration(path / "config.json")
    if path.is_dir():
        raise CommandError(f"there are no .safetensors files and no config.json in {path}{about_pickles(path)}")
    if path.suffix in PICKLES and path.is_file():
        raise CommandError(f"{path} may be a pickle, which plan does not open: save the model as safetensors")
    if path.suffix == ".safetensors":
        return load_safetensors(text, [path], dtype)
    if path.suffix == ".json":
        return load_configuration(path)
    if path.exists():
        raise CommandError(f"{path} is no model: MODEL must be {KINDS}")
    if ":" in text:
        return call_factory(text)
    if path.suffix in PICKLES or len(path.parts) > 1:
        hint = "" if path.is_absolute() else ", and plan downloads nothing: fetch config.json, and plan its folder"
        raise CommandError(f"there is no file or folder {text}{hint}")
    hint = suggest(text, BUILT_IN)
    raise CommandError(f"there is no model {text!r}: {hint}{'' if hint.endswith('?') else '.'} It may also be {KINDS}")


def about_pickles(folder: Path) -> str:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    return f"; {pickles[0]} may be a pickle, which plan does not open: save the model as safetensors" if pickles else ""


# ---- factories


def call_factory(text: str) -> Model:
    """The module that a function returns, called where tensors take no memory."""
    factory, _ = import_attribute(text, "factory function", "mymodel:build", callable)
    if not callable(factory):
        raise CommandError(f"{text} cannot be called: it is a {type(factory).__name__}; name a class or a function")
    torch = import_for(text, "torch")
    try:
        with torch.device("meta"):
            module = factory()
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise CommandError(f"{text} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return Model(text, type(module).__name__, module)


def import_for(text: str, *packages: str) -> Any:
    """The last of these packages, all of which a model needs."""
    try:
        return [importlib.import_module(package) for package in packages][-1]
    except ImportError as error:
        raise CommandError(f"{text}: install {error.name} to plan it: pip install {' '.join(packages)}") from None


# ---- checkpoints, of which headers are read and no tensor


def find_safetensors(folder: Path) -> Iterator[Path]:
    """The files that an index in the folder names, or all that there are."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        yield from sorted(folder.glob("*.safetensors"))
        return
    try:
        names = {str(name) for name in json.loads(indexes[0].read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CommandError(f"{indexes[0]} is not an index of safetensors files: it has no weight_map") from None
    yield from (folder / Path(name).name for name in sorted(names))


def load_safetensors(text: str, files: list[Path], dtype: str | None) -> Model:
    torch, params, left_out = import_for(text, "torch"), dict[str, Any](), 0
    for file in files:
        for key, shape, kind in read_header(file):
            is_trained_bias = key.endswith(".attn.bias") and len(shape) != 4  # the mask of GPT-2 has four axes
            if kind in WHOLE_NUMBERS or (BUFFERS.search(key) and not is_trained_bias):
                left_out += 1
                continue
            trained = dtype or spelt_dtype(kind)
            if trained not in DTYPES:
                raise CommandError(f"{text}: {key!r} has dtype {kind}, which cannot be trained: say --dtype bfloat16")
            if key in params:
                raise CommandError(f"{file}: the tensor {key!r} is in another file of this model as well")
            params[key] = torch.nn.Parameter(torch.empty(shape, dtype=getattr(torch, trained), device="meta"))
    if not params:
        raise CommandError(f"{text}: it has no floating-point tensor")
    about = count_words(len(files), "safetensors file")
    if left_out:
        about += f", {count_words(left_out, 'tensor that is', 'tensors that are')} no parameter left out"
    return Model(text, about, arrange_parameters(params))


def read_header(file: Path) -> list[tuple[str, Shape, str]]:
    """The name, shape and dtype of each tensor of a file."""
    check_file(file)
    safetensors = import_for(str(file), "safetensors")
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = [(key, opened.get_slice(key)) for key in opened.offset_keys()]
            return [(key, tuple(entry.get_shape()), entry.get_dtype()) for key, entry in slices]
    except (safetensors.SafetensorError, OSError) as error:
        raise CommandError(f"{file} is damaged, or not a safetensors file: {error}") from None


# ---- configurations, of which transformers builds the model


def load_configuration(file: Path) -> Model:
    """The model of a configuration, of the class that it names, or else of the one without a head."""
    check_file(file)
    transformers = import_for(str(file), "torch", "transformers")
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(file.parent / file.name, trust_remote_code=False)
        config.use_pretrained_backbone = False  # it would be downloaded
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        with torch.device("meta"):
            module = named[0](config) if named and named[0] else transformers.AutoModel.from_config(config)
        module = module.to(getattr(config, "dtype", None) or torch.float32)
    except Exception as error:
        raise CommandError(f"{file}: transformers cannot build it: {describe_error(error)}") from error
    return Model(str(file), f"{type(module).__name__} of transformers {transformers.__version__}", module)
