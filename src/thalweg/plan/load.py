"""From the word MODEL to a torch module without memory. Nothing is downloaded, and no code of a checkpoint is run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg.dtypes import DTYPES, spelt_dtype
from thalweg.errors import CommandError
from thalweg.plan.models import BUILT_IN, arrange_parameters, build_module, find_builtin
from thalweg.show.arguments import check_file, suggest
from thalweg.show.modules import describe_error, import_attribute
from thalweg.show.units import count_words

if TYPE_CHECKING:
    from torch import nn

KINDS = "module:factory, a folder of .safetensors files, or a config.json of transformers"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
#: How safetensors calls whole numbers and truth values, of which nothing is trained.
WHOLE_NUMBERS = re.compile(r"BOOL|[UI]\d+")
#: Floating point that checkpoints carry along and nobody trains.
BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|inv_freq|masked_bias)$")


class Model(NamedTuple):
    """A module without memory, and how it was found."""

    name: str
    about: str
    module: nn.Module


def load_model(text: str, dtype: str | None = None) -> Model:
    """The model that the word means. dtype: of parameters whose dtype in a checkpoint cannot be trained in."""
    known, path = find_builtin(text), Path(text)
    if known is not None:
        return Model(known, BUILT_IN[known][0], build_module(known))
    if path.is_dir():
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
        if files or not (path / "config.json").is_file():
            return load_safetensors(path, files, dtype)
        return load_configuration(path / "config.json")
    if path.suffix in PICKLES and path.exists():
        raise CommandError(f"{path} may be a pickle, which plan does not open: save the model as safetensors")
    if path.suffix == ".safetensors":
        return load_safetensors(path, [path], dtype)
    if path.suffix == ".json":
        return load_configuration(path)
    if ":" in text:
        return call_factory(text)
    if path.suffix or len(path.parts) > 1:
        raise CommandError(f"there is no such folder or model: {text}; plan downloads nothing. MODEL may be {KINDS}")
    hint = suggest(text, BUILT_IN)
    raise CommandError(f"there is no model {text!r}: {hint}{'' if hint.endswith('?') else '.'} It may also be {KINDS}")


def import_for(text: object, *packages: str) -> Any:
    """The last of the packages that a model needs."""
    try:
        return [importlib.import_module(package) for package in packages][-1]
    except ImportError as error:
        raise CommandError(f"{text}: install {error.name} to plan it: pip install {' '.join(packages)}") from None


def call_factory(text: str) -> Model:
    """The module that a function returns, called where tensors take no memory."""
    factory, _ = import_attribute(text, "factory function", "mymodel:build", callable)
    torch = import_for(text, "torch")
    try:
        with torch.device("meta"):
            module = factory()
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise CommandError(f"{text} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return Model(text, type(module).__name__, module)


def load_safetensors(path: Path, files: list[Path], dtype: str | None) -> Model:
    """The parameters that the headers of files tell of; whole numbers and well-known buffers are left out."""
    torch, safetensors = import_for(path, "torch"), import_for(path, "safetensors")
    params: dict[str, Any] = {}
    left_out = 0
    for file in files:
        check_file(file)
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                for key in opened.offset_keys():
                    entry = opened.get_slice(key)
                    kind, shape = entry.get_dtype(), entry.get_shape()
                    # the causal mask of GPT-2 is called like a bias
                    is_mask = key.endswith(".attn.bias") and len(shape) == 4
                    if WHOLE_NUMBERS.fullmatch(kind) or BUFFERS.search(key) or is_mask:
                        left_out += 1
                        continue
                    stored = dtype or spelt_dtype(kind)
                    if stored not in DTYPES:
                        raise CommandError(f"{file}: {key!r} has dtype {kind}, which cannot be trained: set --dtype")
                    params[key] = torch.nn.Parameter(torch.empty(shape, dtype=getattr(torch, stored), device="meta"))
        except (safetensors.SafetensorError, OSError, RuntimeError) as error:
            raise CommandError(f"{file} is damaged, or not a safetensors file: {error}") from None
    if not params:
        pickles = [file.name for file in path.glob("*") if file.suffix in PICKLES]
        hint = f"; {pickles[0]} may be a pickle, which plan does not open: save it as safetensors" if pickles else ""
        raise CommandError(f"{path} has no parameters in .safetensors files, and no config.json{hint}")
    about = count_words(len(files), "safetensors file")
    if left_out:
        about += f", {count_words(left_out, 'tensor that is', 'tensors that are')} no parameter left out"
    return Model(str(path), about, arrange_parameters(params))


def load_configuration(file: Path) -> Model:
    """The model of a configuration, of the class that it names, or else the one without a head."""
    check_file(file)
    transformers = import_for(file, "torch", "transformers")
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
        config.use_pretrained_backbone = False  # it would be downloaded
        named: Any = getattr(transformers, (config.architectures or [""])[0], None)
        is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        with torch.device("meta"):
            module = named(config) if is_model else transformers.AutoModel.from_config(config)
        module = module.to(getattr(config, "dtype", None) or torch.float32)
    except Exception as error:
        raise CommandError(f"{file}: transformers cannot build it: {describe_error(error)}") from error
    return Model(str(file), f"{type(module).__name__} of transformers {transformers.__version__}", module)
