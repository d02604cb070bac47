"""`master_weights`: bfloat16 parameters whose further bits are in the optimizer's state (numerics.md 19)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import one_of
from jaxlowprec.ops.optimizer_states import REMAINDERS, join_weight, split_weight
from jaxlowprec.ops.rounding import widened
from jaxlowprec.optim import wrapping
from jaxlowprec.optim.draws import STREAM_OF_WEIGHTS, half_words, words_of, words_of_leaves
from jaxlowprec.optim.leafwise import HeldWeight, Leafwise, leafwise, no_signs
from jaxlowprec.optim.rules import path_of

_WHO = "master_weights"
_U32 = jnp.uint32


class MasterState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        inner: the state of the wrapped transformation.
        remainders: int16 or int8 of each bfloat16 parameter's shape; None for others, and with 16 bits.
        words: uint32 [2], of the key.
        step: uint32 [], updates so far.
        version: int32 [], of these bytes.
    """

    inner: Any
    remainders: Any
    words: jax.Array
    step: jax.Array
    version: jax.Array


def master_weights(inner: Any, *, bits: int = 32, key: Any = 0) -> Any:
    """`inner` on float32 weights, kept as bfloat16 parameters and a remainder of `bits` - 16 bits.

    Make it the outermost of transformations that read parameters or moments. Its updates are float32 and lead to the
    new parameter: apply them with `optax.apply_updates`, which keeps the dtype. `optax.apply_if_finite` goes inside.
    Parameters that are not bfloat16 pass through.

    Arguments:
        inner: an `optax.GradientTransformation`; it sees float32 weights and gradients.
        bits: 32: weights of float32, to the bit, with int16 remainders. 24: int8 remainders, a relative error of at
            most 2^-16. 16: no remainder; the new parameter is rounded stochastically.
        key: an int or a JAX key, for 16 bits.

    Returns:
        An `optax.GradientTransformationExtraArgs`, whose state is a `MasterState`.

    Raises:
        TypeError: an argument is none of these, or a parameter is not an array of floats.
        ValueError: no parameters were given to `update`; the state was made by other arguments or another version; or,
            with 16 bits within `jax.shard_map`, a parameter is a shard. In a jitted update the version is only known
            when the program runs: then the weights become NaN.

    Source: numerics.md 19.

    >>> import jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> tx = jlp.optim.master_weights(optax.sgd(1.0))
    >>> params = jnp.ones(2, jnp.bfloat16)
    >>> state = tx.init(params)
    >>> for _ in range(3):  # each step is too small for bfloat16
    ...     updates, state = tx.update(jnp.full(2, -0.001, jnp.bfloat16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.dtype.name, params[0].item(), state.remainders[0].item()
    ('bfloat16', 1.0, 25152)
    """
    inner = wrapping.with_extra_arguments(_WHO, inner)
    one_of(_WHO, "bits", bits, 32, 24, 16)
    words = words_of(_WHO, key)

    def init(params: Any) -> Any:
        leaves, tree = _leaves(params)
        full: list[Any] = [widened(p) if _is_ours(p) else p for _, p in leaves]
        rests = [jnp.zeros_like(p, REMAINDERS[bits]) if _is_ours(p) and bits > 16 else None for _, p in leaves]
        state = begun(inner.init(tree.unflatten(full)), tree.unflatten(rests))
        notes = lambda: _notes(leaves, bits, leafwise(inner) is not None)  # noqa: E731
        return wrapping.explained(state, notes, lambda: conversion(wrapping.shapes_of(params)))

    def begun(state: Any, remainders: Any) -> MasterState:
        """The state of step 0."""
        return MasterState(state, remainders, jnp.array(words), jnp.zeros((), _U32), wrapping.version())

    def conversion(like: Any) -> wrapping.Conversion:
        shapes, tree = _leaves(like)

        def opened(state: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            weights, _, readable = held(state, tree.unflatten([_named(params, path) for path, _ in shapes]))
            return state.inner, params | dict(zip(dict(shapes), joined(weights, readable), strict=True))

        def closed(state: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            """To nearest, with 16 bits too: the first rounding that draws is that of an update."""
            ours = [path for path, p in shapes if _is_ours(p)]
            halves = {path: split(widened(_named(params, path)), 24 if bits == 24 else 32) for path in ours}
            rests = [halves[path][1] if path in halves and bits > 16 else None for path, _ in shapes]
            return begun(state, tree.unflatten(rests)), params | {path: p for path, (p, _) in halves.items()}

        return wrapping.Conversion(opened, closed)

    def held(state: Any, params: Any) -> tuple[list[Any], Any, jax.Array]:
        """The parameters, those of bfloat16 as weights; the tree's structure; and whether the state is readable."""
        readable = wrapping.is_readable(_WHO, state, MasterState)
        if params is None:
            raise ValueError(f"{_WHO}: update was called without params; needs update(gradients, state, params)")
        leaves, tree = _leaves(params)
        drawn: Any = [None] * len(leaves)
        if bits == 16:
            drawn = words_of_leaves(state.words, state.step + 1, [path for path, _ in leaves], STREAM_OF_WEIGHTS)
        weights, rests = [], wrapping.leaves_of(_WHO, tree, state.remainders)  # type: list[Any], list[Any]
        for (path, p), rest, words in zip(leaves, rests, drawn, strict=True):
            if rest is not None and not _is_ours(p):
                raise ValueError(
                    f"{_WHO}: the parameter {path!r} is {p.dtype}, and the state has a remainder of bfloat16: apply "
                    "updates with optax.apply_updates, which keeps the dtype, or start from init(params)"
                )
            shape = p.shape if _is_ours(p) and bits > 16 else None
            wrapping.check_leaf(_WHO, wrapping.within("remainders", path), rest, shape, REMAINDERS.get(bits))
            weights.append(HeldWeight(p, rest, bits, words) if _is_ours(p) else p)
        return weights, tree, readable

    def joined(weights: list[Any], readable: jax.Array) -> list[Any]:
        """The float32 weights, and the parameters that pass through."""
        return [
            jnp.where(readable, join_weight(w.parameter, w.rest), jnp.nan) if isinstance(w, HeldWeight) else w
            for w in weights
        ]

    def made(updated: Any, after: Any, state: MasterState, tree: Any) -> tuple[Any, Any]:
        """The updates or parameters, and the state, of what was updated."""
        leaves = tree.flatten_up_to(updated)
        given = [x.parameter if isinstance(x, HeldWeight) else x for x in leaves]
        rests = [x.rest if isinstance(x, HeldWeight) else None for x in leaves]
        new = MasterState(after, tree.unflatten(rests), state.words, state.step + 1, state.version)
        return tree.unflatten(given), new

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        weights, tree, readable = held(state, params)
        full = joined(weights, readable)
        wide = jax.tree.map(lambda g: widened(g) if _is_ours(g) else g, gradients)
        updates, after = inner.update(wide, state.inner, tree.unflatten(full), **extra)
        updated = []
        for w, weight, u in zip(weights, full, tree.flatten_up_to(updates), strict=True):
            if isinstance(w, HeldWeight):
                new, rest = split(weight + u.astype(jnp.float32), bits, w.words)
                if rest is not None:  # it belongs to new: beside another number it is any number, and beside 0 NaN
                    is_new = jnp.abs(widened(new)) * 2.0**16 >= jnp.abs(widened(w.parameter))
                    rest = jnp.where(is_new, rest, jnp.zeros_like(rest))
                u = dataclasses.replace(w, parameter=widened(new) - widened(w.parameter), rest=rest)
            updated.append(u)
        return made(tree.unflatten(updated), after, state, tree)

    def one_pass(gradients: Any, state: Any, params: Any, result: str, readable: Any) -> tuple[Any, Any]:
        weights, tree, known = held(state, params)
        updated, after = inner.update.one_pass(
            gradients, state.inner, tree.unflatten(weights), result, readable & known
        )
        return made(updated, after, state, tree)

    def signs(state: Any) -> Any:
        state = state.state if isinstance(state, wrapping.Explained) else state
        return no_signs(state)._replace(inner=inner.update.signs(state.inner))

    return wrapping.transformation(init, Leafwise(one_pass, signs) if leafwise(inner) else update)


def split(weight: jax.Array, bits: int, words: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """float32 weights [...] as bfloat16, and the rest of so many bits: see `split_weight`.

    Arguments:
        bits: 32, 24 or 16.
        words: uint32 [2], for 16 bits: these are rounded stochastically and leave no rest.
    """
    if bits != 16:
        return split_weight(weight, bits)
    assert words is not None
    drawn = half_words(weight.reshape(weight.shape or (1,)), words).reshape(weight.shape)
    return split_weight(weight, bits, drawn)


def _is_ours(p: Any) -> bool:
    return p.dtype == jnp.bfloat16


def _leaves(params: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The parameters by their paths, and the tree's structure."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    named = [(path_of(path), leaf) for path, leaf in leaves]
    for path, leaf in named:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
            given = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(
                f"{_WHO}: the parameter {path!r} is {given}; needs arrays of floats: leave it out with optax.masked"
            )
    return named, tree


def _named(params: dict[str, Any], path: str) -> Any:
    """A parameter by its path in the tree that the wrapper sees."""
    if path not in params:
        raise ValueError(
            f"{_WHO}: its parameter {path!r} is none of those given, {', '.join(params)}: a transformation around it "
            f"changes their tree; make {_WHO} the outer one"
        )
    return params[path]


def _notes(leaves: list[tuple[str, Any]], bits: int, one_pass: bool) -> Iterator[tuple[str, wrapping.Note]]:
    for path, p in leaves:
        if _is_ours(p) and bits > 16:
            yield wrapping.within("remainders", path), wrapping.Note(f"remainder of {bits} bits", "", one_pass)
