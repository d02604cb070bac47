"""What numerics.md says of NVFP4, by hand and by statistics."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.ops.quantize.random_bits import philox4x32
from tests.eager import jlp
from tests.helpers import assert_same_bytes, random_array
from tests.ops.quantize.test_quantize import NVFP4_SHAPES


@jax.jit
def there_and_back(x):
    """By each axis, rotated and not."""
    ways = itertools.product((-1, -2), (False, True))
    return [jlp.quantize(x, jlp.NVFP4(), axis=axis, hadamard=hadamard).dequantize() for axis, hadamard in ways]


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
        column, row = jlp.quantize(x, jlp.NVFP4(), axis=-2), jlp.quantize(jnp.swapaxes(x, -1, -2), jlp.NVFP4())
        assert_same_bytes(column, row)
        assert_same_bytes(column.mT, row)

    def test_tiles_columnwise_codes_are_the_rowwise_ones_transposed(self):
        row, column = jlp.quantize_both(random_array((48, 64)), jlp.NVFP4((16, 16)))
        np.testing.assert_array_equal(np.asarray(jlp.dequantize(row)), np.asarray(jlp.dequantize(column)))
        np.testing.assert_array_equal(np.asarray(row.scale).view(np.uint8).T, np.asarray(column.scale).view(np.uint8))

    def test_both_are_the_two_single_directions(self):
        x, key = random_array((70, 90)), jax.random.key(5)
        for block in ((1, 16), (16, 16)):
            for options in ({}, {"rounding": "stochastic", "key": key}):
                row, column = jlp.quantize_both(x, jlp.NVFP4(block), hadamard_columnwise=True, **options)
                assert_same_bytes(row, jlp.quantize(x, jlp.NVFP4(block), **options))
                assert_same_bytes(column, jlp.quantize(x, jlp.NVFP4(block), axis=-2, hadamard=True, **options))

    def test_zero_tensor(self):
        for q in jlp.quantize_both(jnp.zeros((32, 32)), jlp.NVFP4()):
            assert not q.data.any() and not np.asarray(q.scale).view(np.uint8).any() and q.amax == 0
            assert not jlp.dequantize(q).any()

    @pytest.mark.parametrize("shape", NVFP4_SHAPES, ids=str)
    def test_dequantize_approximates_in_the_original_orientation(self, isa, shape):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        for y in there_and_back(x):
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            assert np.linalg.norm(y - x) < 0.15 * np.linalg.norm(x)

    def test_a_vector_is_one_row(self):
        x = random_array((40,))
        q = jlp.quantize(x, jlp.NVFP4())
        assert_same_bytes(q, jax.tree.map(lambda leaf: leaf, q))
        np.testing.assert_array_equal(np.asarray(q.data), np.asarray(jlp.quantize(x[None], jlp.NVFP4()).data[0]))
        assert jlp.dequantize(q).shape == (40,)

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
        assert 1000 * float(jnp.mean((jlp.dequantize(q) - x) ** 2)) == pytest.approx(18.85, abs=0.1)

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
            np.testing.assert_array_equal(np.asarray(jlp.dequantize(q)), np.asarray(grid))

    def test_same_key_same_bytes_other_key_other_bytes(self):
        x = random_array((64, 64))

        def quantize(seed):
            return jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(seed))

        assert_same_bytes(quantize(1), quantize(1))
        assert (quantize(1).data != quantize(2).data).mean() > 0.1

    def test_rowwise_and_columnwise_draw_different_bits(self):
        x = random_array((64, 64), "float32")
        row, column = jlp.quantize_both(x, jlp.NVFP4((16, 16)), rounding="stochastic", key=jax.random.key(0))
        assert (jlp.dequantize(row) != jlp.dequantize(column)).mean() > 0.1

    def test_raw_and_typed_keys_agree(self):
        x = random_array((32, 32))
        typed = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(9))
        raw = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=jax.random.PRNGKey(9))
        assert_same_bytes(typed, raw)

    @pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
    def test_keys_of_four_words(self, impl):
        """Typed or raw they are one key of two words, in which each of the four has a part."""
        x, key = random_array((32, 32)), jax.random.split(jax.random.key(9, impl=impl))[0]
        w0, w1, w2, w3 = (np.uint32(word) for word in jax.random.key_data(key))
        two = np.stack(philox4x32((w2, w3, np.uint32(0), np.uint32(13)), (w0, w1))[:2])
        quantize = functools.partial(jlp.quantize, x, jlp.NVFP4(), rounding="stochastic")
        for same in (key, jax.random.key_data(key)):
            assert_same_bytes(quantize(key=same), quantize(key=two))
        for word in range(4):
            other = np.array(jax.random.key_data(key))
            other[word] ^= 1
            assert (quantize(key=other).data != quantize(key=key).data).mean() > 0.1

    def test_a_key_for_each_slice(self):
        x, keys = random_array((3, 32, 32)), jax.random.split(jax.random.key(0), 3)
        q = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=keys)
        for i in range(3):
            one = jlp.quantize(x[i], jlp.NVFP4(), rounding="stochastic", key=keys[i])
            np.testing.assert_array_equal(np.asarray(q.data[i]), np.asarray(one.data))
