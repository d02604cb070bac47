"""Norms that are quantised in the same pass: their bytes are those of the norm, and then of `quantize`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.norms.api import NormSpec, normed
from jaxlowprec.ops.norms.quantized import quantized_norm
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes
from tests.ops.implementations import ByKernels, ByReference, compiled
from tests.ops.test_result_amaxes import norm_operands
from tests.products import native_calls
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(5)

FORMATS = {
    "mxfp8": jlp.MXFP8(),
    "mxfp8 e5m2 floor": jlp.MXFP8("e5m2", scale_rule="floor"),
    "mxfp4": jlp.MXFP4(),
    "float8block": jlp.Float8Block(),
    "float8block tiles": jlp.Float8Block(block=(128, 128), power_of_two=False),
}
DIRECTIONS = [(True, True), (True, False), (False, True)]
WORDS = jnp.array([3, 5], jnp.uint32)


def spec_of(kind, residual=True, implementation=None):
    return NormSpec(kind, 1e-6, residual, kind == "layer", implementation)


def in_one_pass(spec, fmt, arrays, directions=(True, True), words=None, rows_split=False):
    x, residual, weight, beta = arrays
    given = x, weight, residual if spec.residual else None, beta if spec.beta else None
    options = {"rowwise": directions[0], "columnwise": directions[1], "words": words, "rows_split": rows_split}
    return quantized_norm(spec, fmt, *given, **options)


def separately(spec, fmt, arrays, directions=(True, True), words=None, rows_split=False):
    """By the kernels."""

    def run(*arrays):
        return _separately(spec, fmt, arrays, directions, words, rows_split)

    return compiled(None)(run)(*arrays)


def _separately(spec, fmt, arrays, directions, words, rows_split):
    x, residual, weight, beta = arrays
    of_norm = [jnp.broadcast_to(p, p.shape) for p in (weight, beta)]
    found = normed(spec, x, of_norm[0], residual if spec.residual else None, of_norm[1] if spec.beta else None)
    options = {"rounding": "nearest" if words is None else "stochastic", "key": words, "rows_split": rows_split}
    row, column = (
        jlp.quantize(found.y, fmt, axis=axis, **options) if wanted else None
        for axis, wanted in zip((-1, -2), directions, strict=True)
    )
    return row, column, found.total, found.saved


class BytesCases:
    @pytest.mark.sampled(37)
    @pytest.mark.parametrize("words", [None, WORDS], ids=["nearest", "stochastic"])
    @pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kind", ["rms", "layer"])
    def test_are_those_of_the_separate_ops(self, shape, fmt, kind, dtype, directions, words):
        arrays, fmt = norm_operands(shape, dtype), FORMATS[fmt]
        words = words if words is None else jnp.broadcast_to(words, (*shape[:-2], 2))
        spec = spec_of(kind, shape[-1] % 3 > 0, self.implementation)
        found = self.compiled(lambda *arrays: in_one_pass(spec, fmt, arrays, directions, words))(*arrays)
        assert_same_bytes(tuple(found), separately(spec_of(kind, spec.residual), fmt, arrays, directions, words))

    def test_of_split_rows_are_of_one_matrix(self, fmt):
        arrays, fmt = norm_operands((2, 3, 128, 96), "bfloat16"), FORMATS[fmt]
        spec, words = spec_of("layer", implementation=self.implementation), jnp.stack([WORDS, WORDS + 1])
        found = self.compiled(lambda *arrays: in_one_pass(spec, fmt, arrays, words=words, rows_split=True))(*arrays)
        assert_same_bytes(tuple(found), separately(spec_of("layer"), fmt, arrays, words=words, rows_split=True))

    def test_of_hostile_rows(self):
        spec = spec_of("layer", implementation=self.implementation)
        run = self.compiled(lambda *arrays: in_one_pass(spec, jlp.MXFP8(), arrays))
        for value, parameters in itertools.product([np.nan, np.inf, 3e38, 0.0], [False, True]):
            arrays = x, _, weight, beta = [*map(np.array, norm_operands((70, 96), "bfloat16"))]
            x[3, 7] = x[40] = value
            if parameters:
                weight[2], beta[5] = value, -value
            *found, saved = run(*arrays)
            *expected, expected_saved = separately(spec_of("layer"), jlp.MXFP8(), arrays)
            assert_same_bytes(found, expected)
            for actual, number in zip(saved, expected_saved, strict=True):
                np.testing.assert_array_equal(actual, number)  # the sign of a NaN is XLA's choice


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
        x, residual, weight, beta = norm_operands((3, 64, 96), "bfloat16")
        weights = jnp.stack([weight, weight / 2, -weight])
        spec, fmt = spec_of("rms"), jlp.MXFP8()
        found = jax.vmap(lambda *arrays: in_one_pass(spec, fmt, (*arrays, None)))(x, residual, weights)
        for i in range(3):
            expected = in_one_pass(spec, fmt, (x[i], residual[i], weights[i], None))
            assert_same_bytes(jax.tree.map(lambda leaf, i=i: leaf[i], tuple(found)), tuple(expected))

    @by_axis_type
    @pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "float8block"])
    @pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(("a", "b")), P("b", "a")], ids=str)
    def test_meshes_give_the_same_bytes(self, spec, fmt, axis_type):
        """Rows may be split into whole blocks; the features are gathered."""
        arrays, fmt, mesh = norm_operands((512, 256), "bfloat16"), FORMATS[fmt], mesh_of((2, 2), axis_type)
        norm = spec_of("layer")

        def run(*arrays):
            return tuple(in_one_pass(norm, fmt, arrays, words=WORDS))

        expected = jax.jit(run)(*arrays)
        with jax.set_mesh(mesh):
            placed = [place(a, mesh, spec if a.ndim == 2 else P()) for a in arrays]
            assert_same_bytes(jax.jit(run)(*placed), expected)

    def test_within_shard_map(self):
        x, residual, weight, beta = norm_operands((128, 96), "bfloat16")
        norm, mesh = spec_of("rms"), mesh_of((2,))

        def run(x, residual, weight):
            found = in_one_pass(norm, jlp.MXFP8(), (x, residual, weight, None), (True, False))
            return found.rowwise.data, found.rowwise.scale, found.total

        mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("a"), P("a"), P()), out_specs=P("a"))
        assert_same_bytes(jax.jit(mapped)(x, residual, weight), run(x, residual, weight))

    def test_export(self):
        arrays, norm = norm_operands((64, 96), "bfloat16"), spec_of("layer")
        run = jax.jit(lambda *arrays: jax.tree.leaves(tuple(in_one_pass(norm, jlp.MXFP8(), arrays))))
        disabled = [jax.export.DisabledSafetyCheck.custom_call("jaxlowprec_norm_quantize")]
        exported = jax.export.export(run, disabled_checks=disabled)(*arrays)
        assert_same_bytes(exported.call(*arrays), run(*arrays))

    def test_no_elements(self):
        x = jnp.zeros((0, 64), jnp.bfloat16)
        found = in_one_pass(spec_of("rms", False), jlp.MXFP8(), (x, None, jnp.ones(64), None))
        assert (found.rowwise.data.shape, found.columnwise.data.shape) == ((0, 64), (64, 0))


def test_the_norm_itself_is_not_stored():
    x, _, weight, _ = norm_operands((64, 96), "bfloat16")
    calls = native_calls(lambda x: in_one_pass(spec_of("rms", False), jlp.MXFP8(), (x, None, weight, None)), x)
    assert dict(calls) == {"jaxlowprec_norm_quantize": 1}


def test_formats_with_a_tensor_scale_take_the_norm():
    assert not any(fmt.scaled_by_blocks_alone for fmt in (jlp.NVFP4(), jlp.Float8Tensor(), jlp.Int4()))
    assert all(fmt.scaled_by_blocks_alone for fmt in FORMATS.values())


def test_random_bits_follow_the_key():
    arrays = norm_operands((64, 96), "bfloat16")
    one, other = (in_one_pass(spec_of("rms"), jlp.MXFP8(), arrays, words=WORDS + i).rowwise.data for i in range(2))
    assert (jnp.asarray(one, jnp.float32) != jnp.asarray(other, jnp.float32)).any()
