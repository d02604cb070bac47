"""linear, dot_general and einsum with a kernel that was loaded quantised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import FLOATS, assert_same_bytes, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, on_mesh, place

INT4 = jlp.Int4(32)
X, W, DY = random_array((24, 64)), random_array((64, 48), "float32", 1), random_array((24, 48), "bfloat16", 2)


def loaded(fmt=INT4):
    return jlp.quantize(W, fmt, axis=-2)


class TestGradients:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_of_the_inputs_are_those_of_training(self, dtype):
        x, dy = X.astype(dtype), DY.astype(dtype)
        recipe = jlp.WeightQAT(INT4)
        trained = jax.vjp(lambda x, b: jlp.linear(x, W, b, recipe=recipe), x, jnp.ones(48))
        served = jax.vjp(lambda x, b: jlp.linear(x, loaded(), b), x, jnp.ones(48))
        assert_same_bytes((served[0], *served[1](dy)), (trained[0], *trained[1](dy)))

    def test_an_adapter_beside_the_frozen_kernel_learns(self):
        q, target = loaded(), X @ jnp.roll(W, 1).astype(X.dtype)
        adapter = {"a": 0.1 * jax.random.normal(jax.random.key(0), (64, 4)), "b": jnp.zeros((4, 48))}

        def loss(adapter, q):
            y = jlp.linear(X, q) + (X @ adapter["a"] @ adapter["b"]).astype(X.dtype)
            return jnp.mean((y - target).astype(jnp.float32) ** 2)

        step = jax.jit(jax.value_and_grad(loss))
        first, gradients = step(adapter, q)
        assert step(jax.tree.map(lambda p, g: p - 1e-3 * g, adapter, gradients), q)[0] < first

    def test_of_the_kernel_are_refused_and_zero_where_insisted_on(self):
        def loss(q):
            return jlp.linear(X, q).astype(jnp.float32).sum()

        with pytest.raises(TypeError, match="uint8"):
            jax.grad(loss)(loaded())
        gradient = jax.grad(loss, allow_int=True)(loaded())
        assert gradient.data.dtype == jax.dtypes.float0
        assert not jnp.any(gradient.scale)


class TestRecipe:
    def test_none_is_needed_and_what_trained_it_fits(self):
        y = jlp.linear(X, loaded())
        for recipe in (jlp.WeightQAT(INT4), jlp.Int4QAT(32, ste="clipped")):
            with jlp.autocast(recipe):
                assert_same_bytes(jlp.linear(X, loaded(), name="up"), y)
                with jlp.autocast(enabled=False):
                    assert_same_bytes(jlp.linear(X, loaded()), y)

    @pytest.mark.parametrize(
        ("recipe", "wants"),
        [
            (jlp.Int4QAT(64), "Int4 1x64"),
            (jlp.WeightQAT(jlp.NVFP4()), "NVFP4 1x16"),
            (jlp.NVFP4BlockScaling(), "NVFP4 16x16 with quantised activations"),
            (jlp.Int4QAT(32, exclude=("up",)), "high precision"),
        ],
        ids=str,
    )
    def test_one_that_wants_something_else_is_named(self, recipe, wants):
        calls = [
            lambda: jlp.linear(X, loaded(), recipe=recipe, name="up"),
            lambda: jlp.dot_general(X, loaded(), (((1,), (0,)), ((), ())), recipe=recipe, name="up"),
            lambda: jlp.einsum("tk,kn->tn", X, loaded(), recipe=recipe, name="up"),
        ]
        for call in calls:
            with pytest.raises(
                ValueError, match=f"layer 'up' has a kernel in Int4 1x32, but the recipe wants {wants};"
            ):
                call()


class TestErrors:
    def test_quantised_along_the_other_axis(self):
        for q in (jlp.quantize(W, jlp.Int4(16)), loaded().mT):
            with pytest.raises(ValueError, match=r"quantised along axis -1; needs \[K, N\].*pass kernel.mT"):
                jlp.linear(X, q)

    def test_a_vector(self):
        with pytest.raises(ValueError, match="needs two dimensions"):
            jlp.linear(X, jlp.quantize(W[:, 0], INT4))

    def test_of_another_length(self):
        with pytest.raises(ValueError, match=r"x \(24, 32\) and kernel \(64, 48\)"):
            jlp.linear(X[:, :32], loaded())

    def test_with_a_second_kernel(self):
        with pytest.raises(ValueError, match="needs one of them"):
            jlp.linear(X, loaded(), quantized_kernel=jlp.quantize_kernel(W, jlp.WeightQAT(INT4)))

    @pytest.mark.parametrize("subscripts", ["tn,kn->tk", "tk,kn->tkn", "tk,kn->t", "tk,kn->tk"])
    def test_an_einsum_that_contracts_something_else(self, subscripts):
        x = DY if subscripts.startswith("tn") else X
        with pytest.raises(
            ValueError, match="second last axis: contract only that axis|sums or repeats the axis 'n' of the kernel"
        ):
            jlp.einsum(subscripts, x, loaded())


def test_an_einsum_puts_axes_in_any_order():
    x = random_array((2, 3, 4, 64))
    y = jlp.einsum("abck,kn->nbac", x, loaded())
    assert_same_bytes(y, jlp.linear(x, loaded()).transpose(3, 1, 0, 2))
    assert_same_bytes(
        jlp.einsum("bk...,kn->b...n", x.swapaxes(1, 3), loaded()),
        jlp.linear(x.swapaxes(1, 3).swapaxes(1, 3), loaded()).swapaxes(1, 2),
    )
    with jlp.autocast(jlp.WeightQAT(INT4)):
        assert_same_bytes(jlp.einsum("abck,kn->abcn", x, loaded()), jlp.linear(x, loaded()))


class TestMeshes:
    """The weight split along N, as tensor parallelism does it, gives the same bytes."""

    recipe = jlp.Int4QAT(32)

    @by_axis_type
    @pytest.mark.parametrize(("x_spec", "w_spec"), [(P(), P(None, "a")), (P("a"), P())], ids=["n", "tokens"])
    def test_n_or_tokens_split(self, axis_type, x_spec, w_spec):
        def train(x, w):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=self.recipe), x, w)
            return y, *pullback(y)

        expected = jax.jit(train)(X, W)
        (y, dx, dw), _ = on_mesh(train, (X, W), (x_spec, w_spec), mesh_of((2,), axis_type))
        assert_same_bytes(y, expected[0])
        np.testing.assert_allclose(dx.astype(np.float32), expected[1].astype(np.float32), rtol=0.02, atol=1)
        np.testing.assert_allclose(dw, expected[2], rtol=1e-5, atol=1e-2)

    def test_n_split_in_shard_map(self):
        mesh = mesh_of((2,))
        call = jax.shard_map(
            lambda x, w: jlp.linear(x, w, recipe=self.recipe),
            mesh=mesh,
            in_specs=(P(), P(None, "a")),
            out_specs=P(None, "a"),
        )
        assert_same_bytes(jax.jit(call)(X, W), jlp.linear(X, W, recipe=self.recipe))

    def test_k_split_into_whole_blocks_in_shard_map(self):
        def partial(x, w):
            return jax.lax.psum(jlp.linear(x.astype(jnp.float32), w, recipe=self.recipe), "a")

        mesh = mesh_of((2,))
        call = jax.shard_map(partial, mesh=mesh, in_specs=(P(None, "a"), P("a")), out_specs=P())
        whole = jlp.linear(X.astype(jnp.float32), W, recipe=self.recipe)
        np.testing.assert_allclose(jax.jit(call)(X, W), whole, rtol=1e-5, atol=1e-3)

    def test_k_split_within_a_block_in_shard_map(self):
        mesh = mesh_of((4,))
        call = jax.shard_map(
            lambda x, w: jax.lax.psum(jlp.linear(x, w, recipe=self.recipe, name="up"), "a"),
            mesh=mesh,
            in_specs=(P(None, "a"), P("a")),
            out_specs=P(),
        )
        with pytest.raises(ValueError, match="layer 'up'.*K = 16, which is not a multiple of the group of 32"):
            call(X, W)

    def test_k_split_within_a_block_is_seen(self):
        message = "layer 'up'.*K = 64, in shards of 16, .* a group would lie on two shards"
        auto, explicit = mesh_of((4,)), mesh_of((4,), jax.sharding.AxisType.Explicit)
        with pytest.raises(ValueError, match=message):
            jlp.linear(X, place(W, auto, P("a")), recipe=self.recipe, name="up")
        with jax.set_mesh(explicit), pytest.raises(ValueError, match=message):
            jax.jit(lambda x, w: jlp.linear(x, w, recipe=self.recipe, name="up"))(X, place(W, explicit, P("a")))

    def test_groups_are_the_whole_kernels_where_unknown(self):
        call = jax.jit(lambda x, w: jlp.linear(x, w, recipe=self.recipe))
        sharded = call(X.astype(jnp.float32), place(W, mesh_of((4,)), P("a")))
        np.testing.assert_allclose(sharded, call(X.astype(jnp.float32), W), rtol=1e-5, atol=1e-3)
