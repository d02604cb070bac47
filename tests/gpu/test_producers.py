"""The bytes of norms and activations on a GPU are the CPU's, forwards and backwards: every kind and dtype.

A NaN of a result that is not quantised may be any NaN (numerics.md 12).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.activations.api import activated, activation_gradients
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.norms.op import NormSpec, norm_op
from jaxlowprec.ops.norms.quantized import quantized_norm
from tests.gpu.sides import assert_same_bytes_on, assert_same_numbers_on, run_on
from tests.helpers import FLOATS, assert_same_bytes, random_array

PLAIN, GATED = ("gelu", "silu", "relu_squared"), ("swiglu", "geglu")
SHAPES = ((1, 16), (17, 33), (130, 258), (2, 3, 20, 40), (512, 1024))
BLOCK_FORMATS = [jlp.MXFP8(), jlp.MXFP8("e5m2"), jlp.MXFP4(), jlp.Float8Block()]
WORDS = jnp.array([3, 5], jnp.uint32)
ROUNDINGS = pytest.mark.parametrize("words", [None, WORDS], ids=["nearest", "stochastic"])
WIDTHS = (1, 5, 8, 96, 255, 256, 264, 1032, 4096, 6152, 24584)  # the last one does not fit into shared memory
LARGE = ((8192, 4096), (4096, 8192), (4095, 8191))


def spoilt(shape, dtype, seed=1):
    """With zeros of either sign, subnormal, large and small numbers, infinity and NaN where there is room."""
    x = 4 * random_array(shape, "float32", seed=seed).reshape(-1)
    if x.size > 1000:
        x = x.at[:40].set(-0.0).at[70:90].set(1e-39).at[100:120].multiply(1e30).at[200:220].multiply(1e-30)
        x = x.at[-3].set(jnp.nan).at[-500].set(-jnp.inf)
    return x.reshape(shape).astype(dtype)


def with_gradients(name, *args):
    """An activation, and the gradients of its operands."""
    y, backward = jax.vjp(lambda *args: getattr(jlp, name)(*args, implementation="ffi"), *args)
    return y, backward(args[-1])


@pytest.mark.parametrize("name", (*PLAIN, *GATED))
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations(cpu, gpu, name, dtype):
    for shape in SHAPES:
        args = [spoilt(shape, dtype, seed) for seed in range(1 + (name in GATED))]
        assert_same_numbers_on((cpu, gpu), lambda *args: with_gradients(name, *args), *args)


@pytest.mark.parametrize("name", (*PLAIN, *GATED))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_of_every_bit_pattern(cpu, gpu, name, dtype):
    x = jax.lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.dtype(dtype)).reshape(256, 256)
    x = jnp.where(jnp.isnan(x), 0, x)
    args = [x, spoilt((256, 256), dtype)] if name in GATED else [x]
    assert_same_numbers_on((cpu, gpu), lambda *args: with_gradients(name, *args), *args)


def norm_and_gradient(kind, residual, x, dy, gamma, beta):
    """The results of a norm, and the gradient of its rows; those of gamma and beta have no defined bytes."""
    more = {"residual": dy} if residual else {}

    def run(x):
        if kind == "rms":
            return jlp.rms_norm(x, gamma, implementation="ffi", **more)
        return jlp.layer_norm(x, gamma, beta, implementation="ffi", **more)

    y, backward = jax.vjp(run, x)
    return y, backward((dy, dy) if residual else dy)


def assert_same_norms(devices, kind, residual, x):
    dy = random_array(x.shape, x.dtype, seed=2)
    gamma, beta = (random_array(x.shape[-1:], "float32", seed=seed) for seed in (3, 4))
    assert_same_numbers_on(devices, lambda *args: norm_and_gradient(kind, residual, *args), x, dy, gamma, beta)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms(cpu, gpu, kind, dtype, residual):
    for shape in (*SHAPES, *((7, width) for width in WIDTHS)):
        assert_same_norms((cpu, gpu), kind, residual, random_array(shape, dtype, seed=1))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e15, 1e25, np.inf, np.nan])
def test_norms_of_hostile_rows(cpu, gpu, kind, scale):
    x = random_array((40, 520), "float32", seed=1)
    x = x.at[2].multiply(scale) if np.isfinite(scale) else x.at[2, 7].set(scale)
    for dtype in FLOATS:
        assert_same_norms((cpu, gpu), kind, False, x.astype(dtype))


@pytest.mark.parametrize("wanted", [Amaxes(), Amaxes(hadamard=jlp.Hadamard()), Amaxes(False, jlp.Hadamard())], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_amaxes_of_results(cpu, gpu, dtype, wanted):
    def run(x, gamma):
        y = activated("swiglu", [x, x], wanted, "ffi")
        gradients = activation_gradients("swiglu", x, [x, x], wanted, "ffi")
        spec = NormSpec("rms", 1e-6, False, False, "ffi", wanted.of_rows(x.shape[-2]))
        return y, gradients, norm_op(spec)(x, jnp.broadcast_to(gamma, (*x.shape[:-2], x.shape[-1])))

    for shape in SHAPES:
        x, gamma = random_array(shape, dtype, seed=1), random_array(shape[-1:], "float32", seed=2)
        assert_same_bytes_on((cpu, gpu), run, x, gamma)


def amaxed_norm(kind, residual, wanted, x):
    """A norm and its amaxes."""
    spec = NormSpec(kind, 1e-6, residual, False, "ffi", wanted.of_rows(x.shape[-2]))
    return norm_op(spec)(x, *[x] * residual, random_array((*x.shape[:-2], x.shape[-1]), "float32", seed=3))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_amaxes_of_norms(cpu, gpu, dtype, kind, residual):
    """Rows that a block keeps, all or in part; whole turns of 16 rows, and others; several matrices."""
    for shape in ((2, 35, 264), (3, 16, 265), *((17, width) for width in WIDTHS)):
        for wanted in (Amaxes(), Amaxes(hadamard=jlp.Hadamard()), Amaxes(False, jlp.Hadamard())):
            x = random_array(shape, dtype, seed=1)
            assert_same_bytes_on((cpu, gpu), functools.partial(amaxed_norm, kind, residual, wanted), x)


def quantised(kind, fmt, words, x):
    """A norm of x + x that is quantised and not stored, with what is saved of it."""
    spec = NormSpec(kind, 1e-6, True, kind == "layer", "ffi")
    gamma, beta = (random_array(x.shape[-1:], "float32", seed=seed) for seed in (3, 4))
    return quantized_norm(spec, fmt, x, gamma, x, beta if spec.beta else None, words=words)


@ROUNDINGS
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantised_norms(cpu, gpu, dtype, kind, fmt, words):
    for shape in ((1, 16), (17, 33), (130, 264), (200, 1024)):
        x = random_array(shape, dtype, seed=1)
        assert_same_bytes_on((cpu, gpu), functools.partial(quantised, kind, fmt, words), x)


def quantised_activation(name, fmt, words, dy, *operands):
    """An activation and the gradients of its operands, each quantised and not stored; gradients to nearest."""
    value = quantized_activation(name, fmt, operands, words=words, implementation="ffi")
    return value, quantized_activation_gradients(name, fmt, dy, operands, implementation="ffi")


def assert_same_quantised_activations(devices, name, fmt, words, shape, dtype):
    arrays = [spoilt(shape, dtype, seed) for seed in range(2 + (name in GATED))]
    assert_same_bytes_on(devices, functools.partial(quantised_activation, name, fmt, words), *arrays)


@ROUNDINGS
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
@pytest.mark.parametrize("name", (*PLAIN, *GATED))
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantised_activations(cpu, gpu, dtype, name, fmt, words):
    for shape in ((1, 16), (17, 33), (130, 264), (200, 1024)):
        assert_same_quantised_activations((cpu, gpu), name, fmt, words, shape, dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_gamma_and_beta(cpu, gpu, dtype, residual):
    """Sums whose order is another on a GPU, and the same in every run."""
    for rows, columns in ((1, 5), (7, 264), (100, 265), (4099, 40), (40, 6152)):
        x, dy = (random_array((rows, columns), dtype, seed=seed) for seed in (1, 2))
        gamma, beta = (random_array((columns,), "float32", seed=seed) for seed in (3, 4))

        def run(x, dy, gamma, beta):
            more = {"residual": dy} if residual else {}
            _, of_rms = jax.vjp(lambda g: jlp.rms_norm(x, g, implementation="ffi", **more), gamma)
            _, of_layer = jax.vjp(lambda g, b: jlp.layer_norm(x, g, b, implementation="ffi", **more), gamma, beta)
            given = (dy, dy) if residual else dy
            return of_rms(given), of_layer(given)

        expected, found, again = (
            jax.tree.leaves(run_on(device, run, x, dy, gamma, beta)) for device in (cpu, gpu, gpu)
        )
        assert_same_bytes(again, found)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * rows)


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(cpu, gpu, shape):
    x = random_array(shape, "bfloat16", seed=1)
    assert_same_bytes_on((cpu, gpu), lambda x: with_gradients("swiglu", x, x), x)
    for kind in ("rms", "layer"):
        assert_same_norms((cpu, gpu), kind, True, x)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kernel_once(cpu, gpu, dtype):
    """Small: whole pieces and single elements, rows that are kept and rows that are read again."""
    for name in (*PLAIN, *GATED):
        args = [spoilt((67, 150), dtype, seed) for seed in range(1 + (name in GATED))]
        assert_same_numbers_on((cpu, gpu), lambda *args, n=name: with_gradients(n, *args), *args)
    for kind in ("rms", "layer"):
        for shape in ((6, 264), (6, 265), (2, 24584)):
            x = random_array(shape, dtype, seed=1)
            assert_same_norms((cpu, gpu), kind, True, x)
            wanted = Amaxes(hadamard=jlp.Hadamard())
            assert_same_bytes_on((cpu, gpu), functools.partial(amaxed_norm, kind, True, wanted), x)
    for fmt, words in itertools.product((jlp.MXFP8(), jlp.MXFP8("e5m2"), jlp.MXFP4()), (None, WORDS)):
        for kind in ("rms", "layer"):
            x = random_array((130, 264), dtype, seed=1)
            assert_same_bytes_on((cpu, gpu), functools.partial(quantised, kind, fmt, words), x)
        for name in ("silu", "swiglu"):
            assert_same_quantised_activations((cpu, gpu), name, fmt, words, (130, 264), dtype)
