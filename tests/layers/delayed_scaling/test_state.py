"""Delayed scaling, one layer: histories and scales step by step, hostile amaxes, state that does not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling
from tests.helpers import assert_same_bytes, random_array

F = np.float32
E4M3, E5M2 = jlp.Float8Tensor(), jlp.Float8Tensor("e5m2")
FORMATS = {"input": E4M3, "kernel": E4M3, "output_grad": E5M2}
KEPT = None

# Five steps, a history of three: slot 0 is the latest amax, then come the oldest and the one before the latest.
AMAXES = {
    "input": [4.0, 3.0, 0.0, 0.5, 0.1],
    "kernel": [1.0, 0.0, 0.0, 0.0, 2.0],
    "output_grad": [16.0, 0.0, 0.0, 3.0, 0.1],
}
HISTORIES = {
    "input": [[4, 0, 0], [3, 0, 4], [0, 4, 3], [0.5, 3, 0], [0.1, 0, 0.5]],
    "kernel": [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [2, 0, 0]],
    "output_grad": [[16, 0, 0], [0, 0, 16], [0, 16, 0], [3, 0, 0], [0.1, 0, 3]],
}
# What the amax is taken to be in each step, before it is seen: that of the earlier ones. First there is none.
KNOWN = {
    "max": {
        "input": [KEPT, 4, 4, 4, 3],
        "kernel": [KEPT, 1, 1, 1, KEPT],
        "output_grad": [KEPT, 16, 16, 16, 3],
    },
    "most_recent": {
        "input": [KEPT, 4, 3, KEPT, 0.5],
        "kernel": [KEPT, 1, KEPT, KEPT, KEPT],
        "output_grad": [KEPT, 16, KEPT, KEPT, 3],
    },
}


def operand(shape, amax, seed=0):
    """Numbers whose largest magnitude is `amax`."""
    x = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    x[1, 0] = -1
    return x * F(amax)


@functools.partial(jax.jit, static_argnames="recipe")
def step(recipe, state, x, w, dy):
    """y, dx, dw and the new state."""
    y, pullback, _ = jax.vjp(lambda *a: jlp.linear(*a[:2], recipe=recipe, state=a[2]), x, w, state, has_aux=True)
    dx, dw, state = pullback(dy)
    return (y, dx, dw), state


@jax.jit
def gemms(x, w, dy, encode):
    """What a step computes with these encode scales."""
    x_row, x_column = jlp.quantize_both(x, E4M3, encode_scale=encode["input"])
    w_row, w_column = jlp.quantize_both(w, E4M3, encode_scale=encode["kernel"])
    dy_row, dy_column = jlp.quantize_both(dy, E5M2, encode_scale=encode["output_grad"])
    pairs = (x_row, w_column.mT), (dy_row, w_row), (x_column.mT, dy_column.mT)
    return tuple(jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32) for a, b in pairs)


@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_five_steps(algorithm, margin):
    recipe = jlp.DelayedScaling(margin=margin, amax_history_len=3, amax_compute_algo=algorithm)
    state = delayed_scaling.init_state(recipe)
    encode = dict.fromkeys(FORMATS, F(1))  # of the first step
    for t in range(5):
        for name, fmt in FORMATS.items():
            known = KNOWN[algorithm][name][t]
            if known is not KEPT:
                encode[name] = F(fmt.maximum * 2.0**-margin) / F(known)
            else:  # through its reciprocal, which is what the state holds
                encode[name] = F(1) / (F(1) / F(encode[name]))
        x, w, dy = (operand(s, AMAXES[n][t], t) for n, s in zip(FORMATS, [(4, 8), (8, 6), (4, 6)], strict=True))
        results, state = step(recipe, state, x, w, dy)
        assert_same_bytes(results, gemms(x, w, dy, encode))
        for name in FORMATS:
            history, scale = state[f"{name}_amax_history"], state[f"{name}_scale"]
            assert (history.dtype, scale.dtype) == (jnp.float32, jnp.float32)
            np.testing.assert_array_equal(history, np.asarray(HISTORIES[name][t], F))
            np.testing.assert_array_equal(scale, F(1) / F(encode[name]))


def test_a_history_of_one_is_the_latest_amax():
    recipe = jlp.DelayedScaling(amax_history_len=1)
    state = delayed_scaling.init_state(recipe)
    for amax in (4.0, 0.5):
        _, state = step(recipe, state, operand((4, 8), amax), operand((8, 6), 1.0), operand((4, 6), 1.0))
        assert state["input_amax_history"].tolist() == [amax]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_step_keeps_the_scale(bad):
    recipe = jlp.DelayedScaling(amax_history_len=2)
    state = delayed_scaling.init_state(recipe)
    x, w, dy = operand((4, 8), 4.0), operand((8, 6), 1.0), operand((4, 6), 2.0)
    _, state = step(recipe, state, x, w, dy)
    spoiled = x.copy()
    spoiled[2, 3] = bad
    (y, _, dw), state = jax.device_get(step(recipe, state, spoiled, w, dy))
    assert not np.any(np.isfinite(y[2])) and not np.any(np.isfinite(dw[3]))
    assert not np.isfinite(state["input_amax_history"][0])
    assert state["input_scale"][0] == 4 / F(448)
    for _ in range(2):  # while it is in the history, the scale of before is good enough
        (y, _, dw), state = step(recipe, state, x / 2, w, dy)
        assert np.all(np.isfinite(y)) and np.all(np.isfinite(dw))
        np.testing.assert_allclose(state["input_scale"], 4 / 448, rtol=1e-6)
    _, state = step(recipe, state, x / 2, w, dy)
    np.testing.assert_array_equal(state["input_scale"], F(1) / F(224))
    assert np.all(np.isfinite(np.concatenate(jax.tree.leaves(state))))


class TestEncodeScale:
    def scale(self, amax, margin=0, stored=1.0):
        recipe = jlp.DelayedScaling(margin=margin, amax_history_len=2)
        state = delayed_scaling.init_state(recipe)
        state |= {"kernel_amax_history": jnp.asarray([amax, 0], jnp.float32)}
        state |= {"kernel_scale": jnp.full(1, stored, jnp.float32)}
        return float(delayed_scaling.encode_scale(recipe, state, "kernel", 448.0))

    @pytest.mark.parametrize("amax", [1e-37, 2.0**-126, 1.5 * 2.0**-118])
    def test_is_capped_where_its_reciprocal_would_be_subnormal(self, amax):
        assert self.scale(amax) == 2.0**126

    def test_of_a_large_amax_and_margin_is_not_zero(self):
        assert self.scale(3e38, margin=20) == 2.0**-126

    @pytest.mark.parametrize("stored", [np.nan, np.inf])
    def test_of_a_scale_that_is_none_is_one(self, stored):
        assert self.scale(0.0, stored=stored) == 1.0

    @pytest.mark.parametrize(("amax", "stored"), [(-1.0, 1.0), (0.0, -1.0), (2.0, -1.0), (2.0, 0.0)])
    def test_of_a_state_that_something_has_changed_is_none(self, amax, stored):
        assert np.isnan(self.scale(amax, stored=stored))

    def test_elements_beyond_it_saturate(self):
        recipe = jlp.DelayedScaling(amax_history_len=2)
        state = delayed_scaling.init_state(recipe)
        x, w, dy = np.eye(4, 8, dtype=F), np.ones((8, 6), F), np.ones((4, 6), F)
        _, state = step(recipe, state, x, w, dy)
        (y, *_), state = step(recipe, state, 10 * x, w, dy)
        np.testing.assert_allclose(y, 1, rtol=1e-6)  # not 10: the amax was 1
        (y, *_), state = step(recipe, state, 10 * x, w, dy)
        np.testing.assert_allclose(y, 10, rtol=1e-6)


class TestState:
    recipe = jlp.DelayedScaling(amax_history_len=3)
    x, w = random_array((16, 32)), random_array((32, 16), "float32", 1)

    def test_is_flaxs_own(self):
        """The names, shapes and dtypes of flax.linen.fp8_ops, so that its trainers take it."""
        from flax.linen import fp8_ops

        flax = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=3)
        dims = (((1,), (0,)), ((), ()))
        variables = flax.init(jax.random.key(0), self.x, self.w, dims)[delayed_scaling.OVERWRITE_WITH_GRADIENT]
        state = delayed_scaling.init_state(self.recipe)
        assert {n: (v.shape, v.dtype) for n, v in state.items()} == {
            n: (v.shape, jnp.float32) for n, v in variables.items()
        }

    def test_is_returned_unchanged(self):
        state = delayed_scaling.init_state(self.recipe) | {"input_scale": jnp.full(1, 0.5)}
        y, after = jlp.linear(self.x, self.w, recipe=self.recipe, state=state)
        assert_same_bytes(after, state)
        assert y.shape == (16, 16)

    @pytest.mark.parametrize("recipe", [None, jlp.MXFP8BlockScaling()], ids=["none", "stateless"])
    def test_goes_past_a_recipe_that_needs_none(self, recipe):
        state, x, w = delayed_scaling.init_state(self.recipe), self.x, self.w
        found = jax.jit(lambda s: (jlp.linear(x, w, recipe=recipe, state=s), jlp.linear(x, w, recipe=recipe)))
        (y, after), expected = found(state)
        assert_same_bytes((y, after), (expected, state))

    def test_of_a_product_that_contracts_nothing_is_handed_on(self):
        state = delayed_scaling.init_state(self.recipe)
        y, after = jlp.einsum("bti,i->bti", self.x[None], self.x[0], recipe=self.recipe, state=state)
        assert y.shape == (1, 16, 32)
        assert_same_bytes(after, state)

    def test_overwritten_by_an_unused_layers_gradient_is_an_error(self, isa):
        state = delayed_scaling.init_state(self.recipe)
        unused = jax.jit(jax.grad(lambda s: 0.0 * sum(jnp.sum(v) for v in jax.tree.leaves(s))))(state)
        assert not any(np.any(np.asarray(v)) for v in unused.values())
        dy = random_array((16, 16), seed=2)
        if isa == "cuda":  # where nothing stops a program
            assert np.isnan(step(self.recipe, unused, self.x, self.w, dy)[0][0]).all()
            return
        with pytest.raises(jax.errors.JaxRuntimeError, match="a scale of 0, says that .* keep_unused"):
            step(self.recipe, unused, self.x, self.w, dy)

    def test_of_inference_alone_keeps_the_kernels(self):
        """A quantised kernel without its master weight: no amax of it is seen."""
        state = delayed_scaling.init_state(self.recipe) | {"kernel_amax_history": jnp.asarray([2.0, 3.0, 5.0])}
        quantized = jlp.quantize_kernel(self.w, self.recipe, state=state)

        def loss(state):
            return jlp.linear(self.x, None, recipe=self.recipe, quantized_kernel=quantized, state=state)[0].sum()

        new = jax.device_get(jax.jit(jax.grad(loss))(state))
        assert new["kernel_amax_history"].tolist() == [2, 3, 5]
        assert new["input_amax_history"][0] == np.abs(np.float32(self.x)).max()

    def test_a_quantised_kernel_has_the_scale_of_the_step(self):
        state = delayed_scaling.init_state(self.recipe) | {"kernel_amax_history": jnp.asarray([2.0, 3.0, 5.0])}
        quantized = jlp.quantize_kernel(self.w, self.recipe, state=state)
        encode = jnp.asarray(F(448) / F(5))
        assert_same_bytes(quantized.rowwise, jlp.quantize(self.w, E4M3, axis=-1, encode_scale=encode))
        assert_same_bytes(quantized.columnwise, jlp.quantize(self.w, E4M3, axis=-2, encode_scale=encode))

    def test_orbax_round_trip(self, tmp_path):
        _, state = step(
            self.recipe, delayed_scaling.init_state(self.recipe), self.x, self.w, random_array((16, 16), seed=2)
        )
        variables = {"params": {"kernel": self.w}, delayed_scaling.OVERWRITE_WITH_GRADIENT: {"layer": state}}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "variables", variables)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "variables", jax.eval_shape(lambda: variables))
        assert jax.tree.structure(restored) == jax.tree.structure(variables)
        assert_same_bytes(restored, variables)


class TestErrors:
    recipe = jlp.DelayedScaling(amax_history_len=3)
    x, w = random_array((16, 32)), random_array((32, 16), "float32", 1)
    calls = pytest.mark.parametrize(
        "call",
        [
            lambda x, w, **o: jlp.linear(x, w, **o),
            lambda x, w, **o: jlp.dot_general(x, w, (((1,), (0,)), ((), ())), **o),
            lambda x, w, **o: jlp.einsum("tk,kn->tn", x, w, **o),
            lambda x, w, **o: jlp.quantize_kernel(w, **o),
        ],
        ids=["linear", "dot_general", "einsum", "quantize_kernel"],
    )

    @calls
    def test_a_missing_state_names_every_way_to_one(self, call, request):
        who = request.node.callspec.id
        with pytest.raises(ValueError, match=f"^{who}: DelayedScaling needs .* there are none") as raised:
            call(self.x, self.w, recipe=self.recipe)
        for remedy in ("autocast(recipe)", "jaxlowprec.nnx.add_delayed_scaling", "delayed_scaling.init_state(recipe)"):
            assert remedy in str(raised.value)

    @calls
    def test_a_history_of_another_length(self, call):
        state = delayed_scaling.init_state(jlp.DelayedScaling(amax_history_len=4))
        with pytest.raises(ValueError, match=r"'input_amax_history'\] has shape \(4,\).* needs \(3,\): make it anew"):
            call(self.x, self.w, recipe=self.recipe, state=state)

    def test_a_leaf_that_is_not_there(self):
        state = delayed_scaling.init_state(self.recipe)
        del state["kernel_scale"]
        with pytest.raises(ValueError, match=r"state\['kernel_scale'\] has shape None"):
            jlp.linear(self.x, self.w, recipe=self.recipe, state=state)

    def test_something_that_is_no_state(self):
        with pytest.raises(TypeError, match="linear: state is a list; needs what .*init_state"):
            jlp.linear(self.x, self.w, recipe=self.recipe, state=[1.0])
