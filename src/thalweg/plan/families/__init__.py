"""From a configuration to the names and shapes of parameters, without building anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.errors import CommandError
from thalweg.plan.families.configuration import Configuration, Family, Named
from thalweg.plan.families.convolutions import resnet50
from thalweg.plan.families.decoders import DECODERS
from thalweg.plan.families.encoders import ENCODERS
from thalweg.plan.families.perception import PERCEPTION

FAMILIES: Mapping[str, Family] = {**DECODERS, **ENCODERS, **PERCEPTION}


def tensors_of(configuration: Mapping[str, Any]) -> Named:
    """Names and shapes of the parameters that a configuration describes, in their order."""
    kind = configuration.get("model_type")
    if kind == "resnet50":
        return resnet50()
    if kind is None:
        raise CommandError("this configuration has no model_type: it is not the config.json of a model")
    if not isinstance(kind, str):
        raise CommandError(f"the configuration's model_type must be a name such as 'llama', got {kind!r:.60}")
    if kind not in FAMILIES:
        raise CommandError(
            f"install transformers and torch to plan {kind}: without them there are {', '.join(sorted(FAMILIES))}; or "
            "give its .safetensors, or module:factory"
        )
    family = FAMILIES[kind]
    return family.tensors(Configuration(configuration, family.defaults, family.also_called))
