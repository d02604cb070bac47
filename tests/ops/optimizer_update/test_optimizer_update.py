"""AdamW's and Lion's update: the bytes of the specification, whatever the states, the weights and the program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.ops.optimizer_states import Coded
from jaxlowprec.ops.optimizer_update import optimizer_update, reference
from tests.helpers import assert_same_bytes
from tests.numpy_oracle import optimizer_states as oracle
from tests.ops.implementations import ByKernels, ByReference, with_options
from tests.ops.optimizer_update.cases import ROUNDINGS, SCALARS, WEIGHTS, WORDS, expected, numbers, operands

SHAPES = ((8, 64), (6, 104), (7, 1), (5, 31), (4, 33), (2, 3, 40), (96,), (1,))
SOME = (  # each rounding of each moment, each way to keep weights, each type of gradients, both results
    (("stochastic", "stochastic"), jnp.bfloat16, 32, jnp.bfloat16, False),
    (("stochastic", "stochastic"), jnp.bfloat16, 24, np.float32, True),
    (("nearest", "nearest"), jnp.bfloat16, 24, jnp.bfloat16, False),
    ((None, "stochastic"), jnp.bfloat16, 16, jnp.bfloat16, False),
    (("nearest", None), jnp.bfloat16, 16, np.float32, True),
    (("stochastic", "nearest"), np.float32, None, np.float32, False),
    ((None, None), np.float32, None, np.float32, False),
    ((None, None), np.float32, None, jnp.bfloat16, True),
    ((None, None), jnp.bfloat16, None, jnp.bfloat16, False),
    (("nearest", "stochastic"), jnp.bfloat16, None, np.float32, True),
)


def name_of(value):
    return getattr(value, "__name__", None) or str(value)


class UpdateCases:
    rule = "adamw"

    def update(self, args, codes, bits, is_update=False):
        options = {"rule": self.rule, "codes": codes, "bits": bits, "result": "update" if is_update else "parameter"}
        return with_options(optimizer_update, self.implementation, **options)(*args)

    def check(self, args, codes, bits, is_update=False):
        """The update of these operands has the bytes of the specification."""
        found = self.update(args, codes, bits, is_update)
        assert_same_bytes(tuple(found), expected(args, codes, bits, is_update, self.rule))
        return found

    def codes(self, mu, nu):
        """The roundings of the rule's moments."""
        return (mu, nu) if self.rule == "adamw" else (mu, None)

    @pytest.mark.parametrize(("codes", "p_dtype", "bits", "g_dtype", "is_update"), SOME, ids=name_of)
    def test_bytes_are_those_of_the_specification(self, codes, p_dtype, bits, g_dtype, is_update):
        codes = self.codes(*codes)
        for seed, shape in enumerate(self.shapes):
            args = operands(shape, codes, p_dtype, bits, g_dtype, 10 * seed, rule=self.rule)
            self.check(args, codes, bits, is_update)

    def test_one_gradient_that_is_nan_poisons_one_block(self):
        codes = self.codes("stochastic", "stochastic")
        args = operands((4, 96), codes, jnp.bfloat16, 32, hostile=False, rule=self.rule)
        args[0][1, 40] = np.nan
        found = self.update(args, codes, 32)
        for moment in (found.mu, found.nu)[: 1 + (self.rule == "adamw")]:
            poisoned = np.asarray(moment.exponents) == 255
            assert poisoned[1, 1] and poisoned.sum() == 1
        assert np.isnan(np.asarray(found.parameter).astype(np.float32)).sum() == 1

    def test_an_array_without_axes(self):
        self.check(operands((), (None, None), np.float32, None, rule=self.rule), (None, None), None)


class AdamwCases(UpdateCases):
    def test_moments_of_zeros_and_gradients_of_zeros_stay(self):
        """So does v exactly: 1 / (sqrt(0) + eps) of a number that is not 0 would explode."""
        codes = ("stochastic", "stochastic")
        g, p, rest, mu, nu, *others = operands((4, 64), codes, jnp.bfloat16, 32, hostile=False)
        zero = Coded(np.zeros_like(mu.codes), np.zeros_like(mu.exponents))
        scalars = SCALARS.copy()
        scalars[7] = 0  # no weight decay
        found = self.update((np.zeros_like(g), p, rest, zero, zero, scalars, WORDS), codes, 32)
        assert_same_bytes(tuple(found), (p, rest, zero, zero))

    def test_a_tiny_gradient_has_a_bounded_update(self):
        """Squares of 1e-12 are far below all other moments, but not 0: 1 / sqrt(v) does not explode."""
        codes = ("stochastic", "nearest")
        g, p, rest, mu, nu, scalars, words = operands((8, 64), codes, np.float32, None, hostile=False)
        zero = Coded(np.zeros_like(mu.codes), np.zeros_like(mu.exponents))
        scalars = np.array([0.9, 0.1, 0.95, 0.05, 0.1, 0.05, 0, 0, -1.0], np.float32)
        tiny = np.where(g < 0, np.float32(-1e-12), np.float32(1e-12))
        found = self.update((tiny, p, rest, zero, zero, scalars, words), codes, None, True)
        assert (np.asarray(found.nu.codes) > 0).all()
        np.testing.assert_allclose(np.abs(found.parameter), 1, rtol=1e-5)

    def test_a_weight_that_cancels_leaves_nothing(self):
        """Contracted, the sum would be what the rounding of the update lost: a remainder beside a parameter of 0."""
        m = np.random.default_rng(3).uniform(1, 2, (8, 64)).astype(np.float32)
        rate, ones = np.float32(0.37), np.ones_like(m)
        upper, rest = oracle.split(m * rate, 32)
        p = upper.view(jnp.bfloat16)
        scalars = np.array([1, 0, 1, 0, 1, 1, 0, 0, -rate], np.float32)
        for is_update in (False, True):
            found = self.check((0 * m, p, rest, m, ones, scalars, None), (None, None), 32, is_update)
            assert not np.any(found.rest)
            np.testing.assert_array_equal(found.parameter, -p.astype(np.float32) if is_update else 0)


class LionCases(UpdateCases):
    rule = "lion"

    def test_steps_are_signs(self):
        """Zero has its own; what is infinite has one, too."""
        g = np.array([[3, -3, 0, -0.0, 1e-30, -1e-40, np.inf, -np.inf, 1e38, np.nan]], np.float32)
        zero = np.zeros_like(g)
        scalars = np.array([0.9, 0.1, 0.99, 0.01, 0, -1], np.float32)
        found = self.check((g, zero, None, zero, None, scalars, None), (None, None), None, True).parameter
        signs = [-1, 1, 0, 0, -1, 0, -1, 1, -1, np.nan]
        np.testing.assert_array_equal(np.asarray(found)[0], signs)

    def test_moments_that_are_no_numbers_beside_weights_that_are(self):
        """Infinite, overflowing and cancelling ones, of which the step has only the sign."""
        for scalars in ((0.9, 0.1, 0.99, 0.01), (0, 1, 1, 0), (1, 0, 0, 1), (0.5, 0.5, 2, 2), (0, 1, np.nan, 0)):
            scalars = np.array([*scalars, 0.1, -1e-3], np.float32)
            for codes, bits in ((None, 32), ("nearest", 32), ("stochastic", 16)):
                g, p, rest, mu, nu, _, words = operands((8, 256), (codes, None), jnp.bfloat16, bits, rule="lion")
                self.check((g, p, rest, mu, nu, scalars, words), (codes, None), bits)


class TestAdamwByReference(AdamwCases, ByReference):
    shapes = SHAPES[1:6:4]

    def test_a_program_and_its_operations_one_by_one_agree(self):
        """XLA contracts products with sums and merges divisions, unless the reference keeps them apart."""
        shape, codes = (64, 96), ("stochastic", "stochastic")
        args = operands(shape, codes, jnp.bfloat16, 32, hostile=False)
        rows, blocks = np.arange(64, dtype=np.uint32), np.arange(3, dtype=np.uint32)
        options = {"rule": "adamw", "stochastic": (True, True), "bits": 32, "is_update": False}

        def update(g, p, rest, mu, nu, scalars, words):
            places = reference.Places(words, rows, blocks)
            return reference.optimizer_update(g, p, scalars, rest, mu, nu, places, **options)

        given = jax.tree.map(jnp.asarray, args)
        wanted = expected(args, codes, 32)
        assert_same_bytes(update(*given), wanted)
        assert_same_bytes(jax.jit(update)(*given), wanted)

    def test_what_is_computed_around_it_changes_no_bit(self):
        codes = (None, None)
        args = operands((128, 128), codes, np.float32, None, hostile=False)
        step = functools.partial(optimizer_update, codes=codes, implementation="reference")

        @jax.jit
        def program(g, p, mu, nu, scalars):
            double = lambda x: (x + x) * 0.5  # noqa: E731
            new = step(double(g), double(p), None, double(mu), double(nu), scalars * 1.0, None)
            return new.parameter + 0.0, new.mu * 1.0, new.nu * 1.0

        wanted = expected(args, codes, None)
        found = program(args[0], args[1], args[3], args[4], args[5])
        assert_same_bytes(found, (wanted[0], *wanted[2:]))


class TestLionByReference(LionCases, ByReference):
    shapes = SHAPES[1:6:4]


class KernelCases(UpdateCases):
    shapes = SHAPES

    @pytest.mark.parametrize("mu", ROUNDINGS)
    @pytest.mark.parametrize(("p_dtype", "bits"), WEIGHTS, ids=name_of)
    def test_every_way_to_keep_states_and_weights(self, mu, p_dtype, bits):
        for codes in {self.codes(mu, nu) for nu in ROUNDINGS}:
            for seed, g_dtype in enumerate((np.float32, jnp.bfloat16)):
                for is_update in (False, True):
                    args = operands((9, 136), codes, p_dtype, bits, g_dtype, 100 + seed, rule=self.rule)
                    self.check(args, codes, bits, is_update)

    def test_every_upper_half_of_float32_as_gradient(self):
        g = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        for seed, order in enumerate((g, np.random.default_rng(0).permutation(g))):
            for rounding in ROUNDINGS:
                codes = self.codes(rounding, rounding)
                args = operands((1 << 11, 32), codes, np.float32, None, seed=seed, hostile=False, rule=self.rule)
                self.check((order.reshape(1 << 11, 32), *args[1:]), codes, None)

    def test_every_upper_half_of_float32_as_weight(self):
        weight = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(1 << 11, 32)
        for bits in (None, 16, 24, 32):
            args = operands(weight.shape, (None, None), jnp.bfloat16, bits, hostile=False, rule=self.rule)
            args = (args[0], (weight.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16), *args[2:])
            for is_update in (False, True):
                self.check(args, (None, None), bits, is_update)

    def test_a_long_run_stays_with_the_oracle(self):
        """Ten steps, each from the bytes of the last."""
        codes = self.codes("stochastic", "stochastic")
        args = list(operands((16, 96), codes, jnp.bfloat16, 24, hostile=False, rule=self.rule))
        for i in range(10):
            args[0], args[6] = numbers((16, 96), 50 + i, 1e-3, hostile=False), WORDS + np.uint32(i)
            args[1:5] = jax.device_get(self.check(tuple(args), codes, 24))


class TestAdamwByKernels(AdamwCases, KernelCases, ByKernels):
    pass


class TestLionByKernels(LionCases, KernelCases, ByKernels):
    pass


def test_rows_count_over_all_leading_axes():
    """The draws of [2, 3, C] are those of [6, C]."""
    codes = ("stochastic", "stochastic")
    args = operands((6, 40), codes, jnp.bfloat16, 16, hostile=False)
    stacked = jax.tree.map(lambda x: x.reshape(2, 3, x.shape[-1]) if x.shape[:1] == (6,) else x, args)
    whole = optimizer_update(*args, codes=codes, bits=16)
    found = optimizer_update(*stacked, codes=codes, bits=16)
    assert_same_bytes(jax.tree.map(lambda x: x.reshape(6, x.shape[-1]), found), whole)
    draws = oracle.half_words((2, 3, 40), WORDS[0])
    np.testing.assert_array_equal(draws.reshape(6, 40), oracle.half_words((6, 40), WORDS[0]))
