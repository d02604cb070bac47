"""Products of quantised operands with their custom_vjp: the core of `linear` and `grouped_matmul`.

See `product` for their three GEMMs.
"""

from __future__ import annotations

import functools

import jax

from jaxlowprec.layers.product import (
    Product,
    Specs,
    States,
    backward_of_all,
    for_each,
    forward_of_all,
    fprop,
    products_differentiated_once,
    quantized_inputs,
    recorded,
)
from jaxlowprec.layers.residuals import differentiated_once, dtype_marker, product
from jaxlowprec.recipes.transformer_engine import DelayedScaling


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(specs: Specs, x, products: tuple[Product, ...], states: tuple[States, ...]):
    inputs = for_each(specs, quantized_inputs(specs, x, states, sizes=products[0].sizes))
    of_scaling = [state for state, _ in states]
    return tuple(fprop(*each)[0] for each in zip(specs, inputs, products, of_scaling, strict=True))


def _forward(specs: Specs, x, products, states):
    x, products = differentiated_once(x), products_differentiated_once(products)
    inputs = quantized_inputs(specs, x, states, sizes=products[0].sizes, backward=True)
    ys, kept, _, kept_inputs = forward_of_all(specs, inputs, products, states)
    return tuple(map(product, ys)), (kept_inputs, dtype_marker(x), kept)


def _backward(specs: Specs, residuals, dys):
    xs, like_x, kept = residuals
    return backward_of_all(specs, xs, kept, differentiated_once(dys), like_x)


_matmul.defvjp(_forward, _backward)
quantized_matmuls = jax.jit(_matmul, static_argnums=0)  # layers with equal specs are traced once, whatever their names
"""ProductSpecs, x [..., T, K], as many Products and States -> as many [..., T, N]: x is quantised once for all."""


# --- calibrating


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recording(delayed: DelayedScaling, x, w, y, state):
    """y, for calibrating: x, w and the gradient of y give the state's gradient."""
    del delayed, x, w, state
    return y


def _recording_forward(delayed: DelayedScaling, x, w, y, state):
    return y, recorded(delayed, recorded(delayed, state, "input", x), "kernel", w)


def _recording_backward(delayed: DelayedScaling, state, dy):
    return None, None, dy, recorded(delayed, state, "output_grad", dy)


recording.defvjp(_recording_forward, _recording_backward)
