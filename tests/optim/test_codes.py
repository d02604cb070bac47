"""Codes of optimizer states: bytes of the specification, no bias, and nothing that is not finite lost."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.optim.codes import Coded
from jaxlowprec.optim.draws import half_words, words_of_leaves
from jaxlowprec.optim.rules import FIXED, SIGNED, UNSIGNED
from tests.helpers import assert_same_bytes, assert_same_numbers
from tests.numpy_oracle import optimizer_states as oracle

WORDS = np.array([3, 9], np.uint32)
CODES = [
    *(jlp.optim.RelativeCode(signed, rounding) for signed in (True, False) for rounding in ("nearest", "stochastic")),
    *(jlp.optim.FixedCode(rounding) for rounding in ("nearest", "stochastic")),
]
GOLDEN = (0x073D66AE, 0x3FB18449, 0x7BB0498C, 0x9F50A27A, 0x79E722EE, 0x6C645073)
"""Of each code, the CRC-32 of bytes that checkpoints have."""
every_code = pytest.mark.parametrize("code", CODES, ids=str)
UPPER_HALVES = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(-1, 32)


def expected(code, x):
    draws = oracle.half_words(x.shape, WORDS) if code.rounding == "stochastic" else None
    if isinstance(code, jlp.optim.FixedCode):
        return oracle.encode_fixed(x, draws)
    return oracle.encode_relative(x, code.signed, draws)


def decoded(code, q):
    q = [np.asarray(array) for array in q]
    if isinstance(code, jlp.optim.FixedCode):
        return oracle.decode_fixed(*q)
    return oracle.decode_relative(*q, code.signed)


def numbers(shape, seed=0):
    """Normal numbers over 60 octaves, with zeros, subnormals, the largest, infinities and NaN in some rows."""
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape), np.float32)
    rows = x.reshape(-1, shape[-1])
    edges = [0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, -np.nan]
    for i, edge in enumerate(edges[: len(rows)]):
        rows[i, i % shape[-1]] = edge
    if len(rows) > 12:
        rows[11] *= np.float32(2.0**-100)  # the bottom of float32
        rows[12] = 0
    return x


def on_device(code, x):
    return jax.jit(code.encode)(x, WORDS if code.rounding == "stochastic" else None)


class TestBytes:
    @every_code
    @pytest.mark.parametrize("shape", [(16, 104), (16, 1), (16, 31), (13, 33), (2, 8, 64), (96,)], ids=str)
    def test_are_those_of_the_specification(self, code, shape):
        x = numbers(shape)
        q = on_device(code, x)
        assert_same_bytes(tuple(q), expected(code, x))
        assert_same_numbers(code.decode(q), decoded(code, q))
        assert q.codes.shape == shape and q.exponents.shape == (*shape[:-1], -(-shape[-1] // 32))

    @every_code
    def test_are_those_that_checkpoints_have(self, code):
        """The oracle may not change either: rows of 104, 1, 31 and 33 numbers over 32 octaves."""
        crc = 0
        for columns in (104, 1, 31, 33):
            bits = (np.arange(12 * columns, dtype=np.uint32) * np.uint32(2654435761)).reshape(12, columns)
            x = np.ldexp(np.float32(2**-24) * (bits >> 8), (bits & 31).astype(np.int32) - 16).astype(np.float32)
            if getattr(code, "signed", True):
                x = np.where(bits & 128, -x, x)
            for array in on_device(code, x):
                crc = zlib.crc32(np.asarray(array).tobytes(), crc)
        assert crc == GOLDEN[CODES.index(code)]

    @every_code
    def test_of_every_upper_half_of_float32(self, code):
        for x in (UPPER_HALVES, np.random.default_rng(0).permutation(UPPER_HALVES.ravel()).reshape(-1, 32)):
            q = on_device(code, x)
            assert_same_bytes(tuple(q), expected(code, x))
            assert_same_numbers(jax.jit(code.decode)(q), decoded(code, q))

    @every_code
    def test_are_the_same_eagerly_and_from_bfloat16(self, code):
        x = np.asarray(numbers((13, 64)), jnp.bfloat16)
        words = WORDS if code.rounding == "stochastic" else None
        q = code.encode(jnp.asarray(x), words)
        assert_same_bytes(tuple(q), tuple(on_device(code, x)))
        assert_same_bytes(tuple(q), expected(code, x.astype(np.float32)))
        assert_same_numbers(code.decode(q, jnp.bfloat16), code.decode(q).astype(jnp.bfloat16))

    @every_code
    def test_every_code_decodes_to_what_encodes_to_it(self, code):
        """So a state that is decoded and encoded, but not updated, keeps its bytes."""
        codes = np.arange(256, dtype=np.uint8).view(code.dtype)
        codes = codes[codes != -128] if codes.dtype == np.int8 else codes
        largest = {"int8": 127, "uint8": 127 if getattr(code, "signed", False) else 255}[codes.dtype.name]
        others = codes[codes != 128] if getattr(code, "signed", False) else codes  # -0 is the code 0
        rows = np.stack([np.full(others.size, largest, codes.dtype), *[others] * 31], axis=-1)
        for exponent in (41, 127, 254):
            q = Coded(rows, np.full((len(rows), 1), exponent, np.uint8))
            assert_same_bytes(tuple(on_device(code, np.asarray(code.decode(q)))), tuple(q))

    @every_code
    def test_numbers_of_an_encoded_state_do_not_move(self, code):
        x = numbers((64, 96), 3)
        x = x if getattr(code, "signed", True) else np.abs(x)
        once = code.decode(on_device(code, x))
        assert_same_numbers(code.decode(on_device(code, np.asarray(once))), once)

    @every_code
    @pytest.mark.parametrize("exponent", [0, 1, 2, 253, 254, 255])
    def test_of_the_first_and_the_last_exponents(self, code, exponent):
        """At the bottom a code may decode to a number that has another; that one keeps its code."""
        codes = np.arange(256, dtype=np.uint8).view(code.dtype).reshape(-1, 32)
        q = Coded(codes, np.full((len(codes), 1), exponent, np.uint8))
        x = np.asarray(jax.jit(code.decode)(q))
        assert_same_numbers(x, decoded(code, q))
        once = on_device(code, x)
        assert_same_bytes(tuple(once), expected(code, x))
        assert_same_bytes(tuple(on_device(code, np.asarray(code.decode(once)))), tuple(once))

    def test_draws_are_those_of_the_specification(self):
        for shape in ((5, 100), (2, 3, 8), (7,)):
            assert_same_bytes(
                half_words(jnp.zeros(shape), WORDS).astype(jnp.int32), oracle.half_words(shape, WORDS).astype(np.int32)
            )
        words = words_of_leaves(WORDS, np.uint32(7), ["0/v", "0/w"], 15)
        assert_same_bytes(words, np.stack([oracle.leaf_words(WORDS, 7, path, 15) for path in ("0/v", "0/w")]))


class TestNumbers:
    @every_code
    def test_one_that_is_not_finite_poisons_its_block_alone(self, code):
        for bad in (np.nan, np.inf, -np.inf):
            x = np.ones((4, 96), np.float32)
            x[2, 40] = bad
            y = np.asarray(code.decode(on_device(code, x)))
            assert np.isnan(y[2, 32:64]).all() and np.isnan(y).sum() == 32

    def test_a_negative_second_moment_poisons_its_block(self):
        x = np.ones((2, 64), np.float32)
        x[0, 0], x[1, 0] = -1e-9, -0.0
        y = np.asarray(UNSIGNED.decode(on_device(UNSIGNED, x)))
        assert np.isnan(y[0, :32]).all() and np.isnan(y).sum() == 32 and y[1, 0] == 0

    def test_a_second_moment_is_zero_only_if_it_was(self):
        x = np.full((64, 32), 1e-30, np.float32)
        x[:, 0], x[:, 1] = 1, 0
        y = np.asarray(UNSIGNED.decode(on_device(UNSIGNED, x)))
        assert (y[:, 2:] > 0).all() and (y[:, 1] == 0).all()

    @pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=str)
    def test_errors_are_relative_to_the_element(self, code):
        x = np.exp2(np.random.default_rng(1).uniform(-14, 0, (512, 32))).astype(np.float32)
        nearest = jlp.optim.RelativeCode(code.signed, "nearest")
        for each, bound in ((code, 1 / 8), (nearest, 1 / 16)):
            error = np.abs(np.asarray(each.decode(on_device(each, x))) / x - 1)
            assert bound * 0.9 < error.max() <= bound

    def test_errors_of_fixed_codes_are_relative_to_the_block(self):
        x = np.random.default_rng(1).standard_normal((512, 32)).astype(np.float32)
        largest = np.abs(x).max(-1, keepdims=True)
        for code, bound in ((FIXED, 1 / 63.5), (jlp.optim.FixedCode("nearest"), 1 / 127)):
            error = np.abs(np.asarray(code.decode(on_device(code, x))) - x) / largest
            assert bound * 0.9 < error.max() <= bound

    @pytest.mark.parametrize("code", [SIGNED, UNSIGNED, FIXED], ids=str)
    def test_a_small_change_comes_out_on_average(self, code):
        """A byte of random bits would give a change of 1e-4 back as 0."""
        for change in (1e-2, 1e-3, 1e-4):
            x = np.full((4096, 32), 1 + change, np.float32)
            x[:, 0] = 1.9
            y = np.asarray(code.decode(on_device(code, x)))[:, 1:].astype(np.float64)
            step = 1 / 64 if code == FIXED else 1 / 8
            deviation = np.sqrt(change / step * (1 - change / step)) * step / np.sqrt(y.size)
            assert abs(y.mean() - 1 - change) < 3.5 * deviation, change

    def test_the_largest_of_a_fixed_block_can_grow(self):
        """Limited to 127 units, a slow average could not grow past them."""
        x = np.full((4096, 32), 127.5 / 64, np.float32)
        y = np.asarray(FIXED.decode(on_device(FIXED, x))).astype(np.float64)
        assert abs(y.mean() * 64 - 127.5) < 0.02


class TestErrors:
    def test_arguments_that_are_none(self):
        with pytest.raises(ValueError, match='RelativeCode: rounding=\'up\'; needs "nearest" or "stochastic"'):
            jlp.optim.RelativeCode(True, "up")
        with pytest.raises(TypeError, match="RelativeCode: signed=1; needs True or False"):
            jlp.optim.RelativeCode(1)
        with pytest.raises(ValueError, match="FixedCode: rounding="):
            jlp.optim.FixedCode("eden")
