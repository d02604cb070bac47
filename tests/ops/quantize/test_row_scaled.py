"""Row-scaled NVFP4: each line is a tensor of its own, so its bytes are those of the line alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.eager import jlp
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import collectives, mesh_of

ROWS = jlp.NVFP4(row_scaled=True)
SHAPES = [(1, 16), (5, 1), (7, 40), (33, 200), (3, 9, 48), (0, 32), (4, 0)]


def array(shape, dtype="bfloat16", seed=0):
    """Rows of very different sizes."""
    scale = np.exp2(np.arange(shape[-2], dtype=np.float32) * 3 % 40 - 20)[:, None]
    return (np.asarray(random_array(shape, "float32", seed)) * scale).astype(jnp.dtype(dtype))


def alone(x):
    """Each row of x [..., M, K] quantised as a matrix of its own."""
    return jlp.quantize(x[..., None, :], jlp.NVFP4())


def test_its_repr_and_size_say_that_it_has_amaxes():
    q = jlp.quantize(array((64, 64)), ROWS)
    assert "row-scaled" in repr(q)
    assert q.amax.shape == (64,)
    assert q.nbytes == 64 * (32 + 4 + 4)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_each_row_alone(shape, dtype, implementation):
    x = array(shape, dtype)
    q, each = jlp.quantize(x, ROWS, implementation=implementation), alone(x)
    assert_same_bytes((q.data, q.scale, q.amax), (each.data[..., 0, :], each.scale[..., 0, :], each.amax))
    assert_same_bytes(jlp.dequantize(q), jlp.dequantize(each)[..., 0, :])


@pytest.mark.parametrize("rule", ["four_over_six", "four_over_six_mse", "search"])
def test_rows_may_choose_their_scales(rule):
    x = array((33, 200))
    q = jlp.quantize(x, jlp.NVFP4(scale_rule=rule, row_scaled=True))
    each = jlp.quantize(x[:, None], jlp.NVFP4(scale_rule=rule))
    assert_same_bytes((q.data, q.scale, q.amax), (each.data[:, 0], each.scale[:, 0], each.amax))
    assert_same_bytes(jlp.dequantize(q), jlp.dequantize(each)[:, 0])


@pytest.mark.parametrize("shape", [(7, 40), (5, 4200)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rule", ["six", "four_over_six", "four_over_six_mse", "search"])
def test_kernels_give_the_bytes_of_the_reference(isa, rule, dtype, shape):
    fmt = jlp.NVFP4(scale_rule=rule, row_scaled=True)
    x = array(shape, "float32")
    x[0], x[1, 3], x[2, 9] = 0, np.nan, -np.inf
    x[3, 20:] *= np.float32(1e-38)
    found, expected = (jlp.quantize(x.astype(jnp.dtype(dtype)), fmt, implementation=i) for i in ("ffi", "reference"))
    assert_same_bytes(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columnwise_it_is_the_transposed_array(shape):
    x = array(shape)
    q, transposed = jlp.quantize(x, ROWS, axis=-2), jlp.quantize(jnp.swapaxes(x, -1, -2), ROWS)
    assert_same_bytes((q.data, q.scale, q.amax), (transposed.data, transposed.scale, transposed.amax))
    assert_same_bytes(jlp.dequantize(q), jnp.swapaxes(jlp.dequantize(transposed), -1, -2))
    row, column = jlp.quantize_both(x, ROWS)
    assert_same_bytes(jax.tree.leaves((row, column)), jax.tree.leaves((jlp.quantize(x, ROWS), q)))


def test_a_vector_is_one_row():
    x = array((1, 40))[0]
    q, row = jlp.quantize(x, ROWS), jlp.quantize(x, jlp.NVFP4())
    assert_same_bytes((q.data, q.scale, q.amax), (row.data, row.scale, row.amax))
    assert_same_bytes(jlp.dequantize(q), jlp.dequantize(row))
    assert_same_bytes(jax.vmap(lambda x: jlp.quantize(x, ROWS).dequantize())(x[None]), jlp.dequantize(row)[None])


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e-40])
def test_a_hostile_row_leaves_the_others_alone(value):
    x = array((6, 48), "float32")
    x[2, 7] = value
    found = jlp.dequantize(jlp.quantize(x, ROWS))
    x[2] = 0
    clean = jlp.dequantize(jlp.quantize(x, ROWS))
    others = np.arange(6) != 2
    assert_same_bytes(found[others], clean[others])
    assert np.isfinite(value) or np.isnan(np.asarray(found)[2]).any()


def test_transformations():
    x = array((3, 9, 48))
    expected = jax.tree.leaves(jlp.quantize(x, ROWS))
    assert_same_bytes(jax.tree.leaves(jax.vmap(lambda x: jlp.quantize(x, ROWS))(x)), expected)
    assert_same_bytes(jax.tree.leaves(jax.jit(lambda x: jlp.quantize(x, ROWS))(x)), expected)
    _, scanned = jax.lax.scan(lambda _, x: (None, jlp.quantize(x, ROWS)), None, x)
    assert_same_bytes(jax.tree.leaves(scanned), expected)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("columns", [64, 72])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b")], ids=str)
def test_bytes_do_not_depend_on_the_mesh(spec, columns, implementation):
    mesh, x = mesh_of((2, 2)), array((8, columns))
    quantize = jax.jit(lambda x: jlp.quantize(x, ROWS, implementation=implementation))
    q = quantize(jax.device_put(x, NamedSharding(mesh, spec)))
    assert_same_bytes(jax.tree.leaves(q), jax.tree.leaves(jlp.quantize(x, ROWS)))


@pytest.mark.parametrize(("spec", "reduced"), [(P("a"), []), (P(None, "a"), [8]), (P("a", "b"), [4])], ids=str)
def test_only_amaxes_travel(spec, reduced):
    """Devices that share rows, in whole blocks, tell each other the amaxes; others nothing."""
    mesh = mesh_of((2, 2))
    x = jax.device_put(array((8, 64)), NamedSharding(mesh, spec))
    compiled = jax.jit(lambda x: jlp.quantize(x, ROWS)).lower(x).compile()
    assert collectives(compiled) == [("all-reduce", n) for n in reduced]


def test_in_explicit_mode_and_in_shard_map():
    mesh, x = mesh_of((2, 2), AxisType.Explicit), array((8, 64))
    expected = jax.tree.leaves(jlp.quantize(x, ROWS))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("a", "b"))
        q = jax.jit(lambda x: jlp.quantize(x, ROWS))(placed)
        assert [jax.typeof(leaf).sharding.spec for leaf in (q.data, q.amax)] == [P("a", "b"), P("a")]
        assert_same_bytes(jax.tree.leaves(q), expected)
        rows = jax.shard_map(lambda x: jlp.quantize(x, ROWS), in_specs=P(("a", "b")), out_specs=P(("a", "b")))
        assert_same_bytes(jax.tree.leaves(jax.jit(rows)(jax.device_put(x, P(("a", "b"))))), expected)


class TestGemm:
    def operands(self, rows=(True, False)):
        a, b = array((9, 80)), array((24, 80), seed=1)
        quantized = (jlp.quantize(x, jlp.NVFP4(row_scaled=of_rows)) for x, of_rows in zip((a, b), rows, strict=True))
        return tuple(quantized)

    @staticmethod
    def by_rule(a, b):
        """The sums with an amax of 1, times both amaxes (numerics.md 9.1)."""

        def with_one(q):
            return jlp.QuantizedArray(
                q.data, q.scale, jnp.float32(1), None, jlp.NVFP4(), q.matrix_shape, q.dtype, q.axis, None
            )

        y = np.asarray(jlp.scaled_matmul(with_one(a), with_one(b), preferred_element_type=jnp.float32))
        amaxes = [np.asarray(q.amax)[:, None] if q.format.row_scaled else np.asarray(q.amax)[None] for q in (a, b)]
        if a.format.row_scaled and b.format.row_scaled:
            return y * amaxes[0] * amaxes[1].T
        return y * (amaxes[0] * amaxes[1].T)

    @pytest.mark.parametrize("implementation", [None, "reference"])
    @pytest.mark.parametrize("rows", [(True, False), (False, True), (True, True)], ids=str)
    def test_bytes_are_those_of_the_rule(self, rows, implementation):
        a, b = self.operands(rows)
        y = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation)
        assert_same_bytes(y, self.by_rule(a, b))

    def test_a_row_depends_on_no_other(self):
        x, b = array((9, 80)), self.operands()[1]
        y = jlp.scaled_matmul(jlp.quantize(x, ROWS), b)
        for part in (slice(0, 1), slice(3, 7)):
            assert_same_bytes(jlp.scaled_matmul(jlp.quantize(x[part], ROWS), b), y[part])

    def test_the_epilogue_follows(self):
        a, b = self.operands()
        bias, total = random_array((24,), "float32", 2), random_array((9, 24), "float32", 3)
        y = self.by_rule(a, b) + np.asarray(bias)
        found = jlp.scaled_matmul(a, b, bias, accumulate=total, preferred_element_type=jnp.float32)
        assert_same_bytes(found, y + np.asarray(total))
        _, before = jlp.scaled_matmul(
            a, b, bias, activation="gelu", preferred_element_type=jnp.float32, return_pre_activation=True
        )
        assert_same_bytes(before, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounding": "stochastic", "key": jax.random.key(0)}, "only rounds to nearest"),
        ({"hadamard": True}, "are not rotated"),
        ({"amax": jnp.float32(1)}, "by its own amax"),
        ({"axis_name": "data"}, "axis_name='data' was given, but NVFP4 1x16 row-scaled"),
    ],
)
def test_what_it_does_not_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jlp.quantize(array((4, 32)), ROWS, **options)


def test_formats_and_products_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"a tile lies in several lines: use \(1, 16\)"):
        jlp.NVFP4((16, 16), row_scaled=True)
    with pytest.raises(TypeError, match="row_scaled"):
        jlp.NVFP4(row_scaled="yes")
    with pytest.raises(NotImplementedError, match="no weight-only GEMM of row-scaled weights"):
        jlp.scaled_matmul(array((4, 32)), jlp.quantize(array((8, 32)), ROWS))
