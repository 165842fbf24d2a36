"""From the word MODEL to a torch module without memory. Nothing is downloaded, and no code of a checkpoint is run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from thalweg.dtypes import DTYPES, spelt_dtype
from thalweg.errors import CommandError
from thalweg.plan.models import BUILT_IN, arrange_parameters, shapes_of
from thalweg.show.arguments import check_file, suggest
from thalweg.show.modules import describe_error, import_attribute

if TYPE_CHECKING:
    from torch import nn

#: How safetensors calls whole numbers and truth values, of which nothing is trained.
WHOLE_NUMBERS = re.compile(r"BOOL|[UI]\d+")


def load_model(text: str, dtype: str | None = None) -> nn.Module:
    """The model that the word means. dtype: of parameters whose dtype in a checkpoint cannot be trained in."""
    path = Path(text)
    if text in BUILT_IN:
        torch = import_for(text, "torch")
        return arrange_parameters(
            {name: torch.nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes_of(text).items()}
        )
    if path.is_dir():
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
        is_configured = not files and (path / "config.json").is_file()
        return load_configuration(path / "config.json") if is_configured else load_safetensors(path, files, dtype)
    if path.suffix == ".safetensors":
        return load_safetensors(path, [path], dtype)
    if path.suffix == ".json":
        return load_configuration(path)
    if ":" in text:
        return call_factory(text)
    raise CommandError(
        f"there is no model {text!r}, and plan downloads none: {suggest(text, BUILT_IN)} MODEL may also be "
        "module:factory, a folder of .safetensors files, or a config.json of transformers"
    )


def import_for(text: object, *packages: str) -> Any:
    """The last of the packages that a model needs."""
    try:
        return [importlib.import_module(package) for package in packages][-1]
    except ImportError as error:
        raise CommandError(f"{text}: install {error.name} to plan it: pip install {' '.join(packages)}") from None


def call_factory(text: str) -> nn.Module:
    """The module that a function returns, called where tensors take no memory."""
    factory, _ = import_attribute(text, "factory function", "mymodel:build", callable)
    torch = import_for(text, "torch")
    try:
        with torch.device("meta"):
            module: Any = factory()
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise CommandError(f"{text} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return cast("nn.Module", module)


def load_safetensors(path: Path, files: list[Path], dtype: str | None) -> nn.Module:
    """The floating-point tensors that the headers of files tell of, all as parameters."""
    torch, safetensors = import_for(path, "torch"), import_for(path, "safetensors")
    params: dict[str, Any] = {}
    for file in files:
        check_file(file)
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                for key in opened.offset_keys():
                    entry = opened.get_slice(key)
                    kind = entry.get_dtype()
                    stored = dtype or spelt_dtype(kind)
                    if WHOLE_NUMBERS.fullmatch(kind):
                        continue
                    if stored not in DTYPES:
                        raise CommandError(f"{file}: {key!r} has dtype {kind}, which cannot be trained: set --dtype")
                    values = torch.empty(entry.get_shape(), dtype=getattr(torch, stored), device="meta")
                    params[key] = torch.nn.Parameter(values)
        except (safetensors.SafetensorError, OSError, RuntimeError) as error:
            raise CommandError(f"{file} is damaged, or not a safetensors file: {error}") from None
    if not params:
        raise CommandError(f"{path} has no parameters in .safetensors files, and no config.json")
    return arrange_parameters(params)


def load_configuration(file: Path) -> nn.Module:
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
            module: nn.Module = named(config) if is_model else transformers.AutoModel.from_config(config)
        return module.to(getattr(config, "dtype", None) or torch.float32)
    except Exception as error:
        raise CommandError(f"{file}: transformers cannot build it: {describe_error(error)}") from error
