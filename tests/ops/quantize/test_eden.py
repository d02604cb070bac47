"""MS-EDEN: scales that are corrected and rounded stochastically (numerics.md 14), against the oracle."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.quantize import reference
from jaxlowprec.ops.quantize.random_bits import Draws
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, often, random_array
from tests.ops.implementations import ByKernels, ByReference
from tests.ops.quantize.every_way import KEY, assert_all_match, by_implementation, ways
from tests.ops.quantize.hostile_arrays import GIVEN_AMAXES, GRID, any_floats, spread, ties_and_outliers
from tests.ops.quantize.oracle_cases import OracleCases, arrays_and_oracle, ordinary_and_extreme, with_amax
from tests.sharding.meshes import mesh_of, name_of, on_mesh

pytestmark = pytest.mark.sampled(11)

RULES = ("six", "four_over_six", "four_over_six_mse", "search")
FORMATS = tuple(jlp.NVFP4(scale_rule=rule) for rule in RULES)
SHAPES = [(1, 16), (16, 1), (17, 33), (130, 258), (3, 2050), (2, 3, 20, 40)]
WAYS = ways(["eden"], (-1, -2), (jlp.Hadamard(), jlp.Hadamard(32)))
ROWS = ways(["eden"], (-1,), (jlp.Hadamard(),))
EACH = ways(["eden"], (-1, -2), (jlp.Hadamard(),))
by_rule = pytest.mark.parametrize("fmt", FORMATS, ids=RULES)
over_rules = pytest.mark.parametrize("fmt", often(FORMATS[::3], FORMATS), ids=RULES)


def quantized(x, fmt=FORMATS[0], axis=-2, key=KEY, **options):
    return jlp.quantize(x, fmt, axis=axis, hadamard=True, rounding="eden", key=key, **options)


class EdenCases(OracleCases):
    """What every implementation promises."""

    SHAPES = SHAPES
    WAYS = WAYS
    DRAWN = FORMATS

    @pytest.mark.parametrize("turn", often([0], range(3)))
    @over_rules
    def test_both_directions_and_sizes_of_rotations(self, fmt, turn):
        arrays, expected = arrays_and_oracle(fmt, turn, tuple(self.SHAPES), self.WAYS)
        assert_all_match(by_implementation(arrays, fmt, self.WAYS, self.implementation), expected)

    @pytest.mark.parametrize("exponent", often([-126, -100, 0, 124], [-126, -110, -100, -78, -20, 0, 60, 98, 115, 124]))
    @over_rules
    def test_any_magnitude(self, fmt, exponent):
        """Stored scales below 2^-6 included, where the grid of E4M3 is even."""
        for dtype in self.DTYPES:
            arrays, expected = ordinary_and_extreme(fmt, exponent, dtype, ROWS)
            assert_all_match(by_implementation(arrays, fmt, ROWS, self.implementation), expected)

    @pytest.mark.parametrize("amax", often([0.5, 1e30, 0.0, np.nan], GIVEN_AMAXES))
    @over_rules
    def test_a_given_amax(self, fmt, amax):
        """Elements beyond it are far beyond the largest code, and scales at the largest or at zero."""
        x, expected = with_amax(fmt, amax, EACH)
        options = {"amax": jnp.float32(amax)}
        assert_all_match(by_implementation([x], fmt, EACH, self.implementation, options), expected)

    @given(number=st.integers(0, 3), x=any_floats())
    def test_arbitrary_floats(self, number, x):
        self.assert_gives_the_oracles([x], self.DRAWN[number % len(self.DRAWN)], ROWS)

    @given(number=st.integers(0, 3), x=ties_and_outliers())
    def test_ties_and_outliers(self, number, x):
        self.assert_gives_the_oracles([x], self.DRAWN[number % len(self.DRAWN)], ROWS)

    @over_rules
    def test_what_is_not_finite_never_comes_out_finite(self, fmt):
        @self.compiled
        def with_and_without_an_amax(x):
            options = {"implementation": self.implementation}
            both = quantized(x, fmt, **options), quantized(x, fmt, amax=jnp.float32(4), **options)
            return both[0], *(jlp.dequantize(q, **options) for q in both)

        x = np.array(random_array((48, 32), "float32"))
        for bad in (np.nan, np.inf, -np.inf):
            x[3, 5] = bad
            q, decoded, with_amax = with_and_without_an_amax(x)
            assert not np.isfinite(float(q.amax)) and not np.asarray(q.data).any()
            assert np.isnan(np.asarray(decoded)).all()
            assert np.isfinite(np.asarray(with_amax)).sum() == 48 * 32 - 16  # its block, and no other

    @over_rules
    def test_a_part_at_any_block_has_the_bytes_of_the_whole(self, fmt):
        @self.compiled
        def whole_and_part(x):
            options = {"amax": jnp.float32(9), "implementation": self.implementation}
            return quantized(x, fmt, **options), quantized(x[48:, 80:], fmt, offset=(48, 80), **options)

        whole, part = whole_and_part(random_array((96, 160)))
        assert_same_bytes((part.data, part.scale), (whole.data[80:, 24:], whole.scale[80:, 3:]))


class TestByReference(ByReference, EdenCases):
    SHAPES = [(37, 53)]
    WAYS = EACH
    DTYPES = ("float32",)
    DRAWN = FORMATS[::3]


class TestByKernels(ByKernels, EdenCases):
    @given(
        fmt=st.sampled_from(FORMATS),
        shape=st.tuples(st.integers(1, 150), st.integers(1, 300)),
        exponent=st.integers(-126, 120),
        width=st.integers(0, 20),
        seed=st.integers(0, 2**32 - 1),
        dtype=st.sampled_from(FLOATS),
    )
    def test_any_shape_and_spread_of_magnitudes(self, fmt, shape, exponent, width, seed, dtype):
        x = spread(shape, exponent, width, dtype, seed)
        self.assert_gives_the_oracles([x], fmt, EACH)

    @by_rule
    def test_parts_of_split_rows(self, fmt):
        x = random_array((2, 3, 32, 48))
        whole = quantized(x.reshape(2, 96, 48), fmt)
        parts = quantized(x, fmt, rows_split=True)
        np.testing.assert_array_equal(jlp.dequantize(parts).reshape(2, 96, 48), jlp.dequantize(whole))

    @over_rules
    def test_vmap_and_scan(self, fmt):
        x, keys = random_array((3, 32, 48)), jax.random.split(KEY, 3)
        q = quantized(x, fmt, key=keys)
        assert_same_bytes(jax.vmap(lambda x, key: quantized(x, fmt, key=key))(x, keys), q)
        scanned = jax.lax.scan(lambda _, xs: (None, quantized(xs[0], fmt, key=xs[1])), None, (x, keys))[1]
        assert_same_bytes(scanned, q)


# --- golden numbers, by hand and by another program


GOLDEN = [  # a block, its tensor's amax, its codes, what its scale becomes, and its bytes by three random numbers
    ((np.arange(16) - 8) * 0.375, 3, "ffeedcba02345667", "0x1.f45d18p7", [0x77, 0x78, 0x78]),
    (np.arange(16) / 16, 7, "0122344555666677", "0x1.2584b2p5", [0x61, 0x61, 0x62]),
    (((7 * np.arange(16)) % 16 - 8) / 8 + 1 / 16, 1, "f97c6e4f17a6d5e2", "0x1.ce28cap7", [0x76, 0x76, 0x77]),
]


jitted_corrected_scales = jax.jit(reference.corrected_scales)


@pytest.mark.parametrize(("values", "g", "codes", "wanted", "stored"), GOLDEN)
def test_golden_blocks(values, g, codes, wanted, stored):
    """The golden codes are those of numbers as they are: unrotated, which `quantize` refuses."""
    x, encode = np.asarray(values, np.float32), np.float32(1536) / np.float32(g)
    scale = (np.abs(x).max() * (encode * np.float32(1 / 6))).astype(jnp.float8_e4m3fn).astype(np.float32)
    scaled = np.abs(x) * (np.float32(1) / (scale * (np.float32(1) / encode)))
    numbers = np.array([GRID[int(code, 16) & 7] for code in codes], np.float32)
    for bits, byte in zip((0, 0x80000, 0xFFFFF), stored, strict=True):
        arrays = [np.asarray(v)[None, None] for v in (scale, scaled, numbers)]
        found = jitted_corrected_scales(*arrays, np.full((1, 1), bits, np.uint32))
        assert found.tolist() == [[byte]]
    energy, product = np.float32(0), np.float32(0)
    for v, q in zip(scaled, numbers, strict=True):
        energy, product = energy + v * v, product + v * q
    ratio = energy / product
    assert float(scale * ratio) == float.fromhex(wanted)


def test_golden_bits():
    """Philox's words are 4b25fde1 1f46a607 b354728c c482a820; a block takes the upper 20 bits of its own."""
    draws = Draws(jnp.array([1, 2], jnp.uint32), jnp.array([3], jnp.uint32), jnp.arange(4, 8, dtype=jnp.uint32), 2)
    assert reference.random_bits(draws).tolist() == [[0x4B25F, 0x1F46A, 0xB3547, 0xC482A]]


def test_the_chance_of_the_upper_neighbour():
    """It is the distance from the lower one: by all 2^20 random numbers, below the least normal number too."""
    bits, rounded_up_by = np.arange(2**20, dtype=np.uint32), jax.jit(reference.rounded_up_by)
    for wanted, low, high in [
        (1.3, 1.25, 1.375),
        (2**-8 * 1.25, 2**-8, 2**-8 * 1.5),
        (2**-10, 0, 2**-9),
        (500, 448, 448),
    ]:
        stored = rounded_up_by(np.full(bits.shape, wanted, np.float32), bits)
        numbers = np.asarray(stored).view(jnp.float8_e4m3fn).astype(np.float64)
        assert set(numbers) == {low, high}
        expected = (np.float32(wanted) - low) / (high - low) if high > low else 0
        assert abs((numbers == high).mean() - expected) <= 2**-20 or high == low


@pytest.mark.parametrize(("rule", "expected"), [("six", 9.37), ("four_over_six_mse", 8.15), ("search", 7.73)])
def test_expected_error(rule, expected):
    """numerics.md 14: mean squared error x 1000 on N(0, 1)."""
    x = jax.random.normal(jax.random.key(0), (4096, 1024))
    error = 1000 * float(jnp.mean((quantized(x, jlp.NVFP4(scale_rule=rule)).dequantize() - x) ** 2))
    assert error == pytest.approx(expected, abs=0.03)


# --- across devices and programs


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("fmt", often(FORMATS[3:], FORMATS), ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=name_of)
@pytest.mark.parametrize("shape", [(256, 512), (384, 640)], ids=str)  # shards of 4 or 8 blocks, and of others
def test_bytes_are_equal_on_any_mesh(shape, axis_type, fmt, axis):
    def columnwise(x):
        return quantized(x, fmt, axis)

    x = random_array(shape, seed=1)
    result, found = on_mesh(columnwise, [x], [P("a", "b")], mesh_of((2, 4), axis_type))
    assert_same_bytes(result, columnwise(x))
    assert {kind for kind, _ in found} <= {"all-reduce"}


def test_a_program_that_is_exported_and_loaded_gives_the_bytes():
    def columnwise(x, words):
        q = quantized(x, FORMATS[3], key=words)
        return q.data, q.scale, q.amax

    x, words = random_array((64, 48)), jax.random.key_data(KEY)
    kernels = [export.DisabledSafetyCheck.custom_call(f"jaxlowprec_{name}") for name in ("amax", "quantize")]
    exported = export.export(jax.jit(columnwise), platforms=("cpu", "cuda", "tpu"), disabled_checks=kernels)(x, words)
    loaded = export.deserialize(exported.serialize())
    assert_same_bytes(loaded.call(x, words), columnwise(x, words))


# --- refusals


REFUSED = [
    (jlp.NVFP4(), {}, "without hadamard="),
    (jlp.NVFP4((16, 16)), {"hadamard": True}, "it corrects the E4M3 scale of each 16 elements"),
    (jlp.MXFP8(), {"hadamard": True}, "it corrects the E4M3 scale of each 16 elements"),
    (jlp.NVFP4(row_scaled=True), {}, "only rounds to nearest"),
    (jlp.Int4(32), {}, "only rounds to nearest"),
    (jlp.NVFP4(), {"hadamard": True, "key": None}, "needs key="),
]


@pytest.mark.parametrize(("fmt", "options", "message"), REFUSED, ids=str)
def test_what_is_refused(fmt, options, message):
    x = random_array((32, 32), "float32")
    with pytest.raises(ValueError, match=re.escape(message)):
        jlp.quantize(x, fmt, rounding="eden", **({"key": KEY} | options))


# --- both directions


@pytest.mark.parametrize("row", ["nearest", "stochastic"])
def test_both_directions_with_a_rounding_each(row):
    x, fmt = random_array((64, 48)), jlp.NVFP4()
    found = jlp.quantize_both(x, fmt, hadamard_columnwise=True, rounding=(row, "eden"), key=KEY)
    rowwise = jlp.quantize(x, fmt, axis=-1, rounding=row, key=KEY if row == "stochastic" else None)
    assert_same_bytes(found, (rowwise, quantized(x, fmt)))


def test_both_directions_refuse_eden_of_plain_rows():
    x = random_array((32, 32))
    with pytest.raises(ValueError, match="of the rowwise result, which is not rotated; pass a pair"):
        jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True, rounding="eden", key=KEY)
    with pytest.raises(ValueError, match="without hadamard="):
        jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=False, rounding=("nearest", "eden"), key=KEY)
    with pytest.raises(TypeError, match="needs one rounding, or that of rows and that of columns"):
        jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True, rounding=("eden",), key=KEY)
