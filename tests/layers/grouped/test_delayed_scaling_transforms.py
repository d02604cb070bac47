"""Delayed scaling of experts under transformations of JAX, on meshes, while calibrating, and when it is misused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import add_gradients, combined_by_max, init_state
from tests.helpers import assert_same_bytes, random_array
from tests.layers.grouped.test_delayed_scaling import RECIPE, SIZES, E, K, N, operands, seen_state, step
from tests.sharding.meshes import by_axis_type, mesh_of, place

UNEVEN = jnp.asarray(SIZES["uneven"], jnp.int32)
HISTORIES = [f"{name}_amax_history" for name in jlp.delayed_scaling.TENSORS]


def loss_of(x, kernels, state, sizes=UNEVEN, recipe=RECIPE, **options):
    y, _ = jlp.grouped_matmul(x, kernels, sizes, recipe=recipe, state=state, **options)
    return (y.astype(jnp.float32) ** 2).sum()


def new_state(loss, *given):
    return jax.device_get(jax.jit(jax.grad(loss))(*given))


class TestUses:
    """Values that a layer saw in several places are combined by max."""

    x, kernels, *_ = jax.device_get(operands())
    state = seen_state(RECIPE)

    @functools.cached_property
    def after(self):
        """The new state after a use of these rows: one program for all of them."""
        step = jax.jit(jax.grad(lambda s, x: loss_of(x, self.kernels, s)))
        return lambda x: jax.device_get(step(self.state, x))

    def seen(self, *xs):
        """The new histories after a use of each of these rows."""
        news = [self.after(x) for x in xs]
        return {name: np.maximum.reduce([new[name] for new in news]) for name in HISTORIES}

    def check(self, new, *xs):
        expected = self.seen(*xs)
        for name in HISTORIES:
            assert_same_bytes(new[name], expected[name])

    def test_one_after_the_other(self):
        def loss(state, x):
            total = 0.0
            for k in (1, 4, 2):
                y, state = jlp.grouped_matmul(k * x, self.kernels, UNEVEN, recipe=RECIPE, state=state)
                total += (y.astype(jnp.float32) ** 2).sum()
            return total

        self.check(new_state(loss, self.state, self.x), *(k * self.x for k in (1, 4, 2)))

    def test_in_a_scan_whose_loss_is_combined_by_max(self):
        def loss(state, x):
            def body(total, k):
                return total + loss_of(
                    k.astype(x.dtype) * x, self.kernels, state[jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT]
                ), None

            return jax.lax.scan(body, 0.0, jnp.asarray([1.0, 4.0, 2.0]))[0]

        tree = {jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT: self.state}
        (new,) = jax.jit(jax.grad(combined_by_max(loss)))(tree, self.x).values()
        self.check(new, *(k * self.x for k in (1, 4, 2)))

    def test_over_microbatches(self):
        key = jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT
        first, second = ({key: self.after(k * self.x)} for k in (1, 4))
        self.check(add_gradients(first, second)[key], self.x, 4 * self.x)

    @pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable], ids=["all", "nothing"])
    def test_in_remat(self, policy):
        remat = jax.checkpoint(lambda s, x: loss_of(x, self.kernels, s), policy=policy)
        assert_same_bytes(new_state(remat, self.state, self.x), self.after(self.x))


class TestVmap:
    def both(self):
        x, kernels, _, dy = jax.device_get(operands())
        sizes = np.stack([UNEVEN, np.asarray([10, 20, 30, 0, 33], np.int32)])
        return np.stack([x, -2 * x]), kernels, sizes, np.stack([dy, 3 * dy])

    def test_of_layers_with_states_of_their_own(self):
        x, kernels, sizes, dy = self.both()
        kernels = np.stack([kernels, kernels / 2])
        states = jax.tree.map(lambda *leaves: np.stack(leaves), seen_state(RECIPE), seen_state(RECIPE, seed=1))

        def one(x, kernels, dy, sizes, state):
            y, pullback, _ = jax.vjp(
                lambda *a: jlp.grouped_matmul(*a[:2], sizes, recipe=RECIPE, state=a[2]), x, kernels, state, has_aux=True
            )
            return y, *pullback(dy)

        found = jax.jit(jax.vmap(one))(x, kernels, dy, sizes, states)
        one = jax.jit(one)
        each = [
            jax.device_get(one(*jax.tree.map(lambda a, i=i: a[i], (x, kernels, dy, sizes, states)))) for i in (0, 1)
        ]
        assert_same_bytes(found, jax.tree.map(lambda *leaves: np.stack(leaves), *each))

    def test_of_rows_that_share_a_layer(self):
        x, kernels, sizes, _ = self.both()
        state = seen_state(RECIPE)

        def loss(state):
            return jax.vmap(lambda x, sizes: loss_of(x, kernels, state, sizes))(x, sizes).sum()

        one = jax.jit(jax.grad(lambda s, x, sizes: loss_of(x, kernels, s, sizes)))
        news = [jax.device_get(one(state, x[i], sizes[i])) for i in range(2)]
        expected = {name: np.maximum(*(new[name] for new in news)) for name in state}
        assert_same_bytes(new_state(loss, state), expected)


class TestKernelsQuantisedOnce:
    x, kernels, *_ = operands()

    def test_have_the_scales_of_the_state(self):
        state = seen_state(RECIPE)
        quantized = jlp.quantize_kernel(self.kernels, RECIPE, state=state, module_type="grouped_linear")
        state = jax.device_get(state)
        for e in range(E):
            own = {name: leaf[e] for name, leaf in state.items()}
            own = jlp.quantize_kernel(np.asarray(self.kernels)[e], RECIPE, state=own)
            for ours, theirs in ((quantized.rowwise, own.rowwise), (quantized.columnwise, own.columnwise)):
                assert_same_bytes(
                    [np.asarray(part)[e] for part in (ours.data, ours.scale)], (theirs.data, theirs.scale)
                )

        def gradients(quantized):
            loss = lambda kernels, state: loss_of(self.x, kernels, state, quantized_kernel=quantized)  # noqa: E731
            return jax.jit(jax.grad(loss, argnums=(0, 1)))(self.kernels, state)

        assert_same_bytes(gradients(quantized), gradients(None))

    def test_without_a_master_weight_its_histories_stay(self):
        state = seen_state(RECIPE)
        quantized = jlp.quantize_kernel(self.kernels, RECIPE, state=state, module_type="grouped_linear")
        new = new_state(lambda s: loss_of(self.x, None, s, quantized_kernel=quantized), state)
        for name in ("kernel_amax_history", "kernel_scale"):
            assert_same_bytes(new[name], state[name])

    def test_of_another_number_of_experts(self):
        with pytest.raises(ValueError, match=r"has shape \(4, 3\).* needs \(5, 3\).* and 5 experts"):
            jlp.quantize_kernel(
                self.kernels, RECIPE, state=init_state(RECIPE, num_experts=4), module_type="grouped_linear"
            )


class TestCalibrating:
    def test_is_in_high_precision_and_records_what_a_step_would(self):
        x, kernels, bias, dy = operands()
        state = init_state(RECIPE, num_experts=E)

        def results(state, **scope):
            with jlp.autocast(RECIPE, **scope):

                def layer(x, kernels, bias, state):
                    return jlp.grouped_matmul(x, kernels, UNEVEN, bias, state=state)

                def run(x, kernels, bias, state):
                    y, pullback, after = jax.vjp(layer, x, kernels, bias, state, has_aux=True)
                    return (y, *pullback(dy)), after

                return jax.jit(run)(x, kernels, bias, state)

        (*found, new), after = results(state, calibrating=True)
        (*_, expected), _ = results(state)
        assert_same_bytes(new, expected)
        assert_same_bytes(after, state)
        plain = jax.jit(lambda *a: jax.vjp(lambda *a: jlp.grouped_matmul(*a[:2], UNEVEN, a[2], recipe=None), *a)[0])
        assert_same_bytes(found[0], plain(x, kernels, bias))


class TestOnAMesh:
    x, kernels, bias, dy = operands()

    def test_each_device_has_experts(self):
        """Their part of the state is theirs: nothing is reduced."""
        x, kernels, dy, state = self.x[:128], self.kernels[:4], self.dy[:128], seen_state(RECIPE, 4)
        sizes = jnp.asarray([20, 44, 60, 4], jnp.int32)

        def local(x, kernels, dy, sizes, state):
            y, pullback, _ = jax.vjp(
                lambda *a: jlp.grouped_matmul(*a[:2], sizes, recipe=RECIPE, state=a[2]), x, kernels, state, has_aux=True
            )
            return y, *pullback(dy)

        mapped = jax.shard_map(local, mesh=mesh_of((2,)), in_specs=P("a"), out_specs=P("a"))
        given = x, kernels, dy, sizes, state
        assert_same_bytes(jax.jit(mapped)(*given), jax.jit(local)(*given))

    def test_amaxes_are_those_of_the_rows_of_all_devices(self):
        rows, state = random_array((2, 75, K), seed=7), seen_state(RECIPE)
        sizes = jnp.asarray([[10, 0, 1, 30, 20], [0, 5, 0, 40, 25]], jnp.int32)
        dy = random_array((2, 75, N), seed=8)

        def local(x, dy, sizes, kernels, state):
            _, pullback, _ = jax.vjp(
                lambda kernels, state: jlp.grouped_matmul(x[0], kernels, sizes[0], recipe=RECIPE, state=state),
                *(kernels, state),
                has_aux=True,
            )
            return pullback(dy[0])

        specs = P("a"), P("a"), P("a"), P(), P()
        mapped = jax.shard_map(local, mesh=mesh_of((2,)), in_specs=specs, out_specs=P())
        dw, new = jax.jit(mapped)(rows, dy, sizes, self.kernels, state)

        def in_order(a):
            """All rows, sorted by expert; 19 belong to none."""
            ends = np.cumsum(sizes, axis=1)
            parts = [a[d, ends[d, e] - sizes[d, e] : ends[d, e]] for e in range(E) for d in range(2)]
            return jnp.concatenate(parts)

        whole = in_order(rows), self.kernels, self.bias, in_order(dy), sizes.sum(axis=0), state
        (_, _, expected_dw, _, expected), _ = step(RECIPE, *whole)
        assert_same_bytes(new, expected)
        np.testing.assert_allclose(dw, expected_dw, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected_dw).max()))

    @by_axis_type
    @pytest.mark.parametrize("of_state", [P(), P("a")], ids=str)
    @pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "a"), P("a")], ids=str)
    def test_split_kernels_have_the_new_state_of_one_device(self, spec, of_state, axis_type):
        x, w = random_array((150, 256)), random_array((4, 256, 512), "float32", 1)
        sizes, state, mesh = jnp.asarray([40, 0, 77, 33], jnp.int32), seen_state(RECIPE, 4), mesh_of((2,), axis_type)
        dy = random_array((150, 512), seed=2)

        def run(x, w, dy, sizes, state):
            layer = lambda *a: jlp.grouped_matmul(*a[:2], sizes, recipe=RECIPE, state=a[2])  # noqa: E731
            y, pullback, _ = jax.vjp(layer, x, w, state, has_aux=True)
            if jax.typeof(y).sharding.mesh.explicit_axes:
                dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
            return pullback(dy)[2]

        expected = jax.jit(run)(x, w, dy, sizes, state)
        with jax.set_mesh(mesh):
            x, dy, sizes = (place(a, mesh, P()) for a in (x, dy, sizes))
            state = {name: place(leaf, mesh, of_state) for name, leaf in state.items()}
            assert_same_bytes(jax.jit(run)(x, place(w, mesh, spec), dy, sizes, state), expected)


class TestErrors:
    x, kernels, *_ = operands()

    @pytest.mark.parametrize(
        ("state", "error", "message"),
        [
            (None, ValueError, r"there are none: .*init_state\(recipe, num_experts=5\)"),
            (
                init_state(RECIPE),
                ValueError,
                r"has shape \(3,\).* needs \(5, 3\): make it anew for this recipe and 5 exp",
            ),
            (init_state(RECIPE, num_experts=4), ValueError, r"has shape \(4, 3\).* needs \(5, 3\): .* and 5 experts"),
            ([1.0], TypeError, "state is a list; needs what .*init_state"),
        ],
        ids=["none", "of a linear", "of four experts", "list"],
    )
    def test_of_a_state_that_does_not_fit(self, state, error, message):
        with pytest.raises(error, match=f"^grouped_matmul: .*{message}"):
            jlp.grouped_matmul(self.x, self.kernels, UNEVEN, recipe=RECIPE, state=state)

    @pytest.mark.parametrize(
        ("experts", "error", "message"),
        [(0, ValueError, "num_experts=0; needs an int from 1 on"), ("8", TypeError, "num_experts='8'; needs an int")],
    )
    def test_of_a_number_of_experts(self, experts, error, message):
        with pytest.raises(error, match=f"^init_state: {message}"):
            init_state(RECIPE, num_experts=experts)

    def test_a_linear_does_not_take_the_state_of_experts(self):
        with pytest.raises(ValueError, match=r"^linear: .*has shape \(5, 3\).* needs \(3,\)"):
            jlp.linear(self.x, self.kernels[0], recipe=RECIPE, state=init_state(RECIPE, num_experts=E))

    def test_a_recipe_without_a_state_hands_it_on(self):
        state = seen_state(RECIPE)
        for recipe in (None, jlp.MXFP8BlockScaling(), jlp.Int4QAT(group_size=16)):
            y, after = jlp.grouped_matmul(self.x, self.kernels, UNEVEN, recipe=recipe, state=state)
            assert_same_bytes((y, after), (jlp.grouped_matmul(self.x, self.kernels, UNEVEN, recipe=recipe), state))
