"""Layouts: written-out formulas, permutations with inverses, zero padding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec import layouts
from tests.helpers import ONE_OF_EACH, as_bytes, assert_same_bytes, format_name, quantized_from_bytes, random_array

SIZES = [(1, 1), (3, 5), (128, 4), (130, 5), (127, 3), (256, 9), (300, 17)]
UNPACKED = [fmt for fmt in ONE_OF_EACH if not fmt.packed]


def numbered(shape, dtype=np.float32):
    """Distinct numbers from 1 on."""
    return np.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)


def assert_permutes(flat, original):
    """Each number once, and else zeros."""
    kept = np.asarray(flat).ravel()
    np.testing.assert_array_equal(np.sort(kept[kept != 0]), np.sort(np.asarray(original).ravel()))


def there_and_back(scale):
    swizzled = layouts.swizzle(scale)
    rows, columns = scale.shape[-2:]
    return swizzled, layouts.unswizzle(swizzled, rows=rows, columns=columns)


class TestSwizzle:
    @pytest.mark.parametrize("shape", SIZES, ids=str)
    def test_every_scale_is_where_the_formula_says(self, shape):
        """numerics.md 6. Bytes repeat, so each of a number's two digits to base 251 is placed."""
        rows, columns = shape
        across = -(-columns // 4)
        numbers = np.arange(rows * columns).reshape(shape)
        scale = np.stack([numbers % 251 + 1, numbers // 251 + 1]).astype(np.uint8)
        expected = np.zeros((2, -(-rows // 128) * across * 512), np.uint8)
        for i, j in itertools.product(range(rows), range(columns)):
            place = ((i // 128) * across + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            expected[:, place] = scale[:, i, j]
        swizzled, back = jax.jit(there_and_back)(jnp.asarray(scale))
        np.testing.assert_array_equal(swizzled, expected)
        np.testing.assert_array_equal(back, scale)

    @pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
    def test_dtypes_batches_jit_and_vmap(self, dtype):
        scale = jax.lax.bitcast_convert_type(jnp.asarray(numbered((2, 3, 5, 6), np.uint8)), dtype)
        swizzled, back = there_and_back(scale)
        assert (swizzled.shape, swizzled.dtype) == ((2, 3, 1024), dtype)
        assert_same_bytes(back, scale)
        assert_same_bytes(jax.jit(jax.vmap(jax.vmap(there_and_back)))(scale), (swizzled, scale))
        assert_permutes(as_bytes(swizzled[0, 0]), as_bytes(scale[0, 0]))

    def test_errors(self):
        with pytest.raises(ValueError, match=r"swizzle: scale has shape \(4,\) and dtype uint8; needs \[..., R, C\]"):
            layouts.swizzle(jnp.zeros(4, jnp.uint8))
        with pytest.raises(ValueError, match="dtype float32; needs .* of one byte"):
            layouts.swizzle(jnp.zeros((4, 4)))
        with pytest.raises(ValueError, match=r"has shape \(512,\); 130x5 scales need \[..., 2048\]"):
            layouts.unswizzle(jnp.zeros(512, jnp.uint8), rows=130, columns=5)


def lines_of(q):
    rows, columns = q.matrix_shape if q.axis == -1 else q.matrix_shape[::-1]
    return {"rows": rows, "columns": columns}


class TestGemmScales:
    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
    def test_inverse(self, fmt):
        shapes = itertools.product([(129, 33), (2, 3, 40, 300)], (-1, -2))
        arrays = [quantized_from_bytes(shape, fmt, axis=axis) for shape, axis in shapes]

        @jax.jit
        def back(arrays):
            return [layouts.logical_scales(layouts.gemm_scales(q), fmt, **lines_of(q)) for q in arrays]

        assert_same_bytes(back(arrays), [q.scale for q in arrays])

    @pytest.mark.parametrize("rows", [1, 130, 256])
    def test_transformer_engines_shapes_of_float8_block(self, rows):
        """transformer_engine_numerics.md 6.3, for x [M, K]."""
        m, k = rows, 300

        def up(n, multiple):
            return -(-n // multiple) * multiple

        row, column = jlp.quantize_both(random_array((m, k)), jlp.Float8Block())
        assert layouts.gemm_scales(row).shape == (-(-k // 128), up(m, 4))
        assert layouts.gemm_scales(column).shape == (-(-m // 128), up(k, 4))
        row, column = jlp.quantize_both(random_array((m, k)), jlp.Float8Block(block=(128, 128)))
        assert layouts.gemm_scales(row).shape == (-(-m // 128), up(-(-k // 128), 4))
        assert layouts.gemm_scales(column).shape == (-(-k // 128), up(-(-m // 128), 4))

    def test_float8_block_1d_is_transposed_and_padded_with_zeros(self):
        q = quantized_from_bytes((5, 300), jlp.Float8Block())
        q = dataclasses.replace(q, scale=jnp.asarray(numbered((5, 3))))
        expected = np.zeros((3, 8), np.float32)
        expected[:, :5] = numbered((5, 3)).T
        np.testing.assert_array_equal(layouts.gemm_scales(q), expected)

    def test_float8_block_2d_is_padded_with_zeros(self):
        q = quantized_from_bytes((300, 600), jlp.Float8Block(block=(128, 128)))
        q = dataclasses.replace(q, scale=jnp.asarray(numbered((3, 5))))
        expected = np.zeros((3, 8), np.float32)
        expected[:, :5] = numbered((3, 5))
        np.testing.assert_array_equal(layouts.gemm_scales(q), expected)

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP8(), jlp.MXFP4()], ids=format_name)
    def test_one_dimensional_scales_of_a_byte_are_swizzled(self, fmt):
        q = quantized_from_bytes((130, 200), fmt)
        assert_same_bytes(layouts.gemm_scales(q), layouts.swizzle(q.scale))

    @pytest.mark.parametrize("fmt", [jlp.NVFP4((16, 16)), jlp.MXFP8(block=(32, 32))], ids=format_name)
    def test_a_tiles_scale_is_repeated_for_each_of_its_rows(self, fmt):
        q, height = quantized_from_bytes((70, 200), fmt), fmt.block[0]
        repeated = np.stack([as_bytes(q.scale)[i // height] for i in range(70)])
        assert_same_bytes(as_bytes(layouts.gemm_scales(q)), layouts.swizzle(jnp.asarray(repeated)))

    def test_a_tensors_scale_stays_as_it_is(self):
        q = quantized_from_bytes((3, 40, 50), jlp.Float8Tensor())
        assert layouts.gemm_scales(q) is q.scale
        assert layouts.logical_scales(q.scale, q.format, rows=40, columns=50) is q.scale

    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
    def test_jit_and_vmap(self, fmt):
        q = quantized_from_bytes((3, 40, 300), fmt)
        assert_same_bytes(jax.jit(layouts.gemm_scales)(q), layouts.gemm_scales(q))
        assert_same_bytes(jax.vmap(layouts.gemm_scales)(q), layouts.gemm_scales(q))

    def test_errors(self):
        with pytest.raises(ValueError, match=r"gemm_scales: shape \(40,\) is a vector; needs two dimensions"):
            layouts.gemm_scales(jlp.quantize(jnp.ones(40), jlp.MXFP8()))
        for fmt, shape in ((jlp.Float8Block(), "(3, 8)"), (jlp.Float8Block(block=(128, 128)), "(1, 4)")):
            with pytest.raises(ValueError) as raised:
                layouts.logical_scales(jnp.zeros((5, 3)), fmt, rows=5, columns=300)
            assert f"logical_scales: scales have shape (5, 3); {fmt} of 5x300 needs [..., {shape}]" in str(raised.value)
        with pytest.raises(ValueError, match="5x10 scales need"):
            layouts.logical_scales(jnp.zeros(8, jnp.uint8), jlp.MXFP8(), rows=5, columns=300)


class TestCompact:
    @pytest.mark.parametrize("axis", [-1, -2])
    @pytest.mark.parametrize("fmt", UNPACKED, ids=format_name)
    def test_inverse(self, fmt, axis):
        q = quantized_from_bytes((2, 40, 300), fmt, axis=axis)
        again = layouts.from_compact(*layouts.to_compact(q), fmt, axis=axis, dtype=q.dtype)
        assert jax.tree.structure(again) == jax.tree.structure(q)
        assert_same_bytes(again, q)

    @pytest.mark.parametrize("fmt", UNPACKED, ids=format_name)
    def test_data_in_the_original_orientation_and_scales_along_it(self, fmt):
        """What is at [m, k] of the data stands for x[m, k], with the scale at [m / b, k]."""
        x = random_array((40, 300), "float32")
        q = jlp.quantize(x, fmt, axis=-2)
        data, scale = layouts.to_compact(q)
        assert data.shape == x.shape
        scale = np.asarray(scale.astype(jnp.float32))
        if fmt.scaling != "tensor":
            assert scale.shape == (fmt.blocks(40), -(-300 // fmt.length) if fmt.tiles else 300)
            scale = np.repeat(scale, -(-40 // fmt.blocks(40)) if fmt.scaling == "rows" else fmt.length, axis=0)[:40]
            scale = np.repeat(scale, fmt.length if fmt.tiles else 1, axis=1)[:, :300]
        np.testing.assert_array_equal(np.asarray(data.astype(jnp.float32)) * scale, q.dequantize())

    @pytest.mark.parametrize("fmt", UNPACKED, ids=format_name)
    def test_a_rowwise_one_is_compact_already(self, fmt):
        q = quantized_from_bytes((40, 300), fmt)
        data, scale = layouts.to_compact(q)
        assert data is q.data and scale is q.scale

    def test_codes_are_permuted(self):
        q = quantized_from_bytes((5, 7), jlp.MXFP8(), axis=-2)
        q = dataclasses.replace(
            q, data=jax.lax.bitcast_convert_type(jnp.asarray(numbered((7, 5), np.uint8)), q.data.dtype)
        )
        data = as_bytes(layouts.to_compact(q)[0])
        np.testing.assert_array_equal(data, numbered((7, 5), np.uint8).T)
        assert_permutes(data, numbered((7, 5), np.uint8))

    @pytest.mark.parametrize("fmt", UNPACKED, ids=format_name)
    def test_jit_and_vmap(self, fmt):
        q = quantized_from_bytes((3, 40, 300), fmt, axis=-2)
        assert_same_bytes(jax.jit(layouts.to_compact)(q), layouts.to_compact(q))
        assert_same_bytes(jax.vmap(layouts.to_compact)(q), layouts.to_compact(q))
        compact = layouts.to_compact(q)
        assert_same_bytes(jax.vmap(lambda d, s: layouts.from_compact(d, s, fmt, axis=-2))(*compact), q)

    def test_errors(self):
        for fmt in (jlp.NVFP4(), jlp.MXFP4()):
            with pytest.raises(ValueError, match=f"to_compact: {fmt} packs two codes of a line in a byte"):
                layouts.to_compact(quantized_from_bytes((5, 7), fmt))
            with pytest.raises(ValueError, match="needs 8-bit codes"):
                layouts.from_compact(jnp.zeros((5, 16), jnp.uint8), jnp.ones((5, 1)), fmt)
        with pytest.raises(ValueError, match=r"to_compact: shape \(40,\) is a vector"):
            layouts.to_compact(jlp.quantize(jnp.ones(40), jlp.MXFP8()))
        data = jnp.zeros((40, 300), jnp.float8_e4m3fn)
        with pytest.raises(ValueError, match="axis=0; needs 8-bit codes"):
            layouts.from_compact(data, jnp.ones((40, 3)), jlp.Float8Block(), axis=0)
        with pytest.raises(ValueError, match=r"from_compact: scales have shape \(40, 2\), .* needs \(40, 3\)"):
            layouts.from_compact(data, jnp.ones((40, 2)), jlp.Float8Block())
        with pytest.raises(ValueError, match=r"needs \(300, 1\)"):
            layouts.from_compact(data, jnp.ones((40, 3)), jlp.Float8Block(), axis=-2)
