"""OsciReset: weights whose quantised value moves much further than they do are set to it at a window's end."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, place

NVFP4 = jlp.NVFP4BlockScaling()
RESET = jlp.OsciReset(NVFP4, every=7, window=4, tau=3.0, start=2)
STEPS = 20  # windows from 2 to 6, 9 to 13, 16 to 20


TILES = jlp.NVFP4((16, 16))


@functools.partial(jax.jit, static_argnames="fmt")
def decoded(w, fmt=TILES):
    """The kernel [..., K, N] as fprop reads it."""
    return jlp.quantize(w, fmt, axis=-2).dequantize(w.dtype)


def walk(step, w):
    """An optimizer's step: each weight moves by itself, some of them there and back."""
    noise = np.random.default_rng([1, step]).standard_normal(w.shape, np.float32)
    back_and_forth = np.where(np.arange(w.shape[-1]) % 2 == 0, np.float32((-1) ** step), noise)
    return (np.float32(w) + np.float32(0.02) * back_and_forth).astype(w.dtype)


def by_oracle(reset, w, quantized, steps=STEPS):
    """The weight after each step, by NumPy but for the quantiser, and how many were reset."""
    found, resets = [], 0
    before = before_quantized = moved = moved_quantized = None
    for step in range(steps):
        w = walk(step, w)
        at = (step - reset.start) % reset.every
        if step >= reset.start and at <= reset.window:
            now, now_quantized = (np.float32(v) for v in (w, quantized(w)))
            if at == 0:
                moved = moved_quantized = np.zeros_like(now)
            else:
                moved = moved + np.abs(now - before)
                moved_quantized = moved_quantized + np.abs(now_quantized - before_quantized)
            if at == reset.window:
                chosen = (moved_quantized >= np.float32(reset.tau) * moved) & (moved > 0)
                resets += chosen.sum()
                w = np.where(chosen, now_quantized, now).astype(w.dtype)
            before, before_quantized = now, now_quantized
        found.append(w)
    return found, resets


def run(reset, w, update=None, name="up"):
    """The weight after each step."""
    update = update or jax.jit(reset.update)
    params = jax.device_put({name: {"kernel": w, "bias": np.ones(w.shape[-1], np.float32)}})
    state, found = reset.init(params), []
    for step in range(STEPS):
        params = {name: {**params[name], "kernel": jax.device_put(walk(step, params[name]["kernel"]))}}
        params, state = update(params, state, step)
        found.append(params[name]["kernel"])
    assert_same_bytes(params[name]["bias"], np.ones(w.shape[-1], np.float32))
    return found


class TestResets:
    """Planted: between the codes 1.5 and 2 of a block whose scale is 1."""

    reset = jlp.OsciReset(NVFP4, every=10, window=4)
    values = {
        "oscillates": ((0, 1), (1.74, 1.76, 1.74, 1.76, 1.74), 1.5),
        "moves": ((0, 2), (1.0, 1.3, 1.6, 1.9, 2.2), 2.2),
        "trembles within a code": ((0, 3), (1.49, 1.51, 1.49, 1.51, 1.49), 1.49),
        "crosses far": ((0, 4), (1.6, 1.9, 1.6, 1.9, 1.6), 1.6),
        "rests": ((0, 5), (1.74,) * 5, 1.74),
    }

    def after(self, tau=8.0):
        reset = jlp.OsciReset(NVFP4, every=10, window=4, tau=tau)
        params = {"up": {"kernel": np.zeros((32, 32), np.float32)}}
        params["up"]["kernel"][0, 0] = 6
        state, update = reset.init(params), jax.jit(reset.update)
        for step in range(5):
            w = np.array(params["up"]["kernel"])
            for at, values, _ in self.values.values():
                w[at] = values[step]
            params, state = update({"up": {"kernel": w}}, state, step)
        return np.asarray(params["up"]["kernel"]), jax.device_get(state)

    @pytest.mark.parametrize("name", values)
    def test_only_what_oscillates(self, name):
        at, _, expected = self.values[name]
        assert self.after()[0][at] == np.float32(expected)

    def test_the_state_says_how_far_both_moved(self):
        _, state = self.after()
        moved, moved_quantized = state.moved["up"], state.moved_quantized["up"]
        np.testing.assert_allclose(moved[0, 1:6], [0.08, 1.2, 0.08, 1.2, 0], rtol=1e-5)
        np.testing.assert_array_equal(moved_quantized[0, 1:6], [2.0, 1.0, 0, 2.0, 0])

    def test_tau_is_the_ratio_from_which_on(self):
        """What crosses far has D_Q / D = 2 / 1.2."""
        assert self.after(tau=1.6)[0][0, 4] == 1.5 and self.after(tau=1.7)[0][0, 4] == np.float32(1.6)


class TestAgainstTheOracle:
    w = np.asarray(random_array((64, 48), "float32", 3)) / 4

    @functools.cached_property
    def expected(self):
        return by_oracle(RESET, self.w, decoded)

    def test_every_step_has_the_same_bytes(self):
        expected, resets = self.expected
        assert_same_bytes(run(RESET, jnp.asarray(self.w), RESET.update), expected)
        assert 100 < resets < self.w.size

    def test_a_traced_step_is_compiled_once_and_gives_the_same_bytes(self):
        update = jax.jit(RESET.update)
        assert_same_bytes(run(RESET, self.w, update), self.expected[0])
        assert update._cache_size() == 1

    def test_the_state_may_be_dropped_between_windows(self):
        update = jax.jit(RESET.update)
        kept = None

        def leaner(params, state, step):
            nonlocal kept
            if not RESET.watches(step):
                kept = None
                return params, state
            params, kept = update(params, kept or RESET.init(params), step)
            return params, state

        assert_same_bytes(run(RESET, self.w, leaner), by_oracle(RESET, self.w, decoded)[0])

    def test_bfloat16_weights(self):
        w = self.w.astype(jnp.bfloat16)
        found = run(RESET, w)
        assert found[-1].dtype == jnp.bfloat16
        assert_same_bytes(found, by_oracle(RESET, w, decoded)[0])

    @pytest.mark.parametrize(
        ("recipe", "quantized"),
        [
            (jlp.NVFP4BlockScaling(disable_2d_quantization=True), functools.partial(decoded, fmt=jlp.NVFP4())),
            (jlp.MXFP8BlockScaling(), functools.partial(decoded, fmt=jlp.MXFP8())),
            (jlp.PerGemm(NVFP4, jlp.MXFP8BlockScaling(), None), decoded),
            (
                jlp.WeightQAT(jlp.NVFP4()),
                lambda w: jlp.quantize(w.astype(jnp.bfloat16), jlp.NVFP4(), axis=-2).dequantize(w.dtype),
            ),
        ],
        ids=["nvfp4 1x16", "mxfp8", "per gemm", "nvfp4_qat"],
    )
    def test_the_quantiser_is_that_of_fprop(self, recipe, quantized):
        reset = jlp.OsciReset(recipe, every=7, window=4, tau=2.0)
        expected, resets = by_oracle(reset, self.w, quantized)
        assert_same_bytes(run(reset, self.w), expected)
        assert resets

    def test_stacked_kernels_are_kernels(self):
        stack = np.stack([self.w, self.w / 8])
        expected = [by_oracle(RESET, w, decoded)[0][6] for w in stack]
        params, update = {"layers": {"up": {"kernel": stack}}}, jax.jit(RESET.update)
        state = RESET.init(params)
        for step in range(7):
            kernel = np.stack([walk(step, w) for w in np.asarray(params["layers"]["up"]["kernel"])])
            params, state = update({"layers": {"up": {"kernel": kernel}}}, state, step)
        assert_same_bytes(list(np.asarray(params["layers"]["up"]["kernel"])), expected)

    def test_kernels_of_several_axes_are_the_matrices_that_axes_says(self):
        reset = jlp.OsciReset(NVFP4, every=7, window=4, tau=3.0, start=2, axes={".*/query": (0, 1)})
        assert hash(reset) == hash(jlp.OsciReset(NVFP4, 7, 4, 3.0, 2, axes=((".*/query", (0, 1)),)))
        kernel = self.w.reshape(64, 4, 12)
        params = {"attention": {"query": {"kernel": kernel}}}
        state, update = reset.init(params), jax.jit(reset.update)
        for step in range(7):
            w = walk(step, np.asarray(params["attention"]["query"]["kernel"]).reshape(64, 48)).reshape(64, 4, 12)
            params, state = update({"attention": {"query": {"kernel": w}}}, state, step)
        found = np.asarray(params["attention"]["query"]["kernel"]).reshape(64, 48)
        assert_same_bytes(found, self.expected[0][6])


LAYOUTS = {  # by the axes of batches (b), contracted ones (k, l) and features (n, m): what `axes` says
    "nk": ((), (1,)),
    "kn": ((), (0,)),
    "bnk": ((0,), (2,)),
    "nbk": ((1,), (-1,)),
    "knb": ((2,), (0,)),
    "nkm": ((), (1,)),
    "nlk": ((), (2, 1)),
    "lnk": ((), (2, 0)),
}


@pytest.mark.parametrize("recipe", [jlp.WeightQAT(jlp.NVFP4()), NVFP4], ids=["nvfp4_qat", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_reset_does_not_depend_on_the_layout(layout, recipe):
    """Against the matrices [batch, K, N] of the same weights."""
    order = sorted(range(len(layout)), key=lambda axis: "bklnm".index(layout[axis]))
    resets = [jlp.OsciReset(recipe, every=3, window=2, tau=1.0, axes=axes) for axes in ({".*": LAYOUTS[layout]}, {})]
    w = np.asarray(random_array((16,) * len(layout), "float32", 3))

    def matrices(w):
        batch, k = w.shape[: layout.count("b")], 16 ** len({*layout} & {*"kl"})
        return w.transpose(order).reshape(*batch, k, -1)

    def last(reset, steps):
        state = reset.init({"up": steps[0]})
        for step, w in enumerate(steps):
            params, state = reset.update({"up": w}, state, step)
        return params["up"]

    @jax.jit
    def both(steps):
        return matrices(last(resets[0], steps)), last(resets[1], list(map(matrices, steps)))

    steps = [w, walk(1, w), walk(2, w)]
    found, wanted = both(steps)
    assert_same_bytes(found, wanted)
    assert (np.asarray(found) != matrices(steps[-1])).any()


class TestOutsideOfWindows:
    params = {"up": random_array((32, 32), "float32")}

    def test_nothing_is_computed(self):
        """All arrays are made in a loop of one turn at most, or none."""
        jaxpr = jax.make_jaxpr(RESET.update)(self.params, RESET.init(self.params), 0).jaxpr
        (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "while")
        assert all(v.aval.size <= 1 for eqn in jaxpr.eqns if eqn is not loop for v in eqn.outvars)

    def test_donated_buffers_stay_where_they_are(self):
        update = jax.jit(RESET.update, donate_argnums=(0, 1))
        given = {"up": random_array((32, 32), "float32")}, RESET.init(self.params)
        text = update.lower(*given, 0).compile().as_text()
        entry = text[text.index("ENTRY") :]
        assert "f32[32,32]" in entry and " copy(" not in entry

    @pytest.mark.parametrize("step", [0, 1, 7, 8, 14])
    def test_nothing_changes(self, step):
        state = RESET.init(self.params)
        assert not RESET.watches(step)
        assert_same_bytes(RESET.update(self.params, state, step), (self.params, state))
        assert_same_bytes(jax.jit(RESET.update)(self.params, state, step), (self.params, state))

    def test_windows_are_where_they_are_said_to_be(self):
        assert [step for step in range(20) if RESET.watches(step)] == [*range(2, 7), *range(9, 14), *range(16, 20)]

    def test_the_state_keeps_no_buffer_of_the_parameters(self):
        """A step that is given them with donation would take it away."""
        step = jax.jit(lambda params: jax.tree.map(lambda w: w + 1, params), donate_argnums=0)
        params = {"up": jnp.ones((32, 32))}
        state = RESET.init(params)
        params, state = RESET.update(params, state, 2)
        step(params)
        assert float(state.previous["up"].sum()) == 32 * 32


class TestTrees:
    @staticmethod
    def watched(params, reset=RESET):
        """The names of the weights; and that a window leaves the structure and all other leaves as they are."""
        state, update = reset.init(params), jax.jit(reset.update)
        for step in range(reset.start, reset.start + reset.window + 1):
            updated, state = update(params, state, step)
        assert jax.tree.structure(updated) == jax.tree.structure(params)
        assert_same_bytes(updated, params)  # nothing has moved
        return sorted(state.moved)

    def test_of_nnx(self):
        model = nnx.Dict(
            up=jlp.nnx.Linear(32, 48, rngs=nnx.Rngs(0)),
            norm=nnx.RMSNorm(32, rngs=nnx.Rngs(0)),
            layers=nnx.List([jlp.nnx.Linear(48, 32, rngs=nnx.Rngs(i)) for i in range(2)]),
            lm_head=nnx.Linear(32, 64, rngs=nnx.Rngs(0)),
            embedding=nnx.Embed(64, 32, rngs=nnx.Rngs(0)),
        )
        params = nnx.state(model, nnx.Param)
        assert self.watched(params) == ["layers/0", "layers/1", "up"]
        assert self.watched(nnx.to_pure_dict(params)) == ["layers/0", "layers/1", "up"]

    def test_of_linen_whose_kernels_may_have_axes(self):
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        model = nn.Sequential([jlp.linen.Dense(48, kernel_init=kernel_init), jlp.linen.Dense(32)])
        variables = model.init(jax.random.key(0), jnp.ones((16, 32)))
        assert self.watched(variables) == self.watched(variables["params"]) == ["layers_0", "layers_1"]

    def test_rules_and_patterns_choose(self):
        params = {name: {"kernel": jnp.ones((32, 32))} for name in ("up", "down", "out", "head")}
        rules = jlp.PerLayer((("out", None),), default=NVFP4)
        assert self.watched(params, jlp.OsciReset(rules, every=4, window=2)) == ["down", "up"]
        assert self.watched(params, jlp.OsciReset(NVFP4, 4, 2, include=("u",), exclude=())) == ["out", "up"]
        assert self.watched(params, jlp.OsciReset(NVFP4, 4, 2, exclude=())) == ["down", "head", "out", "up"]

    def test_weights_that_are_frozen_in_few_bits_are_left_alone(self):
        params = {"up": jnp.ones((32, 32)), "down": jlp.quantize(jnp.ones((32, 32)), jlp.NVFP4(), axis=-2)}
        assert self.watched(params) == ["up"]


class TestMeshes:
    @pytest.mark.slow
    @by_axis_type
    def test_the_bytes_do_not_depend_on_the_mesh(self, axis_type):
        mesh, spec = mesh_of((2, 2), axis_type), P("a", "b")
        w = np.asarray(random_array((64, 96), "float32", 3)) / 4
        expected, _ = by_oracle(RESET, w, decoded)
        with jax.set_mesh(mesh):
            update = jax.jit(RESET.update)
            params = {"up": place(w, mesh, spec)}
            state = RESET.init(params)
            for leaf in jax.tree.leaves(state):
                assert leaf.sharding.is_equivalent_to(params["up"].sharding, 2)
            for step in range(7):
                params = {"up": place(np.asarray(walk(step, np.asarray(params["up"]))), mesh, spec)}
                params, state = update(params, state, step)
                for leaf in (*jax.tree.leaves(state), params["up"]):
                    assert leaf.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), 2)
                assert_same_bytes(jax.device_get(params["up"]), np.asarray(expected[step]))


class TestMistakes:
    @pytest.mark.parametrize(
        ("fields", "error", "message"),
        [
            ({"recipe": None}, TypeError, "recipe=None; needs a recipe such as"),
            ({"recipe": jlp.NVFP4()}, TypeError, "recipe=NVFP4.*; needs a recipe such as"),
            ({"recipe": jlp.DelayedScaling()}, ValueError, "recipe=DelayedScaling.*; needs a recipe whose scales"),
            ({"every": 50}, ValueError, "window=50 and every=50; needs a window shorter"),
            ({"window": 0}, ValueError, "window=0; needs an int from 1 on"),
            ({"every": 200.0}, TypeError, "every=200.0; needs an int"),
            ({"start": -1}, ValueError, "start=-1; needs an int from 0 on"),
            ({"tau": 0}, ValueError, "tau=0; needs a number above 0, up to"),
            ({"tau": "8"}, ValueError, "tau='8'; needs a number"),
            ({"exclude": "head"}, TypeError, "exclude='head'; needs a tuple of regular expressions"),
            ({"axes": (".*",)}, TypeError, r"axes=\('\.\*',\); needs pairs such as"),
            ({"axes": {".*": 2}}, TypeError, r"axes\['\.\*'\]=2; needs two whole numbers"),
            ({"axes": {".*": ((), 1)}}, TypeError, r"axes\['\.\*'\]=\(\(\), 1\); needs .* or two tuples of axes"),
        ],
    )
    def test_of_fields_are_named(self, fields, error, message):
        with pytest.raises(error, match=f"OsciReset: {message}"):
            jlp.OsciReset(**({"recipe": NVFP4} | fields))

    @pytest.mark.parametrize(
        "reset",
        [
            jlp.OsciReset(jlp.NVFP4BlockScaling(forward_override="high_precision")),
            jlp.OsciReset(NVFP4, include=("mlp",)),
            jlp.OsciReset(jlp.PerLayer((("down", NVFP4),))),
        ],
        ids=["fprop in high precision", "include", "rules"],
    )
    def test_nothing_to_watch_is_an_error(self, reset):
        message = "OsciReset: the recipe's fprop, include and exclude leave none of the weights 'up'"
        with pytest.raises(ValueError, match=message):
            reset.init({"up": {"kernel": jnp.ones((32, 32))}})

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ({"up": ((), (2,))}, r"axis=2 is out of range for the weight of 'up', \(32, 32\)"),
            ({"up": ((), (0, 1))}, r"axes=\(\(\), \(0, 1\)\) for 'up' of shape \(32, 32\); needs contracted axes"),
            ({"up": ((0,), (-2,))}, r"axes=\(\(0,\), \(-2,\)\) for 'up'"),
            ({"up": (1, 0)}, r"axes=\(1, 0\) for 'up'"),
            ({"up/.*": (0, 1)}, r"axes\['up/\.\*'\] matches none of the weights 'up' whole"),
        ],
    )
    def test_axes_that_do_not_fit_are_named(self, axes, message):
        reset = jlp.OsciReset(NVFP4, 4, 2, axes=axes)
        params = {"up": jnp.ones((32, 32))}
        with pytest.raises(ValueError, match=f"OsciReset: {message}"):
            reset.update(params, reset.init(params), 1)

    def test_a_state_of_other_parameters_is_named(self):
        state = RESET.init({"up": jnp.ones((32, 32))})
        for params, shapes in (
            ({"up": jnp.ones((32, 48))}, "'up' has shape (32, 48), in the state (32, 32)"),
            ({"up": jnp.ones((32, 32)), "down": jnp.ones((32, 32))}, "'down' has shape (32, 32), in the state None"),
        ):
            with pytest.raises(
                ValueError, match=re.escape(f"OsciReset: the weight of layer {shapes}; needs the state")
            ):
                RESET.update(params, state, 3)
        with pytest.raises(TypeError, match="OsciReset: state=None; needs what init makes"):
            RESET.update({"up": jnp.ones((32, 32))}, None, 3)

    @pytest.mark.parametrize("step", [3.0, "3", None, jnp.arange(2)])
    def test_a_step_that_is_no_int_is_named(self, step):
        params = {"up": jnp.ones((32, 32))}
        with pytest.raises(TypeError, match="OsciReset: step=.*; needs an int"):
            RESET.update(params, RESET.init(params), step)

    def test_groups_that_do_not_fit_are_named(self):
        params = {"up": jnp.ones((48, 32))}
        reset = jlp.OsciReset(jlp.Int4QAT(group_size=32), every=4, window=2)
        with pytest.raises(
            ValueError, match="OsciReset: layer 'up' has a kernel of shape .* not a multiple of the group"
        ):
            reset.update(params, reset.init(params), 1)
