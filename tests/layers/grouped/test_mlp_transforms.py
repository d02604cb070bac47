"""grouped_mlp under JAX's transformations, on meshes, with telemetry, debug and find_policy, and exported."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers import product
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import (
    EXACT,
    KEEP_BARRIERS,
    KEY,
    SAVED,
    assert_same_telemetry,
    assert_same_traces,
    measured,
)
from tests.layers.grouped.experts import NAMES, ROWS, SIZES, K, mlp_operands, separate_mlp
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(5)
NVFP4, MXFP8, FP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling(), jlp.Float8CurrentScaling()
X, KERNELS, _, DY = mlp_operands()
UNEVEN = jnp.asarray(SIZES["uneven"], jnp.int32)
each_way = pytest.mark.parametrize("saved", SAVED)
either = pytest.mark.parametrize("recipe", often([MXFP8], [NVFP4, MXFP8]), ids=["nvfp4", "mxfp8"])


def gradients(saved, x=X, kernels=KERNELS, sizes=UNEVEN, dy=DY, recipe=NVFP4):
    y, pullback = jax.vjp(lambda x, w: jlp.grouped_mlp(x, w, sizes, recipe=recipe, saved=saved), x, kernels)
    return y, *pullback(dy)


@functools.cache
def compiled(saved, recipe):
    return jax.jit(functools.partial(gradients, saved, recipe=recipe))


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(trees))


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("axes", [(0, None, 0), (None, 0, None), (0, 0, 0)], ids=["x", "kernels", "all"])
def test_vmap_is_the_loop(saved, axes):
    xs, dys = random_array((2, ROWS, K), seed=51), random_array((2, *DY.shape), seed=52)
    stacks = [np.stack([w, w[::-1]]) for w in KERNELS]
    sizes = jnp.asarray([SIZES["uneven"], SIZES["one takes all"]], jnp.int32)
    pairs = list(zip((xs, stacks, sizes), (X, KERNELS, UNEVEN), axes, strict=True))
    given = [many if axis == 0 else single for many, single, axis in pairs]
    one = jax.jit(functools.partial(gradients, saved))

    def part(i):
        picked = [jax.tree.map(lambda leaf: leaf[i], many) if axis == 0 else single for many, single, axis in pairs]
        return one(*picked, dys[i])

    loop = stacked([part(i) for i in range(2)])
    assert_same_bytes(jax.jit(jax.vmap(one, in_axes=(*axes, 0)))(*given, dys), loop)


@each_way
def test_a_scan_is_the_loop(saved):
    x, kernels, _, _ = mlp_operands(features=K)
    stacks = [np.stack([w, w[::-1]]) for w in kernels]

    def layer(x, kernels):
        return x + jlp.grouped_mlp(x, kernels, UNEVEN, recipe=NVFP4, saved=saved), None

    def looped(x, stacks):
        for i in range(2):
            x, _ = layer(x, [w[i] for w in stacks])
        return x

    def run(function):
        def step(x, stacks):
            y, pullback = jax.vjp(function, x, stacks)
            return y, pullback(x)

        return jax.jit(step, compiler_options=EXACT)(x, stacks)

    assert_same_bytes(run(lambda x, stacks: jax.lax.scan(layer, x, stacks)[0]), run(looped))


@either
@each_way
def test_eager_and_jitted_bits_agree(saved, recipe):
    assert_same_bytes(compiled(saved, recipe)(X, KERNELS, UNEVEN, DY), gradients(saved, recipe=recipe))


@either
@each_way
def test_remat_gives_the_same_bits(saved, recipe):
    mlp = jax.checkpoint(functools.partial(jlp.grouped_mlp, recipe=recipe, saved=saved))
    found = jax.jit(lambda x, kernels, dy: jax.vjp(lambda x, w: mlp(x, w, UNEVEN), x, kernels)[1](dy))(X, KERNELS, DY)
    assert_same_bytes(found, compiled(saved, recipe)(X, KERNELS, UNEVEN, DY)[1:])


@each_way
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
def test_a_second_derivative_is_refused(saved, recipe):
    loss = lambda x: jlp.grouped_mlp(x, KERNELS, UNEVEN, recipe=recipe, saved=saved).astype(jnp.float32).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.eval_shape(lambda x: jax.jvp(jax.grad(loss), (x,), (x,)), X)


@either
@each_way
def test_an_exported_gradient_has_its_bits(saved, recipe):
    step = compiled(saved, recipe)
    text = step.lower(X, KERNELS, UNEVEN, DY).as_text()
    names = {part.split("(")[0].strip() for part in text.split("stablehlo.custom_call @")[1:]}
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = jax.export.export(step, disabled_checks=checks)(X, KERNELS, UNEVEN, DY)
    loaded = jax.export.deserialize(exported.serialize())
    expected = jax.tree.leaves(step(X, KERNELS, UNEVEN, DY))
    assert_same_bytes(jax.tree.leaves(loaded.call(X, KERNELS, UNEVEN, DY)), expected)


class TestMeshes:
    x, dy = random_array((ROWS, 256)), random_array((ROWS, 256), seed=2)
    kernels = [random_array((4, 256, 256), "float32", 1 + i) / 8 for i in range(3)]
    sizes = jnp.asarray([40, 0, 77, 33], jnp.int32)

    @pytest.mark.slow
    @by_axis_type
    @pytest.mark.parametrize("recipe", often(["nvfp4"], ["nvfp4", "mxfp8", "fp8_current"]))
    @pytest.mark.parametrize("saved", SAVED)
    @pytest.mark.parametrize(
        ("hidden", "down"), [(P(None, None, "a"), P(None, "a")), (P(None, "a"), P(None, None, "a")), (P("a"), P("a"))]
    )
    def test_split_kernels_give_the_numbers_of_one_device(self, recipe, saved, hidden, down, axis_type):
        recipes = {"nvfp4": NVFP4, "mxfp8": MXFP8, "fp8_current": jlp.Float8CurrentScaling()}
        mesh = mesh_of((2,), axis_type)

        def run(x, kernels, sizes, dy):
            f = functools.partial(jlp.grouped_mlp, recipe=recipes[recipe], key=KEY, saved=saved, activation=product_of)
            y, pullback = jax.vjp(lambda x, w: f(x, w, sizes), x, kernels)
            if jax.typeof(y).sharding.mesh.explicit_axes:
                dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
            return y, *pullback(dy)

        expected = jax.jit(run)(self.x, self.kernels, self.sizes, self.dy)
        with jax.set_mesh(mesh):
            kernels = [place(w, mesh, s) for w, s in zip(self.kernels, (hidden, hidden, down), strict=True)]
            x, sizes, dy = (place(a, mesh, P()) for a in (self.x, self.sizes, self.dy))
            found = jax.jit(run)(x, kernels, sizes, dy)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = np.float64(a), np.float64(b)
            assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)

    @each_way
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_within_shard_map_each_device_has_its_experts(self, saved, check_vma):
        """Under a recipe whose rounding does not depend on the number of an expert."""
        sizes = jnp.asarray([20, 44, 60, 4])
        x, kernels, dy = np.asarray(X)[:128], [np.asarray(w)[:4] for w in KERNELS], np.asarray(DY)[:128]
        call = lambda x, w, sizes: jlp.grouped_mlp(x, w, sizes, recipe=MXFP8, saved=saved)  # noqa: E731
        mapped = jax.shard_map(call, mesh=mesh_of((2,)), in_specs=P("a"), out_specs=P("a"), check_vma=check_vma)

        def run(f):
            y, pullback = jax.vjp(lambda x, w: f(x, w, sizes), x, kernels)
            return y, pullback(dy)

        assert_same_bytes(jax.jit(run, static_argnums=0)(mapped), jax.jit(run, static_argnums=0)(call))


def product_of(gate, up):
    return gate * up


def loss(function, kernels, x=X, **options):
    y = function(x, kernels, UNEVEN, names=NAMES, recipe=FP8, **options)
    return jnp.square(y.astype(jnp.float32)).mean()


class TestWatching:
    """The layers within the MLP are seen under their names, with the numbers of separate ones."""

    def measured(self, function, **options):
        return measured(functools.partial(loss, function, **options), KERNELS, X)

    @pytest.mark.slow
    @pytest.mark.parametrize("saved", ["quantized", "recompute"])
    def test_telemetry(self, saved):
        results, found = self.measured(jlp.grouped_mlp, saved=saved)
        expected_results, expected = self.measured(separate_mlp)
        assert_same_bytes(results, expected_results)
        assert_same_telemetry(found, expected, NAMES)

    @each_way
    def test_traces(self, saved):
        found, expected = (
            jlp.debug.trace(functools.partial(loss, f, **options), KERNELS)
            for f, options in ((jlp.grouped_mlp, {"saved": saved}), (separate_mlp, {}))
        )
        assert_same_traces(found, expected, NAMES, values=saved != "8bit")

    @pytest.mark.slow
    def test_find_policy(self):
        batches = random_array((2, ROWS, K), seed=70)
        found = jlp.find_policy(lambda w, x: loss(jlp.grouped_mlp, w, x), KERNELS, batches, FP8, budget=1 / 9)
        assert {row.layer for row in found.table} == set(NAMES)


class TestNames:
    @pytest.fixture(autouse=True)
    def names_are_part_of_the_key(self):
        """A compilation cache would answer with the names that a program was first compiled with."""
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        yield
        jax.config.update("jax_compilation_cache_include_metadata_in_key", False)

    def test_are_joined_in_profiles(self):
        lowered = jax.jit(jax.grad(functools.partial(loss, jlp.grouped_mlp, saved="recompute"))).lower(KERNELS)
        found = re.findall(r'op_name="([^"]*)"', lowered.compile(compiler_options=KEEP_BARRIERS).as_text())
        for part in ("quantize input", "activation gradient", "recompute/fprop", "dgrad", "wgrad"):
            assert any(re.search(rf"experts/gate\+up\+down\)*/.*{part}/", name) for name in found), part

    def test_equal_ones_of_different_names_are_traced_once(self):
        def traces(layers):
            def model(kernels, x):
                for i in range(layers):
                    names = [f"layers/{i}/{name}" for name in ("gate", "up", "down")]
                    y = jlp.grouped_mlp(x, kernels, UNEVEN, recipe=FP8, names=names)
                    x = x + jnp.pad(y, ((0, 0), (0, K - y.shape[1])))
                return x.astype(jnp.float32).sum()

            jax.clear_caches()
            with mock.patch.object(product, "forward", side_effect=product.forward) as counted:
                jax.jit(jax.grad(model)).trace(KERNELS, X)
            return counted.call_count

        assert traces(4) == traces(2) > 0
