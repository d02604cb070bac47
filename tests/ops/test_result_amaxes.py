"""Activations, their gradients and norms with the amaxes of their results: those of the amax op on these results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.activations.api import activated, activation_gradients
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.norms.api import NormSpec, normed
from tests import numpy_oracle
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, random_array
from tests.ops.implementations import ByKernels, ByReference
from tests.ops.test_activations import HOSTILE, KINDS, operands
from tests.sharding.meshes import by_axis_type, collectives, mesh_of, place

pytestmark = pytest.mark.sampled(23)

ROTATION = jlp.Hadamard()
WANTED = [Amaxes(), Amaxes(False, ROTATION), Amaxes(True, ROTATION), Amaxes(True, jlp.Hadamard(signs=None))]
BOTH = WANTED[2]
SHAPES = [(1, 1), (16, 128), (3, 40, 130), (37, 300), (2, 160, 17)]
NORMS = ["rms", "layer"]


def found_of(y, wanted):
    """The amaxes of an array by the oracle."""
    y = np.asarray(y)
    matrices = y.reshape(*y.shape[:-3], -1, y.shape[-1]) if wanted.rows_split else y
    signs = [None] * wanted.plain + ([wanted.hadamard.negative] if wanted.hadamard else [])
    return [numpy_oracle.amax(matrices, y.dtype, negative) for negative in signs]


def activation(kind, arrays, wanted=BOTH, implementation=None, run=jax.jit):
    """A call by `run`: the activation, the gradients for dy, which is the last array, and the amaxes of each."""

    def call(dy, *operands):
        y, of_y = activated(kind, operands, wanted, implementation)
        gradients, of_gradients, _ = activation_gradients(kind, dy, operands, wanted, implementation)
        return [y, *gradients], [of_y, *of_gradients]

    return run(call)(arrays[-1], *arrays[:-1])


def with_dy(kind, shape, dtype):
    return [*operands(kind, shape, dtype), random_array(shape, dtype, 9)]


def norm(kind, arrays, wanted=BOTH, implementation=None, run=jax.jit):
    """A call by `run` on x, the residual, weight and beta: the results, and the amaxes."""
    spec = NormSpec(kind, 1e-6, True, kind == "layer", implementation, wanted)

    def call(x, residual, weight, beta):
        return normed(spec, x, weight, residual, beta if spec.beta else None)

    return run(call)(*arrays)


def norm_operands(shape, dtype, seed=1):
    weight, beta = (random_array(shape[-1:], "float32", seed + i) for i in range(2))
    return [random_array(shape, dtype, seed + 2), random_array(shape, dtype, seed + 3), weight, beta]


class AmaxesCases:
    """The results are those without amaxes, which other tests compare with the oracle; the amaxes, those of the
    results."""

    def activation(self, kind, arrays, wanted=BOTH):
        return activation(kind, arrays, wanted, self.implementation, self.compiled)

    def norm(self, kind, arrays, wanted=BOTH):
        return norm(kind, arrays, wanted, self.implementation, self.compiled)

    @pytest.mark.parametrize("wanted", WANTED, ids=range(len(WANTED)))
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_activations_and_gradients(self, shape, kind, dtype, wanted):
        arrays = with_dy(kind, shape, dtype)
        results, amaxes = self.activation(kind, arrays, wanted)
        assert_same_bytes(results, self.activation(kind, arrays, None)[0])
        assert_same_bytes(amaxes, [found_of(result, wanted) for result in results])

    @pytest.mark.parametrize("wanted", WANTED, ids=range(len(WANTED)))
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", NORMS)
    def test_of_norms(self, shape, kind, dtype, wanted):
        arrays = norm_operands(shape, dtype)
        results = self.norm(kind, arrays, wanted)
        assert_same_bytes(results[:3], self.norm(kind, arrays, None)[:3])
        assert_same_bytes(results.amaxes, found_of(results.y, wanted))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_hostile_numbers(self, kind, dtype):
        with np.errstate(over="ignore"):
            values = np.array(HOSTILE, np.float32).astype(jnp.dtype(dtype))
        arrays = [np.array(a) for a in with_dy(kind, (values.size, 40, 33), dtype)]
        for a in arrays:
            a[:, 21, 5] = values  # one in a matrix, of 3 rotations
        results, amaxes = self.activation(kind, arrays)
        assert_same_bytes(amaxes, [found_of(result, BOTH) for result in results])

    @pytest.mark.parametrize("kind", NORMS)
    def test_of_hostile_rows(self, kind):
        x, *others = norm_operands((4, 40, 96), "float32")
        x = np.array(x)
        x[:, 21, 5] = [1e-30, 1e25, np.inf, np.nan]
        results = self.norm(kind, [x, *others])
        assert_same_bytes(results.amaxes, found_of(results.y, BOTH))

    def test_of_a_tensor_whose_rows_are_split(self):
        wanted, shape = Amaxes(True, ROTATION, rows_split=True), (2, 3, 32, 40)
        results, amaxes = self.activation("swiglu", with_dy("swiglu", shape, "bfloat16"), wanted)
        assert_same_bytes(amaxes, [found_of(result, wanted) for result in results])
        results = self.norm("layer", norm_operands(shape, "bfloat16"), wanted)
        assert_same_bytes(results[:3], self.norm("layer", norm_operands(shape, "bfloat16"), None)[:3])
        assert results.amaxes[0].shape == shape[:1]
        assert_same_bytes(results.amaxes, found_of(results.y, wanted))

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 16, 8), (2, 16, 0)], ids=str)
    def test_of_arrays_without_elements(self, shape):
        results, amaxes = self.activation("geglu", with_dy("geglu", shape, "bfloat16"))
        assert_same_bytes(amaxes, [found_of(result, BOTH) for result in results])


class TestReference(ByReference, AmaxesCases):
    @pytest.fixture(params=[SHAPES[2], SHAPES[3]], ids=str)
    def shape(self, request):
        """Each takes XLA a while to compile."""
        return request.param


class TestKernels(ByKernels, AmaxesCases):
    @pytest.fixture(params=SHAPES, ids=str)
    def shape(self, request):
        return request.param


class TestTransformations:
    def test_vmap_is_a_batch_axis(self):
        arrays = with_dy("swiglu", (4, 32, 40), "bfloat16")
        mapped = jax.vmap(lambda *a: activation("swiglu", a))(*arrays)
        assert_same_bytes(mapped, activation("swiglu", arrays))
        x, residual, *given = norm_operands((4, 32, 40), "bfloat16")
        mapped = jax.vmap(lambda x, r: norm("layer", [x, r, *given]))(x, residual)
        assert_same_bytes(mapped, norm("layer", [x, residual, *given]))

    @by_axis_type
    @pytest.mark.parametrize("rows", [64, 40])
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(("a", "b")), P()], ids=str)
    def test_meshes_give_the_same_bits(self, spec, rows, axis_type):
        mesh, arrays = mesh_of((2, 2), axis_type), with_dy("swiglu", (rows, 80), "bfloat16")
        given = norm_operands((rows, 80), "bfloat16")
        expected = activation("swiglu", arrays), norm("layer", given)
        with jax.set_mesh(mesh):
            found = activation("swiglu", [place(a, mesh, spec) for a in arrays])
            rows_and_parameters = [place(a, mesh, spec if a.ndim > 1 else P()) for a in given]
            assert_same_bytes((found, norm("layer", rows_and_parameters)), expected)

    @by_axis_type
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, "a", "b"), P("a", "b", None)], ids=str)
    def test_meshes_split_tensors_in_parts(self, spec, axis_type):
        wanted, shape = Amaxes(True, ROTATION, rows_split=True), (4, 32, 48)
        mesh, arrays, given = (
            mesh_of((2, 2), axis_type),
            with_dy("swiglu", shape, "bfloat16"),
            norm_operands(shape, "bfloat16"),
        )
        expected = activation("swiglu", arrays, wanted), norm("layer", given, wanted)
        with jax.set_mesh(mesh):
            found = activation("swiglu", [place(a, mesh, spec) for a in arrays], wanted)
            rows_and_parameters = [place(a, mesh, spec if a.ndim > 1 else P()) for a in given]
            assert_same_bytes((found, norm("layer", rows_and_parameters, wanted)), expected)

    @by_axis_type
    def test_only_amaxes_travel(self, axis_type):
        """Results stay split as the operands are; each op's amaxes are combined over the axes that split it."""
        mesh, spec = mesh_of((2, 2), axis_type), P("a", "b")
        gate, up, _ = (place(a, mesh, spec) for a in with_dy("swiglu", (64, 80), "bfloat16"))

        def call(gate, up):
            return activated("swiglu", (gate, up), BOTH)

        with jax.set_mesh(mesh):
            compiled = jax.jit(call).lower(gate, up).compile()
        y, amaxes = compiled(gate, up)
        assert y.sharding.is_equivalent_to(gate.sharding, 2)
        assert all(a.sharding.is_fully_replicated for a in amaxes)
        assert {(kind, size) for kind, size in collectives(compiled)} <= {("all-reduce", 1), ("all-reduce", 2)}

    def test_within_shard_map_they_are_the_shards_own(self):
        mesh, (gate, up) = mesh_of((2,)), operands("swiglu", (64, 48), "bfloat16")

        def call(gate, up):
            return [a[None] for a in activated("swiglu", (gate, up), BOTH)[1]]

        found = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("a"), out_specs=P("a")))(gate, up)
        halves = activated("swiglu", [a.reshape(2, 32, 48) for a in (gate, up)], BOTH)[1]
        assert_same_bytes(found, halves)


def test_quantising_with_them_is_quantising_without():
    gate, up, _ = with_dy("swiglu", (64, 96), "bfloat16")

    @jax.jit
    def both(gate, up):
        y, amaxes = activated("swiglu", (gate, up), BOTH)
        return jlp.quantize_both(y, jlp.NVFP4(), hadamard_columnwise=True, amax=tuple(amaxes))

    assert_same_bytes(both(gate, up), jlp.quantize_both(jlp.swiglu(gate, up), jlp.NVFP4(), hadamard_columnwise=True))
