"""hadamard_transform: every implementation against an oracle, byte for byte, and what the transform is for."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import numpy_oracle
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, assert_same_numbers, often, random_array
from tests.ops.implementations import ByKernels, ByReference, with_options

pytestmark = pytest.mark.sampled(7)

SIZES = [16, 32, 64, 128, 256]
CUSTOM = tuple(int(s) for s in np.random.default_rng(0).choice([-1, 1], 16))
SIGNS = {"default": jlp.DEFAULT_SIGNS, "plain": None, "custom": CUSTOM}


def oracle(x, axis, size, signs, inverse):
    """The rule of numerics.md 3 as tests/numpy_oracle.py has it, rounded once to x's dtype."""
    negative = jlp.Hadamard(size, signs).negative
    rows = np.moveaxis(np.asarray(x).astype(np.float32), axis, -1)
    rotate = numpy_oracle.rotate_back if inverse else numpy_oracle.rotate
    with np.errstate(all="ignore"):
        return np.moveaxis(rotate(rows, negative).astype(x.dtype), -1, axis)


def matrix(size, signs):
    """The transform as a float64 matrix, from the definition of H instead of the butterfly."""
    negative = np.array(jlp.Hadamard(size, signs).negative)
    index = np.arange(size)
    parity = np.bitwise_count(index[:, None] & index) % 2
    return np.where(negative, -1.0, 1.0)[:, None] * np.where(parity, -1.0, 1.0) / np.sqrt(size)


def ways(arrays, size):
    """(array, axis, inverse): along each axis that has whole transforms, there and back."""
    axes = [(x, axis) for x in arrays for axis in (-1, -2) if x.shape[axis] % size == 0]
    return [(x, axis, inverse) for x, axis in axes for inverse in (False, True)]


def transformed(arrays, size, signs, implementation):
    """In each of `ways`, in one program."""
    return with_options(_transformed, implementation, size=size, signs=signs)(arrays)


def _transformed(arrays, *, size, signs, implementation):
    return [
        jlp.hadamard_transform(x, axis=axis, size=size, signs=signs, inverse=inverse, implementation=implementation)
        for x, axis, inverse in ways(arrays, size)
    ]


@functools.cache
def awkward(shapes, dtype, size, signs):
    """Arrays, and what the oracle makes of them in each of `ways`: once for all implementations."""
    arrays = [random_array(shape, dtype, seed=size) for shape in shapes]
    return arrays, [oracle(x, axis, size, signs, inverse) for x, axis, inverse in ways(arrays, size)]


def assert_is_the_rule(implementation, arrays, size=16, signs=jlp.DEFAULT_SIGNS):
    for y, (x, axis, inverse) in zip(transformed(arrays, size, signs, implementation), ways(arrays, size), strict=True):
        assert_same_numbers(y, oracle(x, axis, size, signs, inverse))


RULES = list(itertools.product(SIZES, SIGNS, FLOATS))


class HadamardCases:
    """What every implementation promises."""

    implementation: str

    def assert_gives_the_oracles(self, shapes, dtype, size, signs):
        arrays, expected = awkward(shapes, dtype, size, signs)
        for y, wanted in zip(transformed(arrays, size, signs, self.implementation), expected, strict=True):
            assert_same_numbers(y, wanted)

    @pytest.fixture(params=RULES, ids=lambda rule: "-".join(map(str, rule)))
    def rule(self, request):
        """Size, signs and dtype."""
        return request.param

    def test_bytes_of_every_size_and_sign(self, rule):
        """Along rows and along columns, with another axis that no vector divides."""
        size, signs, dtype = rule
        self.assert_gives_the_oracles(((3, size), (2 * size, 37)), dtype, size, SIGNS[signs])

    def test_any_shape_and_batch(self):
        shapes = (1, 16), (16, 1), (1, 80), (5, 48), (48, 5), (33, 272), (2, 3, 32, 48), (3, 16, 7), (700, 512)
        self.assert_gives_the_oracles(shapes, "bfloat16", 16, jlp.DEFAULT_SIGNS)

    @pytest.mark.parametrize("magnitude", [-126, -122, -100, 100, 122, 126])
    def test_any_magnitude(self, magnitude):
        """Subnormal intermediates count as zero, sums that overflow are infinite."""
        with np.errstate(over="ignore"):
            x = np.ldexp(random_array((32, 64), "float32", seed=2), magnitude)
        assert_is_the_rule(self.implementation, [x])
        assert_is_the_rule(self.implementation, [x], 32)

    @given(
        bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64),
        dtype=st.sampled_from(["bfloat16", "float16"]),
    )
    def test_arbitrary_bit_patterns(self, bits, dtype):
        pattern = np.resize(np.array(bits, np.uint16), (16, 48))
        assert_is_the_rule(self.implementation, [pattern.view(jnp.dtype(dtype))])

    def test_golden_vector(self):
        y = jlp.hadamard_transform(jnp.arange(1.0, 17.0), implementation=self.implementation)
        golden = [-15.5, -7.5, 7.5, -0.5, 7.5, -0.5, -15.5, 8.5, 8.5, 16.5, 1.5, 1.5, 1.5, -2.5, 10.5, -17.5]
        assert y.tolist() == golden

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_stays_so_in_its_own_transform_alone(self, bad):
        x = np.array(random_array((6, 64), "bfloat16"))
        for axis, place in ((-1, np.s_[3, 32:64]), (-2, np.s_[32:64, 3])):
            m = x if axis == -1 else x.T
            spoilt, changed = m.copy(), np.zeros(m.shape, bool)
            changed[place] = True
            spoilt[place][9] = bad
            clean, y = (
                np.asarray(jlp.hadamard_transform(v, axis=axis, size=32, implementation=self.implementation))
                for v in (m, spoilt)
            )
            assert not np.isfinite(y[changed].astype(np.float32)).any()
            np.testing.assert_array_equal(y[~changed], clean[~changed])

    @pytest.mark.parametrize("shape", [(0,), (0, 16), (16, 0), (0, 0), (2, 0, 16), (0, 16, 16)], ids=str)
    def test_empty_arrays(self, shape):
        for axis in (-1, -2)[: len(shape)]:
            y = jlp.hadamard_transform(jnp.zeros(shape, jnp.float16), axis=axis, implementation=self.implementation)
            assert (y.shape, y.dtype) == (shape, jnp.float16)

    def test_vmap_adds_batch_axes(self):
        x = random_array((3, 32, 48))
        for axis in (-1, -2):
            transform = functools.partial(jlp.hadamard_transform, axis=axis, implementation=self.implementation)
            assert_same_bytes(jax.vmap(transform)(x), transform(x))


class TestByReference(ByReference, HadamardCases):
    SOME = (
        *((16, "default", "bfloat16"), (16, "custom", "float16"), (32, "plain", "float32")),
        *((64, "default", "float16"), (128, "custom", "bfloat16"), (256, "default", "float32")),
    )
    PAIRS = [
        (size, signs, FLOATS[(i + j) % 3]) for i, size in enumerate(SIZES) for j, signs in enumerate(SIGNS)
    ]  # of sizes and signs, sizes and dtypes, signs and dtypes

    @pytest.fixture(params=often(SOME, list(dict.fromkeys([*SOME, *PAIRS]))), ids=lambda rule: "-".join(map(str, rule)))
    def rule(self, request):
        """As above: each takes XLA a while to compile."""
        return request.param


class TestByKernels(ByKernels, HadamardCases):
    pass


@given(columns=st.integers(1, 300), size=st.sampled_from([16, 32]), seed=st.integers(0, 999))
@settings(max_examples=20)  # each is traced
def test_kernels_of_arbitrary_lengths(columns, size, seed):
    assert_is_the_rule("ffi", [random_array((32, columns), "float32", seed)], size, CUSTOM)


class TestMeaning:
    @pytest.mark.parametrize("signs", SIGNS.values(), ids=SIGNS)
    @pytest.mark.parametrize("size", SIZES)
    def test_it_is_the_product_with_the_signed_matrix(self, size, signs):
        """Small integers make every sum exact; only the last multiplication rounds, and for 16, 64, 256 none."""
        x = jnp.asarray(np.random.default_rng(1).integers(-8, 9, (6, 2 * size)), jnp.float32)
        exact = (np.asarray(x, np.float64).reshape(-1, size) @ matrix(size, signs)).reshape(x.shape)
        y = np.asarray(jlp.hadamard_transform(x, size=size, signs=signs), np.float64)
        if size in (16, 64, 256):
            np.testing.assert_array_equal(y, exact)
        else:
            np.testing.assert_allclose(y, exact, rtol=2.0**-23, atol=1e-12)

    @pytest.mark.parametrize("axis", [-1, -2, 0, 1])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_inverse_undoes_it_exactly_where_nothing_rounds(self, dtype, axis):
        x = jnp.asarray(np.random.default_rng(2).integers(-2, 3, (32, 48))).astype(dtype)
        y = jlp.hadamard_transform(x, axis=axis)
        assert (y != x).any()
        back = jlp.hadamard_transform(y, axis=axis, inverse=True)
        np.testing.assert_array_equal(np.asarray(back), np.asarray(x))

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_inverse_undoes_it_within_rounding(self, dtype, size):
        x = jax.random.normal(jax.random.key(0), (8, 2 * size)).astype(dtype)
        transform = functools.partial(jlp.hadamard_transform, x, size=size)
        back = jlp.hadamard_transform(transform(), size=size, inverse=True)
        unit = float(jnp.finfo(dtype).eps) / 2
        norm = np.linalg.norm(np.asarray(x, np.float64).reshape(-1, size), axis=1)
        error = np.linalg.norm(np.asarray(back - x, np.float64).reshape(-1, size), axis=1)
        roundings = 2 + 2 * np.log2(size)  # one of each result, and one of each addition in float32
        assert (error <= (roundings if dtype == "float32" else 2.1) * unit * norm).all()

    @pytest.mark.parametrize("size", [16, 128])
    def test_it_cancels_in_a_product(self, size):
        """Rotating both operands of a GEMM along the contraction axis changes nothing but rounding."""
        a, b = (jax.random.normal(jax.random.key(i), (8, 256)) for i in range(2))
        ra, rb = (jlp.hadamard_transform(x, size=size) for x in (a, b))
        product = functools.partial(jnp.matmul, precision="highest")
        np.testing.assert_allclose(product(ra, rb.T), product(a, b.T), atol=1e-4)
        assert jnp.abs(product(ra, b.T) - product(a, b.T)).max() > 1

    def test_a_vector_is_one_row(self):
        x = random_array((64,))
        row = jlp.hadamard_transform(x[None])[0]
        assert_same_bytes(jlp.hadamard_transform(x), row)
        assert_same_bytes(jlp.hadamard_transform(x, axis=0), row)

    def test_signs_repeat_to_the_size(self):
        x = random_array((4, 64), "float32")
        short = jlp.hadamard_transform(x, size=64, signs=CUSTOM)
        assert_same_bytes(short, jlp.hadamard_transform(x, size=64, signs=CUSTOM * 4))
        other = jlp.hadamard_transform(x, size=64, signs=CUSTOM * 3 + (1,) * 16)
        assert (other != short).any()

    @pytest.mark.parametrize("inverse", [False, True])
    def test_the_gradient_is_the_transpose(self, inverse):
        x, dy = random_array((32, 40), "float32", 1), random_array((32, 40), "float32", 2)
        for m, axis in ((x, -2), (x.T, -1)):
            cotangent = dy if axis == -2 else dy.T
            transform = functools.partial(jlp.hadamard_transform, axis=axis)
            _, pull = jax.vjp(functools.partial(transform, inverse=inverse), m)
            assert_same_bytes(pull(cotangent)[0], transform(cotangent, inverse=not inverse))
