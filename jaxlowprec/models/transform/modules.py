"""Models as arguments of functions, where tracing sees an NNX module as its arrays, and in the place of functions."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.layers.subscripts import has_matrices


@jax.tree_util.register_pytree_with_keys_class
class ModuleTree:
    """An NNX module as a tree of its arrays, by their paths."""

    def __init__(self, graph: Any, state: Any):
        self.graph, self.state = graph, state

    def tree_flatten_with_keys(self) -> Any:
        """The module's arrays with their paths, and its static part."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.state)
        keys = [(jax.tree_util.GetAttrKey(jax.tree_util.keystr(p, simple=True, separator="/")), v) for p, v in leaves]
        return keys, (self.graph, structure)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> ModuleTree:
        """The inverse."""
        return cls(static[0], jax.tree.unflatten(static[1], leaves))


def check_is_function(who: str, fn: Any) -> None:
    """Raises TypeError unless fn is a function; a model is none, since it holds its parameters itself."""
    if not callable(fn):
        raise TypeError(f"{who}: fn={shown(fn)}; needs a function")
    remedies = [f"jaxlowprec.{kind}.convert(model)" for kind in ("nnx", "linen") if _is_module(fn, kind)]
    arrays = [leaf for leaf in jax.tree.leaves(fn) if isinstance(leaf, jax.Array | np.ndarray)]
    if not isinstance(fn, functools.partial) and any(has_matrices(array.shape) for array in arrays):
        remedies.append(f"{who}(lambda model, x: model(x))")
    if remedies:
        raise TypeError(f"{who}: fn is a {type(fn).__name__}, which holds its parameters; use {remedies[0]}")


def _is_module(model: Any, kind: str) -> bool:
    flax: Any = sys.modules.get(f"flax.{kind}")  # None: then nobody has a module
    return flax is not None and isinstance(model, flax.Module)


def opened(tree: Any) -> tuple[Any, list[Any]]:
    """A tree with each NNX module in it opened, and these modules."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # then nobody has a module
        return tree, []
    modules: list[Any] = []

    def one(node: Any) -> Any:
        if not isinstance(node, nnx.Module):
            return node
        modules.append(node)
        return ModuleTree(*nnx.split(node))

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, nnx.Module)), modules


def closed(tree: Any) -> tuple[Any, list[tuple[Any, dict[Any, Any]]]]:
    """A tree with its modules made again, and each of these with the arrays that it was made of, by their paths."""
    made: list[tuple[Any, dict[Any, Any]]] = []

    nnx: Any = sys.modules.get("flax.nnx")

    def one(node: Any) -> Any:
        if not isinstance(node, ModuleTree):
            return node
        arrays = {path: variable.get_value() for path, variable in nnx.to_flat_state(node.state)}
        made.append((nnx.merge(node.graph, node.state), arrays))
        return made[-1][0]

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, ModuleTree)), made


def changes(made: list[tuple[Any, dict[Any, Any]]]) -> list[Any]:
    """Changes that a function made to its modules: for each the state of the variables whose arrays are other ones now.

    Raises:
        ValueError: the function gave a module other variables.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    found = []
    for module, old in made:
        new = dict(nnx.to_flat_state(nnx.state(module)))
        if old.keys() != new.keys():
            names = sorted("/".join(map(str, path)) for path in old.keys() ^ new.keys())
            raise ValueError(
                f"quantize_matmuls: the function adds or removes variables of {type(module).__name__}: {names}; return "
                "such values instead, or create the variables before"
            )
        changed = {path: value for path, value in new.items() if value.get_value() is not old[path]}
        found.append(nnx.from_flat_state(changed))
    return found


def update(modules: list[Any], states: list[Any]) -> None:
    """Sets the changed variables of the caller's modules."""
    for module, state in zip(modules, states, strict=True):
        if jax.tree.leaves(state):
            sys.modules["flax.nnx"].update(module, state)
