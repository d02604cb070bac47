"""FSDP by hand: kernels whose shards are gathered as codes, and gradients of which each device keeps its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import weights
from tests.low_precision import STRUCTURES
from tests.sharding.meshes import mesh_of

TOKENS, K, N, E = 64, 512, 512, 4
RECIPES = {name: STRUCTURES[name] for name in STRUCTURES if name not in ("bf16", "fp8_delayed")}
by_recipe = pytest.mark.parametrize("name", often(["nvfp4", "mxfp8", "int4_qat clipped"], RECIPES))
over_meshes = pytest.mark.parametrize("devices", [1, 2, 4])
by_axis = pytest.mark.parametrize("axis", [-2, -1])
KEY = jax.random.key(4)


@functools.cache
def operands():
    return random_array((TOKENS, K)), weights((K, N), 1), random_array((TOKENS, N), seed=2)


def split(axis, ndim=2):
    return P(*[None] * (ndim + axis), "a")


def one_device(recipe, x, kernel, dy):
    """The result, and the gradients of x and the kernel."""
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=KEY), x, kernel)
    return y, *pullback(dy)


def over_devices(recipe, x, kernel, dy, devices, axis, check_vma=True, **options):
    """The same over devices that have the same tokens: each has the whole gradient, and its part of their sum."""

    def local(x, shard, dy):
        def layer(x, shard):
            whole, once = jlp.all_gather_kernel(shard, "a", recipe, axis=axis, **options)
            return jlp.linear(x, whole, recipe=recipe, key=KEY, quantized_kernel=once)

        y, pullback = jax.vjp(layer, *(jax.lax.pcast(v, "a", to="varying") for v in (x,)), shard)
        dx, dw = pullback(jax.lax.pcast(dy, "a", to="varying"))
        return jax.lax.pmean(y, "a"), jax.lax.pmean(dx, "a"), dw

    spec = split(axis)
    mapped = jax.shard_map(
        local, mesh=mesh_of((devices,)), in_specs=(P(), spec, P()), out_specs=(P(), P(), spec), check_vma=check_vma
    )
    return jax.jit(mapped)(x, kernel, dy)


@functools.cache
def expected_of(name):
    return jax.device_get(jax.jit(functools.partial(one_device, RECIPES[name]))(*operands()))


@over_meshes
@by_axis
@by_recipe
def test_bits_are_those_of_the_whole_kernel(name, axis, devices):
    given, (y, dx, dw) = operands(), expected_of(name)
    found = over_devices(RECIPES[name], *given, devices, axis)
    assert_same_bytes(found[0], y)
    assert_same_bytes(found[1], dx)
    if devices < 3:
        assert_same_bytes(found[2], dw * devices)
    np.testing.assert_allclose(found[2], dw * devices, rtol=1e-6)  # of equal terms; three times one is rounded


def sent(function, *args):
    return [(c.kind, c.results) for c in traffic.collectives(jax.jit(function).lower(*args).compile())]


def test_codes_are_gathered_and_nothing_else():
    x, kernel, dy = operands()
    found = sent(functools.partial(over_devices, jlp.NVFP4BlockScaling(), devices=8, axis=-2), x, kernel, dy)
    gathered = [dtype for kind, results in found if kind == "all-gather" for dtype, _ in results]
    assert gathered and set(gathered) <= {"u8"}


def test_a_product_in_high_precision_gathers_the_kernel_itself():
    x, kernel, dy = operands()
    recipe = jlp.NVFP4BlockScaling(backward_override="high_precision")
    found = sent(functools.partial(over_devices, recipe, devices=8, axis=-2), x, kernel, dy)
    assert "f32" in {dtype for kind, results in found if kind == "all-gather" for dtype, _ in results}


@functools.cache
def exact_sum():
    return np.asarray(over_devices(jlp.MXFP8BlockScaling(), *operands(), 8, -2)[2])


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16_stochastic", "quantized"])
@pytest.mark.parametrize("key", often([KEY], [None, KEY]), ids=["without a key", "with a key"])
def test_gradients_are_added_up_as_the_recipe_says(kind, key):
    exact = exact_sum()
    *_, dw = over_devices(jlp.MXFP8BlockScaling(sums=jlp.Sums(wgrad=kind)), *operands(), 8, -2, key=key)
    error = np.linalg.norm(np.asarray(dw) - exact) / np.linalg.norm(exact)
    least, most = {"quantized": (0.005, 0.05)}.get(kind, (1e-4, 5e-3))
    assert least < error < most


def test_experts():
    """Kernels [E, K, N], each with an amax of its own."""
    x, kernels, sizes = (
        random_array((TOKENS, K)),
        random_array((E, K, N), "float32", seed=3),
        jnp.asarray([20, 0, 30, 9]),
    )
    kernels = np.asarray(kernels) * np.arange(1, E + 1, dtype=np.float32)[:, None, None]
    recipe = jlp.NVFP4BlockScaling()

    def product(x, kernels, once=None):
        return jlp.grouped_matmul(x, kernels, sizes, recipe=recipe, key=KEY, quantized_kernel=once)

    def local(x, shard):
        def loss(shard):
            y = product(x, *jlp.all_gather_kernel(shard, "a", recipe, module_type="grouped_linear"))
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss)(shard)

    spec = split(-2, 3)
    mapped = jax.shard_map(local, mesh=mesh_of((4,)), in_specs=(P(), spec), out_specs=spec, check_vma=False)
    expected = jax.jit(jax.grad(lambda w: jnp.sum(product(x, w).astype(jnp.float32) ** 2)))(kernels)
    np.testing.assert_allclose(jax.jit(mapped)(x, kernels), np.asarray(expected) * 4, rtol=1e-6)


def test_without_a_recipe_the_kernel_is_gathered():
    x, kernel, dy = operands()
    y, dx, dw = jax.jit(functools.partial(one_device, None))(x, kernel, dy)
    found = over_devices(None, x, kernel, dy, 4, -2)
    assert_same_bytes(found[:2], (y, dx))
    np.testing.assert_allclose(np.float32(found[2]), np.float32(dw) * 4, rtol=2**-7)


@pytest.mark.parametrize(
    ("recipe", "shape", "options", "message"),
    [
        (jlp.MXFP8BlockScaling(), (80, 64), {}, r"shard of shape \(40, 64\) has 40 along axis -2; blocks of MXFP8"),
        (jlp.MXFP8BlockScaling(), (64,), {}, r"kernel has shape \(32,\); needs \[\.\.\., K, N\]"),
        (jlp.MXFP8BlockScaling(), (2, 64, 64), {"axis": 0}, "is a batch axis"),
        (jlp.MXFP8BlockScaling(), (64, 64), {"axis_name": "b"}, "axis_name='b'; needs an axis of the mesh"),
        (jlp.MXFP8BlockScaling(), (64, 64), {"module_type": "x"}, "module_type='x'"),
        (jlp.NVFP4Eden(), (256, 256), {}, "draws signs or bits for the weight, which would differ from shard to shard"),
        (jlp.DelayedScaling(), (64, 64), {}, "scales by a state of the layer"),
    ],
)
def test_what_does_not_fit_is_named(recipe, shape, options, message):
    options = {"axis_name": "a"} | options
    mapped = jax.shard_map(
        lambda shard: jlp.all_gather_kernel(shard, recipe=recipe, **options)[0],
        mesh=mesh_of((2,)),
        in_specs=P("a"),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, jnp.float32))
