"""QuantizedArray: its invariants, and that it goes where any pytree goes."""

import copy
import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxlowprec as jlp
from tests.helpers import (
    FLOATS,
    FORMATS,
    OF_CACHES,
    ONE_OF_EACH,
    assert_same_bytes,
    format_name,
    often,
    random_array,
)
from tests.sharding import meshes

pytestmark = pytest.mark.sampled(5)

over_formats = pytest.mark.parametrize("fmt", (*ONE_OF_EACH, *OF_CACHES), ids=format_name)
over_scalings = pytest.mark.parametrize(
    "fmt",
    often([jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Block("e5m2", (128, 128), False), jlp.Float8Tensor()], ONE_OF_EACH),
    ids=format_name,
)
quantize = functools.partial(jlp.quantize, fmt=jlp.NVFP4())
DRAWN = jlp.Hadamard(signs="drawn")


def assert_same(actual, expected):
    """Equal in structure, static fields included, and in every byte."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_same_bytes(actual, expected)


class TestInvariants:
    @over_formats
    @pytest.mark.parametrize("shape", [(32, 64), (20, 37), (1, 1), (2, 3, 20, 37), (0, 16)], ids=str)
    def test_shapes_of_the_fields(self, shape, fmt):
        *batch, m, k = shape
        for axis, lines, length in ((-1, m, k), (-2, k, m)):
            q = jlp.quantize(random_array(shape), fmt, axis=axis)
            assert (q.shape, q.ndim, q.size, q.axis) == (shape, len(shape), int(np.prod(shape)), axis)
            blocks = fmt.blocks(length)
            codes = blocks * fmt.length // 2 if fmt.packed else length
            scales = () if fmt.scaling == "tensor" else (-(-lines // (fmt.length if fmt.tiles else 1)), blocks)
            assert (q.data.shape, q.data.dtype) == ((*batch, lines, codes), fmt.data_dtype)
            assert (q.scale.shape, q.scale.dtype) == ((*batch, *scales), fmt.scale_dtype)
            amaxes = 0
            if fmt.scaling == "two_level":
                assert (q.amax.shape, q.amax.dtype) == (tuple(batch), jnp.float32)
                amaxes = q.amax.size
            else:
                assert q.amax is None
            assert q.zero_point is None
            assert q.nbytes == q.data.size + q.scale.size * q.scale.dtype.itemsize + 4 * amaxes

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_static_fields_say_how_it_was_made(self, dtype):
        h = jlp.Hadamard(32)
        q = jlp.quantize(random_array((32, 64), dtype), jlp.NVFP4(), axis=-2, hadamard=h)
        assert (q.format, q.matrix_shape, q.dtype, q.axis, q.hadamard) == (
            jlp.NVFP4(),
            (32, 64),
            jnp.dtype(dtype),
            -2,
            h,
        )
        assert jlp.quantize(random_array((32, 64)), jlp.NVFP4(), hadamard=True).hadamard == jlp.Hadamard()

    def test_a_vector_has_one_axis(self):
        q = quantize(random_array((40,)))
        assert (q.shape, q.matrix_shape, q.ndim, q.data.shape, q.scale.shape) == ((40,), (40,), 1, (24,), (3,))

    def test_compression_counts_every_field(self):
        x = random_array((128, 256))
        q = quantize(x)
        assert q.compression == x.nbytes / (128 * 128 + 128 * 16 + 4)
        assert quantize(x.astype("float32")).compression == 2 * q.compression
        assert jlp.quantize(x, jlp.NVFP4((16, 16))).compression > 3.9

    def test_repr_has_format_shape_and_compression(self):
        q = quantize(random_array((128, 256)))
        assert (
            repr(q) == "QuantizedArray(NVFP4 1x16, shape=(128, 256), dtype=bfloat16, axis=-1, 18.0 KiB, 3.55x smaller)"
        )
        rotated = jlp.quantize(random_array((4, 4096)), jlp.NVFP4(), hadamard=jlp.Hadamard(64, None))
        assert "Hadamard(64, plain)" in repr(rotated)
        tiles = jlp.quantize(jnp.zeros((16, 16)), jlp.NVFP4((16, 16)))
        assert "NVFP4 16x16" in repr(tiles) and "133 B" in repr(tiles)

    @pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
    def test_repr_of_every_format(self, fmt):
        q = jlp.quantize(random_array((128, 256)), fmt)
        assert repr(q).startswith(f"QuantizedArray({fmt}, shape=(128, 256), dtype=bfloat16, axis=-1, ")
        least = 3.5 if fmt.packed else 1.88
        assert least < q.compression < 2 * least + 0.5 and f"{q.compression:.2f}x smaller" in repr(q)

    def test_repr_of_whatever_transformations_put_there(self):
        q = quantize(random_array((16, 16)))
        assert "data=codes, scale=codes" in repr(jax.tree.map(lambda _: "codes", q))
        jax.make_jaxpr(lambda q: repr(q) and q.data)(q)

    def test_it_is_frozen(self):
        q = quantize(random_array((16, 16)))
        for name in ("data", "scale", "amax", "axis"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(q, name, None)

    @over_formats
    @pytest.mark.parametrize("shape", [(2, 20, 37)], ids=str)
    def test_mt_is_the_matrix_transpose_without_moving_a_byte(self, shape, fmt):
        for axis in (-1, -2):
            q = jlp.quantize(random_array(shape), fmt, axis=axis)
            t = q.mT
            assert t.data is q.data and t.scale is q.scale
            assert (t.shape, t.axis) == ((*shape[:-2], shape[-1], shape[-2]), -3 - axis)
            np.testing.assert_array_equal(t.dequantize(), jnp.swapaxes(q.dequantize(), -1, -2))
            assert jax.tree.structure(t.mT) == jax.tree.structure(q)

    def test_a_vector_has_no_mt(self):
        with pytest.raises(ValueError, match=r"shape \(40,\) is a vector"):
            _ = quantize(random_array((40,))).mT

    def test_dequantize_is_the_functions(self):
        q = quantize(random_array((20, 37)))
        assert_same_bytes(q.dequantize(jnp.float32), jlp.dequantize(q, dtype=jnp.float32))


class TestStructure:
    """Static fields are part of the pytree's structure, hence of jit's cache key."""

    def test_equal_for_arrays_made_alike(self):
        one, two = (jax.tree.structure(quantize(random_array((16, 32), seed=seed))) for seed in range(2))
        assert one == two and hash(one) == hash(two)

    @pytest.mark.parametrize(
        "other",
        [
            lambda x: jlp.quantize(x, jlp.NVFP4((16, 16))),
            lambda x: jlp.quantize(x, jlp.MXFP4()),
            lambda x: jlp.quantize(x, jlp.NVFP4(), axis=-2),
            lambda x: jlp.quantize(x, jlp.NVFP4(), hadamard=True),
            lambda x: jlp.quantize(x.astype("float32"), jlp.NVFP4()),
            lambda x: jlp.quantize(x[:, :31], jlp.NVFP4()),
        ],
        ids=["block", "format", "axis", "hadamard", "dtype", "shape"],
    )
    def test_different_for_arrays_made_otherwise(self, other):
        x = random_array((16, 32))
        assert jax.tree.structure(quantize(x)) != jax.tree.structure(other(x))

    def test_jit_traces_once_for_each(self):
        traced = []
        f = jax.jit(lambda q: traced.append(q.axis) or q.dequantize())
        for seed in range(3):
            f(quantize(random_array((16, 16), seed=seed)))
        f(quantize(random_array((16, 16)), axis=-2))
        assert traced == [-1, -2]

    def test_flatten_and_unflatten(self):
        q = quantize(random_array((2, 20, 37)), axis=-2, hadamard=True)
        leaves, structure = jax.tree.flatten(q)
        assert [leaf.dtype for leaf in leaves] == [jnp.uint8, jnp.float8_e4m3fn, jnp.float32]
        assert_same(jax.tree.unflatten(structure, leaves), q)
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
        assert names == [".data", ".scale", ".amax"]

    def test_tree_map(self):
        q = quantize(random_array((2, 20, 37)))
        assert_same(jax.tree.map(lambda leaf: leaf, q), q)
        first = jax.tree.map(lambda leaf: leaf[0], q)
        assert first.shape == (20, 37)
        assert_same_bytes(first.dequantize(), q.dequantize()[0])

    def test_copies(self):
        q = quantize(random_array((16, 32)))
        assert_same(copy.deepcopy(q), q)
        assert_same(jax.device_get(q), q)

    def test_a_param_gives_it_whole_and_no_part_of_it(self):
        q = jlp.quantize(random_array((32, 64)), jlp.NVFP4())
        assert q[...] is q
        for asarray in (np.asarray, jnp.asarray, jnp.array):
            with pytest.raises(TypeError, match=r"QuantizedArray\(.*is no array of numbers; call q.dequantize\(\)"):
                asarray(q)
        assert_same_bytes(nnx.Param(q)[...].data, q.data)
        for index in (0, slice(2), (..., 0)):
            with pytest.raises(TypeError, match=r"only \[...\] is the whole; decode it first"):
                q[index]


class TestTransformations:
    @over_scalings
    def test_jit_takes_and_returns_it(self, fmt):
        x, make = random_array((20, 37)), functools.partial(jlp.quantize, fmt=fmt)
        assert_same(jax.jit(make)(x), make(x))
        assert_same(jax.jit(lambda q: q)(make(x)), make(x))
        assert_same_bytes(jax.jit(jlp.dequantize)(make(x)), make(x).dequantize())

    @over_scalings
    def test_vmap_does_what_a_batch_axis_does(self, fmt):
        x = random_array((3, 20, 37))
        make = functools.partial(jlp.quantize, fmt=fmt, axis=-2, hadamard=True)
        assert_same(jax.vmap(make)(x), make(x))
        assert_same(jax.vmap(jax.vmap(make))(x[None]), make(x[None]))
        assert_same(jax.vmap(make, in_axes=1)(jnp.swapaxes(x, 0, 1)), make(x))
        assert_same_bytes(jax.vmap(jlp.dequantize)(make(x)), make(x).dequantize())

    @over_scalings
    def test_scan_over_its_leading_axis(self, fmt):
        q = jlp.quantize(random_array((3, 20, 37)), fmt)

        def body(total, layer):
            assert layer.shape == (20, 37)
            return total + layer.dequantize(jnp.float32), layer

        total, layers = jax.lax.scan(body, jnp.zeros((20, 37)), q)
        assert_same(layers, q)
        assert_same_bytes(total, sum(q.dequantize(jnp.float32)))

    def test_scan_carries_it(self):
        def step(q, _):
            return quantize(q.dequantize() * jnp.bfloat16(0.5)), q.amax

        q = quantize(random_array((20, 37)))
        last, amaxes = jax.lax.scan(step, q, length=3)
        expected = q
        for amax in amaxes:
            assert amax == expected.amax
            expected = step(expected, None)[0]
        assert_same(last, expected)

    def test_while_and_cond(self):
        q = quantize(random_array((20, 37)))
        done = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1]), (0, q))[1]
        assert_same(done, q)
        other = quantize(random_array((20, 37), seed=1))
        assert_same(jax.jit(lambda p: jax.lax.cond(p, lambda: q, lambda: other))(False), other)

    @over_scalings
    def test_remat(self, fmt):
        q, v = jlp.quantize(random_array((20, 37), "float32"), fmt), random_array((37,), "float32", 1)

        def f(q, v):
            return jnp.tanh(q.dequantize() @ v).sum()

        expected = jax.grad(f, argnums=1)(q, v)
        assert jnp.abs(expected).max() > 0
        assert_same_bytes(jax.jit(jax.grad(jax.checkpoint(f), argnums=1))(q, v), jax.jit(jax.grad(f, argnums=1))(q, v))

    def test_donated_buffers_are_reused(self):
        q = quantize(random_array((64, 128)))
        renew = jax.jit(lambda q: dataclasses.replace(q, data=q.data ^ 0x88, amax=2 * q.amax), donate_argnums=0)
        assert renew.lower(q).compile().memory_analysis().alias_size_in_bytes >= q.nbytes
        negated = -2 * q.dequantize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "Some donated buffers were not usable"
            new = renew(q)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(q))
        np.testing.assert_array_equal(new.dequantize(), negated)

    @over_formats
    def test_eval_shape_needs_no_numbers(self, fmt):
        x, make = random_array((2, 20, 37)), functools.partial(jlp.quantize, fmt=fmt)
        shapes, q = jax.eval_shape(make, x), make(x)
        assert jax.tree.structure(shapes) == jax.tree.structure(q)
        assert (shapes.shape, shapes.nbytes, shapes.compression) == (q.shape, q.nbytes, q.compression)
        assert repr(shapes) == repr(q)
        assert jax.eval_shape(jlp.dequantize, shapes).shape == x.shape


class TestPlacement:
    def test_device_put(self):
        q = quantize(random_array((20, 37)))
        moved = jax.device_put(q, jax.devices()[3])
        assert {leaf.device for leaf in jax.tree.leaves(moved)} == {jax.devices()[3]}
        assert_same(moved, q)
        assert_same_bytes(moved.dequantize(), q.dequantize())

    def test_one_sharding_splits_the_batch_axis_of_every_field(self):
        q = quantize(random_array((8, 20, 37)))
        sharding = NamedSharding(meshes.mesh_of((4,)), PartitionSpec("a"))
        placed = jax.device_put(q, sharding)
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(placed))
        assert_same(placed, q)
        assert_same_bytes(placed.dequantize(), q.dequantize())

    def test_fields_split_by_rows_and_blocks(self):
        mesh = meshes.mesh_of((2, 2))
        split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("a", "b"), PartitionSpec()))
        a, b = quantize(random_array((32, 64))), quantize(random_array((48, 64), seed=1))
        placed = jax.device_put(a, dataclasses.replace(a, data=split, scale=split, amax=whole))
        assert placed.data.sharding == placed.scale.sharding == split
        assert_same(placed, a)
        assert_same_bytes(placed.dequantize(), a.dequantize())
        by_rows = NamedSharding(mesh, PartitionSpec("a"))
        placed = jax.device_put(a, dataclasses.replace(a, data=by_rows, scale=by_rows, amax=whole))
        assert_same_bytes(jlp.scaled_matmul(placed, jax.device_put(b, whole)), jlp.scaled_matmul(a, b))


class TestCheckpoints:
    @pytest.mark.filterwarnings("ignore:Sharding info not provided")
    @pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
    def test_orbax_round_trip(self, tmp_path, checkpointer):
        tree = {
            "row": quantize(random_array((20, 37))),
            "column": jlp.quantize(random_array((3, 32, 48)), jlp.NVFP4((16, 16)), axis=-2, hadamard=True),
            "formats": [jlp.quantize(random_array((20, 37)), fmt) for fmt in (*ONE_OF_EACH, *OF_CACHES)],
            "drawn": quantize(random_array((3, 20, 37)), hadamard=DRAWN, sign_key=jax.random.key(0)),
            "bias": jnp.ones(3),
        }
        target = jax.eval_shape(lambda: tree)
        with checkpointer() as saver:
            saver.save(tmp_path / "state", tree)
            if checkpointer is ocp.StandardCheckpointer:
                saver.wait_until_finished()
                restored = saver.restore(tmp_path / "state", target)
            else:
                restored = saver.restore(tmp_path / "state", ocp.args.PyTreeRestore(target))
        assert_same(restored, tree)
        assert_same_bytes(restored["column"].dequantize(), tree["column"].dequantize())

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:Sharding info not provided")
    def test_orbax_does_not_restore_codes_under_another_label(self, tmp_path):
        q = jlp.quantize(random_array((64, 64)), jlp.MXFP8())
        others = {
            r"MXFP8\(scale_rule='floor'\) along axis -1": dataclasses.replace(q, format=jlp.MXFP8(scale_rule="floor")),
            r"along axis -2 of \(64, 64\)": q.mT,
            r"axis -1 of \(64, 61\)": dataclasses.replace(q, matrix_shape=(64, 61)),
            r"rotated by Hadamard\(\)": dataclasses.replace(q, hadamard=jlp.Hadamard()),
            r"rotated by Hadamard\(signs=None\)": dataclasses.replace(q, hadamard=jlp.Hadamard(signs=None)),
            r"\('w', 'signs'\) not found": dataclasses.replace(q, hadamard=DRAWN, signs=jnp.zeros(4, "uint32")),
        }
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / "state", {"w": q})
            saver.wait_until_finished()
            for said, other in others.items():
                with pytest.raises(ValueError, match=said):
                    saver.restore(tmp_path / "state", jax.eval_shape(lambda other=other: {"w": other}))
            again = dataclasses.replace(q, dtype=jnp.dtype("float32"))  # what dequantize gives by default
            restored = saver.restore(tmp_path / "state", jax.eval_shape(lambda: {"w": again}))
        assert_same_bytes(restored, {"w": q})
