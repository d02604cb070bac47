"""Delayed scaling where a layer is reached more than once: new states are combined by max, and never added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT, combined_by_max
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(5)

RECIPE = jlp.DelayedScaling(amax_history_len=3)
X, W, D = random_array((16, 32), "float32"), random_array((32, 32), "float32", 1), random_array((16, 32), "float32", 2)
# What three uses multiply the input and the gradient by.
INPUTS, GRADIENTS = np.asarray([1, 3, 2], np.float32), np.asarray([2, 1, 0.5], np.float32)


def a_state():
    state = jax.device_get(delayed_scaling.init_state(RECIPE))
    for name, history in (("input", [7, 5, 6]), ("kernel", [3, 4, 1]), ("output_grad", [5, 6, 8])):
        state[f"{name}_amax_history"] = np.asarray(history, np.float32)
    return state


def gradient(loss, state=None):
    return jax.device_get(jax.jit(jax.grad(loss))(a_state() if state is None else state))


def amax(x):
    return np.abs(np.asarray(x)).max()


def assert_is_next(new, inputs=3.0, gradients=2.0, kernel=1.0, before=None):
    """The state after one step that saw these multiples of the largest elements of X, D and W."""
    before = a_state() if before is None else before
    seen = {"input": inputs * amax(X), "kernel": kernel * amax(W), "output_grad": gradients * amax(D)}
    for name, maximum in (("input", 448.0), ("kernel", 448.0), ("output_grad", 57344.0)):
        _, oldest_but_one, latest = np.roll(before[f"{name}_amax_history"], -1)
        np.testing.assert_array_equal(
            new[f"{name}_amax_history"], np.asarray([seen[name], oldest_but_one, latest], np.float32)
        )
        encode = delayed_scaling.encode_scale(RECIPE, before, name, maximum)
        np.testing.assert_array_equal(new[f"{name}_scale"], 1 / np.asarray([encode]))


def use(state, k, c, w=W, x=X, d=D):
    """The loss of one use, and the state to hand on."""
    y, state = jlp.linear(k * x, w, recipe=RECIPE, state=state)
    return c * (y * d).sum(), state


def apart(state, k, c):
    return use(state, k, c)[0]


class TestHandedOn:
    def test_from_call_to_call(self):
        def loss(state):
            total = 0.0
            for k, c in zip(INPUTS, GRADIENTS, strict=True):
                part, state = use(state, k, c)
                total += part
            return total

        assert_is_next(jax.grad(loss)(a_state()))
        assert_is_next(gradient(loss))
        assert_is_next(gradient(jax.checkpoint(loss)))

    def test_between_kernels_that_share_it(self):
        def loss(state):
            first, state = use(state, 1.0, 1.0, w=W)
            return first + use(state, 1.0, 1.0, w=2 * W)[0]

        assert_is_next(gradient(loss), 1, 1, 2)

    def test_through_the_carry_of_a_scan(self):
        def loss(state):
            def body(carry, scales):
                part, state = use(carry[1], *scales)
                return (carry[0] + part, state), None

            return jax.lax.scan(body, (0.0, state), (INPUTS, GRADIENTS))[0][0]

        assert_is_next(jax.jit(jax.grad(loss))(a_state()))

    def test_through_a_pipeline_of_stages_over_microbatches(self):
        """Each stage has its own kernel and state; every microbatch passes through all of them."""
        kernels = np.stack([np.eye(32, dtype=np.float32), np.eye(32, dtype=np.float32) / 2])

        def stage(x, stage):
            w, state = stage
            return jlp.linear(x, w, recipe=RECIPE, state=state)

        def loss(states):
            def microbatch(carry, scale):
                total, states = carry
                y, states = jax.lax.scan(stage, scale * X, (kernels, states))
                return (total + (y * D).sum(), states), None

            return jax.lax.scan(microbatch, (0.0, states), INPUTS)[0][0]

        states = jax.tree.map(lambda v: np.stack([16 * v, 32 * v]), a_state())  # so that nothing saturates
        new = jax.jit(jax.grad(loss))(states)
        histories = {n: np.asarray(new[f"{n}_amax_history"]) for n in ("input", "kernel", "output_grad")}
        assert histories["input"][0, 0] == 3 * amax(X)  # of three microbatches the largest
        assert histories["kernel"][:, 0].tolist() == [1, 0.5]
        assert histories["output_grad"][1, 0] == amax(D)
        np.testing.assert_allclose(histories["output_grad"][0, 0], amax(D) / 2, rtol=2**-3)  # dgrad of stage two
        np.testing.assert_allclose(histories["input"][1, 0], 3 * amax(X), rtol=2**-3)
        assert histories["input"][:, 1:].tolist() == [[96, 112], [192, 224]]  # rolled once, not once a microbatch


class TestReadTwice:
    """The same state in several places: typed so that autodiff combines by max."""

    def gradient(self, loss, **others):
        variables = {OVERWRITE_WITH_GRADIENT: {"layer": a_state()}, "params": others}
        new = jax.jit(jax.grad(combined_by_max(loss)))(variables)
        state = new[OVERWRITE_WITH_GRADIENT]["layer"]
        assert {leaf.dtype for leaf in state.values()} == {jnp.dtype("float32")}
        return state, new["params"]

    def test_by_several_calls_parameters_being_added_up(self):
        def loss(variables):
            state, w = variables[OVERWRITE_WITH_GRADIENT]["layer"], variables["params"]["w"]
            return sum(use(state, k, c, w=w)[0] for k, c in zip(INPUTS, GRADIENTS, strict=True))

        state, params = self.gradient(loss, w=W)
        assert_is_next(state)
        of_each = jax.vmap(lambda k, c: jax.grad(lambda w: use(a_state(), k, c, w=w)[0])(W))
        plain = np.asarray(jax.jit(of_each)(INPUTS, GRADIENTS))
        np.testing.assert_allclose(params["w"], plain.sum(0), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
    def test_by_a_scan_over_a_closure(self, wrap):
        def loss(variables):
            state = variables[OVERWRITE_WITH_GRADIENT]["layer"]
            body = wrap(lambda total, scales: (total + apart(state, *scales), None))
            return jax.lax.scan(body, 0.0, (INPUTS, GRADIENTS))[0]

        assert_is_next(self.gradient(loss)[0])

    def test_of_other_types_than_trees_of_states_does_nothing(self):
        loss = combined_by_max(lambda variables, k, *, power: (k * variables["w"] ** power).sum())
        assert jax.grad(loss)({"w": jnp.ones(2)}, 3.0, power=2)["w"].tolist() == [6, 6]


class TestVmap:
    def test_over_examples_that_share_a_state(self):
        def loss(state):
            return jax.vmap(functools.partial(apart, state))(INPUTS, GRADIENTS).sum()

        assert_is_next(jax.jit(jax.grad(loss))(a_state()))

    def test_over_examples_that_pass_a_layer_twice(self):
        def loss(state):
            def example(k, c):
                part, handed_on = use(state, k, c)
                return part + use(handed_on, 2 * k, c)[0]

            return jax.vmap(example)(INPUTS, GRADIENTS).sum()

        assert_is_next(jax.jit(jax.grad(loss))(a_state()), 6)

    def test_over_gradients_of_examples(self):
        new = jax.device_get(jax.jit(jax.vmap(jax.grad(apart), (None, 0, 0)))(a_state(), INPUTS, GRADIENTS))
        for i in range(3):  # the amax is that of all examples
            np.testing.assert_array_equal(new["input_amax_history"][i, 0], 3 * amax(X))

    def test_over_examples_twice(self):
        def loss(state):
            inner = jax.vmap(lambda k, c: apart(state, k * c, c), (0, None))
            return jax.vmap(inner, (None, 0))(INPUTS, GRADIENTS).sum()

        assert_is_next(jax.jit(jax.grad(loss))(a_state()), 6)

    def test_over_examples_of_each_member_of_an_ensemble(self):
        def loss(state):
            return jax.vmap(functools.partial(apart, state))(INPUTS, GRADIENTS).sum()

        states = jax.tree.map(lambda v: np.stack([v, 2 * v]), a_state())
        new = jax.device_get(jax.jit(jax.vmap(jax.grad(loss)))(states))
        for i in range(2):
            own = jax.tree.map(lambda v, i=i: v[i], states)
            assert_is_next(jax.tree.map(lambda v, i=i: v[i], new), before=own)

    def test_over_an_ensemble_with_states_of_its_own(self):
        states = jax.tree.map(lambda v: np.stack([v, 2 * v, 4 * v]), a_state())
        new = jax.device_get(jax.jit(jax.vmap(jax.grad(apart)))(states, INPUTS, GRADIENTS))
        for i in range(3):
            own = jax.tree.map(lambda v, i=i: v[i], states)
            member = jax.tree.map(lambda v, i=i: v[i], new)
            assert_is_next(member, float(INPUTS[i]), float(GRADIENTS[i]), before=own)

    def test_over_an_ensemble_that_shares_the_examples(self):
        states = jax.tree.map(lambda v: np.stack([v, 2 * v]), a_state())
        new = jax.device_get(jax.jit(jax.vmap(jax.grad(apart), (0, None, None)))(states, 3.0, 2.0))
        for i in range(2):
            own = jax.tree.map(lambda v, i=i: v[i], states)
            assert_is_next(jax.tree.map(lambda v, i=i: v[i], new), before=own)


class TestSlices:
    def test_of_a_batch_share_a_state(self):
        w = np.asarray(W)
        xs, ws = INPUTS[:, None, None] * np.asarray(X), np.stack([w, 2 * w, w])

        def loss(state):
            y, _ = jlp.dot_general(xs, ws, (((2,), (1,)), ((0,), (0,))), recipe=RECIPE, state=state)
            return (GRADIENTS[:, None, None] * y * D).sum()

        assert_is_next(gradient(loss), kernel=2)


class TestShardMap:
    scales = np.repeat(np.asarray([1, 2, 3, 1], np.float32), 4)[:, None]  # of the rows of four shards

    def loss(self, x, d, state):
        return (jlp.linear(x, W, recipe=RECIPE, state=state)[0] * d).sum()

    def new(self, where, x, d):
        mesh = mesh_of((4,))
        specs = (P("a"), P("a"), P())
        if where == "within":
            f = jax.grad(self.loss, argnums=2)
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P()))(x, d, a_state())

        def total(*args):
            return jax.lax.psum(self.loss(*args), "a")

        mapped = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.jit(jax.grad(mapped, argnums=2))(x, d, a_state())

    @pytest.mark.parametrize("where", ["within", "around"])
    def test_shards_combine_by_max(self, where):
        given = self.scales * np.asarray(X), self.scales[::-1] * np.asarray(D)
        reference = jax.jit(jax.grad(self.loss, argnums=2))(*given, a_state())
        assert_same_bytes(self.new(where, *given), reference)

    @pytest.mark.parametrize("where", ["within", "around"])
    def test_nan_in_one_shard_reaches_the_history(self, where):
        x = np.array(X)
        x[5, 7] = np.nan
        new = jax.device_get(self.new(where, x, D))
        assert np.isnan(new["input_amax_history"][0])
        assert np.isfinite(new["kernel_amax_history"]).all()

    def test_shards_with_states_of_their_own_keep_them(self):
        mesh = mesh_of((4,))
        states = jax.tree.map(lambda v: np.stack([v] * 4), a_state())

        def step(x, state):
            return jax.grad(self.loss, argnums=2)(x, D[:4], jax.tree.map(lambda v: v[0], state))

        f = jax.shard_map(
            lambda x, s: jax.tree.map(lambda v: v[None], step(x, s)),
            mesh=mesh,
            in_specs=(P("a"), P("a")),
            out_specs=P("a"),
        )
        x = self.scales * np.asarray(X)
        history = np.asarray(jax.jit(f)(x, states)["input_amax_history"])
        assert history[:, 0].tolist() == [amax(part) for part in np.split(x, 4)]

    @pytest.mark.parametrize("where", ["within", "around"])
    def test_without_types_of_varying_values_it_is_refused(self, where):
        def value(state, x):
            return self.loss(x, D[:4], state)

        f = jax.grad(value) if where == "within" else value
        mapped = jax.shard_map(f, mesh=mesh_of((4,)), in_specs=(P(), P("a")), out_specs=P(), check_vma=False)
        f = mapped if where == "within" else jax.grad(mapped)
        with pytest.raises(ValueError, match=r"DelayedScaling: .*check_vma=False.* add them up; leave check_vma=True"):
            jax.eval_shape(f, a_state(), X)


@by_axis_type
def test_a_sharded_batch_has_the_state_of_one_device(axis_type: AxisType):
    def step(w, state, x, d):
        return jax.grad(lambda w, s: use(s, 3.0, 2.0, w=w, x=x, d=d)[0], argnums=(0, 1))(w, state)

    mesh = mesh_of((2, 2), axis_type)
    with jax.set_mesh(mesh):
        args = [place(W, mesh, P(None, "b")), place(X, mesh, P("a")), place(D, mesh, P("a", "b"))]
        state = jax.tree.map(lambda v: place(v, mesh, P()), a_state())
        dw, new = jax.jit(step)(args[0], state, *args[1:])
    assert_is_next(jax.tree.map(np.asarray, new))
    np.testing.assert_allclose(np.asarray(dw), jax.jit(step)(W, a_state(), X, D)[0], rtol=1e-5, atol=1e-4)


def test_gradients_of_microbatches_are_added_and_states_combined():
    variables = {"w": W, OVERWRITE_WITH_GRADIENT: a_state()}
    part = jax.jit(jax.grad(lambda v, k, c: use(v[OVERWRITE_WITH_GRADIENT], k, c, w=v["w"])[0]))
    parts = [part(variables, k, c) for k, c in zip(INPUTS, GRADIENTS, strict=True)]
    total = functools.reduce(delayed_scaling.add_gradients, parts)
    assert_is_next(total[OVERWRITE_WITH_GRADIENT])
    assert_same_bytes(total["w"], parts[0]["w"] + parts[1]["w"] + parts[2]["w"])
