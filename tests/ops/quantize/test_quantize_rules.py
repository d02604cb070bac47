"""What the rules of every format mean: scales by hand, hostile data, stochastic rounding, shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.eager import jlp
from tests.helpers import FLOATS, FORMATS, ONE_OF_EACH, as_bytes, assert_same_bytes, format_name, random_array
from tests.ops.implementations import ByKernels, ByReference

pytestmark = pytest.mark.sampled(7)

NEW = [fmt for fmt in FORMATS if not isinstance(fmt, jlp.NVFP4)]
ONE_OF_EACH_NEW = [fmt for fmt in ONE_OF_EACH if not isinstance(fmt, jlp.NVFP4)]
MANTISSA_BITS = {"e2m1": 1, "e4m3": 3, "e5m2": 2, "int8": 6}  # of the largest numbers
natively_and_once_by_reference = pytest.mark.parametrize(  # random bits take XLA long to compile
    ("fmt", "implementation"),
    [(jlp.MXFP8(), "reference"), *((fmt, "ffi") for fmt in ONE_OF_EACH_NEW)],
    ids=lambda v: v if isinstance(v, str) else format_name(v),
)


def block_of(fmt, shape, row, column):
    """Where an array's elements share a scale with the one at [row, column]."""
    shared = np.zeros(shape, bool)
    if fmt.scaling == "tensor":
        return ~shared
    height, length = (1, shape[1]) if fmt.scaling == "rows" else fmt.block
    down, across = row // height * height, column // length * length
    shared[down : down + height, across : across + length] = True
    return shared


class ScaleCases:
    """What every implementation promises."""

    implementation: str

    def scales(self, cases):
        """The first scale of arrays [1, K], each in its format, by one program."""
        arrays, formats = zip(*cases, strict=True)

        @self.compiled
        def quantized(arrays):
            pairs = zip(arrays, formats, strict=True)
            return [jlp.quantize(x, fmt, implementation=self.implementation).scale for x, fmt in pairs]

        return [np.asarray(scale).ravel()[0] for scale in quantized(arrays)]

    def test_mx_scales_by_hand(self):
        cases = [
            (jlp.MXFP8(), 448.0, 0),
            (jlp.MXFP8(), 450.0, 1),
            (jlp.MXFP8(), 449.0 / 2**20, -19),
            (jlp.MXFP8(scale_rule="floor"), 256.0, 0),
            (jlp.MXFP8(scale_rule="floor"), 511.0, 0),
            (jlp.MXFP8(scale_rule="floor"), 512.0, 1),
            (jlp.MXFP8(scale_rule="even"), 495.0, 0),
            (jlp.MXFP8(scale_rule="even"), 496.0, 1),
            (jlp.MXFP8("e5m2"), 57344.0, 0),
            (jlp.MXFP8("e5m2"), 57600.0, 1),
            (jlp.MXFP8("e5m2", scale_rule="floor"), 65535.0, 0),
            (jlp.MXFP8("e5m2", scale_rule="even"), 61440.0, 1),
            (jlp.MXFP4(), 6.0, 0),
            (jlp.MXFP4(), 6.5, 1),
            (jlp.MXFP4(scale_rule="floor"), 7.9, 0),
            (jlp.MXFP4(scale_rule="even"), 6.9, 0),
            (jlp.MXFP4(scale_rule="even"), 7.0, 1),
            (jlp.MXFP4(), 2.0**-126, -126),  # the least scale of a block that is not zero
            (jlp.MXFP8("e5m2", scale_rule="floor"), 2.0**-120, -126),
        ]
        found = self.scales([(np.float32([[-amax] + [amax / 16] * 31]), fmt) for fmt, amax, _ in cases])
        for scale, (fmt, amax, exponent) in zip(found, cases, strict=True):
            assert scale.view(np.uint8) == 127 + exponent, (fmt, amax)

    def test_float32_scales_by_hand(self):
        cases = [
            (jlp.Float8Block(), 448.0, 1.0),
            (jlp.Float8Block(), 3.0, 2.0**-7),  # 448 / 3 = 149.3, rounded down to 128
            (jlp.Float8Block(), 449.0, 2.0),
            (jlp.Float8Block("e5m2"), 57344.0, 1.0),
            (jlp.Float8Block(power_of_two=False), 3.5, 2.0**-7),
            (jlp.Float8Block(power_of_two=False), 896.0, 2.0),
            (jlp.Float8Block(amax_epsilon=448.0), 3.0, 1.0),
            (jlp.Float8Block(amax_epsilon=448.0), 896.0, 2.0),
            (jlp.Float8Block(amax_epsilon=448.0), 0.0, 1.0),
            (jlp.Float8Block(), 0.0, 1.0),
            (jlp.Float8Block(), 2.0**-126, 2.0**-126),  # 448 / 2^-126 is capped
            (jlp.Float8Tensor(), 3.5, 2.0**-7),
            (jlp.Float8Tensor(power_of_two=True), 3.0, 2.0**-7),
            (jlp.Float8Tensor("e5m2"), 28672.0, 0.5),
            (jlp.Float8Tensor(amax_epsilon=448.0), 0.0, 1.0),
        ]
        found = self.scales([(np.float32([[amax / 4, -amax, 0.0]]), fmt) for fmt, amax, _ in cases])
        for scale, (fmt, amax, wanted) in zip(found, cases, strict=True):
            assert float(scale) == wanted, (fmt, amax)


class TestScalesByReference(ByReference, ScaleCases):
    pass


class TestScalesByKernels(ByKernels, ScaleCases):
    pass


@pytest.mark.parametrize("fmt", ONE_OF_EACH_NEW, ids=format_name)
class HostileCases:
    implementation: str

    def there_and_back(self, fmt, axis=-1):
        """A function of an array: its codes, scales and decoded values."""

        def run(x):
            q = jlp.quantize(x, fmt, axis=axis, implementation=self.implementation)
            return q.data, q.scale, jlp.dequantize(q, implementation=self.implementation)

        return self.compiled(run)

    def test_what_is_not_finite_poisons_its_block_and_no_other(self, fmt):
        x = np.array(random_array((140, 300), "float32", seed=1))
        for axis in (-1, -2):
            run = self.there_and_back(fmt, axis)
            shared = block_of(fmt, x.shape if axis == -1 else x.shape[::-1], *((3, 150) if axis == -1 else (150, 3)))
            for bad in (np.nan, np.inf, -np.inf):
                x[3, 150] = bad
                codes, _, y = map(np.asarray, run(x))
                np.testing.assert_array_equal(np.isnan(y), shared if axis == -1 else shared.T)
                if not fmt.packed:
                    assert not (codes if axis == -1 else codes.T)[np.isnan(y)].view(np.uint8).any()

    def test_zero_blocks(self, fmt):
        """Of zeros of both signs and of subnormals, which count as zero."""
        run = self.there_and_back(fmt)
        for value in (0.0, -0.0, 1e-40, -1e-40):
            codes, scale, y = map(np.asarray, run(np.full((40, 300), value, np.float32)))
            assert not as_bytes(codes).any() and not y.any()
            assert set(scale.astype(np.float32).ravel().tolist()) <= {0.0, 1.0, 2.0**-127}

    def test_one_outlier_in_each_block(self, fmt):
        """It comes out as good as alone; what it drowns comes out as zero, of its sign if the element has one."""
        x = np.tile(np.float32(1e-12) * np.array([1, -1], np.float32), (140, 150))
        where = np.zeros((140, 300), bool)
        height, length = {"tensor": (140, 300), "rows": (1, 300)}.get(fmt.scaling, fmt.block)
        where[::height, ::length] = True
        *_, y = map(np.asarray, self.there_and_back(fmt)(np.where(where, np.float32(3e5), x)))
        np.testing.assert_allclose(y[where], 3e5, rtol=2.0 ** -(MANTISSA_BITS[fmt.element] + 1))
        assert not y[~where].any()
        assert fmt.element == "int8" or np.signbit(y[~where])[x[~where] < 0].all()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_magnitudes(self, dtype, fmt):
        run = self.there_and_back(fmt)
        for exponent in (-100, 100):
            x = np.ldexp(np.random.default_rng(0).standard_normal((140, 300), np.float32), exponent)
            x = x.astype(jnp.dtype(dtype))
            y, exact = (np.asarray(v).astype(np.float64) for v in (run(x)[2], x))
            assert np.isfinite(y).all()
            most = {"e2m1": 0.15, "e4m3": 0.04, "e5m2": 0.07, "int8": 0.01}[fmt.element]
            assert np.linalg.norm(y - exact) < most * np.linalg.norm(exact)

    def test_the_largest_numbers(self, fmt):
        """FLT_MAX is quantised, not poisoned; what it decodes to may round up to infinity, never to less than 2^127."""
        _, scale, y = map(np.asarray, self.there_and_back(fmt)(np.full((1, 32), 3.4028235e38, np.float32)))
        assert np.isfinite(scale.astype(np.float32)).all()
        assert (y >= 2.0**127).all()

    @pytest.mark.parametrize("shape", [(0, 16), (3, 16, 0)], ids=str)
    def test_empty_arrays(self, fmt, shape):
        for q in jlp.quantize_both(jnp.zeros(shape, jnp.bfloat16), fmt, implementation=self.implementation):
            assert q.shape == shape and jlp.dequantize(q).shape == shape


class TestHostileDataByReference(ByReference, HostileCases):
    pass


class TestHostileDataByKernels(ByKernels, HostileCases):
    pass


class TestScales:
    @pytest.mark.parametrize("fmt", NEW, ids=format_name)
    def test_error_is_half_a_step_where_nothing_saturates(self, fmt):
        """And at most a quarter of the largest of a block where "floor" and "even" let it saturate."""
        x = random_array((70, 260), "float32", seed=1)
        error = np.abs(np.asarray(jlp.quantize(x, fmt).dequantize(), np.float64) - np.asarray(x, np.float64))
        amax = np.zeros(x.shape)
        for row in range(0, 70, fmt.length if fmt.tiles else 1):
            for column in range(0, 260, fmt.length if fmt.scaling not in ("tensor", "rows") else 260):
                shared = block_of(fmt, x.shape, row, column)
                amax[shared] = np.abs(np.asarray(x)[shared]).max()
        bits = MANTISSA_BITS[fmt.element]
        smallest_step = {"e2m1": 0.5 / 6, "e4m3": 2.0**-9 / 448, "e5m2": 2.0**-16 / 57344}[fmt.element]
        foreseen = np.maximum(amax, getattr(fmt, "amax_epsilon", 0.0))
        bound = np.maximum(np.abs(np.asarray(x)) * 2.0 ** -(bits + 1), 1.01 * smallest_step * foreseen)
        if getattr(fmt, "scale_rule", "up") != "up":
            bound = np.maximum(bound, np.where(np.abs(np.asarray(x)) > amax * 0.7, amax / 4, 0))
        assert (error <= bound * (1 + 1e-6) + 2.0**-126).all()

    @pytest.mark.parametrize("fmt", [f for f in NEW if f.tiles], ids=format_name)
    def test_tiles_columnwise_are_the_rowwise_ones_transposed(self, fmt):
        row, column = jlp.quantize_both(random_array((150, 300)), fmt)
        np.testing.assert_array_equal(jlp.dequantize(row), jlp.dequantize(column))
        np.testing.assert_array_equal(as_bytes(row.scale).T, as_bytes(column.scale))


class TestStochasticRounding:
    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.MXFP4(), jlp.Float8Block("e5m2")], ids=format_name)
    def test_mean_of_many_draws_converges(self, fmt):
        x, draws = jax.random.normal(jax.random.key(2), (32, 128)), 1024
        nearest = jlp.quantize(x, fmt)
        repeats = nearest.shape[-1] if fmt.scaling == "rows" else fmt.length
        scale = np.repeat(np.asarray(nearest.scale.astype(jnp.float32)), repeats, axis=-1)
        exponent = np.floor(np.log2(np.maximum(np.abs(np.asarray(x)) / scale, 2.0**-100)))
        least = {"e2m1": 0, "e4m3": -6, "e5m2": -14}[fmt.element]
        step = 2.0 ** (np.maximum(exponent, least) - MANTISSA_BITS[fmt.element]) * scale

        def add(total, key):
            return total + jlp.quantize(x, fmt, rounding="stochastic", key=key).dequantize(), None

        keys = jax.random.split(jax.random.key(3), draws)
        mean = np.asarray(jax.jit(lambda k: jax.lax.scan(add, jnp.zeros_like(x), k)[0])(keys)) / draws
        # A draw's deviation is at most half a step, and P(up) is a multiple of 1/256: off by at most 1/512 of a step.
        assert (np.abs(mean - np.asarray(x)) <= (5 * 0.5 / np.sqrt(draws) + 1 / 512) * step).all()
        z = (mean - np.asarray(x)) / step
        assert abs(z.mean()) < 5 * 0.5 / np.sqrt(draws * x.size)  # biased neither way

    @natively_and_once_by_reference
    def test_grid_points_never_move(self, fmt, implementation):
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        if not fmt.packed:
            values = np.arange(128, dtype=np.uint8).view(fmt.data_dtype).astype(np.float32)
        values = np.resize(values[np.isfinite(values)], 128).astype(np.float32)
        values[::16] = fmt.maximum  # so that the scale is one
        x = jnp.asarray(np.tile(values, (2, 1)))
        for seed in range(3):
            q = jlp.quantize(x, fmt, rounding="stochastic", key=jax.random.key(seed), implementation=implementation)
            np.testing.assert_array_equal(jlp.dequantize(q), x)

    @natively_and_once_by_reference
    def test_slices_at_their_offset_have_the_bytes_of_the_whole(self, fmt, implementation):
        x = random_array((256, 512), "float32")
        if fmt.scaling == "rows":
            x = x.at[:, ::384].set(jnp.abs(x).max(axis=1, keepdims=True))  # the same in both parts of a row
        given = {"amax": jnp.float32(40)} if fmt.scaling == "tensor" else {}
        options = {"rounding": "stochastic", "key": jax.random.key(4), "implementation": implementation, **given}
        whole = jlp.quantize(x, fmt, **options)
        part = jlp.quantize(x[128:], fmt, offset=(128, 0), **options)
        np.testing.assert_array_equal(as_bytes(whole.data)[128:], as_bytes(part.data))
        part = jlp.quantize(x[:, 384:], fmt, offset=(0, 384), **options)
        np.testing.assert_array_equal(
            as_bytes(whole.data)[:, as_bytes(whole.data).shape[1] * 3 // 4 :], as_bytes(part.data)
        )

    def test_a_key_for_each_slice(self):
        x, keys = random_array((3, 32, 64)), jax.random.split(jax.random.key(0), 3)
        for fmt in ONE_OF_EACH_NEW:
            q = jlp.quantize(x, fmt, rounding="stochastic", key=keys)
            for i in range(3):
                one = jlp.quantize(x[i], fmt, rounding="stochastic", key=keys[i])
                assert_same_bytes(jax.tree.map(lambda leaf: leaf[i], q), one)


@pytest.mark.parametrize("fmt", ONE_OF_EACH_NEW, ids=format_name)
class TestShapes:
    def test_a_vector_is_one_row(self, fmt):
        x = random_array((40,))
        if fmt.tiles:
            with pytest.raises(ValueError, match="x is a vector"):
                jlp.quantize(x, fmt)
            return
        q, row = jlp.quantize(x, fmt), jlp.quantize(x[None], fmt)
        np.testing.assert_array_equal(as_bytes(q.data), as_bytes(row.data[0]))
        np.testing.assert_array_equal(as_bytes(q.scale).ravel(), as_bytes(row.scale).ravel())
        assert q.shape == jlp.dequantize(q).shape == (40,)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_dequantize_gives_the_dtype_it_came_from(self, fmt, dtype):
        q = jlp.quantize(random_array((20, 37), dtype), fmt)
        assert jlp.dequantize(q).dtype == jnp.dtype(dtype)
