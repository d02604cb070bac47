"""Products around a ring of devices: the bits of the product of the gathered array, and of sums in the ring's order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, format_name, often, random_array
from tests.sharding.meshes import mesh_of, on_mesh

FORMATS = (jlp.NVFP4(), jlp.NVFP4(row_scaled=True), jlp.MXFP8(), jlp.Float8Block(), jlp.Float8Tensor())
over_formats = pytest.mark.parametrize("fmt", often(FORMATS[:3], FORMATS), ids=format_name)
M, K, N = 64, 256, 96


def weight_format(fmt):
    return {"NVFP4": jlp.NVFP4((16, 16)), "Float8Block": jlp.Float8Block(block=(128, 128))}.get(type(fmt).__name__, fmt)


def shared(fmt):
    """Shards share their tensor scale."""
    return {"axis_name": "a"} if fmt.has_tensor_scale else {}


@over_formats
@pytest.mark.parametrize("devices", often([4], [1, 2, 4, 8]))
def test_all_gather_matmul(fmt, devices):
    x, w, bias = random_array((devices * M, K), seed=1), random_array((N, K), seed=2), random_array((N,), seed=3)
    b = jlp.quantize(w, weight_format(fmt))
    options = {"bias": bias, "activation": "gelu", "preferred_element_type": jnp.float32}

    def local(shard):
        return jlp.all_gather_matmul(jlp.quantize(shard, fmt, **shared(fmt)), b, "a", **options)[None]

    function = jax.shard_map(local, mesh=mesh_of((devices,)), in_specs=P("a"), out_specs=P("a"), check_vma=False)
    result, found = on_mesh(function, [x], [P("a")], mesh_of((devices,)))
    expected = jlp.scaled_matmul(jlp.quantize(x, fmt), b, **options)
    for held in result:
        assert_same_bytes(held, expected)
    kinds = [kind for kind, elements in found if elements > 1]
    assert set(kinds) <= {"collective-permute"} and (not kinds) == (devices == 1)


@over_formats
@pytest.mark.parametrize("devices", often([4], [1, 2, 4, 8]))
def test_matmul_reduce_scatter(fmt, devices):
    x, w = random_array((devices * M, devices * K), seed=4), random_array((N, devices * K), seed=5)

    def product(x, w):
        return jlp.quantize(x, fmt), jlp.quantize(w, weight_format(fmt))

    def local(shard, w):
        return jlp.matmul_reduce_scatter(*product(shard, w), "a", preferred_element_type=jnp.float32)

    split = P(None, "a")
    function = jax.shard_map(local, mesh=mesh_of((devices,)), in_specs=(split, split), out_specs=P("a"))
    result, found = on_mesh(function, [x, w], [split, split], mesh_of((devices,)))
    parts = zip(jnp.split(x, devices, 1), jnp.split(w, devices, 1), strict=True)
    terms = [np.asarray(jlp.scaled_matmul(*product(*part), preferred_element_type=jnp.float32)) for part in parts]
    for j in range(devices):
        of_part = [terms[(j + 1 + i) % devices][j * M : (j + 1) * M] for i in range(devices)]
        assert_same_bytes(result[j * M : (j + 1) * M], functools.reduce(np.add, of_part))
    assert {kind for kind, _ in found} <= {"collective-permute"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_along_two_mesh_axes_and_under_scan(check_vma):
    x, w = random_array((3, 8 * M, K), seed=6), random_array((N, K), seed=7)
    fmt = jlp.MXFP8()

    def local(shards):
        def body(carry, shard):
            return carry, jlp.all_gather_matmul(jlp.quantize(shard, fmt), jlp.quantize(w, fmt), ("a", "b"))

        return jax.lax.scan(body, 0, shards)[1][None]

    mesh, spec = mesh_of((2, 4)), P(None, ("a", "b"))
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(("a", "b")), check_vma=check_vma)
    result, _ = on_mesh(function, [x], [spec], mesh)
    for i in range(3):
        expected = jlp.scaled_matmul(jlp.quantize(x[i], fmt), jlp.quantize(w, fmt))
        for held in result:
            assert_same_bytes(held[i], expected)


GATHER, SCATTER = jlp.all_gather_matmul, jlp.matmul_reduce_scatter


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "lhs is a .*; needs a QuantizedArray", lambda q, x: GATHER(x, q, "a")),
        (TypeError, "accumulate= is not among its options", lambda q, x: GATHER(q, q, "a", accumulate=x)),
        (TypeError, "bias= is not among its options", lambda q, x: SCATTER(q, q, "a", bias=x)),
        (ValueError, "axis_name='c'; needs an axis of the mesh", lambda q, x: GATHER(q, q, "c")),
        (ValueError, "has 30 rows for 4 devices along 'a'", lambda q, x: SCATTER(q, q, "a")),
        (ValueError, "lhs is quantised along axis -2; needs -1", lambda q, x: GATHER(q.mT, q, "a")),
        (ValueError, "needs a matrix: map over", lambda q, x: GATHER(q, jlp.quantize(x[None], q.format), "a")),
    ],
)
def test_bad_input(error, message, call):
    def local(x):
        return call(jlp.quantize(x, jlp.MXFP8()), x)

    function = jax.shard_map(local, mesh=mesh_of((4,)), in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(error, match=message):
        jax.eval_shape(function, jnp.ones((30, 64)))
