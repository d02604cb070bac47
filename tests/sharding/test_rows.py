"""Float8Rows and Int8Rows on meshes: what travels is amaxes of lines, and sums of integers are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.ops.grouped_matmul.api import multiply_groups, multiply_within_groups, quantize_groups
from tests.helpers import assert_same_bytes, format_name, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, name_of, on_mesh

FORMATS = (jlp.Float8Rows(), jlp.Int8Rows(), jlp.Int8Rows("bfloat16"))
RANDOM = {"rounding": "stochastic", "key": np.array([3, 5], np.uint32)}
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)


@every_format
@by_axis_type
@pytest.mark.parametrize("spec", [P("a", "b"), P("a"), P(None, "b"), P(("a", "b"))], ids=name_of)
@pytest.mark.parametrize("shape", [(128, 256), (40, 72)], ids=str)
def test_codes_do_not_depend_on_the_mesh(fmt, axis_type, spec, shape):
    x = random_array(shape, seed=1)

    def run(x):
        row, column = jlp.quantize_both(x, fmt)
        return row, column, jlp.quantize_both(x, fmt, **RANDOM), row.dequantize(), column.dequantize(jnp.float32)

    sizes = (2, 4)
    if axis_type is AxisType.Explicit and any(n % 8 for n in shape):
        return
    result, found = on_mesh(run, [x], [spec], mesh_of(sizes, axis_type))
    assert_same_bytes(result, jax.jit(run)(x))
    if shape == (128, 256):
        assert {kind for kind, _ in found} <= {"all-reduce"}
        assert sum(elements for _, elements in found) <= 2 * sum(shape)


@every_format
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None, "a"), P(None, "b", "a")], ids=name_of)
def test_split_rows(fmt, spec):
    x = random_array((4, 64, 96), seed=2)

    def run(x):
        return jlp.quantize_both(x, fmt, rows_split=True, **RANDOM)

    assert_same_bytes(on_mesh(run, [x], [spec], mesh_of((2, 2)))[0], jax.jit(run)(x))


@by_axis_type
@pytest.mark.parametrize(
    "specs", [(P("a"), P("b")), (P(None, "a"), P(None, "a")), (P("b", "a"), P(None, "a"))], ids=str
)
def test_sums_of_integers_are_exact_on_any_mesh(axis_type, specs):
    """Devices add up int32: partial sums in float32 would be rounded before they meet."""
    x, w = random_array((32, 4096), seed=1), random_array((16, 4096), seed=2)

    def run(x, w):
        a, b = jlp.quantize(x, jlp.Int8Rows()), jlp.quantize(w, jlp.Int8Rows())
        return jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32)

    result, found = on_mesh(run, [x, w], list(specs), mesh_of((2, 4), axis_type))
    assert_same_bytes(result, jax.jit(run)(x, w))
    assert bool(found) == (specs[1] == P(None, "a"))


@pytest.mark.parametrize("recipe", [jlp.Float8RowScaling(), jlp.Int8RowScaling()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("specs", [(P("a"), P()), (P("a"), P(None, "b")), (P("a", None, "b"), P("b"))], ids=str)
def test_a_layer_on_a_mesh(recipe, specs):
    x, w = random_array((4, 16, 64), "float32", 1), random_array((64, 96), "float32", 2)

    def run(x, w):
        def loss(x, w):
            with jlp.autocast(recipe):
                y = jlp.linear(x, w, key=jnp.array([1, 2], jnp.uint32))
            return (y * jnp.arange(96)).sum(), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, gradients

    result, _ = on_mesh(run, [x, w], list(specs), mesh_of((2, 2)))
    expected = jax.jit(run)(x, w)
    if isinstance(recipe, jlp.Int8RowScaling):
        assert_same_bytes(result, expected)
    else:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), result, expected)


class TestGroups:
    """Rows in groups: their features split, and the sums of integers stay exact."""

    SIZES = np.array([20, 0, 30], np.int32)

    @every_format
    @by_axis_type
    @pytest.mark.parametrize("shape", [(64, 128), (40, 72)], ids=str)
    @pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
    def test_codes_do_not_depend_on_the_mesh(self, fmt, axis_type, shape, stochastic):
        x, sizes = random_array(shape, seed=1), jnp.asarray(self.SIZES)
        words = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2) if stochastic else None

        def run(x):
            return quantize_groups(x, sizes, fmt, rowwise=True, columnwise=True, words=words)

        result, found = on_mesh(run, [x], [P(None, "b")], mesh_of((2, 4), axis_type))
        assert_same_bytes(result, jax.jit(run)(x))
        if shape == (64, 128):  # the amaxes of rows
            assert sum(elements for kind, elements in found if kind == "all-reduce") == 64

    @by_axis_type
    @pytest.mark.parametrize("pair", [(0, P(None, "a")), (1, P(None, None, "b")), (2, P(None, "a", "b"))], ids=str)
    def test_products_do_not_depend_on_the_mesh(self, axis_type, pair):
        """[T, K] by [E, K, N]: K is split, or N, or both."""
        _, spec = pair
        x, w = random_array((64, 4096), seed=1), random_array((3, 4096, 32), seed=2)
        sizes = jnp.asarray(self.SIZES)

        def run(x, w):
            row, _ = quantize_groups(x, sizes, jlp.Int8Rows(), rowwise=True, columnwise=False)
            q = jlp.quantize(w, jlp.Int8Rows("bfloat16"), axis=-2)
            return multiply_groups(row, q.mT, None, jnp.float32)

        specs = [P(None, *spec[1:2]), spec]
        result, _ = on_mesh(run, [x, w], specs, mesh_of((2, 2), axis_type))
        assert_same_bytes(result, jax.jit(run)(x, w))

    @pytest.mark.parametrize("weight", [jlp.Int4(32), jlp.MXFP4()], ids=format_name)
    @pytest.mark.parametrize("spec", [P(None, "a"), P(None, None, "b"), P(None, "a", "b")], ids=str)
    @pytest.mark.parametrize("depth", [512, 352])  # K splits into whole groups of elements, or not at all
    def test_products_by_weights_in_groups(self, weight, spec, depth):
        x, w = random_array((64, depth), seed=1), random_array((3, depth, 32), seed=2)
        sizes = jnp.asarray(self.SIZES)

        def run(x, w):
            row, _ = quantize_groups(x, sizes, jlp.Int8Rows(), rowwise=True, columnwise=False)
            return multiply_groups(row, jlp.quantize(w, weight, axis=-2).mT, None, jnp.float32)

        result, _ = on_mesh(run, [x, w], [P(None, *spec[1:2]), spec], mesh_of((2, 2)))
        np.testing.assert_allclose(result, jax.jit(run)(x, w), rtol=1e-5, atol=1e-3)

    @every_format
    def test_wgrad_does_not_depend_on_the_mesh(self, fmt):
        x, dy, sizes = random_array((64, 48), seed=1), random_array((64, 32), seed=2), jnp.asarray(self.SIZES)

        def run(x, dy):
            options = {"rowwise": False, "columnwise": True}
            a, b = (quantize_groups(v, sizes, fmt, **options)[1] for v in (x, dy))
            return multiply_within_groups(a, b, jnp.float32)

        result, found = on_mesh(run, [x, dy], [P(None, "a"), P(None, "b")], mesh_of((2, 2)))
        assert_same_bytes(result, jax.jit(run)(x, dy))
        assert not found


class TestShardMap:
    @every_format
    @pytest.mark.parametrize("split", [-2, -1])
    @pytest.mark.parametrize("axis", [-2, -1])
    @pytest.mark.parametrize("how", [{}, RANDOM], ids=["nearest", "stochastic"])
    def test_lines_that_go_on_elsewhere_have_one_scale(self, fmt, split, axis, how):
        x = random_array((64, 96), seed=1)
        spec, size = (P("a", None), 32) if split == -2 else (P(None, "a"), 48)

        def run(x):
            first = jax.lax.axis_index("a") * size
            offset = (first, 0) if split == -2 else (0, first)
            name = "a" if axis == split else None
            q = jlp.quantize(x, fmt, axis=axis, axis_name=name, offset=offset if how else (0, 0), **how)
            return q.data if axis == -1 else q.data.T, q.scale

        whole = P() if axis == split else P("a")
        mapped = jax.shard_map(run, mesh=mesh_of((2,)), in_specs=spec, out_specs=(spec, whole), check_vma=False)
        expected = jlp.quantize(x, fmt, axis=axis, **how)
        data, scale = jax.jit(mapped)(x)
        assert_same_bytes((data, scale), (expected.data if axis == -1 else expected.data.T, expected.scale))

    def test_both_ways_need_to_say_which_lines_go_on(self):
        mapped = jax.shard_map(
            lambda x: jlp.quantize_both(x, jlp.Int8Rows(), axis_name="a")[0].data,
            mesh=mesh_of((2,)),
            in_specs=P("a"),
            out_specs=P("a"),
        )
        with pytest.raises(ValueError, match="call quantize for each way, with axis_name= for the one whose lines"):
            jax.eval_shape(mapped, jnp.ones((8, 8)))

    @pytest.mark.parametrize("axis", [-2, -1])
    @pytest.mark.parametrize(
        "recipe",
        [jlp.Float8RowScaling(), jlp.Int8RowScaling(), jlp.WeightQAT(jlp.Int8Rows("bfloat16"))],
        ids=lambda r: type(r).__name__,
    )
    def test_codes_of_kernels_are_gathered(self, recipe, axis):
        """FSDP: the bytes are those of the whole kernel, quantised."""
        w = random_array((3, 64, 32), "float32", seed=1)
        spec = P(None, "a") if axis == -2 else P(None, None, "a")

        def run(shard):
            options = {"axis": axis, "module_type": "grouped_linear"}
            return jlp.all_gather_kernel(shard, "a", recipe, **options)[1]

        mapped = jax.shard_map(run, mesh=mesh_of((2,)), in_specs=spec, out_specs=P(), check_vma=False)
        expected = jlp.quantize_kernel(w, recipe, module_type="grouped_linear")
        assert_same_bytes(jax.jit(mapped)(w), expected)
