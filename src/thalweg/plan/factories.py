"""Models from ``module:factory``: built without memory, on torch's meta device or as jax's shapes."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from thalweg.errors import CommandError
from thalweg.plan.models import Model, Tensor
from thalweg.show.modules import describe_error, import_user_module

#: Arguments that a factory may ask for and that are given to it: what random numbers begin with.
RANDOM = ("rngs", "key", "rng")


def build_model(text: str) -> Model:
    """The parameters of what a factory returns; ``module:factory`` names it."""
    factory = find_factory(text)
    try:
        model = call_without_memory(factory)
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    return list_parameters(model, text)


def find_factory(text: str) -> Callable[..., Any]:
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise CommandError(f"MODEL {text!r} must be module:factory, such as mymodel:build")
    found: Any = import_user_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_") and callable(getattr(found, known))]
            raise CommandError(f"{module_name} has no {path!r}: it has {', '.join(public[:8]) or 'nothing to call'}")
        found = getattr(found, name)
    if not callable(found):
        raise CommandError(f"{text} cannot be called: it is a {type(found).__name__}; name a class or a function")
    called: Callable[..., Any] = found
    return called


def call_without_memory(factory: Callable[..., Any]) -> Any:
    """What a factory returns, with nothing allocated for it."""
    if is_torch_class(factory):
        return on_meta(factory)
    if "jax" in sys.modules:
        return trace_shapes(factory)
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        return on_meta(factory)
    if importlib.util.find_spec("jax") is not None:
        return trace_shapes(factory)
    raise CommandError('a factory needs torch or JAX: pip install "thalweg[torch]" or "thalweg[jax]"')


def is_torch_class(factory: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and inspect.isclass(factory) and issubclass(factory, torch.nn.Module)


def on_meta(factory: Callable[..., Any]) -> Any:
    import torch

    with torch.device("meta"):
        return factory()


def trace_shapes(factory: Callable[..., Any]) -> Any:
    """By flax where it is, else by jax; what is no model of JAX, a torch module for one, is let through as it is."""
    import jax

    with contextlib.ExitStack() as around:
        if torch := sys.modules.get("torch"):
            around.enter_context(torch.device("meta"))
        other: list[Any] = []

        def build() -> Any:
            result = factory(**beginnings(factory))
            if is_tree_of_arrays(result):
                return result
            other.append(result)
            return ()

        if importlib.util.find_spec("flax") is not None:
            from flax import nnx

            shapes = nnx.eval_shape(build)
        else:
            shapes = jax.eval_shape(build)
    return other[0] if other else shapes


def beginnings(factory: Callable[..., Any]) -> dict[str, Any]:
    """What a factory asks for to draw its first numbers from."""
    import jax

    made: Any = (
        factory.__init__ if inspect.isclass(factory) else factory
    )  # flax's classes have a signature of their own
    parameters = inspect.signature(made).parameters
    asked = [name for name in RANDOM if name in parameters and parameters[name].default is inspect.Parameter.empty]
    given: dict[str, Any] = {}
    for name in asked:
        if name == "rngs":
            from flax import nnx

            given[name] = nnx.Rngs(0)
        else:
            given[name] = jax.random.key(0)
    return given


def is_tree_of_arrays(result: Any) -> bool:
    import jax

    if is_flax_module(result):
        return True
    return all(hasattr(leaf, "dtype") or isinstance(leaf, (int, float)) for leaf in jax.tree.leaves(result))


def is_flax_module(model: Any) -> bool:
    flax = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(model, flax.Module)


def is_torch_model(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def list_parameters(model: Any, text: str) -> Model:
    """The parameters of a model that a factory gave."""
    if is_torch_model(model):
        return of_torch(model, text, f"{type(model).__name__} of torch")
    if "jax" in sys.modules:
        leaves = tuple(of_jax(model))
        if leaves:
            return Model(text, f"{type(model).__name__} of JAX", leaves)
    raise CommandError(
        f"{text} returned a {type(model).__name__}: it must return a torch.nn.Module, an nnx.Module or a tree of JAX "
        "arrays"
    )


def of_torch(model: Any, name: str, about: str) -> Model:
    """The parameters of an ``nn.Module``; those that require no gradient are frozen. What is tied counts once."""
    trained: list[Tensor] = []
    frozen: list[Tensor] = []
    for path, p in model.named_parameters():
        tensor = Tensor(path, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        (trained if p.requires_grad else frozen).append(tensor)
    if not trained:
        raise CommandError(f"{name} has no floating-point parameters" + (" that require a gradient" * bool(frozen)))
    return Model(name, about, tuple(trained), frozen=tuple(frozen), module=model)


def of_jax(model: Any) -> Iterator[Tensor]:
    """Leaves of floating point: of an nnx.Module those that are parameters, of any other tree all."""
    import jax

    if is_flax_module(model):
        from flax import nnx

        model = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
            yield Tensor(name, tuple(leaf.shape), leaf.dtype.name)
