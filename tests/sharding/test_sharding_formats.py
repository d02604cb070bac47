"""The bytes of every format do not depend on the mesh, as test_sharding.py shows for NVFP4 in more places."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import ONE_OF_EACH, assert_same_bytes, format_name, often, random_array
from tests.ops.matmul.test_scaled_matmul_formats import ONE_OF_EACH_KIND, pair_name
from tests.sharding.meshes import by_axis_type, collectives, mesh_of, name_of, on_mesh, split

pytestmark = pytest.mark.sampled(7)

FORMATS = [fmt for fmt in ONE_OF_EACH if not isinstance(fmt, jlp.NVFP4)]
RANDOM = {"rounding": "stochastic", "key": np.array([3, 5], np.uint32)}
over_formats = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
OFTEN = (jlp.MXFP8("e5m2", (32, 32)), jlp.MXFP4(), jlp.Float8Block(), jlp.Float8Tensor())  # each element and scaling
over_pairs = pytest.mark.parametrize("pair", ONE_OF_EACH_KIND, ids=pair_name)


@functools.cache
def every_way(fmt):
    """Both directions, each rounding, and back."""

    def run(x):
        row, column = jlp.quantize_both(x, fmt)
        return row, column, jlp.quantize_both(x, fmt, **RANDOM), row.dequantize(), column.dequantize(jnp.float32)

    return run


class TestQuantize:
    @pytest.mark.parametrize(
        ("fmt", "axis_type"),
        often(
            [*((fmt, AxisType.Auto) for fmt in FORMATS), *((fmt, AxisType.Explicit) for fmt in OFTEN[1::2])],
            list(itertools.product(FORMATS, (AxisType.Auto, AxisType.Explicit))),
            2,
        ),
        ids=lambda value: name_of(value) if isinstance(value, AxisType) else format_name(value),
    )
    def test_bytes_are_equal_on_any_mesh_and_only_an_amax_travels(self, fmt, axis_type):
        """128 x 128 in each part: every block is whole."""
        x = random_array((256, 512), seed=1)
        result, found = on_mesh(every_way(fmt), [x], [P("a", "b")], mesh_of((2, 4), axis_type))
        assert_same_bytes(result, jax.jit(every_way(fmt))(x))
        assert {kind for kind, _ in found} <= {"all-reduce"}
        amaxes = {"tensor": (1, 2), "rows": (4 * 128,)}.get(fmt.scaling, (0,))  # XLA may join those of two calls
        assert sum(elements for _, elements in found) in amaxes

    @pytest.mark.parametrize(
        ("shape", "spec"),
        [
            ((40, 72), P("a", "b")),  # blocks are whole neither in the parts nor in the array
            ((4, 64, 96), P("a", None, "b")),
        ],
        ids=name_of,
    )
    @pytest.mark.parametrize("fmt", often(OFTEN, FORMATS), ids=format_name)
    def test_bytes_of_any_shape(self, fmt, shape, spec):
        x = random_array(shape, seed=2)
        assert_same_bytes(on_mesh(every_way(fmt), [x], [spec], mesh_of((2, 4)))[0], jax.jit(every_way(fmt))(x))

    @pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.scaling != "rows"], ids=format_name)
    def test_shard_map_with_an_offset(self, fmt):
        """A tensor's scale has to be given there: a part does not know the whole. Nor does it know whole lines."""
        mesh, x, spec = mesh_of((2, 2)), random_array((256, 256), seed=3), P("a", "b")
        given = {"encode_scale": jnp.float32(8)} if fmt.scaling == "tensor" else {}

        def quantize(x, offset=(0, 0)):
            q = jlp.quantize(x, fmt, **RANDOM, **given, offset=offset)
            return q.data, q.scale

        def local(x):
            return quantize(x, tuple(jax.lax.axis_index(name) * n for name, n in zip(spec, x.shape, strict=True)))

        out_specs = spec, (P() if fmt.scaling == "tensor" else spec)
        function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=False)
        assert_same_bytes(jax.jit(function)(x), quantize(x))


def test_an_encode_scale_saves_the_all_reduce():
    x, mesh = random_array((64, 128)), mesh_of((2, 4))

    def quantize(x):
        return jlp.quantize(x, jlp.Float8Tensor(), encode_scale=jnp.float32(2))

    result, found = on_mesh(quantize, [x], [P("a", "b")], mesh)
    assert_same_bytes(result, quantize(x))
    assert found == []


@over_pairs
class TestMatmul:
    def operands(self, k):
        x, w = random_array((256, k), seed=3), random_array((128, k), seed=4)
        return x, w, 100 * np.asarray(random_array((128,), "float32", seed=5))

    def function(self, pair):
        def run(x, w, bias):
            a, b = (jlp.quantize(v, f) for v, f in zip((x, w), pair, strict=True))
            return jlp.scaled_matmul(
                a, b, bias, activation="gelu", preferred_element_type=jnp.float32, return_pre_activation=True
            )

        return run

    @by_axis_type
    def test_bytes_do_not_depend_on_how_rows_and_columns_are_split(self, pair, axis_type):
        args, function = self.operands(160), self.function(pair)
        result, _ = on_mesh(function, args, (P("a"), P("b"), P()), mesh_of((2, 2), axis_type))
        assert_same_bytes(result, jax.jit(function)(*args))

    @by_axis_type
    def test_a_split_contraction_adds_the_epilogue_once(self, pair, axis_type):
        """Partial sums meet in another order, so results agree to float32's rounding, not in bytes."""
        args, function = self.operands(512), self.function(pair)
        result, _ = on_mesh(function, args, (P("a", "b"), P(None, "b"), P()), mesh_of((2, 4), axis_type))
        for actual, wanted in zip(result, jax.jit(function)(*args), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=2e-4)

    def test_a_ragged_contraction_is_whole(self, pair):
        args, function = self.operands(72), self.function(pair)
        result, _ = on_mesh(function, args, (P("a", "b"), P("a", "b"), P()), mesh_of((2, 4)))
        expected = jax.jit(function)(*args)
        if pair[0].scaling == "tensor":  # has no blocks, so its contraction is split
            for actual, wanted in zip(result, expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=2e-4)
        else:
            assert_same_bytes(result, expected)

    def test_one_all_reduce_of_the_result(self, pair):
        x, w, _ = self.operands(512)
        a, b = (jlp.quantize(v, f) for v, f in zip((x, w), pair, strict=True))
        mesh = mesh_of((4,))
        with jax.set_mesh(mesh):
            placed = split(a, mesh, P(None, "a")), split(b, mesh, P(None, "a"))
            compiled = jax.jit(jlp.scaled_matmul).lower(*placed).compile()
        assert collectives(compiled) == [("all-reduce", 256 * 128)]
