"""GemmOperands of quantised operands with their custom_vjp: the core of `linear` and `grouped_matmul`.

See `product` for their three GEMMs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.layers.producers import NormedInput, input_dtype_marker, input_gradients, inputs_of
from jaxlowprec.layers.product import (
    GemmOperands,
    Specs,
    States,
    backward_of_all,
    for_each,
    forward_of_all,
    fprop,
    products_differentiated_once,
    recorded,
)
from jaxlowprec.layers.residuals import differentiated_once, tag_product
from jaxlowprec.ops.amax import amax as tensor_amax
from jaxlowprec.ops.grouped_matmul.api import group_amaxes
from jaxlowprec.recipes.transformer_engine import DelayedScaling


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    specs: Specs, x: jax.Array | NormedInput, products: tuple[GemmOperands, ...], states: tuple[States, ...]
) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
    inputs, further, _ = inputs_of(specs, x, states, first=products[0])
    of_scaling = [state for state, _ in states]
    each = zip(specs, for_each(specs, inputs), products, of_scaling, strict=True)
    return tuple(fprop(*arguments)[0] for arguments in each), further


def _forward(
    specs: Specs, x: jax.Array | NormedInput, products: tuple[GemmOperands, ...], states: tuple[States, ...]
) -> tuple[tuple[tuple[jax.Array, ...], list[jax.Array]], Any]:
    x, products = differentiated_once(x), products_differentiated_once(products)
    inputs, further, made_from = inputs_of(specs, x, states, first=products[0], backward=True)
    ys, kept, _, kept_inputs = forward_of_all(specs, inputs, products, states)
    return (tuple(map(tag_product, ys)), further), (kept_inputs, made_from, kept)


def _backward(specs: Specs, residuals: Any, gradients: Any) -> tuple[Any, tuple[GemmOperands, ...], tuple[States, ...]]:
    xs, made_from, kept = residuals
    dys, of_further = differentiated_once(gradients)
    dx, *others = backward_of_all(specs, xs, kept, dys, input_dtype_marker(made_from))
    return input_gradients(made_from, dx, of_further), *others


_matmul.defvjp(_forward, _backward)
quantized_matmuls = jax.jit(_matmul, static_argnums=0)  # layers with equal specs are traced once, whatever their names
"""GemmSpecs, x [..., T, K], as many GemmOperands and States -> as many [..., T, N]: x is quantised once for all.

x may be a NormedInput. A list of further results comes second, see `normed_input.inputs_of`.
"""


# --- calibrating


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recording(
    delayed: DelayedScaling, x: jax.Array, w: jax.Array, y: jax.Array, state: Any, sizes: jax.Array | None
) -> jax.Array:
    """y, for calibrating: x, w and the gradient of y give the state's gradient. `sizes`: see `GemmOperands`."""
    del delayed, x, w, state, sizes
    return y


def _amax(x: jax.Array, sizes: jax.Array | None = None) -> jax.Array:
    x = jnp.atleast_2d(x)
    return (tensor_amax(x, True, None) if sizes is None else group_amaxes(x, sizes, True, None))[0]


def _recording_forward(
    delayed: DelayedScaling, x: jax.Array, w: jax.Array, y: jax.Array, state: Any, sizes: jax.Array | None
) -> tuple[jax.Array, Any]:
    state = recorded(delayed, state, "input", _amax(x, sizes))
    return y, (recorded(delayed, state, "kernel", _amax(w)), sizes)


def _recording_backward(
    delayed: DelayedScaling, residuals: Any, dy: jax.Array
) -> tuple[None, None, jax.Array, Any, None]:
    state, sizes = residuals
    return None, None, dy, recorded(delayed, state, "output_grad", _amax(dy, sizes)), None


recording.defvjp(_recording_forward, _recording_backward)
