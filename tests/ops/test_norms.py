"""Norms: bits against an oracle, gradients against float64, meshes, and what the backward pass keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, random_array
from tests.numpy_oracle import producers
from tests.ops.implementations import ByKernels, ByReference
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(7)

NORMS = ["rms", "layer", "layer without beta"]
EPSILON = 1e-6


def parameters(norm, columns, dtype="float32"):
    gamma = 1 + random_array((columns,), dtype, 5) / 8
    return [gamma, random_array((columns,), dtype, 6)] if norm == "layer" else [gamma]


def normed(norm, x, gamma, *beta, **options):
    return jlp.rms_norm(x, gamma, **options) if norm == "rms" else jlp.layer_norm(x, gamma, *beta, **options)


def oracle(norm, x, dy, gamma, beta=None, zero_centered=False):
    """The normed rows, and the gradient of x in float32."""
    x, dy, gamma = (np.asarray(a) for a in (x, dy, gamma))
    if norm == "rms":
        y, *saved = producers.rms_norm(x, gamma, EPSILON, zero_centered)
        return y, producers.rms_norm_gradient(dy, x, gamma, *saved, zero_centered)
    y, *saved = producers.layer_norm(x, gamma, beta if beta is None else np.asarray(beta), EPSILON, zero_centered)
    return y, producers.layer_norm_gradient(dy, x, gamma, *saved, zero_centered)


class BitsCases:
    """The implementation has the bits of the rule."""

    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", [(1,), (3, 5, 255), (4, 256), (2, 700), (2, 4096)], ids=str)
    @pytest.mark.parametrize("norm", NORMS)
    def test_are_the_oracles(self, norm, shape, dtype, zero_centered):
        x, dy = random_array(shape, dtype, 1), random_array(shape, dtype, 2)
        given, options = parameters(norm, shape[-1]), {"zero_centered_gamma": zero_centered}
        y, dx = oracle(norm, x, dy, *given, zero_centered=zero_centered)
        function = functools.partial(normed, norm, implementation=self.implementation, **options)

        @self.compiled
        def forward_and_backward(x, dy, *given):
            y, backward = jax.vjp(lambda x: function(x, *given), x)
            return y, backward(dy)[0]

        found, gradient = forward_and_backward(x, dy, *given)
        assert_same_bytes(found, y)
        assert_same_bytes(gradient, dx.astype(gradient.dtype))

    @pytest.mark.parametrize("norm", NORMS)
    def test_of_hostile_rows(self, norm):
        given, dy = parameters(norm, 96), random_array((4, 96), "float32", 2)

        @self.compiled
        def forward_and_backward(x, dy, *given):
            y, backward = jax.vjp(lambda x: normed(norm, x, *given, implementation=self.implementation), x)
            return y, backward(dy)[0]

        for scale in (0.0, 1e-25, 1e-12, 1e15, 1e25, np.inf, np.nan):
            x = np.array(random_array((4, 96), "float32", 1))
            if np.isfinite(scale):
                x[2] *= np.float32(scale)
            else:
                x[2, 7] = scale
            for found, wanted in zip(forward_and_backward(x, dy, *given), oracle(norm, x, dy, *given), strict=True):
                np.testing.assert_array_equal(found, wanted, str(scale))
                assert np.isfinite(np.asarray(found)[[0, 1, 3]]).all()

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("columns", [256, 264])
    def test_means_of_negative_zeros_are_zero(self, norm, columns):
        x, dy, given = np.full((2, columns), np.float32(-0.0)), random_array((2, columns)), parameters(norm, columns)
        y = self.compiled(functools.partial(normed, norm, implementation=self.implementation))(x, *given)
        assert_same_bytes(y, oracle(norm, x, dy, *given)[0])

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_residual_is_added_and_rounded_before(self, norm, dtype):
        x, residual = random_array((8, 300), dtype, 1), random_array((8, 300), dtype, 2)
        given = parameters(norm, 300)

        @self.compiled
        def added_and_normed(x, residual, *given):
            return normed(norm, x, *given, residual=residual, implementation=self.implementation)

        y, total = added_and_normed(x, residual, *given)
        assert_same_bytes(total, (np.float32(x) + np.float32(residual)).astype(x.dtype))
        assert_same_bytes(y, oracle(norm, total, total, *given)[0])


class SumsCases:
    """The gradients of gamma and beta: sums over rows in float32."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", [(1, 40), (3, 5, 255), (300, 256), (2, 1, 70, 64), (1100, 48)], ids=str)
    @pytest.mark.parametrize("norm", NORMS)
    def test_are_those_of_float64(self, norm, shape, dtype):
        """Within half a rounding of the terms' magnitudes for each row, and two for each term."""
        x, dy, given = random_array(shape, dtype, 1), random_array(shape, dtype, 2), parameters(norm, shape[-1])

        @self.compiled
        def gradients(x, dy, *given):
            return jax.vjp(functools.partial(normed, norm, x, implementation=self.implementation), *given)[1](dy)

        found = gradients(x, dy, *given)
        rows, dy = (np.float64(a).reshape(-1, shape[-1]) for a in (x, dy))
        rows = rows - (0 if norm == "rms" else rows.mean(-1, keepdims=True))
        terms = [dy * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPSILON), dy]
        for gradient, of in zip(found, terms, strict=False):
            bound = (8 + len(dy)) * 2.0**-24 * np.abs(of).sum(0) + 1e-6 * np.abs(dy).sum(0)
            assert (np.abs(gradient - of.sum(0)) <= bound).all()

    @pytest.mark.parametrize("norm", NORMS)
    def test_under_vmap_are_of_each_slice(self, norm):
        x, dy = random_array((3, 40, 96), seed=1), random_array((3, 40, 96), seed=2)
        function = functools.partial(normed, norm, implementation=self.implementation)

        def gradients(x, dy, *given):
            return jax.vjp(lambda *given: function(x, *given), *given)[1](dy)

        given = [jnp.stack([p, p / 2, -p]) for p in parameters(norm, 96)]
        found = jax.jit(jax.vmap(gradients))(x, dy, *given)
        for i in range(3):
            for a, b in zip(found, gradients(x[i], dy[i], *(p[i] for p in given)), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


class TestReference(ByReference, BitsCases, SumsCases):
    pass


class TestKernels(ByKernels, BitsCases, SumsCases):
    def test_sums_have_the_same_bits_again(self):
        """On any number of threads: parts are added up in their order."""
        x, dy, given = random_array((1000, 512), seed=1), random_array((1000, 512), seed=2), parameters("layer", 512)
        gradients = jax.jit(lambda dy, *given: jax.vjp(lambda *g: normed("layer", x, *g), *given)[1](dy))
        expected = gradients(dy, *given)
        for _ in range(20):
            assert_same_bytes(gradients(dy, *given), expected)


class TestBits:
    def test_what_comes_before_is_rounded(self):
        """XLA would keep the float32 that a bfloat16 operand was rounded from."""

        def both(a, b):
            x = a * b
            return x, jlp.rms_norm(x, jnp.ones(1024))

        x, y = jax.jit(both)(random_array((1024, 1024), seed=1), random_array((1024, 1024), seed=2))
        assert_same_bytes(y, jlp.rms_norm(x, jnp.ones(1024)))


class TestGradients:
    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("with_residual", [False, True])
    @pytest.mark.parametrize("norm", NORMS)
    def test_are_those_of_float64(self, norm, with_residual, zero_centered):
        x, residual, dy, of_sum = (random_array((6, 5, 70), "float32", i) for i in range(4))
        given, options = parameters(norm, 70), {"zero_centered_gamma": zero_centered}

        def ours(x, residual, *given):
            extra = {"residual": residual} if with_residual else {}
            results = normed(norm, x, *given, **options, **extra)
            return sum(
                (r * d).sum() for r, d in zip(results if with_residual else (results,), (dy, of_sum), strict=False)
            )

        def plain(x, residual, gamma, *beta):
            x = x + residual if with_residual else x
            centered = x if norm == "rms" else x - x.mean(-1, keepdims=True)
            y = centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
            y = y * (gamma + 1 if zero_centered else gamma) + (beta[0] if beta else 0)
            return (y * dy).sum() + ((x * of_sum).sum() if with_residual else 0)

        places = tuple(range(2 + len(given)))
        found = jax.jit(jax.grad(ours, places))(x, residual, *given)
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.float64(a)) for a in (x, residual, *given)]
            expected = jax.grad(plain, places)(*wide)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * max(1, float(np.abs(b).max())))

    def test_each_has_the_dtype_of_its_argument(self):
        x, gamma, beta = random_array((4, 64)), jnp.ones(64), jnp.ones(64, jnp.float16)
        found = jax.grad(lambda *a: jlp.layer_norm(*a).astype(jnp.float32).sum(), (0, 1, 2))(x, gamma, beta)
        assert [g.dtype for g in found] == [x.dtype, gamma.dtype, beta.dtype]

    @pytest.mark.parametrize(("norm", "numbers"), [("rms", 1), ("layer without beta", 2)])
    @pytest.mark.parametrize("with_residual", [False, True])
    def test_the_backward_pass_keeps_the_input_and_some_numbers(self, norm, numbers, with_residual):
        x, gamma = random_array((16, 64)), jnp.ones(64)
        extra = {"residual": x + 1} if with_residual else {}
        backward = jax.eval_shape(lambda x: jax.vjp(lambda x: normed(norm, x, gamma, **extra), x)[1], x)
        of_rows = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape[:1] == (16,)]
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in of_rows) == x.nbytes + numbers * 16 * 4


class TestTransformations:
    @pytest.mark.parametrize("norm", NORMS)
    def test_vmap_and_scan(self, norm):
        x, given = random_array((4, 8, 32)), parameters(norm, 32)
        expected = normed(norm, x, *given)
        assert_same_bytes(jax.vmap(lambda x: normed(norm, x, *given))(x), expected)
        assert_same_bytes(jax.lax.scan(lambda _, x: (None, normed(norm, x, *given)), None, x)[1], expected)
        several = jax.vmap(functools.partial(normed, norm))(x, *(jnp.stack([p, p / 2, p, -p]) for p in given))
        assert_same_bytes(several[1], normed(norm, x[1], *(p / 2 for p in given)))

    @by_axis_type
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, None, "a"), P("a", None, "b")], ids=str)
    def test_meshes_give_the_same_bits(self, spec, axis_type):
        mesh, x, residual = mesh_of((2, 2), axis_type), random_array((4, 8, 600), seed=1), random_array((4, 8, 600))
        given = parameters("layer", 600)

        def both(x, residual, gamma, beta):
            results, backward = jax.vjp(lambda *a: jlp.layer_norm(*a), x, gamma, beta, residual)
            return results, backward(results)

        expected = jax.jit(both)(x, residual, *given)
        with jax.set_mesh(mesh):
            placed = [place(a, mesh, spec) for a in (x, residual)]
            found = jax.jit(both)(*placed, *(place(p, mesh, P()) for p in given))
        (results, (dx, dgamma, dbeta, dresidual)) = found
        assert_same_bytes((results, dx, dresidual), (expected[0], expected[1][0], expected[1][3]))
        for a, b in zip((dgamma, dbeta), expected[1][1:3], strict=True):  # sums over rows on several devices
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    def test_within_shard_map(self):
        mesh, x, gamma = mesh_of((2,)), random_array((8, 64)), parameters("rms", 64)[0]

        def loss(x, gamma):
            return jax.lax.psum(jlp.rms_norm(x, gamma).astype(jnp.float32).sum(), "a")

        mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
        dx, dgamma = jax.jit(jax.grad(mapped, (0, 1)))(x, gamma)
        expected = jax.grad(lambda *a: jlp.rms_norm(*a).astype(jnp.float32).sum(), (0, 1))(x, gamma)
        assert_same_bytes(dx, expected[0])
        np.testing.assert_allclose(dgamma, expected[1], rtol=1e-5, atol=1e-5)


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            ((4, 3), {}, r"rms_norm: gamma has shape \(3,\); needs \(4,\), the features of x"),
            ((4, 4), {"epsilon": -1.0}, r"epsilon=-1\.0; needs a number that is not negative"),
            ((4, 4), {"residual": jnp.ones(4)}, r"residual has shape \(4,\); needs that of x, \(2, 4\)"),
            ((0, 0), {}, r"x has shape \(2, 0\); needs \[\.\.\., C\] with one feature or more"),
        ],
    )
    def test_of_values(self, arguments, options, message):
        columns, length = arguments
        with pytest.raises(ValueError, match=message):
            jlp.rms_norm(jnp.ones((2, columns)), jnp.ones(length), **options)

    def test_of_types(self):
        with pytest.raises(TypeError, match="layer_norm: residual has dtype bfloat16; needs that of x, float32"):
            jlp.layer_norm(jnp.ones((2, 4)), jnp.ones(4), residual=jnp.ones((2, 4), jnp.bfloat16))
        with pytest.raises((TypeError, ValueError), match="zero_centered_gamma"):
            jlp.rms_norm(jnp.ones((2, 4)), jnp.ones(4), zero_centered_gamma="yes")

    def test_of_a_second_derivative(self):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.grad(lambda x: jax.grad(lambda x: jlp.rms_norm(x, jnp.ones(4)).sum())(x).sum())(jnp.ones((2, 4)))
