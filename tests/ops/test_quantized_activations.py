"""Activations and gradients that are quantised in the same pass: bytes are those of the separate ops."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.activations.api import ACTIVATIONS, activated, activation_gradients
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.ops.activations.reference import NAMED_ACTIVATIONS
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, random_array
from tests.ops.implementations import ByKernels, ByReference, compiled
from tests.ops.test_quantized_norms import DIRECTIONS, FORMATS, WORDS
from tests.products import native_calls
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(5)

KIND = "swiglu"
OPS = ("jaxlowprec_activation_quantize", "jaxlowprec_activation_gradient_quantize")


def arrays_of(kind, shape, dtype="bfloat16"):
    """The activation's gradient, and its operands."""
    return [random_array(shape, dtype, seed) * 4 for seed in range(2 + NAMED_ACTIVATIONS[kind].gated)]


def in_one_pass(kind, fmt, arrays, directions=(True, True), words=None, rows_split=False, implementation=None):
    """The activation, and the gradients of its operands; only the activation takes random bits."""
    options = {"rowwise": directions[0], "columnwise": directions[1], "rows_split": rows_split}
    dy, *operands = arrays
    value = quantized_activation(kind, fmt, operands, words=words, **options, implementation=implementation)
    return [value, *quantized_activation_gradients(kind, fmt, dy, operands, **options, implementation=implementation)]


def separately(kind, fmt, arrays, directions=(True, True), words=None, rows_split=False):
    """By the kernels."""
    return compiled(None)(lambda arrays: _separately(kind, fmt, arrays, directions, words, rows_split))(arrays)


def _separately(kind, fmt, arrays, directions, words, rows_split):
    def quantized(x, words):
        options = {"rounding": "nearest" if words is None else "stochastic", "key": words, "rows_split": rows_split}
        pairs = zip((-1, -2), directions, strict=True)
        return tuple(jlp.quantize(x, fmt, axis=axis, **options) if wanted else None for axis, wanted in pairs)

    dy, *operands = arrays
    value = quantized(activated(kind, operands, None)[0], words)
    return [value, *(quantized(g, None) for g in activation_gradients(kind, dy, operands, None)[0])]


class BytesCases:
    def run(self, *given, **options):
        return self.compiled(functools.partial(in_one_pass, *given, implementation=self.implementation, **options))

    @pytest.mark.sampled(37)
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    @pytest.mark.parametrize("directions", [(True, True), (True, False)], ids=str)
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu_squared"])
    def test_are_those_of_the_separate_ops(self, shape, fmt, kind, dtype, directions, rounding):
        arrays, fmt = arrays_of(kind, shape, dtype), FORMATS[fmt]
        words = jnp.broadcast_to(WORDS, (*shape[:-2], 2)) if rounding == "stochastic" else None
        found = self.run(kind, fmt, directions=directions, words=words)(arrays)
        assert_same_bytes(found, separately(kind, fmt, arrays, directions, words))

    @pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
    def test_of_split_rows_are_of_one_matrix(self, fmt, directions):
        arrays, fmt, words = arrays_of(KIND, (2, 3, 128, 96)), FORMATS[fmt], jnp.stack([WORDS, WORDS + 1])
        options = {"directions": directions, "words": words, "rows_split": True}
        assert_same_bytes(self.run(KIND, fmt, **options)(arrays), separately(KIND, fmt, arrays, **options))

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_of_hostile_numbers(self, fmt, kind):
        fmt, arrays = FORMATS[fmt], [*map(np.array, arrays_of(kind, (70, 96)))]
        run = self.run(kind, fmt)
        values = (np.nan, np.inf, -np.inf, 3e38, 1e-39, 0.0)
        for value, i in itertools.product(values, range(len(arrays))):
            given = [x.copy() for x in arrays]
            given[i][3, 7] = given[i][40] = value
            assert_same_bytes(run(given), separately(kind, fmt, given))


class TestReference(ByReference, BytesCases):
    @pytest.fixture(params=["mxfp8", "float8block tiles"])
    def fmt(self, request):
        """The reference is one op after the other, whatever the format; each takes XLA a while to compile."""
        return request.param

    @pytest.fixture(params=[(1, 1), (3, 40, 130)], ids=str)
    def shape(self, request):
        return request.param


class TestKernels(ByKernels, BytesCases):
    @pytest.fixture(params=FORMATS)
    def fmt(self, request):
        return request.param

    @pytest.fixture(params=[(1, 1), (128, 256), (3, 40, 130), (200, 300)], ids=str)
    def shape(self, request):
        return request.param


class TestTransformations:
    def test_vmap(self):
        arrays = arrays_of(KIND, (3, 64, 96))
        found = jax.vmap(lambda *arrays: in_one_pass(KIND, jlp.MXFP8(), arrays))(*arrays)
        for i in range(3):
            expected = in_one_pass(KIND, jlp.MXFP8(), [x[i] for x in arrays])
            assert_same_bytes(jax.tree.map(lambda leaf, i=i: leaf[i], found), expected)

    @by_axis_type
    @pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "float8block"])
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(("a", "b")), P("b", "a")], ids=str)
    def test_meshes_give_the_same_bytes(self, spec, fmt, axis_type):
        arrays, mesh = arrays_of(KIND, (512, 256)), mesh_of((2, 2), axis_type)
        run = jax.jit(functools.partial(in_one_pass, KIND, FORMATS[fmt], words=WORDS))
        expected = run(arrays)
        with jax.set_mesh(mesh):
            assert_same_bytes(run([place(x, mesh, spec) for x in arrays]), expected)

    def test_within_shard_map(self):
        arrays, mesh = arrays_of(KIND, (128, 96)), mesh_of((2,))

        def run(*arrays):
            found = in_one_pass(KIND, jlp.MXFP8(), arrays, (True, False))
            return [(row.data, row.scale) for row, _ in found]

        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
        assert_same_bytes(jax.jit(mapped)(*arrays), run(*arrays))

    def test_export(self):
        arrays = arrays_of(KIND, (64, 96))
        run = jax.jit(lambda *arrays: jax.tree.leaves(in_one_pass(KIND, jlp.MXFP8(), arrays)))
        exported = jax.export.export(run, disabled_checks=[*map(jax.export.DisabledSafetyCheck.custom_call, OPS)])
        assert_same_bytes(exported(*arrays).call(*arrays), run(*arrays))

    def test_no_elements(self):
        for row, column in in_one_pass(KIND, jlp.MXFP8(), arrays_of(KIND, (0, 64))):
            assert (row.data.shape, column.data.shape) == ((0, 64), (64, 0))


def test_nothing_is_stored_in_high_precision():
    calls = native_calls(lambda *arrays: in_one_pass(KIND, jlp.MXFP8(), arrays), *arrays_of(KIND, (64, 96)))
    assert dict(calls) == dict.fromkeys(OPS, 1)


def test_formats_with_a_tensor_scale_take_the_activation():
    assert not any(fmt.scaled_by_blocks_alone for fmt in (jlp.NVFP4(), jlp.Float8Tensor(), jlp.Int4()))
    assert all(fmt.scaled_by_blocks_alone for fmt in FORMATS.values())
