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
from thalweg.show.modules import describe_error, import_attribute


def build_model(text: str) -> Model:
    """The parameters of what a factory returns; ``module:factory`` names it."""
    factory, _ = import_attribute(text, "factory function", "mymodel:build", callable)
    if not callable(factory):
        raise CommandError(f"{text} cannot be called: it is a {type(factory).__name__}; name a class or a function")
    try:
        model = call_without_memory(factory)
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"{text} could not be built: {describe_error(error)}") from error
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return of_torch(model, text, f"{type(model).__name__} of torch")
    if leaves := tuple(of_jax(model)) if "jax" in sys.modules else ():
        return Model(text, f"{type(model).__name__} of JAX", leaves)
    raise CommandError(
        f"{text} returned a {type(model).__name__}: it must return a torch.nn.Module, an nnx.Module or a tree of JAX "
        "arrays"
    )


def call_without_memory(factory: Callable[..., Any]) -> Any:
    """What a factory returns, with nothing allocated for it, in the framework that its module has loaded or in both."""
    has_torch, has_jax = ("torch" in sys.modules or importlib.util.find_spec("torch") is not None), "jax" in sys.modules
    if not has_torch and not has_jax and importlib.util.find_spec("jax") is None:
        raise CommandError('a factory needs torch or JAX: pip install "thalweg[torch]" or "thalweg[jax]"')
    with contextlib.ExitStack() as around:
        if "torch" in sys.modules or (has_torch and not has_jax):
            import torch

            around.enter_context(torch.device("meta"))
        return factory() if has_torch and not has_jax else trace_shapes(factory)


def trace_shapes(factory: Callable[..., Any]) -> Any:
    """By flax where it is, else by jax; what is no model of JAX, a torch module for one, is let through as it is."""
    other: list[Any] = []

    def build() -> Any:
        result = factory(**random_arguments(factory))
        if is_tree_of_arrays(result):
            return result
        other.append(result)
        return ()

    if importlib.util.find_spec("flax") is not None:
        from flax import nnx

        shapes = nnx.eval_shape(build)
    else:
        import jax

        shapes = jax.eval_shape(build)
    return other[0] if other else shapes


def random_arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """What a factory asks for to draw its first numbers from."""
    import jax

    # flax's classes have a signature of their own
    called: Any = factory.__init__ if inspect.isclass(factory) else factory
    needed = [name for name, p in inspect.signature(called).parameters.items() if p.default is p.empty]
    given: dict[str, Any] = {name: jax.random.key(0) for name in ("key", "rng") if name in needed}
    if "rngs" in needed:
        from flax import nnx

        given["rngs"] = nnx.Rngs(0)
    return given


def is_tree_of_arrays(result: Any) -> bool:
    import jax

    leaves = jax.tree.leaves(result)
    return is_flax_module(result) or all(hasattr(leaf, "dtype") or isinstance(leaf, (int, float)) for leaf in leaves)


def is_flax_module(model: Any) -> bool:
    flax = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(model, flax.Module)


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
