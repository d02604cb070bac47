"""linears and mlp on meshes: the numbers of one device, and no more traffic than separate layers have."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import EVERY, SAVED, separate_linears, separate_mlp
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(5)

BATCH, TIME, K, F = 4, 64, 128, 256
NVFP4 = jlp.NVFP4BlockScaling()


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """How x and y, the first kernels and the last one lie on the mesh axes; which results are sums of parts."""

    sizes: tuple[int, ...]
    x: P
    first: P
    last: P
    summed: str


PARALLELISMS = {
    "data": Parallelism((4,), P("a"), P(), P(), "w"),
    "fsdp": Parallelism((4,), P("a"), P("a"), P("a"), "w"),
    "tensor": Parallelism((4,), P(), P(None, "a"), P("a"), "yx"),
    "data, fsdp, tensor": Parallelism((2, 2, 2), P(("a", "b")), P("b", "c"), P("c", "b"), "ywx"),
}
over_parallelisms = pytest.mark.parametrize("parallelism", PARALLELISMS.values(), ids=PARALLELISMS)


@functools.cache
def operands():
    x, dy = random_array((BATCH, TIME, K)), random_array((BATCH, TIME, K), seed=1)
    kernels = [random_array(s, "float32", 2 + i) / 8 for i, s in enumerate([(K, F), (K, F), (F, K)])]
    return x, kernels, dy


def step(function, x, kernels, dy):
    """y, dx and the gradients of kernels."""
    y, pullback = jax.vjp(function, x, kernels)
    dx, dw = pullback(dy)
    return y, dx, dw


def on_mesh(function, parallelism, axis_type, dys=None):
    """The step's results and its collectives. `dys`: gradients of linears; of an MLP if there are none."""
    p, mesh = parallelism, mesh_of(parallelism.sizes, axis_type)
    x, kernels, dy = operands()
    of_y, places = p.x, (p.first, p.first, p.last)
    if dys is not None:
        kernels, places, dy = kernels[:2], places[:2], dys
        of_y = P(*(p.x or (None,)), None, *p.first[1:])
    with jax.set_mesh(mesh):
        weights = [place(w, mesh, spec) for w, spec in zip(kernels, places, strict=True)]
        placed = place(x, mesh, p.x), weights, jax.tree.map(lambda leaf: place(leaf, mesh, of_y), dy)
        compiled = jax.jit(functools.partial(step, function)).lower(*placed).compile()
        return jax.device_get(compiled(*placed)), traffic.collectives(compiled)


def check_numbers(parallelism, results, expected):
    """All bytes, but for sums over a split axis, which are added up in another order."""
    for name, actual, single in zip("yxw", results, jax.device_get(expected), strict=True):
        if name not in parallelism.summed:
            assert_same_bytes(actual, single)
            continue
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(single), strict=True):
            a, e, eps = a.astype(np.float64), e.astype(np.float64), float(jnp.finfo(e.dtype).eps)
            np.testing.assert_allclose(a, e, rtol=2 * eps, atol=1e-5 * np.abs(e).max())


def moved(found):
    """Bytes by kind of collective, and the largest of its results in high precision."""
    sizes, largest = collections.Counter(), collections.Counter()
    for collective in found:
        sizes[collective.kind] += collective.nbytes
        wide = [np.prod(shape, dtype=int) for dtype, shape in collective.results if dtype in ("bf16", "f16", "f32")]
        largest[collective.kind] = max(largest[collective.kind], *wide, 0)
    return sizes, largest


def check_traffic(found, separate):
    """No more than separate layers move, and nothing in high precision is gathered or exchanged."""
    (sizes, largest), (expected, _) = moved(found), moved(separate)
    assert set(sizes) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert largest["all-gather"] <= BATCH * TIME * F // 128  # block scales at most
    for kind, size in sizes.items():
        assert size <= expected[kind], (kind, sizes, expected)


@functools.cache
def separately(recipe, parallelism, axis_type):
    return on_mesh(functools.partial(separate_mlp, recipe=EVERY[recipe]), parallelism, axis_type)


@functools.cache
def on_one_device(recipe, saved):
    function = functools.partial(jlp.mlp, recipe=EVERY[recipe], saved=saved)
    return jax.jit(functools.partial(step, function))(*operands())


@pytest.mark.slow
@by_axis_type
@over_parallelisms
@pytest.mark.parametrize(
    ("recipe", "saved"),
    often(
        [("nvfp4", "quantized"), ("nvfp4", "recompute")],
        [*(("nvfp4", saved) for saved in SAVED), ("mxfp8", "recompute"), ("fp8_current", "quantized")],
        2,
    ),
)
def test_an_mlp(recipe, saved, parallelism, axis_type):
    options = {"recipe": EVERY[recipe], "saved": saved}
    if axis_type == AxisType.Explicit:
        options["out_sharding"] = NamedSharding(mesh_of(parallelism.sizes, axis_type), parallelism.x)
    results, found = on_mesh(functools.partial(jlp.mlp, **options), parallelism, axis_type)
    check_numbers(parallelism, results, on_one_device(recipe, saved))
    if saved == "quantized" and axis_type == AxisType.Auto:
        check_traffic(found, separately(recipe, parallelism, axis_type)[1])
    assert moved(found)[1]["all-gather"] <= BATCH * TIME * F // 128


@pytest.mark.slow
@by_axis_type
@over_parallelisms
@pytest.mark.parametrize("recipe", often(["nvfp4"], ["nvfp4", "mxfp8"]))
def test_linears(recipe, parallelism, axis_type):
    dys = tuple(random_array((BATCH, TIME, F), seed=20 + i) for i in range(2))
    x, kernels, _ = operands()
    shared = functools.partial(jlp.linears, recipe=EVERY[recipe])
    results, found = on_mesh(shared, parallelism, axis_type, dys)
    summed = dataclasses.replace(parallelism, summed=parallelism.summed.replace("y", ""))
    check_numbers(summed, results, jax.jit(functools.partial(step, shared))(x, kernels[:2], dys))
    separate = functools.partial(separate_linears, recipe=EVERY[recipe])
    check_traffic(found, on_mesh(separate, parallelism, axis_type, dys)[1])


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_tokens_is_the_loop_over_shards(saved, check_vma):
    """Each shard is a tensor of its own; gradients of kernels are added up."""
    x, kernels, dy = operands()
    function = functools.partial(jlp.mlp, recipe=NVFP4, saved=saved)
    mapped = jax.shard_map(function, mesh=mesh_of((4,)), in_specs=(P("a"), P()), out_specs=P("a"), check_vma=check_vma)
    y, dx, dw = jax.jit(functools.partial(step, mapped))(x, kernels, dy)
    one = jax.jit(functools.partial(step, function))
    loop = [one(x[i : i + 1], kernels, dy[i : i + 1]) for i in range(4)]
    assert_same_bytes((y, dx), tuple(jnp.concatenate([part[i] for part in loop]) for i in range(2)))
    for actual, *parts in zip(dw, *(part[2] for part in loop), strict=True):
        np.testing.assert_allclose(actual, sum(parts), rtol=1e-5, atol=1e-4 * float(jnp.abs(actual).max()))


@pytest.mark.parametrize("saved", SAVED)
def test_shard_map_of_tensor_parallel_kernels(saved):
    """Each device has a slice of the hidden features; the results of down are added up by hand."""
    x, kernels, dy = operands()

    def sliced(x, kernels):
        return jax.lax.psum(jlp.mlp(x, kernels, recipe=jlp.MXFP8BlockScaling(), saved=saved).astype(jnp.float32), "a")

    specs = P(), [P(None, "a"), P(None, "a"), P("a")]
    mapped = jax.shard_map(sliced, mesh=mesh_of((4,)), in_specs=specs, out_specs=P())
    y, dx, dw = jax.jit(functools.partial(step, mapped))(x, kernels, dy.astype(jnp.float32))
    whole = functools.partial(jlp.mlp, recipe=jlp.MXFP8BlockScaling(), saved=saved)
    expected = jax.jit(functools.partial(step, whole))(x, kernels, dy)
    assert_same_bytes(dw, expected[2])
    for actual, single in ((y, expected[0]), (dx, expected[1])):
        a, e = (np.asarray(v).astype(np.float64) for v in (actual, single))
        assert np.linalg.norm(a - e) < 0.01 * np.linalg.norm(e)  # parts are rounded to bfloat16
