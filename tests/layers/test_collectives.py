"""all_gather_quantized: shards quantised where they are, put together, are the bytes of the whole array quantised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import ONE_OF_EACH, assert_same_bytes, format_name, often, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, on_mesh

FORMATS = (*ONE_OF_EACH, jlp.Int4(group_size=32), jlp.Int4(group_size=32, symmetric=False))
OF_EACH_SCALING = (jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Block(), jlp.Float8Tensor(), jlp.Int4(32, symmetric=False))
over_formats = pytest.mark.parametrize("fmt", often(OF_EACH_SCALING, FORMATS), ids=format_name)
over_orientations = pytest.mark.parametrize("axis", [-1, -2], ids=["rowwise", "columnwise"])
over_gathered_axes = pytest.mark.parametrize("gathered", [0, 1], ids=["rows", "columns"])


def shard_spec(gathered, ndim, axis_name):
    entries = [None] * ndim
    entries[gathered] = axis_name
    return P(*entries)


def gather_on(mesh, x, quantize, gathered, axis_name="a", check_vma=False):
    """What every device holds, and the collectives: the shards of x along an axis quantised and put together."""
    spec = shard_spec(gathered, x.ndim, axis_name)

    def local(shard):
        return jlp.all_gather_quantized(quantize(shard, axis_name=axis_name), axis_name, axis=gathered)

    # Every device's result, one after the other: that they are the same is to be shown, not assumed.
    def all_devices(shard):
        return jax.tree.map(lambda leaf: leaf[None], local(shard))

    function = jax.shard_map(all_devices, mesh=mesh, in_specs=spec, out_specs=P(axis_name), check_vma=check_vma)
    result, found = on_mesh(function, [x], [spec], mesh)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], jax.device_get(result)) for i in range(mesh.size)], found


@pytest.mark.sampled(5)
@over_formats
@over_orientations
@over_gathered_axes
@pytest.mark.parametrize("devices", often([8], [1, 2, 8]))
def test_the_bytes_are_those_of_the_whole_array(fmt, axis, gathered, devices):
    shape = [128, 128]
    shape[gathered] = 128 * devices
    x = random_array(tuple(shape), seed=1)
    whole_lines = fmt.scaling == "rows" and gathered != axis % 2

    def quantize(x, axis_name=None):
        return jlp.quantize(x, fmt, axis=axis, axis_name=None if whole_lines else axis_name)

    whole = quantize(x)
    held, found = gather_on(mesh_of((devices,)), x, quantize, gathered)
    for q in held:
        assert_same_bytes(q, whole)
        assert (q.shape, q.axis, q.format, q.dtype) == (whole.shape, whole.axis, whole.format, whole.dtype)
    travelling = sum(elements for kind, elements in found if kind == "all-gather")
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce"}
    shared = fmt.scaling == "tensor" or (fmt.scaling == "rows" and not whole_lines)
    points = 0 if whole.zero_point is None else whole.zero_point.size
    if devices > 1:
        assert travelling == whole.data.size + (0 if shared else whole.scale.size) + points


@pytest.mark.sampled(3)
@over_orientations
@over_gathered_axes
@pytest.mark.parametrize("check_vma", [True, False])
def test_rotated_and_along_two_mesh_axes(axis, gathered, check_vma):
    x = random_array((512, 256) if gathered == 0 else (256, 512), seed=2)
    quantize = functools.partial(jlp.quantize, fmt=jlp.NVFP4(), axis=axis, hadamard=True)
    held, found = gather_on(mesh_of((2, 4)), x, quantize, gathered, ("a", "b"), check_vma)
    for q in held:
        assert_same_bytes(q, quantize(x))
    reductions = [elements for kind, elements in found if kind == "all-reduce"]
    assert sum(reductions) == (1 if check_vma else 3)  # the amax; unless its type says so, also whether all agree


@pytest.mark.parametrize("fmt", often([jlp.NVFP4()], [jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Tensor()]), ids=format_name)
@pytest.mark.parametrize("check_vma", [True, False])
def test_drawn_signs_are_those_of_all_shards_or_nothing_is(fmt, check_vma):
    x, rotation = random_array((512, 128), seed=2), jlp.Hadamard(128, "drawn")

    def quantize(x, sign_key, axis_name=None):
        return jlp.quantize(x, fmt, axis=-2, hadamard=rotation, sign_key=sign_key, axis_name=axis_name)

    def with_own(x, axis_name):
        return quantize(x, jax.random.key(jax.lax.axis_index(axis_name)), axis_name)

    key = jax.random.key(0)
    held, _ = gather_on(mesh_of((4,)), x, functools.partial(quantize, sign_key=key), 0, check_vma=check_vma)
    for q in held:
        assert_same_bytes(q, quantize(x, key))
    for q in gather_on(mesh_of((4,)), x, with_own, 0, check_vma=check_vma)[0]:
        assert np.isnan(np.float32(q.dequantize())).all()


@pytest.mark.parametrize("fmt", [jlp.Float8Block(), jlp.Float8Block(block=(128, 128)), jlp.NVFP4()], ids=format_name)
def test_both_layouts_follow(fmt):
    """What cuBLASLt reads, and the compact form, of the gathered array are those of the whole array."""
    x = random_array((512, 256), seed=3)
    for axis in (-1, -2):
        quantize = functools.partial(jlp.quantize, fmt=fmt, axis=axis)
        q, whole = gather_on(mesh_of((4,)), x, quantize, 0)[0][0], quantize(x)
        assert_same_bytes(jlp.layouts.gemm_scales(q), jlp.layouts.gemm_scales(whole))
        if not fmt.packed:
            assert_same_bytes(jlp.layouts.to_compact(q), jlp.layouts.to_compact(whole))


def test_batch_axes_bring_their_own_amaxes():
    x = np.asarray(random_array((8, 32, 64), seed=4)) * np.arange(1, 9).astype(jnp.bfloat16)[:, None, None]
    spec = P("a")

    def local(shard):
        return jlp.all_gather_quantized(jlp.quantize(shard, jlp.NVFP4()), "a")

    function = jax.shard_map(local, mesh=mesh_of((4,)), in_specs=spec, out_specs=P(), check_vma=False)
    assert_same_bytes(jax.jit(function)(x), jlp.quantize(x, jlp.NVFP4()))


def test_a_vector():
    x = random_array((256,), seed=5)
    held, _ = gather_on(mesh_of((2,)), x, functools.partial(jlp.quantize, fmt=jlp.NVFP4()), 0)
    assert_same_bytes(held[1], jlp.quantize(x, jlp.NVFP4()))


@pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.Float8Tensor()], ids=format_name)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_that_do_not_share_their_tensor_scale_are_nan(fmt, check_vma):
    def gathered(x):
        def local(shard):
            return jlp.all_gather_quantized(jlp.quantize(shard, fmt), "a").dequantize()[None]

        function = jax.shard_map(local, mesh=mesh_of((2,)), in_specs=P("a"), out_specs=P("a"), check_vma=check_vma)
        return np.asarray(jax.jit(function)(x)).astype(np.float32)

    x = random_array((64, 64), "float32", 6)
    assert np.isnan(gathered(x)).all()
    same = np.concatenate([np.asarray(x)[:32]] * 2)
    assert_same_bytes(gathered(same)[0], np.asarray(jlp.quantize(same, fmt).dequantize()).astype(np.float32))


@by_axis_type
def test_a_layer_whose_kernel_is_gathered_in_4_bits(axis_type):
    """FSDP by hand: the product with the gathered kernel is that with the whole one, bit for bit."""
    mesh, x, kernel = mesh_of((4,), axis_type), random_array((64, 128), seed=7), random_array((128, 96), "float32", 8)
    tiles = jlp.NVFP4((16, 16))

    def local(x, shard):
        w = jlp.all_gather_quantized(jlp.quantize(shard, tiles, axis=-2, axis_name="a"), "a")
        return jlp.scaled_matmul(jlp.quantize(x, jlp.NVFP4(), axis_name="a"), w.mT)

    function = jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"))
    result, found = on_mesh(function, [x, kernel], [P("a"), P("a")], mesh)
    assert_same_bytes(result, jlp.scaled_matmul(jlp.quantize(x, jlp.NVFP4()), jlp.quantize(kernel, tiles, axis=-2).mT))
    assert sum(elements for kind, elements in found if kind == "all-gather") == 128 * 96 // 2 + 128 * 96 // 256


class TestAllToAll:
    """Parts that are sent quantised are those of the array that was quantised."""

    def exchanged(self, mesh, x, quantize, split, together, names="a"):
        """What each device has after its part of x [n, ...] was quantised and exchanged; and decoded before that."""

        def local(part):
            q = quantize(part[0])
            moved = jlp.all_to_all_quantized(q, names, split, together)
            plain = jax.lax.all_to_all(q.dequantize(jnp.float32), names, split, together, tiled=True)
            return jax.tree.map(lambda leaf: leaf[None], (moved.dequantize(jnp.float32), plain))

        function = jax.shard_map(local, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)
        (actual, expected), found = on_mesh(function, [x], [P(names)], mesh)
        assert_same_bytes(actual, expected)
        return found

    @pytest.mark.sampled(5)
    @over_formats
    @over_orientations
    @pytest.mark.parametrize(("split", "together"), [(0, 0), (0, 1), (1, 0), (1, 1)])
    def test_along_the_axes_of_a_matrix(self, fmt, axis, split, together):
        quantize = functools.partial(jlp.quantize, fmt=fmt, axis=axis)
        if fmt.has_tensor_scale:
            quantize = functools.partial(quantize, amax=jnp.float32(3))
        found = self.exchanged(mesh_of((2,)), random_array((2, 256, 256), seed=1), quantize, split, together)
        assert {kind for kind, _ in found} <= {"all-to-all", "all-reduce"}

    @over_formats
    def test_along_batch_axes_with_amaxes_of_their_own(self, fmt):
        x = np.asarray(random_array((8, 2, 8, 128, 128), seed=2)) * np.arange(1, 9).astype(jnp.bfloat16)[:, None, None]
        self.exchanged(mesh_of((2, 4)), x, functools.partial(jlp.quantize, fmt=fmt), 1, 0, ("a", "b"))

    def test_from_a_batch_axis_to_rows(self):
        """As experts do: [experts, rows, features] -> [experts of the device, rows of all devices, features]."""
        x = random_array((4, 8, 32, 64), seed=3)
        self.exchanged(mesh_of((4,)), x, functools.partial(jlp.quantize, fmt=jlp.MXFP8()), 0, 1)

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_rows_with_amaxes_of_their_own(self, axis):
        quantize = functools.partial(jlp.quantize, fmt=jlp.NVFP4(row_scaled=True), axis=axis)
        lines = 0 if axis == -1 else 1
        self.exchanged(mesh_of((4,)), random_array((4, 64, 64), seed=4), quantize, lines, lines)

    def test_tensor_scales_that_differ_are_nan(self):
        def local(x):
            return jlp.all_to_all_quantized(jlp.quantize(x, jlp.NVFP4()), "a").dequantize()

        function = jax.shard_map(local, mesh=mesh_of((2,)), in_specs=P("a"), out_specs=P("a"), check_vma=False)
        assert np.isnan(np.asarray(jax.jit(function)(random_array((64, 64)))).astype(np.float32)).all()

    @pytest.mark.parametrize(
        ("fmt", "axes", "message"),
        [
            (jlp.MXFP8(), (0, 5), "axis=5 is out of range"),
            (jlp.MXFP8(), (1, 0), "has 62 along axis 1, and there are 4 devices along 'a'; needs a multiple of that"),
            (jlp.MXFP8(), (2, 0), "has 16 along axis -1; blocks of MXFP8 .* need a multiple of 32"),
            (jlp.NVFP4(), (0, 2), "its slices or rows have amaxes or signs of their own; needs two axes of the matrix"),
            (jlp.NVFP4(row_scaled=True), (0, 2), "amaxes or signs of their own; needs one axis for both"),
        ],
    )
    def test_what_cannot_be_exchanged_is_refused(self, fmt, axes, message):
        def local(x):
            return jlp.all_to_all_quantized(jlp.quantize(x, fmt), "a", *axes).data

        function = jax.shard_map(local, mesh=mesh_of((4,)), in_specs=P(), out_specs=P("a"), check_vma=False)
        with pytest.raises(ValueError, match=f"^all_to_all_quantized: .*{message}"):
            jax.eval_shape(function, jnp.ones((4, 62, 64)))


class TestAxisName:
    """quantize and quantize_both of a shard scale by the amax of the whole."""

    @pytest.mark.parametrize("hadamard", often([True], [False, True]))
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shards_are_those_of_the_whole(self, hadamard, check_vma):
        x = np.array(random_array((64, 128), seed=9))
        x[3, 5] = 1e3

        def both(x, **options):
            row, column = jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=hadamard, **options)
            return row.data, row.scale, column.data, column.scale

        row, column = P("a", "b"), P("b", "a")
        function = jax.shard_map(
            functools.partial(both, axis_name=("a", "b")),
            mesh=mesh_of((2, 4)),
            in_specs=row,
            out_specs=(row, row, column, column),
            check_vma=check_vma,
        )
        assert_same_bytes(jax.jit(function)(x), both(x))

    def test_a_nan_in_one_shard_reaches_all(self):
        x = np.array(random_array((64, 64)))
        x[0, 0] = np.nan

        def local(shard):
            return jlp.quantize(shard, jlp.NVFP4(), axis_name="a").dequantize()

        function = jax.shard_map(local, mesh=mesh_of((4,)), in_specs=P("a"), out_specs=P("a"))
        assert np.isnan(np.asarray(jax.jit(function)(x)).astype(np.float32)).all()


class TestErrors:
    def gather(self, x, gathered=0, **quantize):
        def local(shard):
            return jlp.all_gather_quantized(jlp.quantize(shard, **quantize), "a", axis=gathered)

        jax.eval_shape(jax.shard_map(local, mesh=mesh_of((4,)), in_specs=P("a"), out_specs=P(), check_vma=False), x)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"fmt": jlp.NVFP4(), "axis": -2}, r"has 8 along axis -2; blocks of NVFP4 1x16 need a multiple of 16"),
            ({"fmt": jlp.NVFP4((16, 16))}, r"has 8 along axis -2; blocks of NVFP4 16x16 need a multiple of 16"),
            ({"fmt": jlp.Float8Block(), "axis": -2}, "multiple of 128"),
        ],
    )
    def test_a_shard_that_ends_within_a_block(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.gather(jnp.ones((32, 64)), **options)
        self.gather(jnp.ones((32, 64)), fmt=jlp.NVFP4())  # its lines have any number

    def test_a_rotation_that_would_be_cut(self):
        options = {"fmt": jlp.NVFP4(), "axis": -2, "hadamard": jlp.Hadamard(64)}
        with pytest.raises(ValueError, match="rotated by 64 need a multiple of 64, or gather before quantising"):
            self.gather(jnp.ones((128, 64)), **options)

    def test_what_is_no_quantised_array_or_no_axis_of_it(self):
        with pytest.raises(TypeError, match="q is a .*; needs a QuantizedArray: quantise it first"):
            jlp.all_gather_quantized(jnp.ones((2, 2)), "a")
        with pytest.raises(ValueError, match=r"axis=2 is out of range for a QuantizedArray of shape \(8, 64\)"):
            self.gather(jnp.ones((32, 64)), fmt=jlp.NVFP4(), gathered=2)
