"""quantize, quantize_both and dequantize: native against reference, byte for byte, and the rules themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxlowprec as jlp
from tests import numpy_oracle
from tests.against_oracle import assert_matches_quantized, quantized
from tests.helpers import FLOATS, assert_same_bytes, assert_same_numbers, often, random_array

SHAPES = [
    (16, 16),
    (1, 16),
    (16, 1),
    (3, 5),
    (17, 33),
    (64, 128),
    (128, 256),
    (40, 300),
    (130, 258),
    (1, 1000),
    (1000, 1),
]
BATCHES = [(2, 3, 20, 40), (5, 16, 32)]
BLOCKS = [(1, 16), (16, 16)]
SEED = 7
ROUNDINGS = [("nearest", None), ("stochastic", SEED)]
WAYS = [  # rounding, axis, rotation
    (rounding, axis, hadamard)
    for rounding in ("nearest", "stochastic")
    for axis in (-1, -2)
    for hadamard in (None, jlp.Hadamard())
]


def key_of(seed):
    return None if seed is None else jax.random.key(seed)


def both_implementations(function):
    return function("ffi"), function("reference")


@functools.partial(jax.jit, static_argnames=("fmt", "implementation"))
def in_every_way(x, fmt, key, implementation):
    """Quantised in each of WAYS, by `quantize` and then by `quantize_both`; one compilation."""
    found = []
    for rounding, axis, hadamard in WAYS:
        given = key if rounding == "stochastic" else None
        found.append(jlp.quantize(x, fmt, axis, hadamard or False, rounding, given, implementation=implementation))
    for rounding in ("nearest", "stochastic"):
        given = key if rounding == "stochastic" else None
        for hadamard in (False, True):
            found += jlp.quantize_both(x, fmt, hadamard, rounding, given, implementation)
    return found


@functools.cache
def by_oracle_in_every_way(shape, fmt, dtype):
    """What `in_every_way` must give."""
    x = random_array(shape, dtype, seed=sum(shape))
    ways = {
        (rounding, axis, hadamard): quantized(
            x, fmt, axis, hadamard, rounding, jax.random.key(SEED) if rounding == "stochastic" else None
        )
        for rounding, axis, hadamard in WAYS
    }
    both = [
        ways[way]
        for rounding in ("nearest", "stochastic")
        for hadamard in (None, jlp.Hadamard())
        for way in ((rounding, -1, None), (rounding, -2, hadamard))
    ]
    return [*ways.values(), *both]


class TestNativeAgainstOracle:
    """Every instruction set, any shape, against an implementation that shares nothing with the library."""

    @pytest.mark.parametrize("dtype", often(["bfloat16"], FLOATS))
    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("shape", SHAPES + BATCHES, ids=str)
    def test_all_directions_rotations_and_roundings(self, isa, shape, block, dtype):
        fmt = jlp.NVFP4(block)
        found = in_every_way(random_array(shape, dtype, seed=sum(shape)), fmt, jax.random.key(SEED), "ffi")
        for q, expected in zip(found, by_oracle_in_every_way(shape, fmt, dtype), strict=True):
            assert_matches_quantized(q, expected)

    @pytest.mark.parametrize("magnitude", [-126, -110, -100, -60, 0, 60, 100, 120, 126])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_any_magnitude(self, isa, magnitude, dtype):
        x = jnp.ldexp(random_array((48, 80), "float32", seed=1), magnitude).astype(dtype)
        for rounding, seed in ROUNDINGS:
            key = key_of(seed)
            both = jlp.quantize_both(x, jlp.NVFP4(), True, rounding, key, "ffi")
            for q, axis, hadamard in zip(both, (-1, -2), (None, jlp.Hadamard()), strict=True):
                expected = quantized(x, jlp.NVFP4(), axis, hadamard, rounding, key)
                assert_matches_quantized(q, expected)
            decoded = jlp.dequantize(both[0], jnp.float32, implementation="ffi")
            expected = quantized(x, jlp.NVFP4(), -1, None, rounding, key)
            assert_same_numbers(decoded, numpy_oracle.decode(*expected, jlp.NVFP4()))

    @given(
        shape=st.tuples(st.integers(1, 70), st.integers(1, 300)),
        exponent=st.integers(-100, 100),
        spread=st.integers(0, 20),
        seed=st.integers(0, 2**32 - 1),
        dtype=st.sampled_from(FLOATS),
    )
    def test_any_shape_and_spread_of_magnitudes(self, shape, exponent, spread, seed, dtype):
        rng = np.random.default_rng(seed)
        exponents = exponent + rng.integers(-spread, spread + 1, shape)
        x = jnp.asarray(np.ldexp(rng.standard_normal(shape), exponents).astype(np.float32)).astype(dtype)
        row, column = jlp.quantize_both(x, jlp.NVFP4(), True, implementation="ffi")
        assert_matches_quantized(row, quantized(x, jlp.NVFP4(), -1, None, "nearest", None))
        assert_matches_quantized(column, quantized(x, jlp.NVFP4(), -2, jlp.Hadamard(), "nearest", None))

    @pytest.mark.parametrize("amax", [0.5, 1e-20, 1e30, 0.0, np.inf, np.nan, -0.5, -1e-40, -np.inf])
    def test_a_given_amax(self, isa, amax):
        x = random_array((33, 50), "bfloat16")
        for axis, block in itertools.product((-1, -2), BLOCKS):
            q = jlp.quantize(x, jlp.NVFP4(block), axis, amax=jnp.float32(amax), implementation="ffi")
            assert_matches_quantized(q, quantized(x, jlp.NVFP4(block), axis, None, amax=amax))


class TestNativeAgainstReference:
    """The reference takes half a second to compile for each shape and way; the oracle above has all combinations."""

    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        often([((37, 53), "float32")], [((64, 48), "bfloat16"), ((37, 53), "float32"), ((2, 20, 33), "float16")], 2),
        ids=str,
    )
    def test_all_directions_and_roundings(self, shape, dtype, block):
        x, fmt = random_array(shape, dtype, seed=sum(shape)), jlp.NVFP4(block)
        native, reference = both_implementations(lambda i: in_every_way(x, fmt, jax.random.key(SEED), i))
        assert_same_bytes(native, reference)

    @pytest.mark.parametrize("magnitude", [-126, -100, 0, 100, 126])
    def test_any_magnitude(self, magnitude):
        x = jnp.ldexp(random_array((48, 80), "float32", seed=1), magnitude)
        for rounding, seed in ROUNDINGS:
            native, reference = both_implementations(
                lambda i: jlp.quantize_both(x, jlp.NVFP4(), True, rounding, key_of(seed), i)
            )
            assert_same_bytes(native, reference)
            for n, r in zip(native, reference, strict=True):
                assert_same_numbers(
                    jlp.dequantize(n, jnp.float32, implementation="ffi"),
                    jlp.dequantize(r, jnp.float32, implementation="reference"),
                )

    @given(
        shape=st.sampled_from([(1, 128), (16, 16), (19, 37)]),
        bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64),
        dtype=st.sampled_from(["bfloat16", "float16"]),
    )
    def test_arbitrary_bit_patterns(self, shape, bits, dtype):
        """NaN, infinity, subnormals, zeros of both signs: whatever 16 bits can hold."""
        pattern = np.resize(np.array(bits, np.uint16), shape)
        x = jax.lax.bitcast_convert_type(jnp.asarray(pattern), jnp.dtype(dtype))
        native, reference = both_implementations(lambda i: jlp.quantize_both(x, jlp.NVFP4(), True, implementation=i))
        assert_same_bytes(native, reference)

    @given(values=st.lists(st.floats(width=32), min_size=1, max_size=48))
    def test_arbitrary_floats(self, values):
        x = jnp.asarray(np.resize(np.array(values, np.float32), (16, 32)))
        for block in BLOCKS:
            native, reference = both_implementations(lambda i: jlp.quantize_both(x, jlp.NVFP4(block), implementation=i))
            assert_same_bytes(native, reference)

    @pytest.mark.parametrize("size", [32, 64, 128, 256])
    def test_larger_rotations(self, size):
        x, h = random_array((size + 5, 2 * size), "float32"), jlp.Hadamard(size)
        for axis in (-1, -2):
            native, reference = both_implementations(lambda i: jlp.quantize(x, jlp.NVFP4(), axis, h, implementation=i))
            assert_same_bytes(native, reference)
            assert native.hadamard == h

    @pytest.mark.slow
    @pytest.mark.parametrize("hadamard", [False, True, jlp.Hadamard(signs=None)], ids=["unrotated", "rht", "plain-h"])
    @pytest.mark.parametrize(
        "shape", [(256, 1024), (1024, 256), (256, 272), (304, 304), (320, 256), (8192, 2560), (10240, 2560)], ids=str
    )
    def test_the_larger_shapes_of_the_exact_quantisation_matrix(self, shape, hadamard):
        """With the 16 shapes of tests/golden these make the 23 of the matrix, shapes x rotation x signs."""
        x = random_array(shape, "bfloat16", seed=shape[0])
        native, reference = both_implementations(
            lambda i: jlp.quantize_both(x, jlp.NVFP4(), hadamard, implementation=i)
        )
        assert_same_bytes(native, reference)


class TestRules:
    """What numerics.md says, on the implementation a user gets."""

    def test_golden_block(self):
        x = jnp.asarray([(i - 8) * 0.375 for i in range(16)], jnp.float32)
        q = jlp.quantize(x, jlp.NVFP4(), amax=jnp.float32(3))
        assert q.data.tobytes().hex() == "ffeecdab20436576"
        assert q.scale.view(jnp.uint8).tolist() == [0x7E]

    def test_second_golden_block(self):
        x = jnp.asarray([i / 16 for i in range(16)], jnp.float32)
        q = jlp.quantize(x, jlp.NVFP4(), amax=jnp.float32(7))
        codes = [nibble for byte in np.asarray(q.data) for nibble in (byte & 15, byte >> 4)]
        assert "".join(f"{c:x}" for c in codes) == "0122344556666777"
        assert q.scale.view(jnp.uint8).tolist() == [0x67]

    def test_ties_go_to_the_even_code(self):
        ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
        x = jnp.asarray(ties + [-t for t in ties], jnp.float32)
        q = jlp.quantize(x, jlp.NVFP4())
        assert q.data.tobytes().hex() == "20426476a8caecfe"

    def test_zeros_are_plus_zero_and_negatives_keep_their_sign(self):
        x = jnp.asarray([0.0, -0.0, -1e-40, -1e-3, 6.0] + [0.0] * 11, jnp.float32)
        codes = np.asarray(jlp.quantize(x, jlp.NVFP4()).data)
        assert [codes[0] & 15, codes[0] >> 4, codes[1] & 15, codes[1] >> 4] == [0, 0, 0, 8]

    def test_columnwise_is_rowwise_of_the_transposed(self):
        x = random_array((2, 40, 56))
        column, row = jlp.quantize(x, jlp.NVFP4(), -2), jlp.quantize(jnp.swapaxes(x, -1, -2), jlp.NVFP4())
        assert_same_bytes(column, row)
        assert_same_bytes(column.mT, row)

    def test_tiles_columnwise_codes_are_the_rowwise_ones_transposed(self):
        row, column = jlp.quantize_both(random_array((48, 64)), jlp.NVFP4((16, 16)))
        np.testing.assert_array_equal(np.asarray(row.dequantize()), np.asarray(column.dequantize()))
        np.testing.assert_array_equal(np.asarray(row.scale).view(np.uint8).T, np.asarray(column.scale).view(np.uint8))

    def test_both_are_the_two_single_directions(self):
        x, key = random_array((70, 90)), jax.random.key(5)
        for block in BLOCKS:
            for options in ({}, {"rounding": "stochastic", "key": key}):
                row, column = jlp.quantize_both(x, jlp.NVFP4(block), True, **options)
                assert_same_bytes(row, jlp.quantize(x, jlp.NVFP4(block), **options))
                assert_same_bytes(column, jlp.quantize(x, jlp.NVFP4(block), -2, True, **options))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_what_is_not_finite_never_comes_out_finite(self, bad, implementation):
        x = random_array((32, 48), "float32").at[3, 5].set(bad)
        for q in jlp.quantize_both(x, jlp.NVFP4(), True, implementation=implementation):
            assert not np.isfinite(float(q.amax))
            assert not q.data.any()
            assert np.isnan(np.asarray(q.dequantize())).all()
        poisoned = jlp.quantize(x, jlp.NVFP4(), amax=jnp.float32(4), implementation=implementation).dequantize()
        assert np.isnan(np.asarray(poisoned)[3, :16]).all()  # its block, and no other
        assert np.isfinite(np.asarray(poisoned)).sum() == 32 * 48 - 16

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.Float8Tensor()], ids=str)
    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_a_negative_amax_poisons_its_slice_and_no_other(self, fmt, implementation):
        x, amax = random_array((3, 32, 48), "float32"), jnp.asarray([3, -3, -1e-40], jnp.float32)
        for q in jlp.quantize_both(x, fmt, amax=(amax, amax), implementation=implementation):
            values = np.asarray(q.dequantize())
            assert np.isnan(values[1]).all() and np.isfinite(values[0]).all() and np.isfinite(values[2]).all()

    def test_zero_tensor(self):
        for q in jlp.quantize_both(jnp.zeros((32, 32)), jlp.NVFP4()):
            assert not q.data.any() and not np.asarray(q.scale).view(np.uint8).any() and q.amax == 0
            assert not q.dequantize().any()

    @pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (3, 0, 16), (0, 16, 16), (0,)], ids=str)
    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_empty_arrays(self, shape, implementation):
        x = jnp.zeros(shape, jnp.bfloat16)
        q = jlp.quantize(x, jlp.NVFP4(), implementation=implementation)
        assert q.shape == shape and q.dequantize().shape == shape
        if len(shape) > 1:
            for q in jlp.quantize_both(x, jlp.NVFP4(), True, implementation=implementation):
                assert q.shape == shape and q.dequantize().shape == shape

    @pytest.mark.parametrize("shape", SHAPES + BATCHES, ids=str)
    def test_dequantize_approximates_in_the_original_orientation(self, isa, shape):
        x = jax.random.normal(jax.random.key(0), shape)
        for axis, hadamard in itertools.product((-1, -2), (False, True)):
            y = jlp.quantize(x, jlp.NVFP4(), axis, hadamard).dequantize()
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            error = np.linalg.norm(np.asarray(y - x)) / np.linalg.norm(np.asarray(x))
            assert error < 0.15

    @pytest.mark.parametrize("shape", [(17, 33), BATCHES[0]], ids=str)
    def test_dequantize_gives_the_references_numbers(self, shape):
        """Of any codes and scales: tests/ops/quantize/test_dequantize.py."""
        x = random_array(shape, "float32")
        for axis, hadamard in itertools.product((-1, -2), (False, True)):
            q = jlp.quantize(x, jlp.NVFP4(), axis, hadamard)
            assert_same_numbers(q.dequantize(), jlp.dequantize(q, implementation="reference"))

    def test_a_vector_is_one_row(self):
        x = random_array((40,))
        q = jlp.quantize(x, jlp.NVFP4())
        assert_same_bytes(q, jax.tree.map(lambda leaf: leaf, q))
        np.testing.assert_array_equal(np.asarray(q.data), np.asarray(jlp.quantize(x[None], jlp.NVFP4()).data[0]))
        assert q.dequantize().shape == (40,)

    @pytest.mark.parametrize(
        ("block", "expected"),
        [((1, 16), 9.04), ((16, 16), 12.43)],
    )
    def test_expected_error_of_nearest_rounding(self, block, expected):
        """numerics.md 11: mean squared error x 1000 on N(0, 1)."""
        x = jax.random.normal(jax.random.key(0), (1024, 1024))
        error = 1000 * float(jnp.mean((jlp.quantize(x, jlp.NVFP4(block)).dequantize() - x) ** 2))
        assert error == pytest.approx(expected, abs=0.05)


class TestStochasticRounding:
    def test_expected_error(self):
        """numerics.md 11."""
        x = jax.random.normal(jax.random.key(0), (1024, 1024))
        q = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(1))
        assert 1000 * float(jnp.mean((q.dequantize() - x) ** 2)) == pytest.approx(18.85, abs=0.1)

    def test_mean_of_many_draws_converges_to_the_elements(self):
        x, draws = jax.random.normal(jax.random.key(2), (64, 64)), 4096
        nearest = jlp.quantize(x, jlp.NVFP4())
        scale = np.repeat(np.asarray(nearest.scale).astype(np.float32), 16, axis=-1) * float(nearest.amax) / 2688
        position = np.abs(np.asarray(x)) / scale
        keys = jax.random.split(jax.random.key(3), draws)

        def add(total, key):
            return total + jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=key).dequantize(), None

        mean = np.asarray(jax.jit(lambda k: jax.lax.scan(add, jnp.zeros_like(x), k)[0])(keys)) / draws
        step = np.where(position < 2, 0.5, np.where(position < 4, 1.0, 2.0)) * scale
        inside = position <= 6
        # A draw's deviation is at most half a step, and P(up) is a multiple of 1/256: off by at most 1/512 of a step.
        bound = 5 * 0.5 / np.sqrt(draws) + 1 / 512
        assert (np.abs(mean - np.asarray(x))[inside] <= bound * step[inside]).all()
        z = ((mean - np.asarray(x)) / step)[inside]
        assert abs(z.mean()) < 5 * 0.5 / np.sqrt(draws * inside.sum())  # biased neither way
        assert inside.mean() > 0.95  # the rest are the largest of blocks whose scale was rounded down

    def test_grid_points_never_move(self):
        grid = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 8, jnp.float32).reshape(4, 16)
        for seed in range(20):
            q = jlp.quantize(grid, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(seed))
            np.testing.assert_array_equal(np.asarray(q.dequantize()), np.asarray(grid))

    def test_same_key_same_bytes_other_key_other_bytes(self):
        x = random_array((64, 64))

        def quantize(seed):
            return jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(seed))

        assert_same_bytes(quantize(1), quantize(1))
        assert (quantize(1).data != quantize(2).data).mean() > 0.1

    def test_rowwise_and_columnwise_draw_different_bits(self):
        x = random_array((64, 64), "float32")
        row, column = jlp.quantize_both(x, jlp.NVFP4((16, 16)), rounding="stochastic", key=jax.random.key(0))
        assert (row.dequantize() != column.dequantize()).mean() > 0.1

    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_slices_at_their_offset_have_the_bytes_of_the_whole(self, implementation):
        x, key, amax = random_array((96, 80)), jax.random.key(4), jnp.float32(40)
        options = {"rounding": "stochastic", "key": key, "amax": amax, "implementation": implementation}
        whole = jlp.quantize(x, jlp.NVFP4(), **options)
        part = jlp.quantize(x[33:60], jlp.NVFP4(), offset=(33, 0), **options)
        np.testing.assert_array_equal(np.asarray(whole.data[33:60]), np.asarray(part.data))
        part = jlp.quantize(x[:, 32:], jlp.NVFP4(), offset=(0, 32), **options)
        np.testing.assert_array_equal(np.asarray(whole.data[:, 16:]), np.asarray(part.data))
        whole = jlp.quantize(x, jlp.NVFP4(), -2, **options)
        part = jlp.quantize(x[48:, 7:], jlp.NVFP4(), -2, offset=(48, 7), **options)
        np.testing.assert_array_equal(np.asarray(whole.data[7:, 24:]), np.asarray(part.data))

    def test_raw_and_typed_keys_agree(self):
        x = random_array((32, 32))
        typed = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(9))
        raw = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.PRNGKey(9))
        assert_same_bytes(typed, raw)

    def test_a_key_for_each_slice(self):
        x, keys = random_array((3, 32, 32)), jax.random.split(jax.random.key(0), 3)
        q = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=keys)
        for i in range(3):
            one = jlp.quantize(x[i], jlp.NVFP4(), rounding="stochastic", key=keys[i])
            np.testing.assert_array_equal(np.asarray(q.data[i]), np.asarray(one.data))


X = jnp.ones((16, 32))
