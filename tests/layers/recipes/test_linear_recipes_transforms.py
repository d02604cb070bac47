"""linear under every recipe: reused kernels, dot_general, einsum, jit, vmap, scan, shard_map and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array
from tests.layers.fused.layers import traced_calls
from tests.low_precision import ALL, BASE, state_for, without_state
from tests.sharding.meshes import mesh_of, place

pytestmark = pytest.mark.sampled(5)

each_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
each_base = pytest.mark.parametrize("recipe", BASE.values(), ids=BASE)
X, W, DY = jax.device_get(
    (random_array((3, 32, 64)), random_array((3, 64, 48), "float32", 1), random_array((3, 32, 48), seed=2))
)


def call(function, *args, recipe, **options):
    state = state_for(recipe)
    return without_state(function(*args, recipe=recipe, state=state, **options), state)


def run(recipe, x, w, dy, function=jlp.linear, *before, **options):
    """y, dx and dw of `function(*before, x, w)`."""
    y, pullback = jax.vjp(lambda x, w: call(function, *before, x, w, recipe=recipe, **options), x, w)
    return y, *pullback(dy)


def stacked(results):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(results))


@functools.cache
def compiled(recipe):
    return jax.jit(functools.partial(run, recipe))


@functools.cache
def each_slice(recipe):
    return stacked([compiled(recipe)(X[i], W[i], DY[i]) for i in range(3)])


class TestQuantizedKernel:
    @each_recipe
    def test_reuse_gives_the_bytes_of_quantising_again(self, recipe):
        quantized = jlp.quantize_kernel(W[0], recipe, state=state_for(recipe))
        key = jax.random.key(0)
        step = jax.jit(lambda key, quantized: run(recipe, X[0], W[0], DY[0], key=key, quantized_kernel=quantized))
        expected = step(key, None)
        assert_same_bytes(step(key, quantized), expected)
        alone = jax.jit(lambda quantized: call(jlp.linear, X[0], None, recipe=recipe, quantized_kernel=quantized))
        assert_same_bytes(alone(quantized), expected[0])

    @each_base
    def test_is_not_quantised_again(self, recipe):
        quantized = jlp.quantize_kernel(W[0], recipe, state=state_for(recipe))
        fresh = traced_calls(functools.partial(run, recipe), X[0], W[0], DY[0])
        reused = traced_calls(functools.partial(run, recipe, quantized_kernel=quantized), X[0], W[0], DY[0])
        assert (fresh["jaxlowprec_quantize"], reused["jaxlowprec_quantize"]) == (3, 2)


class TestProducts:
    @each_base
    def test_each_slice_of_a_batch_is_a_tensor_of_its_own(self, recipe):
        """Under delayed scaling they share the state, and so the scale."""
        dims = (((2,), (1,)), ((0,), (0,)))
        product = jax.jit(lambda x, w, dy: run(recipe, x, w, dy, lambda x, w, **o: jlp.dot_general(x, w, dims, **o)))
        assert_same_bytes(product(X, W, DY), each_slice(recipe))

    @each_base
    def test_an_einsum_is_linear_on_matrices(self, recipe):
        x, w, dy = X[0].reshape(4, 8, 64), W[0].reshape(64, 4, 12), DY[0].reshape(4, 8, 4, 12)
        product = jax.jit(lambda *given: run(recipe, *given, jlp.einsum, "btd,dhk->bthk"))
        y, dx, dw = jax.device_get(product(x, w, dy))
        expected = compiled(recipe)(X[0], W[0], DY[0])
        assert_same_bytes((y.reshape(32, 48), dx.reshape(32, 64), dw.reshape(64, 48)), expected)


class TestTransformations:
    @each_base
    def test_vmap_over_all_is_the_loop(self, recipe):
        assert_same_bytes(jax.jit(jax.vmap(functools.partial(run, recipe)))(X, W, DY), each_slice(recipe))

    @each_base
    def test_vmap_over_x_alone_is_the_loop(self, recipe):
        mapped = jax.jit(jax.vmap(lambda x, dy: run(recipe, x, W[0], dy)))(X, DY)
        assert_same_bytes(mapped, stacked([compiled(recipe)(X[i], W[0], DY[i]) for i in range(3)]))

    @pytest.mark.parametrize("recipe", [BASE["fp8_block"], BASE["fp8_delayed"]], ids=["fp8_block", "fp8_delayed"])
    def test_scan_is_the_loop(self, recipe):
        weights = np.asarray(random_array((3, 64, 64), "float32", 1)) / 8

        def scanned(x, weights):
            return jax.lax.scan(lambda x, w: (call(jlp.linear, x, w, recipe=recipe), None), x, weights)[0]

        def loop(x, weights):
            for w in weights:
                x = call(jlp.linear, x, w, recipe=recipe)
            return x

        def step(f, x, weights, dy):
            y, pullback = jax.vjp(f, x, weights)
            return y, pullback(dy)

        assert_same_bytes(*(jax.jit(functools.partial(step, f))(X[0], weights, X[1]) for f in (scanned, loop)))

    @each_base
    def test_a_changed_recipe_retraces_and_the_first_is_cached(self, recipe):
        traces = []

        @jax.jit
        def f(x, w):
            traces.append(jlp.current_recipe())
            current = jlp.current_recipe()
            return without_state(jlp.linear(x, w, state=state_for(current)), state_for(current))

        other = type(recipe)(fp8_format={"HYBRID": "E4M3", "E4M3": "HYBRID"}[recipe.fp8_format])
        other = other if other.delayed is None else jlp.DelayedScaling(margin=1, amax_history_len=3)
        results = []
        for chosen in (recipe, other, recipe, other):
            with jlp.autocast(chosen):
                results.append(f(X[0], W[0]))
        assert traces == [recipe, other]
        assert_same_bytes(results[:2], results[2:])


class TestMeshes:
    x, w, dy = random_array((256, 128)), random_array((128, 256), "float32", 1), random_array((256, 256), seed=2)

    @each_base
    @pytest.mark.parametrize(
        "specs", [(P("a"), P(), P("a")), (P("a"), P(None, "b"), P("a", "b"))], ids=["rows", "rows and columns"]
    )
    def test_the_bytes_do_not_depend_on_the_mesh(self, recipe, specs):
        mesh = mesh_of((2, 2))
        placed = [place(v, mesh, s) for v, s in zip((self.x, self.w, self.dy), specs, strict=True)]
        function = jax.jit(functools.partial(run, recipe))
        y, *gradients = function(*placed)
        expected_y, *expected = function(self.x, self.w, self.dy)
        assert_same_bytes(y, expected_y)
        for a, e in zip(gradients, expected, strict=True):
            # A contraction over a split axis adds float32 parts in another order; the operands' bytes are the same.
            eps = float(jnp.finfo(e.dtype).eps)
            a, e = (np.asarray(v).astype(np.float64) for v in (a, e))
            np.testing.assert_allclose(a, e, rtol=2 * eps, atol=1e-5 * np.abs(e).max())

    @each_base
    def test_a_shard_of_shard_map_is_a_tensor_of_its_own(self, recipe):
        mesh = mesh_of((2,))
        mapped = jax.jit(
            jax.shard_map(
                lambda x, w, dy: run(recipe, x, w, dy)[:2], mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=P("a")
            )
        )(self.x, self.w, self.dy)
        halves = zip(np.split(np.asarray(self.x), 2), np.split(np.asarray(self.dy), 2), strict=True)
        loop = [jax.device_get(compiled(recipe)(x, self.w, dy)[:2]) for x, dy in halves]
        assert_same_bytes(mapped, jax.tree.map(lambda *parts: np.concatenate(parts), *loop))
