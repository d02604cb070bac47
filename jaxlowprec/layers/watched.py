"""Blocks that watch a layer's product (`debug`, calibration), choose its recipe (`find_policy`), or see each call of a
layer, so that no function may compute for several (`explain` of a Linen model).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.layers.layer_call import LayerCall
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.telemetry import scopes
from jaxlowprec.telemetry.scopes import Choices, SecondMoments
from jaxlowprec.telemetry.taps import Taps, tap

Compute = Callable[[LayerCall, Any, Any], tuple[jax.Array, Any]]


def watched(
    call: LayerCall, x: Any, w: Any, compute: Compute, macs: Callable[[], int], sizes: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """compute(call, x, w): a product, and the state of delayed scaling.

    Arguments:
        w: the weight; None if it is quantised already: then its recipe stays.
        macs: gives the multiply-adds of the product.
        sizes: of the groups of x's rows [T, K]. Rows in none have no effect: `debug` sees zeros there.
    """
    here = scopes.current()
    see_inputs(call.name, x, sizes)
    if isinstance(here, Taps):
        x = x if sizes is None else jnp.where(jnp.arange(x.shape[0])[:, None] < sizes.sum(), x, 0)
        return _tapped(here, call, x, w, compute)
    if isinstance(here, Choices) and w is not None and call.quantized is None and here.concerns(call.recipe, call.name):
        return _chosen(here, call, x, w, compute, macs)
    return compute(call, x, w)


def see_inputs(name: str, x: jax.Array, sizes: jax.Array | None = None) -> None:
    """Shows the inputs of a layer to a block that adds up their moments; also of one that is left to Flax."""
    here = scopes.current()
    if isinstance(here, SecondMoments):
        here.see(name, x, sizes)


def is_watched() -> bool:
    """Whether a block watches or chooses what layers compute, so that each must be a call of its own."""
    return isinstance(scopes.current(), Taps | Choices | SecondMoments)


def _tapped(here: Taps, call: LayerCall, x: Any, w: Any, compute: Compute) -> tuple[jax.Array, Any]:
    state = here.layer(call.name)
    if here.high_precision and w is not None and call.quantized is None:
        compute = _under(None, call, compute, x, w)
    if state is None:
        return compute(call, x, w)
    y, scaling_state = compute(call, tap(x, state[0]), None if w is None else tap(w, state[1]))
    return tap(y, state[2]), scaling_state


def _chosen(here: Choices, call: LayerCall, x: Any, w: Any, compute: Compute, macs: Any) -> tuple[jax.Array, Any]:
    here.note(call.name, macs(), w.size)
    if here.chosen is None:
        return compute(call, x, w)
    if call.key is None:
        call = dataclasses.replace(call, key=here.key_of(call.name))

    def with_recipe(recipe: Recipe | None) -> Callable[..., Any]:
        under = _under(recipe, call, compute, x, w)
        return lambda x, w: under(call, x, w)

    return here.compute(call.name, with_recipe, x, w)


def _under(recipe: Recipe | None, call: LayerCall, compute: Compute, x: Any, w: Any) -> Compute:
    """`compute` under another recipe, with a result of the same dtype."""
    dtype = jax.eval_shape(lambda x, w: compute(call, x, w)[0], x, w).dtype

    def under(call: LayerCall, x: Any, w: Any) -> tuple[jax.Array, Any]:
        y, state = compute(dataclasses.replace(call, recipe=recipe), x, w.astype(x.dtype) if recipe is None else w)
        return y.astype(dtype), state

    return under


_current: contextvars.ContextVar[bool] = contextvars.ContextVar("seeing", default=False)


@contextlib.contextmanager
def seeing_calls() -> Iterator[None]:
    """Within the block, blocks of layers call each of them."""
    token = _current.set(True)
    try:
        yield
    finally:
        _current.reset(token)


def calls_are_seen() -> bool:
    """Whether such a block has been entered."""
    return _current.get()
