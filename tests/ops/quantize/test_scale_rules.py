"""NVFP4 whose blocks take the best of several scales (numerics.md 13): every implementation against the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlowprec.checkpoints import schemes
from tests import numpy_oracle
from tests.eager import jlp
from tests.helpers import CHOSEN_SCALES, FLOATS, as_bytes, assert_same_bytes, format_name, often, random_array
from tests.ops.implementations import ByKernels, ByReference, with_options
from tests.ops.quantize.every_way import assert_all_match, by_implementation, by_oracle, ways
from tests.ops.quantize.hostile_arrays import GIVEN_AMAXES, any_floats, beside_ties, spread, ties_and_outliers
from tests.ops.quantize.oracle_cases import OracleCases, arrays_and_oracle, ordinary_and_extreme, with_amax
from tests.sharding.meshes import mesh_of, name_of, on_mesh

pytestmark = pytest.mark.sampled(11)

SHAPES = [(1, 16), (16, 1), (17, 33), (130, 258), (40, 300), (3, 2050), (2, 3, 20, 40)]
WAYS = ways(["nearest"], (-1, -2, None), (None, jlp.Hadamard()))
ROWS = ways(["nearest"], (-1,))
EACH = ways(["nearest"], (-1, -2))
RULES = ("four_over_six", "four_over_six_mse", "search")
over_formats = pytest.mark.parametrize("fmt", CHOSEN_SCALES, ids=format_name)


def to_float32(arrays, implementation):
    return [jlp.dequantize(q, dtype=jnp.float32, implementation=implementation) for q in arrays]


class ScaleRuleCases(OracleCases):
    """What every implementation promises."""

    SHAPES = SHAPES
    WAYS = WAYS
    DRAWN = CHOSEN_SCALES

    @pytest.mark.parametrize("turn", often([0], range(3)))
    @over_formats
    def test_all_directions_and_rotations(self, fmt, turn):
        arrays, expected = arrays_and_oracle(fmt, turn, tuple(self.SHAPES), self.WAYS)
        assert_all_match(by_implementation(arrays, fmt, self.WAYS, self.implementation), expected)

    @pytest.mark.parametrize("exponent", [-126, -110, -100, -78, -20, 0, 60, 98, 115, 124])
    @pytest.mark.parametrize("rule", RULES)
    def test_any_magnitude(self, rule, exponent):
        fmt = jlp.NVFP4(scale_rule=rule)
        for dtype in self.DTYPES:
            arrays, expected = ordinary_and_extreme(fmt, exponent, dtype, ROWS)
            found = by_implementation(arrays, fmt, ROWS, self.implementation)
            assert_all_match(found, expected)
            for y, wanted in zip(with_options(to_float32, self.implementation)(found), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(y), numpy_oracle.decode(*wanted, fmt)[:, :80])

    @pytest.mark.parametrize("amax", GIVEN_AMAXES)
    @over_formats
    def test_a_given_amax(self, fmt, amax):
        x, expected = with_amax(fmt, amax, EACH)
        options = {"amax": jnp.float32(amax)}
        found = by_implementation([x], fmt, EACH, self.implementation, options)
        assert_all_match(found, expected)

    @given(number=st.integers(0, 11), x=any_floats())
    def test_arbitrary_floats(self, number, x):
        self.assert_gives_the_oracles([x], self.DRAWN[number % len(self.DRAWN)], ROWS)

    @given(rule=st.sampled_from(RULES), x=ties_and_outliers())
    def test_ties_and_outliers(self, rule, x):
        self.assert_gives_the_oracles([x], jlp.NVFP4(scale_rule=rule), ROWS)

    @pytest.mark.parametrize("exponent", often([0], [0, -34, -33, 57, 58]))
    @over_formats
    def test_errors_that_are_as_near_each_other_as_can_be(self, fmt, exponent):
        x, amax = beside_ties(fmt.scale_rule, fmt.block[0], exponent)
        (found,) = by_implementation([x], fmt, ROWS, self.implementation, {"amax": amax})
        assert_all_match([found], by_oracle([x], fmt, ROWS, amax=amax))
        its, others = np.split(as_bytes(found.scale), 2)
        assert (its != others).all()

    @pytest.mark.parametrize("rule", RULES)
    def test_equal_errors_keep_the_scale_of_six(self, rule):
        """Errors are zero by either scale: 6 and 4 times the largest code, and zeros."""
        rows = [[4, 2, 1, -1] * 4, [0.0] * 16, [-0.0] * 16]
        x = jnp.asarray([*rows, [6] * 16], jnp.float32)
        q = jlp.quantize(x, jlp.NVFP4(scale_rule=rule), amax=jnp.float32(6), implementation=self.implementation)
        assert as_bytes(q.scale)[1:3].tolist() == [[0], [0]]
        assert as_bytes(q.scale)[3].tolist() == [0x78]  # 256
        np.testing.assert_array_equal(np.asarray(jlp.dequantize(q)), np.asarray(x))

    @over_formats
    def test_what_is_not_finite_never_comes_out_finite(self, fmt):
        @self.compiled
        def both_and_with_an_amax(x):
            options = {"implementation": self.implementation}
            both = jlp.quantize_both(x, fmt, hadamard_columnwise=True, **options)
            q = jlp.quantize(x, fmt, amax=jnp.float32(4), **options)
            return both, *(jlp.dequantize(one, **options) for one in (*both, q))

        x, height = np.array(random_array((32, 48), "float32")), 16 if fmt.tiles else 1
        for bad in (np.nan, np.inf, -np.inf):
            x[3, 5] = bad
            both, *decoded, with_amax = both_and_with_an_amax(x)
            for q, y in zip(both, decoded, strict=True):
                assert not np.isfinite(float(q.amax)) and not np.asarray(q.data).any() and np.isnan(np.asarray(y)).all()
            assert np.isfinite(np.asarray(with_amax)).sum() == 32 * 48 - 16 * height  # its block, and no other

    @pytest.mark.parametrize(
        ("values", "g", "scale", "codes"),
        [
            ((np.arange(16) - 8) * 0.375, 3, 0x77, "ffeedcba02345667"),
            (np.arange(16) / 16, 7, 0x65, "0112233444555566"),
            (((7 * np.arange(16)) % 16 - 8) / 8 + 1 / 16, 1, 0x76, "f97c6e4f17b6d5e3"),
        ],
    )
    def test_golden_blocks(self, values, g, scale, codes):
        x, fmt = jnp.asarray(values, jnp.float32), jlp.NVFP4(scale_rule="search")
        q = jlp.quantize(x, fmt, amax=jnp.float32(g), implementation=self.implementation)
        found = "".join(f"{byte & 15:x}{byte >> 4:x}" for byte in np.asarray(q.data))
        assert (found, as_bytes(q.scale).tolist(), float(q.amax)) == (codes, [scale], 1.75 * g)


class TestByReference(ByReference, ScaleRuleCases):
    SHAPES = [(37, 53)]
    WAYS = ways(["nearest"], (None,), (jlp.Hadamard(),))
    DTYPES = ("float32",)
    DRAWN = (*CHOSEN_SCALES[:3], CHOSEN_SCALES[-1])


class TestByKernels(ByKernels, ScaleRuleCases):
    @given(
        fmt=st.sampled_from(CHOSEN_SCALES),
        shape=st.tuples(st.integers(1, 150), st.integers(1, 300)),
        exponent=st.integers(-126, 120),
        width=st.integers(0, 20),
        seed=st.integers(0, 2**32 - 1),
        dtype=st.sampled_from(FLOATS),
    )
    def test_any_shape_and_spread_of_magnitudes(self, fmt, shape, exponent, width, seed, dtype):
        x = spread(shape, exponent, width, dtype, seed)
        self.assert_gives_the_oracles([x], fmt, ways(["nearest"], (None,), (jlp.Hadamard(),)))

    @pytest.mark.parametrize(
        ("rule", "expected"), [("six", 9.04), ("four_over_six", 7.79), ("four_over_six_mse", 7.56), ("search", 6.98)]
    )
    def test_expected_error(self, rule, expected):
        """numerics.md 13: mean squared error x 1000 on N(0, 1)."""
        x = jax.random.normal(jax.random.key(0), (2048, 1024))
        error = 1000 * float(jnp.mean((jlp.quantize(x, jlp.NVFP4(scale_rule=rule)).dequantize() - x) ** 2))
        assert error == pytest.approx(expected, abs=0.03)

    @pytest.mark.parametrize(("rule", "expected"), [("four_over_six", 12.37), ("search", 11.65)])
    def test_expected_error_of_tiles(self, rule, expected):
        x = jax.random.normal(jax.random.key(0), (2048, 1024))
        q = jlp.quantize(x, jlp.NVFP4((16, 16), rule))
        assert 1000 * float(jnp.mean((jlp.dequantize(q) - x) ** 2)) == pytest.approx(expected, abs=0.05)

    @over_formats
    def test_parts_of_split_rows(self, fmt):
        x = random_array((2, 3, 32, 48))
        whole = jlp.quantize_both(x.reshape(2, 96, 48), fmt)
        for q, wanted in zip(jlp.quantize_both(x, fmt, rows_split=True), whole, strict=True):
            np.testing.assert_array_equal(jlp.dequantize(q).reshape(2, 96, 48), jlp.dequantize(wanted))

    @over_formats
    def test_vmap_and_scan(self, fmt):
        x = random_array((3, 32, 48))
        q = jlp.quantize(x, fmt)
        assert_same_bytes(jax.vmap(lambda x: jlp.quantize(x, fmt))(x), q)
        assert_same_bytes(jax.lax.scan(lambda _, x: (None, jlp.quantize(x, fmt)), None, x)[1], q)


@pytest.mark.parametrize("fmt", often(CHOSEN_SCALES[2::3], CHOSEN_SCALES), ids=format_name)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=name_of)
def test_bytes_are_equal_on_any_mesh(fmt, axis_type):
    def both(x):
        return jlp.quantize_both(x, fmt)

    x = random_array((256, 512), seed=1)
    result, found = on_mesh(both, [x], [P("a", "b")], mesh_of((2, 4), axis_type))
    assert_same_bytes(result, both(x))
    assert {kind for kind, _ in found} <= {"all-reduce"}


@pytest.mark.parametrize("fmt", often(CHOSEN_SCALES[2::3], CHOSEN_SCALES), ids=format_name)
def test_fake_quantize_is_there_and_back(fmt):
    x = random_array((48, 80), "float32")
    np.testing.assert_array_equal(jlp.fake_quantize(x, fmt), jlp.quantize(x, fmt).dequantize())
    assert (jax.grad(lambda x: jlp.fake_quantize(x, fmt, ste="clipped").sum())(x) == 1).all()


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_nvfp4"])
@pytest.mark.parametrize("rule", RULES)
def test_checkpoints_hold_them_as_plain_nvfp4(name, rule):
    """The scale of the file is the amax's, which is 1.75 times the weight's."""
    weight = random_array((32, 64), "bfloat16")
    q, scheme = jlp.quantize(weight, jlp.NVFP4(scale_rule=rule)), schemes.by_name(name, nearest_amax=True)
    stored = scheme.store(q)
    loaded = scheme.load({key: np.asarray(value) for key, value in stored.items()}, dtype=weight.dtype)
    assert_same_bytes((loaded.data, loaded.scale), (q.data, q.scale))
    np.testing.assert_allclose(float(loaded.amax), float(q.amax), rtol=2**-22)
    assert loaded.format == jlp.NVFP4()


@over_formats
def test_a_row_of_tiles_is_the_transposed_columns(fmt):
    x = random_array((48, 64))
    row, column = jlp.quantize_both(x, fmt)
    if fmt.tiles:
        np.testing.assert_array_equal(jlp.dequantize(row), jlp.dequantize(column))
        np.testing.assert_array_equal(as_bytes(row.scale).T, as_bytes(column.scale))
    assert_same_bytes(column, jlp.quantize(x, fmt, axis=-2))


@over_formats
def test_stochastic_rounding_is_refused(fmt):
    x, key = random_array((32, 32)), jax.random.key(0)
    for quantize in (jlp.quantize, jlp.quantize_both):
        with pytest.raises(ValueError, match=f"scale_rule='{fmt.scale_rule}'; to choose among random outcomes biases"):
            quantize(x, fmt, rounding="stochastic", key=key)


@pytest.mark.slow
def test_operands_of_different_rules_are_multiplied():
    x, w = random_array((32, 64)), random_array((48, 64), seed=1)
    rules = ("six", *RULES)
    for a, b in itertools.product(rules, rules):
        qa, qb = jlp.quantize(x, jlp.NVFP4(scale_rule=a)), jlp.quantize(w, jlp.NVFP4((16, 16), b))
        y = jlp.scaled_matmul(qa, qb, preferred_element_type=jnp.float32)
        a_numbers, b_numbers = (np.asarray(jlp.dequantize(q, dtype=jnp.float32), np.float64) for q in (qa, qb))
        np.testing.assert_allclose(np.asarray(y), a_numbers @ b_numbers.T, rtol=1e-4, atol=1e-3)
