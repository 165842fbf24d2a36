"""Which options of a rule kernels written by hand read, and what they refuse for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeAlias

from thalweg.rules import Rule

#: For each rule that kernels are written for the options that they read, parted by spaces.
Reads: TypeAlias = Mapping[type[Rule], str]


def reason_unread(rule: Rule, reads: Reads) -> str | None:
    """Why kernels would compute something else than a rule: it is not theirs, or has an option that they do not read.

    None if they compute the same. An option counts whatever its value: its default may be new mathematics too.
    """
    name, kind = type(rule).__name__, next((kind for kind in type(rule).__mro__ if kind in reads), None)
    if kind is None:
        return f"there is no fused kernel for {name}"
    unread = [f.name for f in fields(rule) if f.name not in reads[kind].split()]
    if unread:
        return f"there is no fused kernel of {name} with the option {unread[0]}"
    return None if type(rule) is kind else f"there is no fused kernel for {name}, which changes {kind.__name__}"
