"""FP8 blocks by MXFP4: the rule of numerics.md 9.2, what both ends of the range do, meshes, and bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.grouped_matmul.api import multiply_groups, multiply_within_groups, quantize_groups
from tests.eager import jlp
from tests.helpers import assert_same_bytes, format_name, random_array
from tests.products import operands
from tests.sharding.meshes import by_axis_type, mesh_of, on_mesh

FORMATS = [jlp.Float8Block(power_of_two=power) for power in (False, True)]
WEIGHTS = [jlp.MXFP4(block) for block in ((1, 32), (32, 32))]
PAIRS = [(a, b) for a in FORMATS for b in WEIGHTS]
over_pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-by-".join(map(format_name, pair)))
WAYS = ["ffi", "reference"]


def product(a, b, implementation):
    return np.asarray(
        jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation), np.float64
    )


def with_scales(q, scale):
    """Bytes of MX scales, or numbers."""
    scale = np.broadcast_to(scale, q.scale.shape)
    scale = scale.astype(np.uint8).view(q.scale.dtype) if q.format.scaling == "e8m0" else scale.astype(np.float32)
    return dataclasses.replace(q, scale=jnp.asarray(scale))


def of_ones(fmt, rows, k=128):
    return jlp.quantize(jnp.ones((rows, k)), fmt)


class TestRule:
    @pytest.mark.parametrize("k", [31, 128, 300])
    @over_pairs
    def test_it_is_the_product_of_blocks_with_scales_of_one(self, pair, k, isa):
        """Where E4M3 holds the weight's numbers."""
        a, b = operands((9, k, 40), pair, seed=1)
        b = with_scales(b, np.random.default_rng(0).integers(119, 134, b.scale.shape))
        numbers = jlp.dequantize(b, dtype=jnp.float32).astype(jnp.float8_e4m3fn)
        as_blocks = of_ones(dataclasses.replace(pair[0], element="e4m3"), 40, k)
        as_blocks = with_scales(dataclasses.replace(as_blocks, data=numbers), 1)
        assert_same_bytes(numbers.astype(jnp.float32), jlp.dequantize(b, dtype=jnp.float32))
        found, expected = (jlp.scaled_matmul(a, w, preferred_element_type=jnp.float32) for w in (b, as_blocks))
        assert_same_bytes(found, expected)

    def test_scales_of_a_are_rounded_once_for_each_block(self, isa):
        """The sums of blocks are exact here, so the bytes tell where the float32 scales come in."""
        a, b = operands((20, 384, 24), PAIRS[0], seed=2)
        codes = np.random.default_rng(3).integers(-8, 9, a.data.shape)
        a, b = dataclasses.replace(a, data=jnp.asarray(codes, a.data.dtype)), with_scales(b, 127)
        codes, numbers = (np.asarray(v, np.float64) for v in (a.data, jlp.dequantize(b, dtype=jnp.float32)))
        y = np.zeros((20, 24), np.float32)
        for block in range(3):
            part = slice(128 * block, 128 * block + 128)
            sums = (codes[:, part] @ numbers[:, part].T).astype(np.float32)
            y = y + sums * np.asarray(a.scale)[:, block, None]
        for way in WAYS:
            np.testing.assert_array_equal(product(a, b, way), y)
        assert (y != ((codes * np.repeat(a.scale, 128, 1)) @ numbers.T).astype(np.float32)).any()


class TestEndsOfTheRange:
    """By kernels and reference alike."""

    @pytest.mark.parametrize("way", WAYS)
    def test_sums_of_large_scales_overflow_before_they_are_scaled(self, way):
        a, b = of_ones(FORMATS[0], 2), of_ones(WEIGHTS[0], 3)  # 448 / 448 by 4 * 2^-2
        for byte, expected in ((127 + 98, 448 * 128 * 4 * 2.0**98), (127 + 120, np.inf), (254, np.inf)):
            y = product(with_scales(a, 2.0**-60), with_scales(b, byte), way)
            np.testing.assert_array_equal(y, np.full((2, 3), expected * 2.0**-60))

    @pytest.mark.parametrize("way", WAYS)
    def test_sums_that_are_subnormal_are_zero(self, way):
        """32 times 2^-9 by 4 * 2^-126 is less than 2^-126, and is not saved by a large scale."""
        a, b = of_ones(FORMATS[0], 2, 32), of_ones(WEIGHTS[0], 3, 32)
        least = with_scales(dataclasses.replace(a, data=jnp.full((2, 32), 2.0**-9, a.data.dtype)), 2.0**100)
        np.testing.assert_array_equal(product(least, with_scales(b, 1), way), np.zeros((2, 3)))
        y = product(with_scales(a, 1), with_scales(b, 0), way)  # 2^-127, of zero blocks, counts as zero
        np.testing.assert_array_equal(y, np.zeros((2, 3)))
        np.testing.assert_array_equal(product(with_scales(a, 0), b, way), np.zeros((2, 3)))

    @pytest.mark.parametrize("way", WAYS)
    def test_a_scale_that_is_nan_poisons_its_row_alone(self, way):
        a, b = operands((5, 300, 40), PAIRS[0], seed=4)
        scale_a, scale_b = np.array(a.scale), np.array(b.scale.view(jnp.uint8))
        scale_a[3, 1], scale_b[7, 9] = np.nan, 255
        y = product(with_scales(a, scale_a), with_scales(b, scale_b), way)
        poisoned = (np.arange(5) == 3)[:, None] | (np.arange(40) == 7)
        np.testing.assert_array_equal(np.isnan(y), poisoned)


@by_axis_type
@pytest.mark.parametrize("specs", [(P("a"), P("b")), (P("a"), P("a", "b")), (P(None, "a"), P(None, "a"))], ids=str)
@pytest.mark.parametrize("k", [1024, 384])
@over_pairs
def test_products_on_a_mesh(pair, k, specs, axis_type):
    """K is split into blocks of 128, four scales of the weight each, and its parts are added up; three blocks stay
    together, though the weight has twelve."""
    x, w = random_array((32, k), seed=1), random_array((256, k), seed=2)

    def run(x, w):
        return jlp.scaled_matmul(jlp.quantize(x, pair[0]), jlp.quantize(w, pair[1]), preferred_element_type=jnp.float32)

    result, found = on_mesh(run, [x, w], list(specs), mesh_of((2, 4), axis_type))
    expected = jax.jit(run)(x, w)
    if specs[1] == P("b") or k == 384:
        assert_same_bytes(result, expected)
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    if specs[0] == P(None, "a") and k == 1024:
        assert {kind for kind, _ in found} == {"all-reduce"}  # of the sums; codes and scales stay where they are


@pytest.mark.parametrize("depth", [512, 320])  # K splits into whole blocks of 128, or not at all
@pytest.mark.parametrize("spec", [P(None, "a"), P(None, None, "b"), P(None, "a", "b")], ids=str)
@over_pairs
def test_products_of_groups_on_a_mesh(pair, spec, depth):
    """[T, K] by [E, K, N]: K is split, or N, or both."""
    x, w, sizes = random_array((64, depth), seed=1), random_array((3, depth, 64), seed=2), jnp.array([20, 0, 30])

    def run(x, w):
        row, _ = quantize_groups(x, sizes, pair[0], rowwise=True, columnwise=False)
        return multiply_groups(row, jlp.quantize(w, pair[1], axis=-2).mT, None, jnp.float32)

    result, _ = on_mesh(run, [x, w], [P(None, *spec[1:2]), spec], mesh_of((2, 2)))
    expected = jax.jit(run)(x, w)
    if depth == 320 or spec == P(None, None, "b"):
        assert_same_bytes(result, expected)
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


class TestBadInput:
    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            (jlp.Float8Block(block=(128, 128)), jlp.MXFP4(), r"FP8 blocks of 1x128: quantise lhs by Float8Block\(\)"),
            (jlp.MXFP4(), jlp.Float8Block(), "formats scaled differently"),
            (jlp.Float8Block(), jlp.MXFP8(), "formats scaled differently"),
            (jlp.Float8Tensor(), jlp.MXFP4(), "formats scaled differently"),
        ],
        ids=str,
    )
    def test_formats_that_do_not_meet(self, a, b, message):
        x = jnp.ones((4, 128))
        with pytest.raises(NotImplementedError, match=message):
            jlp.scaled_matmul(jlp.quantize(x, a), jlp.quantize(x, b))

    @pytest.mark.parametrize("pair", [PAIRS[0], (jlp.Int8Rows(), jlp.MXFP4())], ids=str)
    def test_a_weight_gradient_is_of_operands_alike(self, pair):
        x, sizes = random_array((64, 128)), jnp.array([40, 24], jnp.int32)
        a, b = (quantize_groups(x, sizes, fmt, rowwise=False, columnwise=True)[1] for fmt in pair)
        with pytest.raises(NotImplementedError, match="such pairs are of rows by weights"):
            multiply_within_groups(a, b, jnp.float32)
