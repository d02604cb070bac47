"""What a GEMM may differ from the exact product by, and what a function compiles to and keeps."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.ops.scaled_matmul import cuda
from jaxlowprec.wiring import native


def decoded(q):
    return np.asarray(q.dequantize(jnp.float32), np.float64)


def sum_error(formats, sizes, float32_sums=False):
    """How far sums of random quantised operands may be from the exact ones on the default device, relative to the sum
    of the terms' magnitudes. Sizes are M, K and N."""
    m, k, n = sizes
    if jax.default_backend() != "gpu":
        return k * 2.0**-24  # numerics.md 9
    return cuda.sum_errors(*formats, m, n, k, float32_sums, round(10 * native.compute_capability()))[0]


def assert_is_product(actual, a, b, sum_error=None):
    """a @ b, rounded once to the result's dtype.

    Arguments:
        sum_error: see the function; default: numerics.md 9's float32 accumulation.
    """
    exact, terms = a @ b, np.abs(a) @ np.abs(b)
    sum_error = a.shape[1] * 2.0**-24 if sum_error is None else sum_error
    rounding = float(jnp.finfo(actual.dtype).eps) / 2
    tiny = float(jnp.finfo(actual.dtype).smallest_subnormal)
    error = np.abs(np.asarray(actual).astype(np.float64) - exact)
    assert np.all(error <= (sum_error + 32 * 2.0**-24) * terms + rounding * np.abs(exact) * 1.001 + tiny)


def native_calls(function, *args):
    """How often a compiled function calls each kernel."""
    return calls_of(jax.jit(function).lower(*args).compile())


def calls_of(compiled):
    """The same of a function that is compiled already."""
    return collections.Counter(re.findall(r'custom_call_target="(jaxlowprec_\w+)"', compiled.as_text()))


def kept(function, *args):
    """The arrays that the backward pass keeps."""
    return jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *args))
