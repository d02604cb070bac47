"""linears and mlp under JAX's transformations, telemetry, debug and find_policy, and their names in profiles."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers import product
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import (
    EXACT,
    KEEP_BARRIERS,
    MLP,
    SAVED,
    assert_same_telemetry,
    assert_same_traces,
    measured,
    mlp_operands,
    separate_mlp,
    weights,
)

NVFP4, MXFP8, FP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling(), jlp.Float8CurrentScaling()
K, F = 64, 96
X, KERNELS, _, DY = mlp_operands((32, K), F, K)
pytestmark = pytest.mark.sampled(5)
each_way = pytest.mark.parametrize("saved", SAVED)


def mlp_saving(saved, recipe=NVFP4):
    return functools.partial(jlp.mlp, recipe=recipe, saved=saved)


def gradients(function, x=X, kernels=KERNELS, dy=DY):
    y, pullback = jax.vjp(function, x, kernels)
    return y, *pullback(dy)


@functools.cache
def compiled(saved, recipe):
    return jax.jit(functools.partial(gradients, mlp_saving(saved, recipe)))


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(trees))


class TestVmap:
    xs, dys = jax.device_get((random_array((3, 32, K), seed=51), random_array((3, 32, K), seed=52)))
    kernels = [np.asarray(weights((3, *w.shape), 53 + i)) for i, w in enumerate(KERNELS)]

    @pytest.mark.slow
    @each_way
    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["x", "kernels", "both"])
    def test_is_the_loop(self, saved, axes):
        mapped = {"x": axes[0] is not None, "kernels": axes[1] is not None}
        x, kernels = self.xs if mapped["x"] else X, self.kernels if mapped["kernels"] else KERNELS
        one = compiled(saved, NVFP4)
        loop = [
            one(x[i] if mapped["x"] else x, [w[i] for w in kernels] if mapped["kernels"] else kernels, self.dys[i])
            for i in range(3)
        ]
        assert_same_bytes(jax.jit(jax.vmap(one, in_axes=(*axes, 0)))(x, kernels, self.dys), stacked(loop))

    def test_of_linears_is_the_loop(self):
        def one(x, kernels, dys):
            ys, pullback = jax.vjp(lambda x, w: jlp.linears(x, w, recipe=NVFP4), x, kernels)
            return ys, pullback(dys)

        dys = tuple(np.asarray(random_array((3, 32, F), seed=60 + i)) for i in range(2))
        kernels, one = [w[0] for w in self.kernels[:2]], jax.jit(one)
        loop = [one(self.xs[i], kernels, tuple(dy[i] for dy in dys)) for i in range(3)]
        assert_same_bytes(jax.jit(jax.vmap(one, in_axes=(0, None, 0)))(self.xs, kernels, dys), stacked(loop))


@each_way
def test_a_scan_is_the_loop(saved):
    stack = [weights((2, *w.shape), 53 + i) for i, w in enumerate(KERNELS)]

    def layer(x, kernels):
        return x + mlp_saving(saved)(x, kernels), None

    def looped(x, stack):
        for i in range(2):
            x, _ = layer(x, [w[i] for w in stack])
        return x

    run = functools.partial(jax.jit, compiler_options=EXACT)
    scanned = run(functools.partial(gradients, lambda x, stack: jax.lax.scan(layer, x, stack)[0]))(X, stack, DY)
    assert_same_bytes(scanned, run(functools.partial(gradients, looped))(X, stack, DY))


either = pytest.mark.parametrize("recipe", often([FP8], [NVFP4, FP8]), ids=["nvfp4", "fp8_current"])


@either
@each_way
def test_eager_and_jitted_bits_agree(saved, recipe):
    assert_same_bytes(compiled(saved, recipe)(X, KERNELS, DY), gradients(mlp_saving(saved, recipe)))


@each_way
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
def test_a_second_derivative_is_refused(saved, recipe):
    def loss(x):
        return jlp.mlp(x, KERNELS, recipe=recipe, saved=saved).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="linear: there is no second derivative under a recipe"):
        jax.eval_shape(lambda x: jax.jvp(jax.grad(loss), (x,), (x,)), X)

    def of_linears(x):
        return sum(y.astype(jnp.float32).sum() for y in jlp.linears(x, KERNELS[:2], recipe=recipe))

    with pytest.raises(NotImplementedError, match="linear: there is no second derivative under a recipe"):
        jax.eval_shape(lambda x: jax.jvp(jax.grad(of_linears), (x,), (x,)), X)


def test_shapes_and_dtypes_need_no_data():
    x = jax.ShapeDtypeStruct((1 << 20, 4096), jnp.bfloat16)
    kernels = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 16384), (4096, 16384), (16384, 4096))]
    for saved in SAVED:
        y, dx, dw = jax.eval_shape(functools.partial(gradients, mlp_saving(saved)), x, kernels, x)
        assert (y.shape, y.dtype) == (dx.shape, dx.dtype) == (x.shape, x.dtype)
        assert [(g.shape, g.dtype) for g in dw] == [(w.shape, w.dtype) for w in kernels]


@either
@each_way
def test_an_exported_gradient_has_its_bits(saved, recipe):
    step = compiled(saved, recipe)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls(step)]
    exported = jax.export.export(step, disabled_checks=checks)(X, KERNELS, DY)
    loaded = jax.export.deserialize(exported.serialize())
    assert_same_bytes(jax.tree.leaves(loaded.call(X, KERNELS, DY)), jax.tree.leaves(step(X, KERNELS, DY)))


def custom_calls(step):
    text = step.lower(X, KERNELS, DY).as_text()
    return {part.split("(")[0].strip() for part in text.split("stablehlo.custom_call @")[1:]}


def loss(function, kernels, x=X, **options):
    y = function(x, kernels, names=MLP, recipe=FP8, **options)
    return jnp.square(y.astype(jnp.float32)).mean()


class TestWatching:
    """The layers within an MLP are seen under their names, with the numbers of separate ones."""

    def measured(self, function, **options):
        return measured(functools.partial(loss, function, **options), KERNELS, X)

    @pytest.mark.slow
    @pytest.mark.parametrize("saved", ["quantized", "recompute"])
    def test_telemetry(self, saved):
        results, found = self.measured(jlp.mlp, saved=saved)
        expected_results, expected = self.measured(separate_mlp)
        assert_same_bytes(results, expected_results)
        assert_same_telemetry(found, expected, MLP)

    @pytest.mark.slow
    def test_telemetry_changes_no_bits_in_8_bits(self):
        results, found = self.measured(jlp.mlp, saved="8bit")
        expected = jax.jit(jax.value_and_grad(functools.partial(loss, jlp.mlp, saved="8bit")))(KERNELS, X)
        assert_same_bytes(results, expected)
        assert list(found) == sorted(MLP)

    @pytest.mark.slow
    @each_way
    def test_traces(self, saved):
        found, expected = (
            jlp.debug.trace(functools.partial(loss, f, **options), KERNELS)
            for f, options in ((jlp.mlp, {"saved": saved}), (separate_mlp, {}))
        )
        assert_same_traces(found, expected, MLP, values=saved != "8bit")

    def test_the_first_bad_layer(self):
        spoiled = [KERNELS[0], np.array(KERNELS[1]), KERNELS[2]]
        spoiled[1][3, 5] = np.nan
        found = jlp.debug.first_bad(functools.partial(loss, jlp.mlp), spoiled)
        assert (found.layer, found.tensor) == ("mlp/up", "weight")

    @pytest.mark.slow
    def test_find_policy(self):
        batches = random_array((2, 32, K), seed=70)
        found = jlp.find_policy(lambda kernels, x: loss(jlp.mlp, kernels, x), KERNELS, batches, FP8, budget=1 / 9)
        assert {row.layer for row in found.table} == set(MLP) and len(found.table) == 9


class TestNames:
    parts = ("quantize input", "fprop", "activation", "activation gradient", "recompute/fprop", "dgrad", "wgrad")

    @pytest.fixture(autouse=True)
    def names_are_part_of_the_key(self):
        """A compilation cache would answer with the names that a program was first compiled with."""
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        yield
        jax.config.update("jax_compilation_cache_include_metadata_in_key", False)

    def test_are_joined_in_profiles(self):
        lowered = jax.jit(jax.grad(functools.partial(loss, jlp.mlp, saved="recompute"))).lower(KERNELS)
        found = re.findall(r'op_name="([^"]*)"', lowered.compile(compiler_options=KEEP_BARRIERS).as_text())
        for part in self.parts:
            assert any(re.search(rf"mlp/gate\+up\+down\)*/.*{part}/", name) for name in found), part

    @pytest.mark.parametrize("saved", often(["recompute"], SAVED))
    def test_equal_ones_of_different_names_are_traced_once(self, saved):
        def traces(layers):
            def model(kernels, x):
                for i in range(layers):
                    names = [f"layers/{i}/{name}" for name in ("gate", "up", "down")]
                    x = jlp.mlp(x, kernels, recipe=FP8, saved=saved, names=names)
                    query, key = jlp.linears(x, [KERNELS[2].mT, KERNELS[2].mT], recipe=FP8, names=names[:2])
                    x = x + (query + key)[:, :K]
                return x.astype(jnp.float32).sum()

            jax.clear_caches()
            with mock.patch.object(product, "forward", side_effect=product.forward) as counted:
                jax.jit(jax.grad(model)).trace(KERNELS, X)
            return counted.call_count

        assert traces(4) == traces(2) > 0
