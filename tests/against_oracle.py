"""What tests/numpy_oracle makes of whole arrays, batch axes included, and comparisons of the library with it."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import numpy_oracle
from tests.eager import jlp
from tests.helpers import as_bytes, assert_same_numbers
from tests.numpy_oracle import weight_only


def slices(q):
    """(codes, scales, amax, format) of each slice of the batch axes, as the oracle takes them."""
    batch = q.shape[:-2]

    def flat(leaf):
        leaf = np.asarray(leaf)
        return (as_bytes(leaf) if leaf.dtype.itemsize == 1 else leaf).reshape(-1, *leaf.shape[len(batch) :])

    amaxes = [None] * int(np.prod(batch)) if q.amax is None else flat(q.amax)
    return [(*part, q.format) for part in zip(flat(q.data), flat(q.scale), amaxes, strict=True)]


def quantized(x, fmt, axis=-1, hadamard=None, rounding="nearest", key=None, **given):
    """Codes and scales as bytes (float32 scales as such) and amax, stacked as QuantizedArray's fields are."""
    matrices = np.asarray(x).reshape(-1, *x.shape[-2:])
    random = None if key is None else (np.asarray(jax.random.key_data(key)), int(axis == -2), 0, 0)
    negative = hadamard.negative if hadamard else None
    given |= {"eden": rounding == "eden"}
    out = [numpy_oracle.quantize_matrix(m, x.dtype, fmt, axis, negative, random, **given) for m in matrices]
    return [
        None if part[0] is None else np.stack(part).reshape((*x.shape[:-2], *np.shape(part[0])))
        for part in zip(*out, strict=True)
    ]


def assert_matches_quantized(q, expected, message=""):
    """Every byte of a QuantizedArray is the oracle's."""
    data, scale, amax = expected
    np.testing.assert_array_equal(as_bytes(q.data), data, message)
    np.testing.assert_array_equal(as_bytes(q.scale), as_bytes(scale), message)
    if amax is None:
        assert q.amax is None
    else:
        np.testing.assert_array_equal(np.asarray(q.amax), amax, message)


def dequantized(q, dtype):
    """Decoded and rotated back in float32, rounded once."""
    lines = q.matrix_shape[-1] if q.axis == -1 else q.matrix_shape[0]

    def one(operand):
        y = numpy_oracle.decode(*operand)
        if q.hadamard:
            negative = q.hadamard.negative
            y = numpy_oracle.rotate_back(numpy_oracle.pad(y, 1, len(negative)), negative)
        y = y[:, :lines]
        return y.T if q.axis == -2 else y

    with np.errstate(all="ignore"):
        return np.stack([one(part) for part in slices(q)]).reshape(q.shape).astype(dtype)


def assert_dequantizes(q, dtype, *implementations):
    """The numbers are the oracle's."""
    for implementation in implementations:
        assert_same_numbers(
            jlp.dequantize(q, dtype=dtype, implementation=implementation), dequantized(q, jnp.dtype(dtype))
        )


def product(
    a, b, bias=None, activation=None, accumulate=None, activation_input=None, preferred_element_type=jnp.bfloat16
):
    """The result and the pre-activation of scaled_matmul."""
    batch, (m, n) = a.shape[:-2], (a.shape[-2], b.shape[-2])
    matrices = {"accumulate": accumulate, "activation_input": activation_input}
    extras = {name: None if e is None else np.asarray(e).reshape(-1, m, n) for name, e in matrices.items()}
    extras["bias"] = None if bias is None else np.broadcast_to(np.asarray(bias), (*batch, n)).reshape(-1, n)
    out = []
    for i, pair in enumerate(zip(slices(a), slices(b), strict=True)):
        one = {name: None if extra is None else extra[i] for name, extra in extras.items()}
        y = numpy_oracle.matmul(*pair)
        out.append(numpy_oracle.epilogue(y, activation=activation, dtype=jnp.dtype(preferred_element_type), **one))
    return tuple(np.stack(part).reshape(*batch, m, n) for part in zip(*out, strict=True))


def assert_multiplies(a, b, *implementations, **options):
    """The numbers are the oracle's, with an activation what it was applied to as well."""
    expected, before = product(a, b, **options)
    for implementation in implementations:
        assert_same_numbers(jlp.scaled_matmul(a, b, implementation=implementation, **options), expected)
        if options.get("activation") == "gelu":
            both = jlp.scaled_matmul(a, b, implementation=implementation, return_pre_activation=True, **options)
            assert_same_numbers(both[0], expected)
            assert_same_numbers(both[1], before)


def weight_only_product(x, q, bias=None, accumulate=None, activation_input=None, **options):
    """The result and the pre-activation of activations and one quantised weight for all batch axes, or one for each."""
    batch = x.shape[:-2]
    flat = [None if v is None else np.asarray(v).reshape(-1, *v.shape[-2:]) for v in (x, accumulate, activation_input)]
    out = []
    for i, matrix in enumerate(flat[0]):
        index = () if q.ndim == 2 else np.unravel_index(i, batch)

        def leaf(v, index=index):
            return None if v is None else np.asarray(v)[index]

        scale = leaf(q.scale)
        scale = as_bytes(scale) if scale.dtype.itemsize == 1 else scale
        data = as_bytes(leaf(q.data))
        y = weight_only.product(matrix.astype(np.float32), data, scale, leaf(q.amax), leaf(q.zero_point), q.format)
        one = {"accumulate": flat[1], "activation_input": flat[2]}
        one = {name: None if v is None else v[i] for name, v in one.items()}
        b = None if bias is None else np.broadcast_to(np.asarray(bias), (*batch, y.shape[1])).reshape(-1, y.shape[1])[i]
        dtype = jnp.dtype(options.get("preferred_element_type", "bfloat16"))
        out.append(numpy_oracle.epilogue(y, b, options.get("activation"), **one, dtype=dtype))
    return tuple(np.stack(part).reshape(*x.shape[:-1], q.shape[-2]) for part in zip(*out, strict=True))
