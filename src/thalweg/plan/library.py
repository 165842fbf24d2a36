"""Parameters from transformers itself, where it is installed: it builds a configuration's model without memory.

Its own code alone is run, and nothing is fetched: what a configuration says of code, kernels and weights from
elsewhere is left out before transformers sees it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.plan.factories import of_torch
from thalweg.plan.models import Model

#: Entries that change no shape, and for which transformers may load code, kernels or packages from elsewhere.
LEFT_OUT = (
    "auto_map",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
)
#: Entries that would fetch the weights of a part.
PRETRAINED = "use_pretrained_backbone"


class Declined(Exception):
    """Why transformers, although it is installed, does not build a model."""


def built(name: str, content: Mapping[str, Any], dtype: Any, otherwise: str | None) -> Model | None:
    """The model of a configuration as transformers builds it; None where it, or torch, is not installed.

    otherwise: the class to take where the configuration names none that transformers has.
    """
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return None
    version = f"transformers {transformers.__version__}"
    kind = content["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise Declined(f"{version} does not know the model type {kind!r}")
    served = dtype in DTYPES
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(without_elsewhere(content))
        with torch.device("meta"):
            module = from_config(transformers, config, content, otherwise, getattr(torch, dtype) if served else None)
        model = of_torch(module, name, f"{type(module).__name__}, shapes from {version}")
    except Exception as error:
        told = str(error).strip().split("\n")[0]
        raise Declined(f"{version} could not build it: {type(error).__name__}: {told}") from error
    # the check of dtypes reports one that is not supported
    return replace(model, says_dtype=served) if served or dtype is None else model.stored_as(dtype)


def from_config(transformers: Any, config: Any, content: Mapping[str, Any], otherwise: str | None, dtype: Any) -> Any:
    """A module of the class that the configuration names, or else of the one that is taken by itself."""
    asked = content.get("architectures")
    for architecture in (*(asked if isinstance(asked, list) else ()), otherwise):
        found: Any = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
        if not is_class_of(found, transformers.PreTrainedModel):
            continue
        own = config if isinstance(config, found.config_class) else config.get_text_config()
        if isinstance(own, found.config_class):
            return found._from_config(own, dtype=dtype, attn_implementation="eager")
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return auto.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)


def is_class_of(found: Any, base: Any) -> bool:
    return isinstance(found, type) and issubclass(found, base)


def without_elsewhere(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those within it, without what may lead out of this machine."""
    return {
        key: False if key == PRETRAINED else without_elsewhere(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if key not in LEFT_OUT
    }
