"""`convert_state`: a run goes on with other states: float32 or 8 bits, float32 weights or bfloat16 and remainders."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.ops.rounding import widened
from jaxlowprec.optim.rules import path_of
from jaxlowprec.optim.wrapping import Explained, check_transformation, checked_shapes, described, in_a_line

_WHO = "convert_state"


def convert_state(state: Any, params: Any, *, source: Any, target: Any, like: Any = None) -> tuple[Any, Any]:
    """Parameters and a state of one transformation as those of another that has other wrappers.

    `source` and `target` are the same transformation but for `quantized_state` and `master_weights`, wherever these
    stand. Codes become the numbers that they stand for, and numbers codes, to nearest; a state that was opened is
    closed to the same codes. Remainders become float32 weights, and weights parameters and remainders. All else stays.
    The steps of the target's wrappers, by which they draw, begin at 0.

    Arguments:
        state: a state of `source`.
        params: the parameters beside it.
        source: an `optax.GradientTransformation`.
        target: the one to go on with.
        like: arrays or shapes in the tree of params, with the dtypes that parameters shall have: bfloat16 for those
            whose further bits `master_weights` in `target` keeps, float32 without it. None: the dtypes stay.

    Returns:
        The parameters and the state of `target`. Shardings follow from the arrays'; within `jax.jit` that is up to
        `out_shardings`.

    Raises:
        TypeError: a transformation is none, `params` or `like` has no arrays, or `state` is no state of `source`.
        ValueError: the two differ in more than wrappers; trees or shapes differ; or a float32 number would become a
            bfloat16 one that nothing keeps the rest of.

    >>> import jax, jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> adamw, params = optax.adamw(1e-3), {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    >>> state = adamw.init(params)  # of a checkpoint
    >>> tx = jlp.optim.master_weights(jlp.optim.quantized_state(adamw), bits=24)
    >>> half = {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    >>> new, new_state = jlp.optim.convert_state(state, params, source=adamw, target=tx, like=half)
    >>> new["w"].dtype.name, new_state.remainders["w"].dtype.name, new_state.inner.codes[0].mu["w"].dtype.name
    ('bfloat16', 'int8', 'uint8')
    >>> back, _ = jlp.optim.convert_state(new_state, new, source=tx, target=adamw, like=params)
    >>> bool(jnp.all(jnp.abs(back["w"] - params["w"]) <= 2**-16 * jnp.abs(params["w"])))
    True
    """
    for name, tx in (("source", source), ("target", target)):
        check_transformation(_WHO, name, tx)
    own = checked_shapes(_WHO, "params", params)
    like = own if like is None else checked_shapes(_WHO, "like", like)
    given, wanted = _by_path(params), _by_path(like)
    _check_trees("like", wanted, "params", given)
    plain, weights = _opened(described(source, params), state, given)
    weights = {path: _widened_to(wanted[path], x) for path, x in weights.items()}

    into = described(target, like)
    initial = jax.eval_shape(lambda p: target.init(p), like)
    shapes, _ = jax.eval_shape(lambda s, p: _opened(into, s, p), initial, wanted)
    found, needed = _by_path(plain), _by_path(shapes)
    _check_trees("the state of target", needed, "that of source", found)
    leaves = {path: _widened_to(x, found[path]) for path, x in needed.items()}
    new_state, new = _closed(into, jax.tree.unflatten(jax.tree.structure(shapes), leaves.values()), weights)
    for what, given_leaves, likes in (("the parameter", new, wanted), ("the state", leaves, needed)):
        for path, x in likes.items():
            if given_leaves[path].dtype != x.dtype:
                raise ValueError(
                    f"{_WHO}: {what} {path!r} is {given_leaves[path].dtype} in source and {x.dtype} in target, where "
                    "nothing keeps the rest: needs master_weights in target, or like= with the dtype of source"
                )
    return jax.tree.unflatten(jax.tree.structure(params), [new[path] for path in given]), new_state


def _opened(description: Any, state: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A state as it would be without wrappers, and parameters with all their bits."""
    parts: list[Any]
    tree: Any
    parts, tree = jax.tree.flatten(description, is_leaf=_is_wrapper)
    try:
        states = tree.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(
            f"{_WHO}: state is no state of source for these params ({in_a_line(error)}): needs one that has the "
            "structure of source.init(params)"
        ) from None
    found = []
    for part, here in zip(parts, states, strict=True):
        if _is_wrapper(part):
            inner, params = part.conversion.opened(here, params)
            here, params = _opened(_within(part), inner, params)
        found.append(here)
    return tree.unflatten(found), params


def _closed(description: Any, state: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The inverse."""
    parts: list[Any]
    tree: Any
    parts, tree = jax.tree.flatten(description, is_leaf=_is_wrapper)
    found = []
    for part, here in zip(parts, tree.flatten_up_to(state), strict=True):
        if _is_wrapper(part):
            inner, params = _closed(_within(part), here, params)
            here, params = part.conversion.closed(inner, params)
        found.append(here)
    return tree.unflatten(found), params


def _is_wrapper(part: Any) -> bool:
    return isinstance(part, Explained)


def _within(part: Explained) -> Any:
    """The description of the state that a wrapper wraps: its first tree has the inner state's structure."""
    return part.state[0]


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _widened_to(like: Any, x: Any) -> Any:
    """bfloat16 as float32, where that is the dtype of `like`."""
    return widened(x) if (x.dtype, like.dtype) == (jnp.bfloat16, jnp.float32) else x


def _check_trees(name: str, tree: dict[str, Any], other_name: str, other: dict[str, Any]) -> None:
    """Raises ValueError unless two trees have the same leaves, of the same shapes."""
    for path in [*tree, *other]:
        shapes = [str(list(jnp.shape(t[path]))) if path in t else "no leaf" for t in (tree, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{_WHO}: {name} has {shapes[0]} at {path!r}, and {other_name} {shapes[1]}; without wrappers both need "
                "the same leaves: use the same inner transformation and parameters"
            )
