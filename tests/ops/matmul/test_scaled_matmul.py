"""scaled_matmul: the bytes of numerics.md 9 on every implementation, its error bound, and what does not change them."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import numpy_oracle
from tests.against_oracle import assert_multiplies, product, slices
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, assert_same_numbers, random_array
from tests.ops.implementations import ByKernels, ByReference
from tests.products import epilogues_by_oracle, operands, products, with_epilogues

pytestmark = pytest.mark.sampled(7)

PAIRS = list(itertools.product([jlp.NVFP4(), jlp.NVFP4((16, 16))], repeat=2))
PAIR_IDS = [f"{a.block[0]}x16-by-{b.block[0]}x16" for a, b in PAIRS]
SIZES = [
    (1, 1, 1),
    (16, 16, 16),
    (1, 40, 70),
    (7, 100, 3),
    (33, 16, 65),
    (20, 300, 130),
    (130, 48, 17),
    (2, 3, 5, 33, 18),
]


def epilogue_operands(sizes, dtype, seed):
    *batch, m, _, n = sizes
    return {"bias": random_array((*batch, n), dtype, seed), "accumulate": random_array((*batch, m, n), dtype, seed + 1)}


@functools.cache
def operands_and_products(formats, sizes):
    """Once for both implementations."""
    pairs = [operands(one, formats) for one in sizes]
    return pairs, [product(*pair, preferred_element_type=jnp.float32)[0] for pair in pairs]


@functools.cache
def epilogues(names, dtypes):
    """Operands, cases and the oracle's results. Numbers from flushed ones to some that overflow float16."""
    sizes = (2, 5, 64, 21)
    a, b = operands(sizes, PAIRS[0], seed=5, amax=np.array([3.0, 30.0]))
    extras = {dtype: epilogue_operands(sizes, dtype, seed=6) for dtype in FLOATS}
    cases = tuple((*case[:2], *case[2]) for case in itertools.product(names, (None, "gelu"), dtypes))
    return a, b, extras, cases, epilogues_by_oracle(product, a, b, extras, cases)


class BytesCases:
    """What every implementation promises of the bytes, which the rules define on the CPU."""

    implementation: str
    SIZES = tuple(SIZES)
    ADDED = ((), ("bias",), ("accumulate",), ("bias", "accumulate"))
    DTYPES = tuple(itertools.product(FLOATS, FLOATS))

    @pytest.mark.parametrize("formats", PAIRS, ids=PAIR_IDS)
    def test_bytes_are_the_rules(self, formats):
        pairs, expected = operands_and_products(formats, self.SIZES)
        for y, wanted in zip(products(pairs, self.implementation), expected, strict=True):
            assert_same_numbers(y, wanted)

    def test_epilogue(self):
        """Bias, activation, accumulate, alone and together, of every dtype, to every dtype."""
        a, b, extras, cases, expected = epilogues(self.ADDED, self.DTYPES)
        for found, wanted in zip(with_epilogues(a, b, extras, cases, self.implementation), expected, strict=True):
            for y, w in zip(found, wanted, strict=True):
                assert_same_numbers(y, w)

    def test_gelu_of_every_magnitude(self):
        """Through a product that is zero, so that GELU sees the bias: from flushed numbers to infinity and NaN."""
        steps = np.arange(0x0000, 0x7FC1, 7, dtype=np.uint16)
        magnitudes = jax.lax.bitcast_convert_type(jnp.asarray(steps), jnp.bfloat16).astype(jnp.float32)
        a, b = (jlp.quantize(jnp.zeros((n, 16)), jlp.NVFP4()) for n in (1, steps.size))
        for bias in (magnitudes, -magnitudes):
            assert_multiplies(
                a, b, self.implementation, bias=bias, activation="gelu", preferred_element_type=jnp.float32
            )

    @pytest.mark.parametrize(
        "amaxes", [(1e-28, 1.0), (1e-20, 1e-18), (1e-30, 1e-30), (1e18, 1e20), (0.0, 1.0), (0.0, 3e38)]
    )
    def test_any_tensor_scale(self, amaxes):
        """Alpha is flushed and overflows where its float32 product does."""
        a, b = operands((5, 48, 21), PAIRS[0], seed=7)
        a, b = (dataclasses.replace(q, amax=jnp.float32(g)) for q, g in zip((a, b), amaxes, strict=True))
        assert_multiplies(a, b, self.implementation, preferred_element_type=jnp.float32)

    @given(
        codes=st.binary(min_size=1, max_size=64),
        scales=st.lists(st.integers(0, 0x7F), min_size=1, max_size=16),
        amax=st.floats(0, width=32),
        formats=st.sampled_from(PAIRS),
    )
    def test_arbitrary_bytes(self, codes, scales, amax, formats):
        """Codes of every value, scales to NaN, tensor scales from zero to infinity."""
        a, b = operands((17, 64, 20), formats, codes=list(codes), scales=scales, amax=amax)
        b = dataclasses.replace(b, amax=jnp.float32(0.75))
        assert_multiplies(a, b, self.implementation, preferred_element_type=jnp.float32)

    @given(
        values=st.lists(st.floats(width=32), min_size=1, max_size=48),
        weights=st.lists(st.sampled_from([0.0, -0.0, 1e-40, 0.25, 1.75, 2.5, 5.0, 2.0**100, 2.0**-100]), min_size=1),
    )
    def test_arbitrary_inputs(self, values, weights):
        """NaN, infinity, subnormals, ties and zero blocks, quantised and multiplied."""
        x, w = (jnp.asarray(np.resize(np.array(v, np.float32), (16, 32))) for v in (values, weights))
        a, b = jlp.quantize(x, jlp.NVFP4()), jlp.quantize(w, jlp.NVFP4((16, 16)))
        assert_multiplies(a, b, self.implementation, preferred_element_type=jnp.float32)


class TestBytesByReference(ByReference, BytesCases):
    SIZES = ((20, 300, 33), (2, 3, 17, 40, 18))
    ADDED = (("bias", "accumulate"),)
    DTYPES = tuple(zip(FLOATS, FLOATS, strict=True))


class TestBytesByKernels(ByKernels, BytesCases):
    pass


class ScaledMatmulCases:
    """What every implementation promises, on any device."""

    implementation: str

    @pytest.mark.parametrize(
        "sizes", [(0, 32, 8), (8, 0, 24), (8, 32, 0), (0, 0, 0), (0, 8, 32, 8), (2, 8, 0, 8)], ids=str
    )
    def test_empty_operands(self, sizes):
        """No rows, no columns, no batch; nothing to contract gives zero and the epilogue."""
        *batch, m, k, n = sizes
        a, b = (jlp.quantize(jnp.zeros((*batch, rows, k)), jlp.NVFP4()) for rows in (m, n))
        extras = epilogue_operands(sizes, "float32", seed=3)
        y = jlp.scaled_matmul(a, b, **extras, preferred_element_type=jnp.float32, implementation=self.implementation)
        assert_same_numbers(y, extras["bias"][..., None, :] + extras["accumulate"])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_never_comes_out_finite(self, bad):
        """A bad number in a tensor poisons the result; in a block of known tensor scale, its row."""
        x, w = random_array((9, 64), "float32", 1), random_array((12, 64), "float32", 2)
        b = jlp.quantize(w, jlp.NVFP4())
        for amax, rows in ((None, np.ones(9, bool)), (jnp.float32(8), np.arange(9) == 4)):
            a = jlp.quantize(x.at[4, 33].set(bad), jlp.NVFP4(), amax=amax)
            y = jlp.scaled_matmul(a, b, activation="gelu", implementation=self.implementation).astype(jnp.float32)
            assert np.isnan(np.asarray(y)[rows]).all()
            assert np.isfinite(np.asarray(y)[~rows]).all()
            z = jlp.scaled_matmul(b, a, implementation=self.implementation).astype(jnp.float32)
            assert np.isnan(np.asarray(z)[:, rows]).all()
            assert np.isfinite(np.asarray(z)[:, ~rows]).all()


class TestByReference(ByReference, ScaledMatmulCases):
    pass


class TestByKernels(ByKernels, ScaledMatmulCases):
    pass


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 200), st.integers(1, 140)),
    formats=st.sampled_from(PAIRS),
    seed=st.integers(0, 999),
    out_dtype=st.sampled_from(FLOATS),
)
@settings(max_examples=20)  # each is traced
def test_kernels_of_arbitrary_sizes(sizes, formats, seed, out_dtype):
    assert_multiplies(*operands(sizes, formats, seed), "ffi", preferred_element_type=out_dtype)


class TestMeaning:
    @pytest.mark.parametrize("magnitudes", [(1e-28, 1), (1, 1), (1e3, 1e3), (1e3, 1e-28)], ids=str)
    @pytest.mark.parametrize("formats", PAIRS, ids=PAIR_IDS)
    def test_error_bound(self, formats, magnitudes):
        """numerics.md 9: |C - C_exact| <= K 2^-24 |A||B|^T, against the float64 product of the decoded operands."""
        k = 512
        a, b = (
            jlp.quantize(random_array((rows, k), "float32", seed) * magnitude, fmt)
            for seed, (rows, fmt, magnitude) in enumerate(zip((40, 56), formats, magnitudes, strict=True))
        )

        def decoded(q):
            ((data, scale, _, fmt),) = slices(q)
            return numpy_oracle.decode(data, scale, 2688, fmt).astype(np.float64) * float(q.amax) / 2688

        x, w = decoded(a), decoded(b)
        y = np.asarray(jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32), np.float64)
        assert np.abs(y).max() > 0
        assert (np.abs(y - x @ w.T) <= k * 2.0**-24 * (np.abs(x) @ np.abs(w).T)).all()

    def test_it_approximates_the_product(self):
        x, w = (jax.random.normal(jax.random.key(i), (64, 256)) for i in range(2))
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        for fmt in (jlp.NVFP4(), jlp.NVFP4((16, 16))):
            y = jlp.scaled_matmul(
                jlp.quantize(x, jlp.NVFP4()), jlp.quantize(w, fmt), preferred_element_type=jnp.float32
            )
            assert np.linalg.norm(y - exact) < 0.16 * np.linalg.norm(exact)

    @pytest.mark.parametrize("hadamard", [True, jlp.Hadamard(signs=None), jlp.Hadamard(64)], ids=str)
    def test_a_rotation_of_both_operands_cancels(self, hadamard):
        x, w = (jax.random.normal(jax.random.key(i), (32, 100)) for i in range(2))
        a, b = (jlp.quantize(v, jlp.NVFP4(), hadamard=hadamard) for v in (x, w))
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        assert np.linalg.norm(
            jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32) - exact
        ) < 0.16 * np.linalg.norm(exact)

    def test_columnwise_operands_contract_over_their_rows_as_mt(self):
        """The weight gradient: x^T dy from the columnwise results of quantize_both."""
        x, dy = random_array((48, 40), seed=1), random_array((48, 56), seed=2)
        a, b = (jlp.quantize_both(v, jlp.NVFP4(), hadamard_columnwise=True)[1].mT for v in (x, dy))
        separate = [jlp.quantize(v.T, jlp.NVFP4(), hadamard=True) for v in (x, dy)]
        assert_same_bytes(jlp.scaled_matmul(a, b), jlp.scaled_matmul(*separate))

    def test_gelu_is_the_tanh_form(self):
        bias = jnp.linspace(-12, 12, 4001)
        a, b = (jlp.quantize(jnp.zeros((n, 16)), jlp.NVFP4()) for n in (1, bias.size))
        y = jlp.scaled_matmul(a, b, bias, activation="gelu", preferred_element_type=jnp.float32)[0]
        v = np.asarray(bias, np.float64)
        exact = 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
        np.testing.assert_allclose(y, exact, rtol=2e-5, atol=1e-7)

    def test_the_order_of_the_epilogue(self):
        """Bias before the activation, accumulate after it, one cast at the end."""
        a, b = operands((16, 64, 24), PAIRS[0], seed=8, amax=0.01)
        bias, accumulate = random_array((24,), "float32", 1), random_array((16, 24), "float32", 2)
        product = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32)
        y, before = jlp.scaled_matmul(
            a,
            b,
            bias,
            activation="gelu",
            accumulate=accumulate,
            preferred_element_type=jnp.float32,
            return_pre_activation=True,
        )
        assert_same_bytes(before, product + bias)
        np.testing.assert_allclose(y, jax.nn.gelu(before, approximate=True) + accumulate, rtol=1e-4, atol=1e-5)
        assert_same_bytes(
            jlp.scaled_matmul(a, b, bias, activation="gelu", accumulate=accumulate, preferred_element_type=jnp.float16),
            y.astype(jnp.float16),
        )

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_bad_epilogue_operands_reach_the_result(self, bad):
        a, b = operands((5, 32, 6), PAIRS[0], amax=1)
        bias, accumulate = jnp.zeros(6).at[2].set(bad), jnp.zeros((5, 6)).at[3, 1].set(bad)
        y = np.asarray(
            jlp.scaled_matmul(a, b, bias, activation="gelu", accumulate=accumulate, preferred_element_type=jnp.float32)
        )
        finite = np.ones((5, 6), bool)
        finite[:, 2], finite[3, 1] = False, False
        np.testing.assert_array_equal(np.isfinite(y), finite)

    def test_vmap_adds_batch_axes(self):
        a, b = operands((3, 20, 64, 18), PAIRS[1], seed=9)
        bias = random_array((3, 18), "float32")
        assert_same_bytes(jax.vmap(jlp.scaled_matmul)(a, b, bias), jlp.scaled_matmul(a, b, bias))

    def test_one_operand_shared_over_a_mapped_axis(self):
        a, _ = operands((3, 20, 64, 18), PAIRS[0], seed=10)
        _, b = operands((20, 64, 18), PAIRS[0], seed=11)
        y = jax.vmap(jlp.scaled_matmul, in_axes=(0, None))(a, b)
        for i in range(3):
            assert_same_bytes(y[i], jlp.scaled_matmul(jax.tree.map(lambda leaf, i=i: leaf[i], a), b))


DIGESTS = """
import os, sys
os.sched_setaffinity(0, {{{cpus}}})
import jax, jax.numpy as jnp, jaxlowprec as jlp
from jaxlowprec.wiring import native
from tests.helpers import digest, random_array
assert native.platforms() == ("cpu",)
x, w = random_array((256, 512), seed=1), random_array((320, 512), seed=2)
row, column = jlp.quantize_both(
    x, jlp.NVFP4(), hadamard_columnwise=True, rounding="stochastic", key=jax.random.key(0)
)
y = jlp.scaled_matmul(row, jlp.quantize(w, jlp.NVFP4((16, 16))), preferred_element_type=jnp.float32)
z = jlp.hadamard_transform(column.dequantize(), axis=-2)
print("found", os.cpu_count() and len(os.sched_getaffinity(0)), *map(digest, jax.tree.leaves((row, column, y, z))))
"""


ROWS = [slice(a, a + n) for a, n in ((0, 1), (36, 1), (3, 2), (5, 3), (17, 5), (8, 8), (1, 15), (0, 33))]
COLUMNS = [slice(a, a + n) for a, n in ((0, 1), (69, 1), (3, 7), (30, 33))]


def rows_of(q, rows):
    return dataclasses.replace(
        q, data=q.data[rows], scale=q.scale[rows], matrix_shape=(rows.stop - rows.start, q.shape[-1])
    )


@jax.jit
def by_rows(a, b, bias):
    """The whole product, and the products of some rows of a."""
    multiply = functools.partial(
        jlp.scaled_matmul, bias=bias, activation="gelu", preferred_element_type=jnp.float32, implementation="ffi"
    )
    return multiply(a, b), [multiply(rows_of(a, rows), b) for rows in ROWS]


@jax.jit
def by_columns(a, b):
    """The whole product, and the products with some rows of b."""
    multiply = functools.partial(jlp.scaled_matmul, preferred_element_type=jnp.float32, implementation="ffi")
    return multiply(a, b), [multiply(a, rows_of(b, columns)) for columns in COLUMNS]


class TestWhatDoesNotChangeTheBytes:
    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.NVFP4((16, 16))], ids=str)
    def test_a_row_does_not_depend_on_the_other_rows(self, isa, fmt):
        """Every number of rows meets another shape of the kernel's tile."""
        a, b = operands((37, 80, 70), (jlp.NVFP4(), fmt), seed=12)
        whole, parts = by_rows(a, b, random_array((70,), "float32"))
        for rows, part in zip(ROWS, parts, strict=True):
            assert_same_bytes(part, whole[rows])

    def test_a_column_does_not_depend_on_the_other_columns(self, isa):
        whole, parts = by_columns(*operands((9, 80, 70), PAIRS[0], seed=13))
        for columns, part in zip(COLUMNS, parts, strict=True):
            assert_same_bytes(part, whole[:, columns])

    @pytest.mark.slow
    def test_the_number_of_threads(self):
        """XLA's pool has as many as the process may use processors when jax starts."""
        available = sorted(os.sched_getaffinity(0))
        if len(available) < 2:
            pytest.skip("one processor")
        runs = [
            subprocess.run(
                [sys.executable, "-c", DIGESTS.format(cpus=", ".join(map(str, available[:count])))],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                check=True,
            )
            .stdout.split("found")[-1]
            .split()
            for count in (1, 2)
        ]
        assert [run[0] for run in runs] == ["1", "2"]
        assert len(runs[0]) == 9 and runs[0][1:] == runs[1][1:]


@pytest.mark.parametrize("implementation", ["ffi", "reference"])
@pytest.mark.parametrize("columns", [16, 48])
def test_with_scales_of_zero_results_are_positive_zeros(columns, implementation):
    a, b = (jlp.quantize(random_array((8, columns), "float32", seed), jlp.NVFP4()) for seed in (1, 2))
    a = dataclasses.replace(a, scale=jnp.zeros_like(a.scale))
    y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation)
    assert not np.asarray(y).any() and not np.signbit(y).any()
