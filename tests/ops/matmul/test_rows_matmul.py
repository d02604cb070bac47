"""GEMMs of operands with a scale for each line: integers exactly, by int64 products in NumPy; floats within a bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.arrays.quantized_array import QuantizedArray
from tests.eager import jlp
from tests.helpers import assert_same_bytes, random_array
from tests.numpy_oracle import rows as oracle

SHAPES = [(1, 1, 1), (1, 96, 64), (2, 40, 33), (5, 7, 300), (33, 70, 129), (64, 128, 1024), (130, 257, 65)]
WEIGHTS = (jlp.Int8Rows(), jlp.Int8Rows("bfloat16"), jlp.Int8Rows("bfloat16", "compressed-tensors"))


def operands(shape, fmt=None, seed=0):
    """lhs [M, K] by `Int8Rows()`, rhs [N, K] by `fmt`."""
    m, n, k = shape
    x, w = random_array((m, k), "bfloat16", seed), random_array((n, k), "bfloat16", seed + 1)
    return jlp.quantize(x, jlp.Int8Rows()), jlp.quantize(w, fmt or jlp.Int8Rows())


def numbers(q):
    return np.asarray(q.data), np.asarray(q.scale).astype(np.float32)


def extreme(code, lines, k, fmt):
    """Lines of one code."""
    data, scale = jnp.full((lines, k), code, jnp.int8), jnp.full((lines, 1), 0.37, fmt.scale_dtype)
    return QuantizedArray(data, scale, None, None, fmt, (lines, k), jnp.dtype("float32"), -1, None)


class TestIntegers:
    @pytest.mark.parametrize("implementation", ["ffi", "reference", "portable"])
    @pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_bytes_are_those_of_exact_sums(self, shape, fmt, implementation, isa):
        a, b = operands(shape, fmt)
        y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation)
        np.testing.assert_array_equal(np.asarray(y), oracle.multiply(numbers(a), numbers(b)))

    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    @pytest.mark.parametrize(("a", "b"), [(127, 127), (-127, 127), (127, -128), (-127, -128), (1, -128)], ids=str)
    @pytest.mark.parametrize("k", [131_072, 131_071])
    def test_sums_at_the_limit(self, a, b, k, implementation, isa):
        b_format = jlp.Int8Rows(rule="compressed-tensors") if b == -128 else jlp.Int8Rows()
        if 127 * 128 * k >= 2**31 and b == -128 and a != 1:
            k = 131_072 * 127 // 128
        a, b = extreme(a, 3, k, jlp.Int8Rows()), extreme(b, 5, k, b_format)
        y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation)
        np.testing.assert_array_equal(np.asarray(y), oracle.multiply(numbers(a), numbers(b)))

    def test_the_other_order_of_scales_gives_other_bytes(self):
        a, b = (numbers(q) for q in operands((64, 128, 1024)))
        sums = (a[0].astype(np.int64) @ b[0].astype(np.int64).T).astype(np.float32)
        assert (oracle.multiply(a, b) != (sums * a[1]) * b[1].T).any()

    def test_a_row_does_not_depend_on_others(self, isa):
        a, b = operands((33, 70, 129))
        y = jlp.scaled_matmul(a, b)
        for i in (0, 5, 32):
            alone = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], (a.data, a.scale))
            one = QuantizedArray(*alone, None, None, a.format, (1, 129), a.dtype, -1, None)
            assert_same_bytes(jlp.scaled_matmul(one, b), y[i : i + 1])

    def test_epilogue(self):
        a, b = operands((33, 70, 129))
        bias, onto = random_array((70,), "float32", 5), random_array((33, 70), "float32", 6)
        options = {"bias": bias, "activation": "gelu", "accumulate": onto, "return_pre_activation": True}
        found, expected = (jlp.scaled_matmul(a, b, implementation=i, **options) for i in ("ffi", "reference"))
        assert_same_bytes(found, expected)

    def test_batches_and_vmap(self):
        x, w = random_array((3, 5, 64), seed=1), random_array((3, 7, 64), seed=2)
        a, b = jlp.quantize(x, jlp.Int8Rows()), jlp.quantize(w, jlp.Int8Rows())
        y = jlp.scaled_matmul(a, b)
        assert_same_bytes(jax.vmap(jlp.scaled_matmul)(a, b), y)
        for i in range(3):
            each = [jlp.quantize(v[i], jlp.Int8Rows()) for v in (x, w)]
            assert_same_bytes(jlp.scaled_matmul(*each), y[i])


class TestFloats:
    @pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_sums_are_one_chain_of_multiply_adds(self, shape, elements, isa):
        """Within float32's error of the exact product, and the kernels' bytes for every number of rows."""
        m, n, k = shape
        x, w = random_array((m, k), seed=1), random_array((n, k), seed=2)
        a, b = (jlp.quantize(v, jlp.Float8Rows(e)) for v, e in zip((x, w), elements, strict=True))
        y = np.asarray(jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32))
        exact = [np.asarray(q.data).astype(np.float64) * np.asarray(q.scale) for q in (a, b)]
        bound = (k + 2) * 2.0**-24 * (np.abs(exact[0]) @ np.abs(exact[1]).T)
        assert (np.abs(y - exact[0] @ exact[1].T) <= bound).all()
        reference = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation="reference")
        assert (np.abs(y - np.asarray(reference)) <= 2 * bound).all()
        one = QuantizedArray(a.data[:1], a.scale[:1], None, None, a.format, (1, k), a.dtype, -1, None)
        assert_same_bytes(jlp.scaled_matmul(one, b, preferred_element_type=jnp.float32), y[:1])

    def test_scales_of_columns_come_first(self):
        """Of one product, whose sum is exact, the bytes tell the order."""
        x, w = random_array((64, 1), "float32", 1), random_array((64, 1), "float32", 2)
        a, b = jlp.quantize(x, jlp.Float8Rows()), jlp.quantize(w, jlp.Float8Rows())
        y = np.asarray(jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32))
        sums = np.asarray(a.data).astype(np.float32) @ np.asarray(b.data).astype(np.float32).T
        np.testing.assert_array_equal(y, sums * np.asarray(b.scale).T * np.asarray(a.scale))
        assert (y != sums * np.asarray(a.scale) * np.asarray(b.scale).T).any()


class TestFourBitWeights:
    """W4A8: exact sums of groups, one multiply-add for each."""

    FORMATS = (
        jlp.Int4(32),
        jlp.Int4(128, pad=True),
        jlp.Int4(256, scale_dtype="float16", pad=True),
        jlp.MXFP4(),
        jlp.MXFP4((32, 32), "even"),
    )

    def exact(self, a, b):
        """By float64, which holds a product and, but for a rounding that is rarely seen, a multiply-add."""
        codes = np.asarray(b.data)
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = codes - 8.0 if b.format.element == "int4" else grid[codes & 7] * np.where(codes & 8, -1, 1)
        scales = np.asarray(b.scale.astype(jnp.float32)).astype(np.float64)
        if b.format.tiles:
            scales = np.repeat(scales, 32, axis=0)[: codes.shape[0]]
        y = np.zeros((a.shape[0], b.shape[0]), np.float32)
        for g in range(scales.shape[1]):
            part = slice(g * b.format.length, (g + 1) * b.format.length)
            sums = np.asarray(a.data)[:, part].astype(np.float64) @ values[:, part][:, : a.shape[1] - part.start].T
            y = (sums * scales[:, g] + y).astype(np.float32)
        return y * np.asarray(a.scale)

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    @pytest.mark.parametrize(
        "shape",
        [(1, 96, 64), (2, 40, 96), (33, 70, 256), (64, 128, 1024), (130, 257, 480), (48, 33, 2304)],
        ids=str,
    )
    def test_bytes_are_those_of_exact_groups(self, shape, fmt, isa):
        m, n, k = shape
        a = jlp.quantize(random_array((m, k), seed=1), jlp.Int8Rows())
        b = jlp.quantize(random_array((n, k), seed=2), fmt)
        y = np.asarray(jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32))
        np.testing.assert_array_equal(y, self.exact(a, b))
        for implementation in ("reference", "portable"):
            other = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation)
            np.testing.assert_allclose(y, other, rtol=0, atol=1e-5 * np.abs(y).max())
        one = QuantizedArray(a.data[:1], a.scale[:1], None, None, a.format, (1, k), a.dtype, -1, None)
        assert_same_bytes(jlp.scaled_matmul(one, b, preferred_element_type=jnp.float32), y[:1])

    def test_activations_cost_little_beside_the_weight(self):
        x, w = random_array((64, 1024), "float32", 1), random_array((128, 1024), "float32", 2)
        q = jlp.quantize(w, jlp.Int4(128))
        exact, decoded = (np.asarray(x, np.float64) @ np.asarray(v, np.float64).T for v in (w, q.dequantize()))
        y = np.asarray(jlp.scaled_matmul(jlp.quantize(x, jlp.Int8Rows()), q, preferred_element_type=jnp.float32))
        assert np.linalg.norm(y - exact) < 1.02 * np.linalg.norm(decoded - exact)


@pytest.mark.parametrize("fmt", [jlp.Float8Rows(), jlp.Float8Rows(scale_dtype="bfloat16"), *WEIGHTS], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_alone_may_have_such_scales(fmt, shape, isa):
    m, n, k = shape
    x, w = random_array((m, k), seed=1), jlp.quantize(random_array((n, k), seed=2), fmt)
    found, expected = (jlp.scaled_matmul(x, w, implementation=i) for i in ("ffi", "reference"))
    assert_same_bytes(found, expected)
    decoded = np.asarray(jlp.dequantize(w, dtype="float32"))
    exact = np.asarray(x).astype(np.float32) @ decoded.T
    np.testing.assert_allclose(np.asarray(found).astype(np.float32), exact, rtol=0.01, atol=0.01 * np.sqrt(k))


class TestBadInput:
    def test_too_many_products(self):
        a, b = (extreme(1, 1, 131_073, jlp.Int8Rows()) for _ in range(2))
        with pytest.raises(ValueError, match="131073 elements; int32 holds the sums of 131072"):
            jlp.scaled_matmul(a, b)

    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            (jlp.Int8Rows(), jlp.Float8Rows(), "no GEMM of integers with floats"),
            (jlp.Int8Rows(rule="compressed-tensors"), jlp.Int8Rows(), "codes of -128; only rhs may"),
            (jlp.Float8Rows("e5m2"), jlp.Float8Rows("e5m2"), "no GEMM takes E5M2 x E5M2"),
            (jlp.Int8Rows(), jlp.MXFP8(), "formats scaled differently"),
            (jlp.Int8Rows(), jlp.NVFP4(), "meets MXFP4.. and symmetric Int4"),
            (jlp.Int8Rows(), jlp.Int4(16), "meets MXFP4.. and symmetric Int4 in groups of 32"),
            (jlp.Int8Rows(), jlp.Int4(32, symmetric=False), "symmetric Int4"),
        ],
        ids=str,
    )
    def test_formats_that_do_not_meet(self, a, b, message):
        x = jnp.ones((4, 32))
        with pytest.raises(NotImplementedError, match=message):
            jlp.scaled_matmul(jlp.quantize(x, a), jlp.quantize(x, b))
