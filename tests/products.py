"""Products in one compilation, how far a GEMM may be from the exact one, and what a function compiles to and keeps."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowprec as jlp
from jaxlowprec.ops.scaled_matmul import cuda
from jaxlowprec.wiring import native
from tests.helpers import quantized_from_bytes
from tests.ops.implementations import with_options


def operands(sizes, pair, seed=0, **fields):
    """Any codes and scales, [batch..., M, K] and [batch..., N, K]: partial sums of every magnitude."""
    *batch, m, k, n = sizes
    a = quantized_from_bytes((*batch, m, k), pair[0], seed, **fields)
    return a, quantized_from_bytes((*batch, n, k), pair[1], seed + 1, **fields)


def products(pairs, implementation):
    """Of each pair of operands, in one program."""
    return with_options(_products, implementation)(pairs)


def _products(pairs, implementation):
    return [
        jlp.scaled_matmul(*pair, preferred_element_type=jnp.float32, implementation=implementation) for pair in pairs
    ]


def _options(extras, case):
    names, activation, dtype, out_dtype = case
    names = (*names, *["activation_input"] * (activation == "dgelu"))
    return {name: extras[dtype][name] for name in names} | {
        "activation": activation,
        "preferred_element_type": out_dtype,
    }


def with_epilogues(a, b, extras, cases, implementation):
    """The result and, with a GELU, result and pre-activation for each case, in one program.

    Arguments:
        extras: by dtype, the operands of epilogues by their argument's name.
        cases: (names of the operands taken, activation, their dtype, the dtype of the result) of each.
    """
    return with_options(_with_epilogues, implementation, cases=cases)(a, b, extras)


def _with_epilogues(a, b, extras, *, cases, implementation):
    found = []
    for case in cases:
        options = _options(extras, case) | {"implementation": implementation}
        y = jlp.scaled_matmul(a, b, **options)
        both = jlp.scaled_matmul(a, b, return_pre_activation=True, **options) if case[1] == "gelu" else ()
        found.append((y, *both))
    return found


def epilogues_by_oracle(product, a, b, extras, cases):
    """What `with_epilogues` must give, by one of tests/against_oracle.py's products."""
    found = []
    for case in cases:
        y, before = product(a, b, **_options(extras, case))
        found.append((y, y, before) if case[1] == "gelu" else (y,))
    return found


def decoded(q):
    return np.asarray(q.dequantize(jnp.float32), np.float64)


def sum_error(formats, sizes, float32_sums=False):
    """How far sums of random quantised operands may be from the exact ones on the default device, relative to the sum
    of the terms' magnitudes. Sizes are M, K and N."""
    m, k, n = sizes
    if jax.default_backend() != "gpu":
        return k * 2.0**-24  # numerics.md 9
    return cuda.sum_errors(*formats, m, n, k, float32_sums, round(10 * native.compute_capability()))[0]


def rebase_errors(a, b):
    """What elements of two quantised matrices may be off by on the default device.

    More than 0 only for MXFP4 on compute capability 9.0, by MXFP4 or FP8 blocks, where the scales of blocks differ much
    (numerics.md 9.3).
    """
    kinds = {type(q.format) for q in (a, b)}
    on_hopper = jax.default_backend() == "gpu" and native.compute_capability() == 9
    rebased = on_hopper and jlp.MXFP4 in kinds and kinds <= {jlp.MXFP4, jlp.Float8Block}
    return [
        _rebase_errors(q) if rebased and isinstance(q.format, jlp.MXFP4) else np.zeros_like(decoded(q)) for q in (a, b)
    ]


def _rebase_errors(q):
    numbers = decoded(q)
    rows, depth = numbers.shape
    numbers = np.pad(numbers, ((0, 0), (0, -depth % 128)))
    scales = np.exp2(np.asarray(q.scale).view(np.uint8).astype(np.float64) - 127)
    scales = np.repeat(scales, 32, axis=0)[:rows] if q.format.tiles else scales
    scales = np.pad(scales, ((0, 0), (0, -scales.shape[1] % 4))).reshape(rows, -1, 4)
    zero = ~numbers.reshape(*scales.shape, 32).any(axis=-1)
    largest = np.where(zero, 0, scales).max(axis=-1, keepdims=True)
    errors = np.where(scales < largest * 2.0**-14, largest * 2.0**-16, 0)
    return np.repeat(errors.reshape(rows, -1), 32, axis=1)[:, :depth]


def assert_is_product(actual, a, b, sum_error=None, errors=(0, 0)):
    """a @ b, rounded once to the result's dtype.

    Arguments:
        sum_error: see the function; default: numerics.md 9's float32 accumulation.
        errors: what elements of a and b may be off by.
    """
    exact, sizes = a @ b, np.abs(a) @ np.abs(b)
    terms = (np.abs(a) + errors[0]) @ (np.abs(b) + errors[1])
    sum_error = a.shape[1] * 2.0**-24 if sum_error is None else sum_error
    rounding = float(jnp.finfo(actual.dtype).eps) / 2
    tiny = float(jnp.finfo(actual.dtype).smallest_subnormal)
    error = np.abs(np.asarray(actual).astype(np.float64) - exact)
    assert np.all(
        error <= (sum_error + 32 * 2.0**-24) * terms + terms - sizes + rounding * np.abs(exact) * 1.001 + tiny
    )


def native_calls(function, *args):
    """How often a compiled function calls each kernel."""
    return calls_of(jax.jit(function).lower(*args).compile())


def calls_of(compiled):
    """The same of a function that is compiled already."""
    return collections.Counter(re.findall(r'custom_call_target="(jaxlowprec_\w+)"', compiled.as_text()))


def quantizations_and_gradients(layer, x, weights, policy):
    """How often the gradient of a scan over `layer(x, w)`, rematerialised by a policy, quantises; and that gradient."""
    body = jax.checkpoint(lambda x, w: (layer(x, w), None), policy=policy)

    def loss(x, weights):
        return jax.lax.scan(body, x, weights)[0].astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, weights).compile()
    return calls_of(compiled)["jaxlowprec_quantize"], compiled(x, weights)


def kept(function, *args):
    """The arrays that the backward pass keeps."""
    return jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *args))
