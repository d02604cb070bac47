"""Codes and scales chosen by what a linear reads: plain bytes, a slow reference, and what is gained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.checkpoints.calibration.feedback import Method, factor_of, output_error, quantized
from jaxlowprec.checkpoints.calibration.grids import grid_of
from tests.eager import jlp
from tests.helpers import as_bytes

FORMATS = {
    "int4": jlp.Int4(32),
    "int4_asymmetric": jlp.Int4(32, symmetric=False),
    "int4_float16": jlp.Int4(64, scale_dtype="float16"),
    "nvfp4": jlp.NVFP4(),
}
PLAIN = Method(search=False, feedback=False)


def weight(rows=24, columns=192, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32).astype(jnp.bfloat16)


def moments(columns=192, seed=1):
    """Those of inputs that share a few directions, some much larger than others."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((4 * columns, 24)) @ random.standard_normal((24, columns))
    x = (mixed + 0.5 * random.standard_normal(mixed.shape)) * np.exp(random.standard_normal(columns))
    return (x.T @ x / len(x)).astype(np.float32)


def chosen(w, h, fmt, method):
    grid = grid_of(fmt, float(np.abs(np.asarray(w, np.float32)).max()))
    return quantized(w, h, grid, method, jnp.bfloat16)


def decoded(q):
    return np.asarray(q.dequantize(jnp.float32))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_bytes_without_a_method_are_plain(fmt):
    w = weight()
    q, plain = chosen(w, moments(), fmt, PLAIN), jlp.quantize(jax.device_put(w), fmt)
    for name in ("data", "scale", "zero_point", "amax"):
        given, wanted = getattr(q, name), getattr(plain, name)
        assert (given is None) == (wanted is None)
        if given is not None:
            np.testing.assert_array_equal(as_bytes(given), as_bytes(wanted))


def reference(w, h, fmt, damping):
    """Optimal brain quantisation, float64: after each column, the exact update of all later ones, and of H^-1 without
    that column. No factor, no blocks of columns."""
    grid = grid_of(fmt, float(np.abs(np.asarray(w, np.float32)).max()))
    w, h = np.asarray(w, np.float64).copy(), np.asarray(h, np.float64).copy()
    importance = np.diagonal(h).astype(np.float32)
    inverse = np.linalg.inv(h + damping * np.diagonal(h).mean() * np.eye(len(h)))
    numbers = np.empty_like(w)
    for k in range(w.shape[1]):
        if k % grid.length == 0:
            block = slice(k, k + grid.length)
            fitted = grid.fit(w[:, block].astype(np.float32), importance[block], True)
        numbers[:, k] = grid.nearest(w[:, k].astype(np.float32), fitted)
        w -= np.outer((w[:, k] - numbers[:, k]) / inverse[k, k], inverse[k])
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return numbers


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_feedback_is_that_of_a_slow_reference(fmt):
    w, h = weight(), moments()
    ours, wanted = decoded(chosen(w, h, fmt, Method())), reference(w, h, fmt, 0.01)
    # a rounding of float32 may decide a tie in another way, and the rest of that row then differs
    same_rows = np.isclose(ours, wanted, rtol=1e-5, atol=1e-6).all(axis=1)
    assert same_rows.mean() >= 0.75
    assert output_error(w, ours, h) == pytest.approx(output_error(w, wanted, h), rel=0.02)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("method", "most"),
    [(Method(feedback=False), 0.97), (Method(search=False), 0.7), (Method(), 0.7)],
    ids=["search", "feedback", "both"],
)
def test_the_output_changes_less_than_with_plain_rounding(fmt, method, most):
    w, h = weight(), moments()
    plain, ours = (output_error(w, decoded(chosen(w, h, fmt, m)), h) for m in (PLAIN, method))
    assert ours < most * plain


def test_the_factor_is_that_of_the_inverse():
    h = moments(columns=48)
    factor = factor_of(h, 0.01).astype(np.float64)
    damped = h.astype(np.float64) + 0.01 * np.diagonal(h).mean() * np.eye(48)
    assert np.array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(48), atol=1e-3)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_inputs_of_zero_leave_their_weights_plain(fmt):
    w, h = weight(columns=128), moments(columns=128)
    h[64:], h[:, 64:] = 0, 0
    ours, plain = (decoded(chosen(w, h, fmt, method)) for method in (Method(), PLAIN))
    np.testing.assert_array_equal(ours[:, 64:], plain[:, 64:])


def test_weights_of_zero_stay_zero():
    w = np.zeros((8, 64), jnp.bfloat16)
    for fmt in (jlp.Int4(32), jlp.Int4(32, symmetric=False), jlp.NVFP4()):
        assert not decoded(chosen(w, moments(64), fmt, Method())).any()


@pytest.mark.parametrize("damping", [0, -1, 2])
def test_damping_is_a_share(damping):
    with pytest.raises(ValueError, match="needs a number above 0, up to 1"):
        Method(damping=damping)
