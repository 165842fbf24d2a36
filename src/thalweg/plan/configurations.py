"""A ``config.json`` of Hugging Face: transformers is asked for the parameters, or else a table of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thalweg.errors import CommandError
from thalweg.plan import library
from thalweg.plan.families import FAMILIES, tensors_of
from thalweg.plan.models import Model, made
from thalweg.show.dtypes import spelt_dtype

#: Entries that count modules, by their names; how many there may be, and how large any other number may be.
COUNTED = re.compile(r"layer|depth|block|stage|repeat|expert")
MOST_LAYERS, MOST_WIDE = 10_000, 2**31


def from_configuration(name: str, content: Mapping[str, Any]) -> Model:
    """The model of a configuration, in the dtype that it says."""
    check_sizes(name, content)
    said = said_dtype(content)
    kind = content.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    declined = ""
    try:
        if isinstance(kind, str) and (model := library.built(name, content, said, family.built if family else None)):
            return model
    except library.Declined as reason:
        declined = str(reason)
        if family is None:
            raise CommandError(f"{name}: {declined}; give its .safetensors, or module:factory") from None
    try:
        model = made(name, about_table(content, declined), tensors_of(content))
    except CommandError as error:
        raise CommandError(f"{name}: {error}") from None
    if family is not None:
        model = model.freezing(family.frozen)
    return model if said is None else replace(model.stored_as(said), says_dtype=True)


def check_sizes(name: str, content: Any, key: str = "") -> None:
    """Refuse numbers that no model has, before somebody makes so many layers."""
    if isinstance(content, Mapping):
        for inner, value in content.items():
            check_sizes(name, value, str(inner))
    elif isinstance(content, list):
        for value in content:
            check_sizes(name, value, key)
    elif isinstance(content, int) and abs(content) > (most := MOST_LAYERS if COUNTED.search(key) else MOST_WIDE):
        raise CommandError(f"{name}: the configuration's {key} is {content!r:.30}, and may be {most:,} at most")


def said_dtype(content: Mapping[str, Any]) -> Any:
    """What the configuration says of dtypes, or else that of its language model; None if neither does."""
    inner = content.get("text_config")
    for own in (content, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if own.get(key) is not None:
                return spelt_dtype(str(own[key]))
    return None


def about_table(content: Mapping[str, Any], declined: str) -> str:
    """What the table describes, and how that differs from what the configuration asks for."""
    kind = str(content.get("model_type"))
    built = FAMILIES[kind].built if kind in FAMILIES else kind
    about = f"{built}, shapes from thalweg's own table"
    if declined:
        return f"{about}: {declined}"
    asked = content.get("architectures")
    if isinstance(asked, list) and asked and built not in asked:
        return f"{about}; install transformers to plan {asked[0]}"
    return about
