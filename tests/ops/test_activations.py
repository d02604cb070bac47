"""Activations: bits against an oracle, values and gradients against float64, and what the backward pass keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import PartitionSpec as P

from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, random_array
from tests.numpy_oracle import producers
from tests.ops.implementations import ByKernels, ByReference, compiled
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(7)

PLAIN, GATED = ["gelu", "silu", "relu_squared"], ["geglu", "swiglu"]
KINDS = [*PLAIN, *GATED]
HOSTILE = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 3e38, -3e38, 87.0, 88.5, -87.5, -88.5, 10.1, -10.1, 1e-40]


def operands(kind, shape, dtype, seed=0):
    count = 2 if kind in GATED else 1
    return [random_array(shape, dtype, seed + i) * (8 if i == 0 else 1) for i in range(count)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def exact(kind, x, up=1.0):
    """In float64: the activation, the derivative by x and by `up`."""
    with np.errstate(over="ignore"):
        if kind in ("silu", "swiglu"):
            value, derivative = x * sigmoid(x), sigmoid(x) * (1 + x * sigmoid(-x))
        elif kind in ("gelu", "geglu"):
            u = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
            slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
            value, derivative = x * sigmoid(u), sigmoid(u) * (1 + x * sigmoid(-u) * slope)
        else:
            value, derivative = np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)
    return value * up, derivative * up, value


def computed(kind, implementation=None):
    return functools.partial(getattr(jlp, kind), implementation=implementation)


def gradients(kind, arrays, dy, implementation=None):
    run = compiled(implementation)(lambda arrays, dy: jax.vjp(computed(kind, implementation), *arrays)[1](dy))
    return run(arrays, dy)


class BitsCases:
    """The implementation has the bits of the rule."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(7,), (3, 5, 33), (64, 256)], ids=str)
    def test_are_the_oracles(self, shape, kind, dtype):
        arrays = operands(kind, shape, dtype)
        dy, numpy_arrays = random_array(shape, dtype, 9), [np.asarray(x) for x in arrays]
        expected = producers.activation(kind, *numpy_arrays)
        assert_same_bytes(self.compiled(computed(kind, self.implementation))(*arrays), expected)
        wanted = producers.activation_gradient(kind, np.asarray(dy), *numpy_arrays)
        assert_same_bytes(gradients(kind, arrays, dy, self.implementation), tuple(wanted))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_hostile_numbers(self, kind, dtype):
        with np.errstate(over="ignore"):
            values = np.array(HOSTILE, np.float32).astype(jnp.dtype(dtype))
        x, up = (v.ravel() for v in np.meshgrid(values, values))
        arrays = [x, up][: 2 if kind in GATED else 1]
        numpy_arrays = [np.asarray(a) for a in arrays]
        actual = np.float32(self.compiled(computed(kind, self.implementation))(*arrays))
        np.testing.assert_array_equal(actual, np.float32(producers.activation(kind, *numpy_arrays)))
        wanted = producers.activation_gradient(kind, np.asarray(up), *numpy_arrays)
        for a, b in zip(gradients(kind, arrays, up, self.implementation), wanted, strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))


class TestReference(ByReference, BitsCases):
    pass


class TestKernels(ByKernels, BitsCases):
    pass


class TestBits:
    def test_what_comes_before_is_rounded(self):
        """XLA would keep the float32 that a bfloat16 operand was rounded from."""

        def both(a, b):
            x = a * b
            return x, jlp.silu(x)

        x, y = jax.jit(both)(random_array((1024, 1024), seed=1), random_array((1024, 1024), seed=2))
        assert_same_bytes(y, jlp.silu(x))

    @given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(KINDS))
    @settings(max_examples=100, deadline=None)
    def test_of_any_floats(self, values, kind):
        x = np.zeros(40, np.float32)
        x[: len(values)] = values
        arrays = [x, x[::-1].copy()][: 2 if kind in GATED else 1]
        np.testing.assert_array_equal(getattr(jlp, kind)(*arrays), producers.activation(kind, *arrays))


class TestAccuracy:
    X = np.concatenate([np.linspace(-80, 80, 1 << 18), np.geomspace(1e-30, 80, 1 << 14)]).astype(np.float32)

    @pytest.mark.parametrize(("kind", "ulps"), [("silu", 4.5), ("gelu", 40), ("relu_squared", 0.51)])
    def test_in_units_of_the_last_place(self, kind, ulps):
        x = self.X if kind != "gelu" else self.X[np.abs(self.X) < 5.2]
        found, wanted = np.float64(getattr(jlp, kind)(x)), exact(kind, np.float64(x))[0]
        kept = np.abs(wanted) > 1e-36
        assert (np.abs(found - wanted)[kept] / np.spacing(np.float32(np.abs(wanted[kept])))).max() < ulps

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_are_those_of_float64(self, kind):
        arrays = operands(kind, (64, 256), "float32")
        dy = random_array((64, 256), "float32", 9)
        _, by_x, by_up = exact(kind, *(np.float64(a) for a in arrays))
        for found, wanted in zip(gradients(kind, arrays, dy), (by_x, by_up), strict=False):
            np.testing.assert_allclose(found, np.float64(dy) * wanted, rtol=1e-5, atol=1e-6)

    def test_one_rounding_has_a_smaller_error_than_several(self):
        gate, up = (jax.random.normal(jax.random.key(i), (256, 512), jnp.bfloat16) for i in range(2))
        wanted = exact("swiglu", np.float64(gate), np.float64(up))[0]
        ours, several = (
            np.linalg.norm(np.float64(y) - wanted) / np.linalg.norm(wanted)
            for y in (jlp.swiglu(gate, up), jax.nn.silu(gate) * up)
        )
        assert ours < 0.0018 < 0.0025 < several


class TestTransformations:
    @pytest.mark.parametrize("kind", KINDS)
    def test_vmap_scan_and_remat(self, kind):
        function, arrays = getattr(jlp, kind), operands(kind, (4, 8, 32), "bfloat16")
        expected = function(*arrays)
        assert_same_bytes(jax.vmap(function)(*arrays), expected)
        assert_same_bytes(jax.lax.scan(lambda _, a: (None, function(*a)), None, tuple(arrays))[1], expected)
        dy = jnp.ones_like(expected)
        again = jax.vjp(jax.checkpoint(function), *arrays)[1](dy)
        assert_same_bytes(again, jax.vjp(function, *arrays)[1](dy))

    @by_axis_type
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(("a", "b"))], ids=str)
    def test_meshes_give_the_same_bits(self, spec, axis_type):
        mesh, arrays = mesh_of((2, 2), axis_type), operands("swiglu", (8, 64), "bfloat16")

        def both(gate, up):
            y, backward = jax.vjp(jlp.swiglu, gate, up)
            return y, *backward(y)

        expected = jax.jit(both)(*arrays)
        with jax.set_mesh(mesh):
            assert_same_bytes(jax.jit(both)(*(place(a, mesh, spec) for a in arrays)), expected)

    def test_within_shard_map(self):
        mesh, (gate, up) = mesh_of((2,)), operands("swiglu", (8, 64), "bfloat16")

        def loss(gate, up):
            return jax.lax.psum(jlp.swiglu(gate, up).astype(jnp.float32).sum(), "a")

        mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P())
        found = jax.jit(jax.grad(mapped, (0, 1)))(gate, up)
        assert_same_bytes(found, gradients("swiglu", [gate, up], jnp.ones_like(gate)))

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_backward_pass_keeps_the_operands_alone(self, kind):
        arrays = operands(kind, (16, 64), "bfloat16")
        kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(getattr(jlp, kind), *a)[1], *arrays))
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) == sum(a.nbytes for a in arrays)

    def test_export(self):
        arrays = operands("swiglu", (8, 32), "bfloat16")
        kernel = export.DisabledSafetyCheck.custom_call("jaxlowprec_activation")
        exported = export.export(jax.jit(jlp.swiglu), disabled_checks=[kernel])(*arrays)
        assert_same_bytes(export.deserialize(exported.serialize()).call(*arrays), jlp.swiglu(*arrays))


class TestErrors:
    def test_of_shapes_and_dtypes(self):
        with pytest.raises(ValueError, match=r"swiglu: gate has shape \(2, 4\), up \(2, 3\); needs one shape"):
            jlp.swiglu(jnp.ones((2, 4)), jnp.ones((2, 3)))
        with pytest.raises(TypeError, match="geglu: gate has dtype float32, up bfloat16; needs one dtype"):
            jlp.geglu(jnp.ones(4), jnp.ones(4, jnp.bfloat16))
        with pytest.raises(TypeError, match="gelu: x has dtype int32; needs bfloat16, float16 or float32"):
            jlp.gelu(jnp.arange(3))

    def test_of_the_exact_form(self):
        assert_same_bytes(jlp.gelu(jnp.ones(4), approximate=True), jlp.gelu(jnp.ones(4)))
        with pytest.raises(NotImplementedError, match=r"only the tanh form.*use jax.nn.gelu\(x, approximate=False\)"):
            jlp.gelu(jnp.ones(4), approximate=False)

    def test_of_a_second_derivative(self):
        with pytest.raises(NotImplementedError, match=r"no second derivative; use those of jax\.nn"):
            jax.grad(jax.grad(jlp.silu))(1.0)
