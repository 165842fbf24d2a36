"""Mixtures that are ready made: hidden matrices by one rule, all other parameters by AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from thalweg.errors import OptionError, ParameterError
from thalweg.given import Pattern, check_pattern, is_list, matches
from thalweg.rules import AdamW, Kron, Muon, Rule
from thalweg.torch.mixture import Mixture
from thalweg.torch.optimizers import optimizer

#: Names of modules that are output layers wherever they are.
HEADS = ("lm_head", "head", "heads", "classifier", "classification_head", "score", "output_projection", "fc_out")
#: Parts of the name of a parameter that is an embedding, though no module of one holds it.
EMBEDDINGS = ("embed", "token")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def kron_adamw(
    model: nn.Module,
    lr: float = 3e-4,
    adamw_lr: float = 3e-4,
    *,
    weight_decay: float | None = None,
    first: Sequence[Pattern] = (),
    other: Sequence[Pattern] = (),
    kron: Mapping[str, Any] = NO_OPTIONS,
    adamw: Mapping[str, Any] = NO_OPTIONS,
    **arguments: Any,
) -> Mixture:
    """Hidden matrices by Kron; embeddings, output layers, norms, biases and vectors by AdamW.

    lr, kron: of Kron. adamw_lr, adamw: of AdamW. weight_decay: of all matrices, decoupled; None leaves it to each
    rule. Norms, biases and vectors do not decay. first, other: patterns of parameters that go to Kron, or to AdamW,
    whatever they are found to be; first wins. arguments: of :class:`Mixture`. docs/mixtures.md says how parameters are
    told apart.
    """
    decay = {} if weight_decay is None else {"weight_decay_mode": "decoupled"}
    return by_matrices(model, Kron, lr, {**decay, **kron}, adamw_lr, adamw, weight_decay, first, other, arguments)


def muon_adamw(
    model: nn.Module,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    *,
    weight_decay: float | None = None,
    first: Sequence[Pattern] = (),
    other: Sequence[Pattern] = (),
    muon: Mapping[str, Any] = NO_OPTIONS,
    adamw: Mapping[str, Any] = NO_OPTIONS,
    **arguments: Any,
) -> Mixture:
    """Hidden matrices by Muon; embeddings, output layers, norms, biases and vectors by AdamW.

    lr, muon: of Muon. adamw_lr, adamw: of AdamW. weight_decay: of all matrices; None leaves it to each rule. Norms,
    biases and vectors do not decay. first, other: patterns of parameters that go to Muon, or to AdamW, whatever they
    are found to be; first wins. arguments: of :class:`Mixture`. docs/mixtures.md says how parameters are told apart.
    """
    return by_matrices(model, Muon, lr, muon, adamw_lr, adamw, weight_decay, first, other, arguments)


def by_matrices(
    model: nn.Module,
    rule: type[Rule],
    lr: float,
    options: Mapping[str, Any],
    adamw_lr: float,
    adamw: Mapping[str, Any],
    weight_decay: float | None,
    first: Sequence[Pattern],
    other: Sequence[Pattern],
    arguments: Mapping[str, Any],
) -> Mixture:
    if not isinstance(model, nn.Module):
        raise ParameterError(f"this needs a model, whose modules tell parameters apart, got {type(model).__name__}")
    roles = roles_of(model, checked(first, "first"), checked(other, "other"))
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    makers = {
        "hidden matrices": optimizer(rule).options(**{"lr": lr, **decay, **options}),
        "embeddings and output layers": optimizer(AdamW).options(**{"lr": adamw_lr, **decay, **adamw}),
        "norms, biases and vectors": optimizer(AdamW).options(**{"lr": adamw_lr, **adamw, "weight_decay": 0.0}),
    }
    found = {role: frozenset(name for name, own in roles.items() if own == role) for role in makers}
    entries = [(Role(role, names), makers[role]) for role, names in found.items() if names]
    return Mixture(model.named_parameters(), entries, **arguments)


@dataclass(frozen=True)
class Role:
    """The parameters of a model that have a role, as a pattern."""

    role: str
    names: frozenset[str]

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        return f"<{self.role}>"


def checked(patterns: Any, argument: str) -> Sequence[Pattern]:
    if not is_list(patterns):
        raise OptionError(f"{argument} must be a list of patterns, such as ['*.experts.*'], got {patterns!r}")
    for pattern in patterns:
        check_pattern(pattern)
    return list(patterns)


def roles_of(model: nn.Module, first: Sequence[Pattern] = (), other: Sequence[Pattern] = ()) -> dict[str, str]:
    """The role of every parameter of a model, by name."""
    outside = {id(p) for module in (*embeddings(model), *output_layers(model)) for p in module.parameters()}
    norms = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters(recurse=False)}

    def role_of(name: str, p: Tensor) -> str:
        if any(matches(pattern, name, p) for pattern in first):
            return "hidden matrices"
        if not is_matrix(p) or id(p) in norms:
            return "norms, biases and vectors"
        is_other = id(p) in outside or any(part in name.rpartition(".")[2] for part in EMBEDDINGS)
        is_other = is_other or any(matches(pattern, name, p) for pattern in other)
        return "embeddings and output layers" if is_other else "hidden matrices"

    return {name: role_of(name, p) for name, p in model.named_parameters()}


def is_matrix(p: Tensor) -> bool:
    """Whether a parameter, with all axes after the first as one, has several rows and several columns."""
    return p.ndim >= 2 and p.shape[0] > 1 and p.numel() > p.shape[0]


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def embeddings(model: nn.Module) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))


def output_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layer that a model tells of, those that are named as output layers are, or else its last linear one.

    Names and the last one count only outside of lists of layers, whose modules belong to hidden blocks.
    """
    told = getattr(model, "get_output_embeddings", lambda: None)()
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    found = [told] if isinstance(told, nn.Module) else []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in HEADS and not name.startswith(lists):
            found.append(module)
    if not found:
        linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        found = [module for name, module in linear[-1:] if not name.startswith(lists)]
    yield from found
