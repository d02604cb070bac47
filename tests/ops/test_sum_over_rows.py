"""Sums over rows: the order of numerics.md 12.3, by the op and beside gradients of activations; gradients of biases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.activations.api import activation_gradients
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.sum_over_rows import sum_over_rows_op
from tests.eager import evaluated, jlp
from tests.helpers import FLOATS, assert_same_bytes, random_array
from tests.numpy_oracle import producers
from tests.ops.implementations import ByKernels, ByReference, compiled
from tests.ops.test_activations import HOSTILE, KINDS, operands
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(7)

WANTED = [None, Amaxes(), Amaxes(False, jlp.Hadamard()), Amaxes(True, jlp.Hadamard())]


def found_of(x, implementation=None, rows_split=False):
    op = sum_over_rows_op(rows_split, implementation)
    return (op if implementation == "reference" else evaluated(op))(x)[0]


class OrderCases:
    """The implementation adds in the order of the rule."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", [(1, 1), (16, 33), (3, 100, 40), (64, 4100), (1100, 7)], ids=str)
    def test_is_the_oracles(self, shape, dtype):
        x = random_array(shape, dtype)
        assert_same_bytes(found_of(x, self.implementation), producers.sum_over_rows(np.asarray(x)))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_of_hostile_numbers(self, dtype):
        with np.errstate(over="ignore"):
            values = np.array(HOSTILE, np.float32).astype(jnp.dtype(dtype))
        x = np.random.default_rng(0).choice(values, (90, 70))
        x[:, 0] = -0.0
        wanted = producers.sum_over_rows(x)
        found = found_of(x, self.implementation)
        np.testing.assert_array_equal(found, wanted)
        assert not np.signbit(found[0])

    @pytest.mark.parametrize("wanted", WANTED, ids=str)
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_of_activations_bring_theirs(self, kind, dtype, wanted):
        shape = (2, 90, 33)
        dy, arrays = random_array(shape, dtype, 9), operands(kind, shape, dtype)

        @self.compiled
        def run(dy, *arrays):
            return activation_gradients(kind, dy, arrays, wanted, self.implementation, row_sums=True)

        gradients, amaxes, sums = run(dy, *arrays)
        expected = compiled("ffi")(lambda dy, *arrays: activation_gradients(kind, dy, arrays, wanted)[:2])(dy, *arrays)
        assert_same_bytes((gradients, amaxes), expected)
        assert_same_bytes(sums, [producers.sum_over_rows(np.asarray(g)) for g in gradients])

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (16, 0)], ids=str)
    def test_of_no_elements(self, shape):
        assert_same_bytes(
            found_of(jnp.ones(shape), self.implementation), np.zeros((*shape[:-2], shape[-1]), np.float32)
        )


class TestReference(ByReference, OrderCases):
    pass


class TestKernels(ByKernels, OrderCases):
    pass


class TestTransformations:
    def test_vmap_is_a_batch_axis(self):
        x = random_array((4, 70, 24))
        assert_same_bytes(jax.vmap(found_of)(x), found_of(x))

    def test_split_rows_are_merged(self):
        x = random_array((3, 4, 70, 24), "bfloat16")
        assert_same_bytes(found_of(x, rows_split=True), found_of(x.reshape(3, 280, 24)))

    @by_axis_type
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(None, None, "b"), P(None, "a", "b"), P()])
    def test_a_mesh_adds_up_its_parts(self, spec, axis_type):
        """Whole numbers have one sum in any order."""
        x = jnp.round(random_array((4, 64, 32), "float32", 1) * 8)
        mesh = mesh_of((2, 2), axis_type)
        wanted = Amaxes(rows_split=True)
        expected = found_of(x, rows_split=True), activation_gradients("swiglu", x, (x, x), wanted, row_sums=True)[1]

        def run(x):
            gradients, amaxes, sums = activation_gradients("swiglu", x, (x, x), wanted, row_sums=True)
            of_gradients = [found_of(g, rows_split=True) for g in gradients]
            return found_of(x, rows_split=True), amaxes, sums, of_gradients

        with jax.set_mesh(mesh):
            found, amaxes, sums, of_gradients = jax.jit(run)(place(x, mesh, spec))
        assert_same_bytes((found, amaxes), expected)
        assert_same_bytes(sums, of_gradients)


@pytest.mark.parametrize(
    "recipe",
    [jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling(), jlp.Int4QAT(group_size=32)],
    ids=lambda recipe: type(recipe).__name__,
)
@pytest.mark.parametrize("shape", [(100, 32), (3, 70, 32), (2, 2, 40, 32)], ids=str)
def test_a_biass_gradient_is_the_sum_of_the_results(recipe, shape):
    x, w, dy = random_array(shape, "bfloat16"), random_array((32, 48)), random_array((*shape[:-1], 48), "bfloat16", 1)
    bias = jnp.zeros(48)
    _, pullback = jax.vjp(lambda bias: jlp.linear(x, w, bias, recipe, key=jax.random.key(0)), bias)
    assert_same_bytes(pullback(dy)[0], producers.sum_over_rows(np.asarray(dy).reshape(-1, 48)))
