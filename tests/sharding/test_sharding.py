"""The bytes do not depend on the mesh: every op on one device against the same op on meshes of 1 to 8 devices.

What must agree and what may travel: quantised bytes agree always; a GEMM agrees in its bytes unless the contraction is
split; the high-precision input is never gathered where blocks divide, and a tensor amax costs a scalar's all-reduce.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often, random_array
from tests.sharding.meshes import (
    PLACEMENTS,
    by_axis_type,
    collectives,
    mesh_of,
    name_of,
    on_mesh,
    place,
    split,
    unless_refused,
)

ROW, TILES = jlp.NVFP4(), jlp.NVFP4((16, 16))
RANDOM = {"rounding": "stochastic", "key": np.array([3, 5], np.uint32)}
DRAWN, SIGN_KEY = jlp.Hadamard(16, "drawn"), np.array([1, 2], np.uint32)
OPERATIONS = {
    "rowwise": lambda x: jlp.quantize(x, ROW),
    "columnwise": lambda x: jlp.quantize(x, ROW, axis=-2),
    "rowwise-rotated": lambda x: jlp.quantize(x, ROW, axis=-1, hadamard=True),
    "columnwise-rotated": lambda x: jlp.quantize(x, ROW, axis=-2, hadamard=True),
    "both": lambda x: jlp.quantize_both(x, ROW),
    "both-rotated": lambda x: jlp.quantize_both(x, ROW, hadamard_columnwise=True),
    "tiles": lambda x: jlp.quantize(x, TILES),
    "both-tiles": lambda x: jlp.quantize_both(x, TILES),
    "stochastic": lambda x: jlp.quantize(x, ROW, **RANDOM),
    "stochastic-columnwise-rotated": lambda x: jlp.quantize(x, ROW, axis=-2, hadamard=True, **RANDOM),
    "stochastic-both-rotated": lambda x: jlp.quantize_both(x, ROW, hadamard_columnwise=True, **RANDOM),
    "stochastic-tiles": lambda x: jlp.quantize_both(x, TILES, **RANDOM),
    "dequantize": lambda x: jlp.quantize(x, ROW).dequantize(),
    "dequantize-columnwise-rotated": lambda x: jlp.quantize(x, ROW, axis=-2, hadamard=True).dequantize(),
    "dequantize-tiles": lambda x: jlp.quantize(x, TILES, axis=-2).dequantize(jnp.float32),
    "hadamard": lambda x: jlp.hadamard_transform(x),
    "hadamard-columns-inverse": lambda x: jlp.hadamard_transform(x, axis=-2, inverse=True),
    "hadamard-drawn": lambda x: jlp.hadamard_transform(x, signs="drawn", sign_key=SIGN_KEY),
    "drawn-columnwise": lambda x: jlp.quantize(x, ROW, axis=-2, hadamard=DRAWN, sign_key=SIGN_KEY),
    "dequantize-drawn": lambda x: jlp.quantize(x, ROW, axis=-1, hadamard=DRAWN, sign_key=SIGN_KEY).dequantize(),
}
EVERYWHERE = ("stochastic-both-rotated", "both-tiles", "dequantize")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BOTH_AXES = (2, 4), P("a", "b")
PLACED = [
    (name, *placement, axis_type)
    for name in OPERATIONS
    for placement in (PLACEMENTS if name in EVERYWHERE else [BOTH_AXES])
    for axis_type in (AUTO, EXPLICIT)
]
PLACED_OFTEN = [
    *((name, *BOTH_AXES, axis_type) for name in OPERATIONS for axis_type in (AUTO, EXPLICIT)),
    *((EVERYWHERE[0], *placement, AUTO) for placement in PLACEMENTS),
    *(
        (name, *placement, AUTO)
        for name in EVERYWHERE[1:]
        for placement in (((8,), P(None, "a")), ((4, 2), P("b", "a")))
    ),
]


@functools.cache
def on_one_device(name, shape, seed=1):
    return jax.device_get(jax.jit(OPERATIONS[name])(random_array(shape, seed=seed)))


def assert_mesh_does_not_matter(name, shape, mesh, spec):
    found, _ = on_mesh(OPERATIONS[name], [random_array(shape, seed=1)], [spec], mesh)
    assert_same_bytes(found, on_one_device(name, shape))


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "sizes", "spec", "axis_type"), often(PLACED_OFTEN, PLACED, 4), ids=name_of)
def test_bytes_do_not_depend_on_the_mesh_and_only_scalars_travel(name, sizes, spec, axis_type):
    """One all-reduce for each amax: the plain one, the rotated one. 8 x 8 blocks: every placement leaves them whole."""
    x, mesh = random_array((128, 128), seed=1), mesh_of(sizes, axis_type)
    result, found = on_mesh(OPERATIONS[name], [x], [spec], mesh)
    assert_same_bytes(result, on_one_device(name, x.shape))
    whole = NamedSharding(mesh, spec).is_fully_replicated
    amaxes = 0 if whole or name.startswith("hadamard") else 2 if name.endswith("both-rotated") else 1
    assert {kind for kind, _ in found} <= {"all-reduce"}
    assert sum(elements for _, elements in found) == amaxes


SHAPED = ("stochastic-both-rotated", "dequantize", "stochastic-tiles", "dequantize-tiles", "dequantize-drawn")
SHAPES = (
    ((40, 72), P("a", "b")),  # ragged both ways: 72 columns are four and a half blocks
    ((96, 48), P("b", "a")),  # whole blocks, but not in each part: 24 rows, 24 columns
    ((32, 200), P(None, ("a", "b"))),
    ((16, 64), P("a", "b")),  # one block of rows
    ((4, 4), P("a", "b")),
    ((0, 32), P("a", "b")),
)
BATCHES = (((4, 32, 64), P("b", None, "a")), ((2, 4, 32, 32), P("a", "b")))


def shaped(shapes):
    """Two operations with every shape and all of them with the first, on axes of either type."""
    every = [(name, *shape, kind) for name in SHAPED for shape in shapes for kind in (AUTO, EXPLICIT)]
    chosen = [
        *((name, *shape, AUTO) for name in SHAPED[:2] for shape in shapes),
        *((name, *shapes[0], AUTO) for name in SHAPED),
        *((name, *shapes[0], EXPLICIT) for name in SHAPED[1:3]),
    ]
    return pytest.mark.parametrize(("name", "shape", "spec", "axis_type"), often(chosen, every, 4), ids=name_of)


class TestShapes:
    @pytest.mark.sampled(11)
    @shaped(SHAPES)
    def test_bytes_of_any_shape_do_not_depend_on_the_mesh(self, name, shape, spec, axis_type):
        assert_mesh_does_not_matter(name, shape, mesh_of((2, 4), axis_type), spec)

    @shaped(BATCHES)
    def test_batch_axes_are_split_too(self, name, shape, spec, axis_type):
        assert_mesh_does_not_matter(name, shape, mesh_of((2, 4), axis_type), spec)

    @by_axis_type
    def test_keys_of_signs_are_split_with_their_matrices(self, axis_type):
        def run(x, keys):
            q = jlp.quantize(x, ROW, axis=-2, hadamard=jlp.Hadamard(32, "drawn"), sign_key=keys)
            return q, q.dequantize()

        x, keys = random_array((4, 32, 64)), np.arange(8, dtype=np.uint32).reshape(4, 2)
        found, _ = on_mesh(run, [x, keys], [P("b", None, "a"), P("b")], mesh_of((2, 4), axis_type))
        assert_same_bytes(found, jax.jit(run)(x, keys))


@pytest.mark.parametrize("name", ["both-rotated", "stochastic-tiles", "dequantize"])
def test_dimensions_that_no_mesh_axis_divides(name):
    sharding, x = NamedSharding(mesh_of((2, 4)), P("a", "b")), random_array((33, 50))

    def constrained(x):
        return OPERATIONS[name](jax.lax.with_sharding_constraint(x, sharding))

    assert_same_bytes(jax.jit(constrained)(x), on_one_device(name, x.shape, seed=0))


@by_axis_type
class TestPlaces:
    def test_each_slice_is_reduced_where_it_is(self, axis_type):
        x, mesh = random_array((4, 32, 64)), mesh_of((2, 4), axis_type)
        for spec, found in ((P("a"), []), (P("a", "b"), [("all-reduce", 2)])):
            assert on_mesh(OPERATIONS["rowwise"], [x], [spec], mesh)[1] == found

    def test_a_key_for_each_slice_may_be_split_or_not(self, axis_type):
        keys = np.arange(8, dtype=np.uint32).reshape(4, 2)
        mesh, x = mesh_of((2, 4), axis_type), random_array((4, 32, 64))
        wanted = jax.device_get(jlp.quantize(x, ROW, rounding="stochastic", key=keys))
        for spec in (P("a", "b"), P(None, "b")):
            for key in (keys, place(keys, mesh, P("a"))):
                assert_same_bytes(jlp.quantize(place(x, mesh, spec), ROW, rounding="stochastic", key=key), wanted)

    def test_eager_and_without_an_ambient_mesh(self, axis_type):
        mesh, x = mesh_of((2, 4), axis_type), random_array((64, 64))
        for name in ("stochastic-both-rotated", "dequantize-tiles"):
            assert_same_bytes(OPERATIONS[name](place(x, mesh, P("a", "b"))), on_one_device(name, x.shape, seed=0))

    def test_results_stay_where_their_operand_is(self, axis_type):
        mesh = mesh_of((2, 4), axis_type)
        row = jlp.quantize(place(random_array((64, 128)), mesh, P("a", "b")), ROW)
        column = jlp.quantize(place(random_array((128, 64)), mesh, P("b", "a")), ROW, axis=-2, hadamard=True)
        for leaf, spec in (
            (row.data, P("a", "b")),
            (row.scale, P("a", "b")),
            (row.amax, P()),
            (column.data, P("a", "b")),
            (column.scale, P("a", "b")),
            (column.dequantize(), P("b", "a")),
        ):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


@by_axis_type
class TestMatmul:
    M, N, K = 64, 32, 128

    def operands(self, batch=()):
        x, w = random_array((*batch, self.M, self.K), seed=3), random_array((*batch, self.N, self.K), seed=4)
        bias = 100 * np.asarray(random_array((self.N,), "float32", seed=5))
        return x, w, bias, 10 * np.asarray(random_array((*batch, self.M, self.N), "float32", seed=6))

    def function(self, formats=(ROW, TILES), **options):
        def run(x, w, bias, accumulate):
            a, b = (jlp.quantize(v, f) for v, f in zip((x, w), formats, strict=True))
            return jlp.scaled_matmul(
                a, b, bias, activation="gelu", accumulate=accumulate, return_pre_activation=True, **options
            )

        return run

    @pytest.mark.parametrize(
        ("sizes", "x_spec", "w_spec", "formats"),
        [
            ((2, 2), P("a"), P("b"), (ROW, ROW)),
            ((2, 2), P("a"), P("b"), (TILES, ROW)),
            ((2, 2), P("a"), P("b"), (ROW, TILES)),
            ((4,), P(), P("a"), (ROW, ROW)),
            ((8,), P("a"), P(), (ROW, TILES)),
            ((4, 2), P("a"), P("a"), (ROW, TILES)),  # rows of both on one axis: one of them is gathered
            ((2, 2), P(("a", "b")), P(), (TILES, ROW)),
        ],
        ids=name_of,
    )
    def test_bytes_do_not_depend_on_how_rows_and_columns_are_split(self, sizes, x_spec, w_spec, formats, axis_type):
        args, function = self.operands(), self.function(formats)
        result, _ = on_mesh(function, args, (x_spec, w_spec, P(), P()), mesh_of(sizes, axis_type))
        assert_same_bytes(result, jax.jit(function)(*args))

    @pytest.mark.parametrize(
        ("sizes", "x_spec", "w_spec", "implementation"),
        [
            ((8,), P(None, "a"), P(None, "a"), None),
            ((2, 4), P("a", "b"), P("a", "b"), None),
            ((2, 2), P("b", "a"), P(None, "a"), None),
            ((2, 2), P(None, "a"), P("b"), None),
            ((2, 2), P("b", "a"), P(None, "a"), "reference"),
        ],
        ids=name_of,
    )
    def test_a_split_contraction_adds_the_epilogue_once(self, sizes, x_spec, w_spec, implementation, axis_type):
        """Partial sums meet in another order, so results agree to float32's rounding, not in bytes."""
        args, function = (
            self.operands(),
            self.function(preferred_element_type=jnp.float32, implementation=implementation),
        )
        result, _ = on_mesh(function, args, (x_spec, w_spec, P(), P()), mesh_of(sizes, axis_type))
        for actual, wanted in zip(result, jax.jit(function)(*args), strict=True):
            assert actual.dtype == wanted.dtype
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize(("spec", "elements"), [(P(None, "b"), M * N), (P("a", "b"), M // 2 * N)], ids=name_of)
    def test_a_split_contraction_costs_one_all_reduce_of_the_result(self, spec, elements, axis_type):
        mesh = mesh_of((2, 4), axis_type)
        a, b = (jlp.quantize(v, ROW) for v in self.operands()[:2])
        with jax.set_mesh(mesh):
            placed = split(a, mesh, spec), split(b, mesh, P(None, "b"))
            compiled = jax.jit(jlp.scaled_matmul).lower(*placed).compile()
        assert collectives(compiled) == [("all-reduce", elements)]

    @pytest.mark.parametrize(("a_spec", "b_spec"), [(P("a"), P("b")), (P("a"), P())], ids=str)
    def test_split_rows_and_columns_cost_nothing(self, a_spec, b_spec, axis_type):
        mesh = mesh_of((2, 2), axis_type)
        a, b = (jlp.quantize(v, f) for v, f in zip(self.operands()[:2], (ROW, TILES), strict=True))
        with jax.set_mesh(mesh):
            placed = split(a, mesh, a_spec), split(b, mesh, b_spec)
            compiled = jax.jit(jlp.scaled_matmul).lower(*placed).compile()
            assert_same_bytes(compiled(*placed), jlp.scaled_matmul(a, b))
        assert collectives(compiled) == []

    @pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b"))], ids=str)
    def test_batch_axes_are_split_too(self, spec, axis_type):
        args, function = self.operands((4,)), self.function()
        result, _ = on_mesh(function, args, (spec, P(spec[0]), P(), P()), mesh_of((2, 2), axis_type))
        assert_same_bytes(result, jax.jit(function)(*args))

    @pytest.mark.parametrize("formats", [(ROW, TILES), (TILES, ROW)], ids=name_of)
    def test_ragged_operands(self, formats, axis_type):
        """The codes of a ragged contraction are whole, whatever splits the columns of x and w."""
        args = random_array((40, 72), seed=1), random_array((24, 72), seed=2)

        def function(x, w):
            return jlp.scaled_matmul(*(jlp.quantize(v, f) for v, f in zip((x, w), formats, strict=True)))

        expected = jax.jit(function)(*args)
        for specs in ((P("a"), P("b")), (P("a", "b"), P("a", "b"))):
            assert_same_bytes(on_mesh(function, args, specs, mesh_of((2, 4), axis_type))[0], expected)


class TestShardMap:
    @by_axis_type
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize(
        ("spec", "axis"), [(P("a", "b"), -1), (P("a", "b"), -2), (P(None, ("a", "b")), -1)], ids=name_of
    )
    def test_an_explicit_offset_gives_the_bytes_of_the_whole(self, spec, axis, axis_type, check_vma):
        mesh, x, amax = mesh_of((2, 4), axis_type), random_array((64, 128)), jnp.float32(40)

        def quantize(x, key, amax, offset=(0, 0)):
            q = jlp.quantize(
                x, ROW, axis=axis, hadamard=axis == -2, rounding="stochastic", key=key, amax=amax, offset=offset
            )
            return q.data, q.scale

        def local(x, key, amax):
            offset = [jax.lax.axis_index(name) * n if name else 0 for name, n in zip(spec, x.shape, strict=True)]
            return quantize(x, key, amax, tuple(offset))

        out_spec = spec if axis == -1 else P(*reversed(spec))
        function = jax.shard_map(
            local, mesh=mesh, in_specs=(spec, P(), P()), out_specs=(out_spec, out_spec), check_vma=check_vma
        )
        args = x, RANDOM["key"], amax
        assert_same_bytes(on_mesh(function, args, (spec, P(), P()), mesh)[0], quantize(*args))

    def test_without_an_offset_shards_share_their_random_bits(self):
        x = np.tile(random_array((32, 64), "float32"), (2, 1))

        def local(x):
            return jlp.quantize(x, ROW, **RANDOM, amax=jnp.float32(40)).data

        function = jax.jit(jax.shard_map(local, mesh=mesh_of((2,)), in_specs=P("a"), out_specs=P("a")))
        first, second = np.split(np.asarray(function(x)), 2)
        np.testing.assert_array_equal(first, second)
        assert (np.asarray(local(x))[32:] != second).mean() > 0.1

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_an_amax_reduced_by_the_caller_is_that_of_the_whole(self, check_vma):
        mesh, x, spec = mesh_of((2, 4)), random_array((64, 128)), P("a", "b")

        def local(x):
            amax = jax.lax.pmax(jnp.max(jnp.abs(x.astype(jnp.float32))), ("a", "b"))
            q = jlp.quantize(x, ROW, amax=amax)
            return q.data, q.scale

        function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=check_vma)
        whole = jlp.quantize(x, ROW)
        assert_same_bytes(jax.jit(function)(x), (whole.data, whole.scale))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_matmul_of_the_parts(self, check_vma):
        mesh, x, w = mesh_of((2, 2)), random_array((64, 128), seed=1), random_array((32, 128), seed=2)
        a, b = jlp.quantize(x, ROW), jlp.quantize(w, ROW)
        amax_x, amax_w = a.amax, b.amax

        def local(x, w):
            a, b = jlp.quantize(x, ROW, amax=amax_x), jlp.quantize(w, ROW, amax=amax_w)
            return jax.lax.psum(jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32), "b")

        function = jax.shard_map(
            local, mesh=mesh, in_specs=(P("a", "b"), P(None, "b")), out_specs=P("a"), check_vma=check_vma
        )
        wanted = jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(jax.jit(function)(x, w), wanted, rtol=1e-5, atol=1e-5)

    @by_axis_type
    @pytest.mark.parametrize("name", ["both-tiles", "stochastic", "dequantize"])
    @pytest.mark.parametrize("spec", [P("a", None, "b"), P("a", "b"), P("a")], ids=str)
    def test_partially_manual_gives_the_bytes_or_says_that_it_cannot(self, name, spec, axis_type):
        mesh, x = mesh_of((2, 4), axis_type), random_array((4, 32, 64))
        function = jax.shard_map(
            lambda x: jax.tree.leaves(OPERATIONS[name](x)), in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )
        out = unless_refused(lambda: on_mesh(function, [x], [spec], mesh)[0])
        assert out is not None or spec != P("a")  # nothing else splits there
        if out is not None:
            assert_same_bytes(out, on_one_device(name, x.shape, seed=0))
