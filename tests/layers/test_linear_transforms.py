"""linear under JAX's transformations: vmap, scan, remat, meshes, shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array
from tests.sharding import meshes

pytestmark = pytest.mark.sampled(5)

FULL = jlp.NVFP4BlockScaling()
linear = jax.jit(functools.partial(jlp.linear, recipe=FULL))


@jax.jit
def gradients(x, w, dy, **options):
    return jax.vjp(lambda x, w: jlp.linear(x, w, recipe=FULL, **options), x, w)[1](dy)


def stacked(results):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(results))


class TestVmap:
    x, dy = jax.device_get((random_array((3, 32, 64)), random_array((3, 32, 48), seed=2)))
    kernels = np.asarray(random_array((3, 64, 48), "float32", 1))

    @pytest.mark.parametrize("keyed", [False, True])
    def test_over_all_is_the_loop(self, keyed):
        keys = jax.random.split(jax.random.key(0), 3) if keyed else None

        def one(x, w, dy, key):
            return linear(x, w), gradients(x, w, dy, key=key)

        loop = [one(self.x[i], self.kernels[i], self.dy[i], keys[i] if keyed else None) for i in range(3)]
        mapped = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0 if keyed else None)))(self.x, self.kernels, self.dy, keys)
        assert_same_bytes(mapped, stacked(loop))

    def test_over_x_alone_is_the_loop(self):
        w = self.kernels[0]
        mapped = jax.jit(jax.vmap(lambda x, dy: gradients(x, w, dy)))(self.x, self.dy)
        assert_same_bytes(mapped, stacked([gradients(self.x[i], w, self.dy[i]) for i in range(3)]))

    def test_over_another_axis_and_over_a_quantised_kernel(self):
        quantized = jlp.quantize_kernel(self.kernels, FULL)
        mapped = jax.jit(jax.vmap(lambda x, q: linear(x, None, quantized_kernel=q), in_axes=(1, 0)))
        found = mapped(self.x.swapaxes(0, 1), quantized)
        assert_same_bytes(found, np.stack([linear(self.x[i], self.kernels[i]) for i in range(3)]))

    def test_the_gradient_of_a_vmap_sums_over_what_is_shared(self):
        w = self.kernels[0]
        of_all = jax.jit(lambda w, dy: jax.vjp(lambda w: jax.vmap(lambda x: linear(x, w))(self.x), w)[1](dy)[0])
        loop = [np.asarray(gradients(self.x[i], w, self.dy[i])[1]) for i in range(3)]
        np.testing.assert_allclose(of_all(w, self.dy), sum(loop), rtol=1e-5, atol=1e-4)


class TestScanAndRemat:
    x, weights = random_array((32, 64)), random_array((3, 64, 64), "float32", 1)

    def loss(self, x, weights, scanned, wrap=lambda layer: layer):
        layer = wrap(lambda x, w: jax.nn.gelu(linear(x, w)))
        if scanned:
            x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        else:
            for w in weights:
                x = layer(x, w)
        return x.astype(jnp.float32).sum()

    def grads(self, *args):
        return jax.jit(lambda x, weights: jax.grad(self.loss, argnums=(0, 1))(x, weights, *args))(self.x, self.weights)

    @functools.cached_property
    def of_a_scan(self):
        return self.grads(True)

    def test_gradients_in_a_scan_are_those_of_the_loop(self):
        dx, dw = self.of_a_scan
        expected_dx, expected_dw = self.grads(False)
        for actual, expected in ((dx, expected_dx), (dw, expected_dw)):  # gelu is fused otherwise: a few codes move
            a, e = (np.asarray(v).astype(np.float64) for v in (actual, expected))
            assert np.linalg.norm(a - e) < 0.05 * np.linalg.norm(e)
        assert dw.dtype == jnp.float32

    @pytest.mark.parametrize("names", [(), jlp.CHECKPOINT_NAMES])
    def test_remat_in_a_scan_keeps_loss_and_gradients(self, names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        wrap = functools.partial(jax.checkpoint, policy=policy)
        for actual, expected in zip(self.grads(True, wrap), self.of_a_scan, strict=True):
            a, e = (np.asarray(v).astype(np.float64) for v in (actual, expected))
            assert np.linalg.norm(a - e) < 0.05 * np.linalg.norm(e)

    def test_grad_within_a_checkpointed_function(self):
        x, w, dy = self.x, np.asarray(self.weights)[0], random_array((32, 64), seed=3)
        assert_same_bytes(jax.jit(jax.checkpoint(gradients))(x, w, dy), gradients(x, w, dy))


@pytest.fixture(scope="module")
def mesh():
    return meshes.mesh_of((4, 2), names=("data", "model"))


class TestMesh:
    """Automatic sharding: the tensor amax covers all shards, so the quantised bytes are those of one device."""

    x, w = random_array((128, 64)), random_array((64, 96), "float32", 1)
    dy = random_array((128, 96), seed=2)

    def placed(self, mesh, *specs):
        values = (self.x, self.w, self.dy)
        return [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(values, specs, strict=True)]

    @pytest.mark.parametrize(
        "specs",
        [
            (P("data"), P(), P("data")),
            (P(), P(None, "model"), P(None, "model")),
            (P("data"), P(None, "model"), P("data", "model")),
            (P(("data", "model")), P("model"), P(("data", "model"))),
        ],
        ids=["rows", "columns", "both", "fully sharded"],
    )
    def test_forward_bytes_do_not_depend_on_the_mesh(self, mesh, specs):
        x, w, dy = self.placed(mesh, *specs)
        expected = jax.jit(linear)(self.x, self.w)
        assert_same_bytes(jax.jit(linear)(x, w), expected)
        for actual, single in zip(jax.jit(gradients)(x, w, dy), gradients(self.x, self.w, self.dy), strict=True):
            # A contraction over a split axis adds float32 parts in another order; the operands' bytes are the same.
            a, e = (np.asarray(v).astype(np.float64) for v in (actual, single))
            eps = float(jnp.finfo(single.dtype).eps)
            np.testing.assert_allclose(a, e, rtol=2 * eps, atol=1e-5 * np.abs(e).max())

    def test_rows_stay_where_they_are(self, mesh):
        x, w, _ = self.placed(mesh, P("data"), P(), P("data"))
        compiled = jax.jit(linear).lower(x, w).compile()
        assert "all-gather" not in compiled.as_text()
        assert compiled(x, w).sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)

    def test_a_split_contraction_is_summed(self, mesh):
        x, w, _ = self.placed(mesh, P(None, "model"), P("model"), P())
        y = np.asarray(jax.jit(linear)(x, w)).astype(np.float64)
        expected = np.asarray(linear(self.x, self.w)).astype(np.float64)
        np.testing.assert_allclose(y, expected, rtol=2**-7, atol=1e-5 * np.abs(expected).max())

    def test_a_quantised_kernel_keeps_its_sharding(self, mesh):
        x, w, _ = self.placed(mesh, P("data"), P(None, "model"), P())
        quantized = jax.jit(lambda w: jlp.quantize_kernel(w, FULL))(w)
        y = jax.jit(lambda x, q: linear(x, None, quantized_kernel=q))(x, quantized)
        assert_same_bytes(y, linear(self.x, self.w))

    def test_explicit_sharding(self):
        mesh = meshes.mesh_of((4, 2), AxisType.Explicit, ("data", "model"))
        with jax.set_mesh(mesh):
            x, w, dy = self.placed(mesh, P("data"), P(None, "model"), P("data", "model"))
            y, (dx, dw) = jax.jit(linear)(x, w), jax.jit(gradients)(x, w, dy)
            assert jax.typeof(y).sharding.spec == P("data", "model")
            assert (jax.typeof(dx).shape, jax.typeof(dw).shape) == (x.shape, w.shape)
        assert_same_bytes(y, linear(self.x, self.w))
        expected = gradients(self.x, self.w, self.dy)
        np.testing.assert_allclose(np.asarray(dw), np.asarray(expected[1]), rtol=1e-4, atol=1e-3)


class TestShardMap:
    """Each shard is a tensor of its own, with its own amax."""

    x, w, dy = random_array((64, 32)), random_array((32, 48), "float32", 1), random_array((64, 48), seed=2)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_over_rows_is_the_loop_over_shards(self, check_vma):
        mesh = meshes.mesh_of((4,), names=("data",))
        mapped = jax.shard_map(linear, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
        xs, dys = np.split(np.asarray(self.x), 4), np.split(np.asarray(self.dy), 4)
        assert_same_bytes(jax.jit(mapped)(self.x, self.w), np.concatenate([linear(x, self.w) for x in xs]))
        dx, dw = jax.jit(jax.grad(lambda x, w: (mapped(x, w).astype(jnp.float32) * self.dy).sum(), argnums=(0, 1)))(
            self.x, self.w
        )
        loop = [jax.device_get(gradients(x, self.w, dy)) for x, dy in zip(xs, dys, strict=True)]
        assert_same_bytes(dx, np.concatenate([g[0] for g in loop]))
        np.testing.assert_allclose(dw, sum(g[1] for g in loop), rtol=1e-5, atol=1e-4)

    def test_gradient_of_a_replicated_kernel_is_reduced(self):
        mesh = meshes.mesh_of((4,), names=("data",))

        def step(x, w, dy):
            return jax.grad(lambda w: (linear(x, w).astype(jnp.float32) * dy).sum())(w)

        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P()))
        dw, step = mapped(self.x, self.w, self.dy), jax.jit(step)
        shards = zip(np.split(np.asarray(self.x), 4), np.split(np.asarray(self.dy), 4), strict=True)
        expected = sum(np.asarray(step(x, self.w, dy)) for x, dy in shards)
        np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-4)


def test_shapes_and_dtypes_need_no_data():
    x, w = jax.ShapeDtypeStruct((1 << 20, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    y, (dx, dw) = jax.eval_shape(lambda x, w: (linear(x, w), gradients(x, w, x)), x, w)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
