"""scaled_matmul of every pair of formats: the bytes of numerics.md 9, its error bound, what does not change them."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import numpy_oracle
from tests.against_oracle import assert_multiplies, product, slices
from tests.eager import jlp
from tests.helpers import (
    FLOATS,
    assert_same_bytes,
    assert_same_numbers,
    format_name,
    often,
    random_array,
    run_python,
)
from tests.numpy_oracle.float32 import flush
from tests.ops.implementations import ByKernels, ByReference
from tests.products import epilogues_by_oracle, operands, products, sum_error, with_epilogues

pytestmark = pytest.mark.sampled(7)

BLOCKS = ((1, 128), (128, 128))


def allowed(a, b):
    return not (a.element == b.element == "e5m2" or (a.scaling == "float32" and a.block == b.block == BLOCKS[1]))


MX = [
    make(block)
    for make in (jlp.MXFP4, lambda b: jlp.MXFP8("e4m3", b), lambda b: jlp.MXFP8("e5m2", b))
    for block in ((1, 32), (32, 32))
]
FLOAT8_BLOCK = {
    power: [jlp.Float8Block(element, block, power) for element in ("e4m3", "e5m2") for block in BLOCKS]
    for power in (True, False)
}
FLOAT8_TENSOR = [jlp.Float8Tensor("e4m3"), jlp.Float8Tensor("e5m2", power_of_two=True)]
PAIRS = [
    pair
    for alike in (MX, FLOAT8_BLOCK[True], FLOAT8_BLOCK[False], FLOAT8_TENSOR)
    for pair in itertools.product(alike, repeat=2)
    if allowed(*pair)
] + [(rows, MX[tiles]) for power in (True, False) for rows in FLOAT8_BLOCK[power][::2] for tiles in (0, 1)]
ONE_OF_EACH_KIND = [  # of kernel, and of how scales enter
    (jlp.MXFP4(), jlp.MXFP4((32, 32))),
    (jlp.MXFP8("e5m2"), jlp.MXFP8("e4m3", (32, 32))),
    (jlp.MXFP8(), jlp.MXFP4()),
    (jlp.Float8Block(), jlp.Float8Block("e4m3", BLOCKS[1])),
    (jlp.Float8Block("e4m3", BLOCKS[1], False), jlp.Float8Block("e5m2", BLOCKS[0], False)),
    (jlp.Float8Tensor(), jlp.Float8Tensor("e5m2")),
    (jlp.Float8Block(power_of_two=False), jlp.MXFP4((32, 32))),
]
SIZES = [(1, 1, 1), (7, 32, 3), (1, 40, 70), (33, 128, 65), (20, 300, 130), (5, 129, 18), (2, 3, 5, 33, 18)]
LONG = (3, 1057, 20)  # along K: more than a kernel takes at a time, and odd


def pair_name(pair):
    return "-by-".join(map(format_name, pair))


over_pairs = pytest.mark.parametrize("pair", often(ONE_OF_EACH_KIND, PAIRS), ids=pair_name)
over_kinds = pytest.mark.parametrize("pair", ONE_OF_EACH_KIND, ids=pair_name)


@functools.cache
def operands_and_products(pair):
    both = [operands(sizes, pair, seed=sum(sizes)) for sizes in (LONG, *SIZES)]
    return both, [product(*ab, preferred_element_type=jnp.float32)[0] for ab in both]


def decoded(q):
    """float64 of one quantised matrix: codes times scales, nothing rounded, nothing flushed."""
    ((data, scale, _, fmt),) = slices(q)
    values = numpy_oracle.code_values(data, fmt).astype(np.float64)
    scales = numpy_oracle.row_scales(scale, fmt, data.shape[0]).astype(np.float64)
    if fmt.scaling != "tensor":
        scales = np.repeat(scales, fmt.block[1], axis=1)[:, : values.shape[1]]
    return values * scales


def product_and_bound(a, b):
    """numerics.md 9: |C - C_exact| <= K 2^-24 |A||B|^T; on a GPU the bound of the way that is taken."""
    x, w = decoded(a), decoded(b)
    stored = min(x.shape[1], w.shape[1])  # that of packed codes is padded
    x, w = x[:, :stored], w[:, :stored]
    assert np.abs(x @ w.T).max() > 0
    error = sum_error((a.format, b.format), (x.shape[0], stored, w.shape[0]))
    return x @ w.T, error * (np.abs(x) @ np.abs(w).T)


@functools.cache
def of_magnitudes(pair, magnitudes):
    """Operands whose 500 columns are no whole blocks, their exact product and the bound of its error."""
    a, b = (
        jlp.quantize(jax.random.normal(jax.random.key(i), (rows, 500)) * magnitude, fmt)
        for i, (rows, fmt, magnitude) in enumerate(zip((40, 56), pair, magnitudes, strict=True))
    )
    return a, b, *product_and_bound(a, b)


EPILOGUE_SIZES = (2, 5, 160, 21)


@functools.cache
def epilogues(pair, cases):
    """Operands and the oracle's results: once for both implementations."""
    *batch, m, _, n = EPILOGUE_SIZES
    extras = {
        dtype: {
            "bias": random_array((*batch, n), dtype, 6),
            "accumulate": random_array((*batch, m, n), dtype, 7),
            "activation_input": 3 * random_array((*batch, m, n), dtype, 8),
        }
        for dtype in FLOATS
    }
    a, b = operands(EPILOGUE_SIZES, pair, seed=5)
    return a, b, extras, epilogues_by_oracle(product, a, b, extras, cases)


def assert_epilogues(pair, cases, implementation):
    a, b, extras, expected = epilogues(pair, cases)
    for found, wanted in zip(with_epilogues(a, b, extras, cases, implementation), expected, strict=True):
        for y, w in zip(found, wanted, strict=True):
            assert_same_numbers(y, w)


@functools.cache
def small_and_large(pair):
    """Operands of small and large scales, and the oracle's products."""
    pairs = []
    for exponents in ((-100, -20), (-20, -100), (-60, -60), (-63, -63), (60, 60), (110, -110), (-126, 100)):
        scaled = []
        for q, exponent in zip(operands((9, 300, 21), pair, seed=4), exponents, strict=True):
            if q.format.scaling == "e8m0":
                scale = np.full(q.scale.shape, 127 + exponent, np.uint8).view(q.scale.dtype)
            else:
                scale = flush(np.asarray(q.scale) * np.float32(2.0**exponent))
            scaled.append(dataclasses.replace(q, scale=jnp.asarray(scale)))
        pairs.append(tuple(scaled))
    return pairs, [product(*ab, preferred_element_type=jnp.float32)[0] for ab in pairs]


class ScaledMatmulCases:
    """What every implementation promises, on any device."""

    implementation: str

    @pytest.mark.parametrize("magnitudes", [(1e-28, 1), (1, 1e-28), (1, 1), (1e3, 1e3), (1e3, 1e-28)], ids=str)
    @over_kinds
    def test_error_bound(self, pair, magnitudes):
        a, b, exact, bound = of_magnitudes(pair, magnitudes)
        y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=self.implementation)
        assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()

    @over_kinds
    def test_empty_operands(self, pair):
        """No rows, no columns, no batch; nothing to contract gives zero and the epilogue."""
        for *batch, m, k, n in ((0, 32, 8), (8, 0, 24), (0, 8, 32, 0)):
            a, b = (
                jlp.quantize(jnp.zeros((*batch, rows, k)), fmt, implementation="reference")
                for rows, fmt in zip((m, n), pair, strict=True)
            )
            bias = jnp.arange(n, dtype=jnp.float32)
            y = jlp.scaled_matmul(a, b, bias, preferred_element_type=jnp.float32, implementation=self.implementation)
            assert_same_bytes(y, jnp.broadcast_to(bias, (*batch, m, n)))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @over_kinds
    def test_what_is_not_finite_never_comes_out_finite(self, pair, bad):
        """It poisons the row of its block; a tile its rows, a tensor all."""
        x = random_array((300, 160), "float32", 1).at[140, 33].set(bad)
        fmt, b = pair[0], jlp.quantize(random_array((12, 160), "float32", 2), pair[1])
        poisoned = np.zeros(300, bool)
        height = 300 if fmt.scaling == "tensor" else fmt.block[0]
        poisoned[140 // height * height : (140 // height + 1) * height] = True
        y = jlp.scaled_matmul(
            jlp.quantize(x, fmt), b, preferred_element_type=jnp.float32, implementation=self.implementation
        )
        np.testing.assert_array_equal(np.isnan(np.asarray(y)), np.repeat(poisoned[:, None], 12, axis=1))


class TestByReference(ByReference, ScaledMatmulCases):
    pass


class TestByKernels(ByKernels, ScaledMatmulCases):
    pass


class BytesCases:
    """What every implementation promises of the bytes, which the rules define on the CPU."""

    implementation: str

    def test_dgelu_of_every_magnitude(self):
        """The product is one, so that the derivative itself is seen: of flushed numbers to infinity and NaN."""
        steps = np.arange(0x0000, 0x7FC1, 7, dtype=np.uint16)
        x = jax.lax.bitcast_convert_type(jnp.asarray(steps), jnp.bfloat16).astype(jnp.float32)
        a, b = (jlp.quantize(jnp.ones((n, 1)), jlp.MXFP4()) for n in (2, steps.size))
        options = {"activation": "dgelu", "activation_input": jnp.stack([x, -x]), "preferred_element_type": jnp.float32}
        assert_multiplies(a, b, self.implementation, **options)


class TestBytesByReference(ByReference, BytesCases):
    @pytest.mark.parametrize("pair", [p for p in PAIRS if p[0].element == p[1].element == "e2m1"], ids=pair_name)
    def test_bytes_of_four_bit_operands_are_the_rules(self, pair):
        both, expected = operands_and_products(pair)
        for y, wanted in zip(products(both[-2:], "reference"), expected[-2:], strict=True):
            assert_same_numbers(y, wanted)

    @over_kinds
    def test_within_the_bound_of_the_rules(self, pair):
        """XLA adds up the products of 8-bit codes in an order of its own."""
        for sizes in ((33, 128, 65), (20, 300, 30)):
            a, b = operands(sizes, pair, seed=1)
            exact, bound = product_and_bound(a, b)
            y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation="reference")
            assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()

    def test_dgelu(self):
        cases = tuple((("bias", "accumulate"), "dgelu", dtype, dtype) for dtype in FLOATS)
        assert_epilogues(ONE_OF_EACH_KIND[0], cases, self.implementation)


class TestBytesByKernels(ByKernels, BytesCases):
    @over_pairs
    def test_bytes_are_the_rules(self, pair):
        both, expected = operands_and_products(pair)
        for ab, y, wanted in zip(both, products(both, "ffi"), expected, strict=True):
            assert_same_numbers(y, wanted)
            assert jnp.isfinite(y).all(), ab

    @over_kinds
    def test_small_and_large_scales(self, pair):
        """Products that are flushed after the first scale or the second, and that overflow."""
        pairs, expected = small_and_large(pair)
        for y, wanted in zip(products(pairs, self.implementation), expected, strict=True):
            assert_same_numbers(y, wanted)

    @over_kinds
    def test_epilogue(self, pair):
        """Every activation, every dtype in and out; bias and accumulate, alone and together."""
        added = zip(FLOATS, ((), ("bias",), ("bias", "accumulate")), strict=True)
        cases = itertools.product(added, (None, "gelu", "dgelu"), FLOATS)
        cases = tuple((names, activation, dtype, out) for (dtype, names), activation, out in cases)
        assert_epilogues(pair, cases, self.implementation)


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 140)),
    pair=st.sampled_from(PAIRS),
    seed=st.integers(0, 999),
    out_dtype=st.sampled_from(FLOATS),
)
@settings(max_examples=20)  # each is traced
def test_kernels_of_arbitrary_sizes(sizes, pair, seed, out_dtype):
    assert_multiplies(*operands(sizes, pair, seed), "ffi", preferred_element_type=out_dtype)


@given(codes=st.binary(min_size=1, max_size=64), pair=st.sampled_from(ONE_OF_EACH_KIND), data=st.data())
def test_kernels_of_arbitrary_bytes(codes, pair, data):
    """Codes of every value, NaN and infinity included; scales to NaN, small ones whose products are flushed."""
    if pair[0].scaling == "e8m0":
        scales = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=16))
    else:
        numbers = st.floats(2.0**-126, width=32) | st.just(np.nan)
        scales = data.draw(st.lists(numbers, min_size=1, max_size=16))
    a, _ = operands((17, 256, 20), (pair[0], pair[0]), codes=list(codes), scales=scales)
    _, b = operands((17, 256, 20), pair, seed=3)
    assert_multiplies(a, b, "ffi", preferred_element_type=jnp.float32)


def exact_dgelu(x):
    """The derivative of GELU's tanh form in float64; XLA's own loses digits where tanh saturates."""
    v = np.asarray(x, np.float64)
    u, du = (np.sqrt(2 / np.pi) * part for part in (v + 0.044715 * v**3, 1 + 3 * 0.044715 * v**2))
    return 0.5 * (1 + np.tanh(u)) + 0.5 * v * du * (1 - np.tanh(u) ** 2)


class TestEpilogue:
    def test_dgelu_is_the_derivative_of_gelu(self):
        v = np.linspace(-12, 12, 4001)
        a, b = (jlp.quantize(jnp.ones((n, 1)), jlp.MXFP8()) for n in (1, v.size))
        x = jnp.asarray(v[None], jnp.float32)
        y = jlp.scaled_matmul(a, b, activation="dgelu", activation_input=x, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(y, exact_dgelu(x), rtol=2e-5, atol=2e-7)
        automatic = jax.vmap(jax.grad(functools.partial(jax.nn.gelu, approximate=True)))(x[0])
        np.testing.assert_allclose(y[0], automatic, rtol=1e-3, atol=1e-5)

    def test_backward_through_a_gelu(self):
        """dgelu takes what gelu gives as its pre-activation: dx = (dy w) gelu'(pre)."""
        x, w, dy = (random_array(s, "float32", i) for i, s in enumerate(((24, 64), (40, 64), (24, 32))))
        v = random_array((32, 40), "float32", 3)
        a, b = jlp.quantize(x, jlp.MXFP8()), jlp.quantize(w, jlp.MXFP8())
        _, before = jlp.scaled_matmul(
            a, b, activation="gelu", preferred_element_type=jnp.float32, return_pre_activation=True
        )
        d, c = jlp.quantize(dy, jlp.MXFP8("e5m2")), jlp.quantize(v, jlp.MXFP8(), axis=-2).mT
        plain = jlp.scaled_matmul(d, c, preferred_element_type=jnp.float32)
        back = jlp.scaled_matmul(d, c, activation="dgelu", activation_input=before, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(back, np.float64(plain) * exact_dgelu(before), rtol=1e-4, atol=1e-4)


class TestMeaning:
    @over_kinds
    def test_it_approximates_the_product(self, pair):
        x, w = (jax.random.normal(jax.random.key(i), (64, 256)) for i in range(2))
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        error = np.linalg.norm(
            jlp.scaled_matmul(*map(jlp.quantize, (x, w), pair), preferred_element_type=jnp.float32) - exact
        )
        assert error < (0.2 if "e2m1" in (pair[0].element, pair[1].element) else 0.06) * np.linalg.norm(exact)

    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.MXFP4(), jlp.Float8Block(), jlp.Float8Tensor()], ids=format_name)
    def test_columnwise_operands_contract_over_their_rows_as_mt(self, fmt):
        """The weight gradient: x^T dy from the columnwise results of quantize_both."""
        x, dy = random_array((48, 40), seed=1), random_array((48, 56), seed=2)
        a, b = (jlp.quantize_both(v, fmt)[1].mT for v in (x, dy))
        separate = [jlp.quantize(v.T, fmt) for v in (x, dy)]
        assert_same_bytes(jlp.scaled_matmul(a, b), jlp.scaled_matmul(*separate))

    def test_a_rotation_of_both_operands_cancels(self):
        x, w = (jax.random.normal(jax.random.key(i), (32, 100)) for i in range(2))
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        for fmt in (jlp.MXFP8(), jlp.Float8Tensor()):
            a, b = (jlp.quantize(v, fmt, hadamard=True) for v in (x, w))
            y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32)
            assert np.linalg.norm(y - exact) < 0.06 * np.linalg.norm(exact)

    @over_kinds
    def test_vmap_adds_batch_axes(self, pair):
        a, b = operands((3, 20, 64, 18), pair, seed=9)
        bias = random_array((3, 18), "float32")
        assert_same_bytes(jax.vmap(jlp.scaled_matmul)(a, b, bias), jlp.scaled_matmul(a, b, bias))
        one = jax.tree.map(lambda leaf: leaf[0], b)
        y = jax.vmap(jlp.scaled_matmul, in_axes=(0, None))(a, one)
        for i in range(3):
            assert_same_bytes(y[i], jlp.scaled_matmul(jax.tree.map(lambda leaf, i=i: leaf[i], a), one))


DIGESTS = """
import os
os.sched_setaffinity(0, {{{cpus}}})
import jax, jax.numpy as jnp, jaxlowprec as jlp
from jaxlowprec.wiring import native
from tests.helpers import FLOATS, digest, random_array
from tests.ops.matmul.test_scaled_matmul_formats import ONE_OF_EACH_KIND
assert native.platforms() == ("cpu",)
x, w = random_array((256, 520), seed=1), random_array((320, 520), seed=2)
out = []
for pair in ONE_OF_EACH_KIND:
    row, column = jlp.quantize_both(x, pair[0], rounding="stochastic", key=jax.random.key(0))
    y = jlp.scaled_matmul(row, jlp.quantize(w, pair[1]), preferred_element_type=jnp.float32)
    out += [row, column, row.dequantize(), y]
print("found", len(os.sched_getaffinity(0)), *map(digest, jax.tree.leaves(out)))
"""


ROWS = [slice(a, a + n) for a, n in ((0, 1), (36, 1), (3, 2), (5, 3), (17, 5), (8, 8), (1, 15), (0, 33), (160, 140))]
COLUMNS = [slice(a, a + n) for a, n in ((0, 1), (128, 7), (256, 33), (0, 130))]


def rows_of(q, rows):
    height = q.format.block[0]
    scale = q.scale[rows.start // height : -(-rows.stop // height)] if q.scale.ndim else q.scale
    return dataclasses.replace(q, data=q.data[rows], scale=scale, matrix_shape=(rows.stop - rows.start, q.shape[-1]))


@jax.jit
def by_rows(a, b):
    """The whole product, and the products of some rows of a."""
    multiply = functools.partial(
        jlp.scaled_matmul, activation="gelu", preferred_element_type=jnp.float32, implementation="ffi"
    )
    return multiply(a, b), [multiply(rows_of(a, rows), b) for rows in ROWS]


@jax.jit
def by_columns(a, b):
    """The whole product, and the products with some rows of b."""
    multiply = functools.partial(jlp.scaled_matmul, preferred_element_type=jnp.float32, implementation="ffi")
    return multiply(a, b), [multiply(a, rows_of(b, columns)) for columns in COLUMNS]


class TestWhatDoesNotChangeTheBytes:
    @over_kinds
    def test_a_row_does_not_depend_on_the_other_rows(self, isa, pair):
        """Every number of rows meets another shape of the kernel's tile."""
        by_row = pair[0] if pair[0].block == (1, 1) else dataclasses.replace(pair[0], block=(1, pair[0].length))
        a, b = operands((300, 300, 70), (by_row, pair[1]), seed=12)
        whole, parts = by_rows(a, b)
        for rows, part in zip(ROWS, parts, strict=True):
            assert_same_bytes(part, whole[rows])

    @over_kinds
    def test_a_column_does_not_depend_on_the_other_columns(self, isa, pair):
        whole, parts = by_columns(*operands((9, 300, 300), pair, seed=13))
        for columns, part in zip(COLUMNS, parts, strict=True):
            assert_same_bytes(part, whole[:, columns])

    @pytest.mark.slow
    def test_the_number_of_threads(self):
        """XLA's pool has as many as the process may use processors when jax starts."""
        available = sorted(os.sched_getaffinity(0))
        if len(available) < 2:
            pytest.skip("one processor")
        runs = [
            run_python("-c", DIGESTS.format(cpus=", ".join(map(str, available[:count]))))
            .stdout.split("found")[-1]
            .split()
            for count in (1, 2)
        ]
        assert [run[0] for run in runs] == ["1", "2"]
        assert len(runs[0]) == 1 + 6 * len(ONE_OF_EACH_KIND) and runs[0][1:] == runs[1][1:]
