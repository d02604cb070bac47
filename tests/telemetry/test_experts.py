"""Experts within blocks that watch layers."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowprec as jlp
from jaxlowprec.telemetry.taps import sketch

SIZES = jnp.array([40, 0, 17])
X = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (3, 64, 32)) / 8


def loss(w, x):
    y = jlp.grouped_matmul(x, w, SIZES, recipe=jlp.MXFP8BlockScaling(), name="experts")
    return jnp.square(y.astype(jnp.float32)).mean()


def test_a_trace_has_what_experts_read_and_their_gradients():
    found = jlp.debug.trace(loss, W, X).layers["experts"]
    real = jnp.where(jnp.arange(64)[:, None] < SIZES.sum(), X, 0)
    dw, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(W, X)
    for seen, expected in ((found[0, 0], real), (found[1, 0], W), (found[0, 1], dx), (found[1, 1], dw)):
        np.testing.assert_allclose(seen, sketch(expected), rtol=1e-4, atol=1e-5)


def test_rows_after_the_last_group_are_not_bad():
    assert jlp.debug.trace(loss, W, X.at[60].set(jnp.nan)).layers["experts"][:, :, 0].sum() == 0


def test_high_precision_differs_by_the_quantisation():
    differences = jlp.debug.compare(jlp.debug.trace(loss, W, X), jlp.debug.trace(loss, W, X, high_precision=True))
    errors = {d.tensor: d.error for d in differences}
    assert errors["input"] == errors["weight"] == 0
    assert 0 < errors["result"] < 0.1
