"""Delayed scaling of experts: each has histories and scales of its own, and the bits of a `linear` with its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import init_state
from tests.helpers import assert_same_bytes, random_array
from tests.layers.fused.layers import EXACT, weights

ROWS, K, F, N, E = 150, 64, 96, 80, 5
SIZES = {
    "uneven": (40, 0, 1, 64, 33),  # 12 rows belong to no expert
    "one takes all": (0, 150, 0, 0, 0),
    "nobody": (0, 0, 0, 0, 0),
}
RECIPES = {
    "default": jlp.DelayedScaling(amax_history_len=3),
    "e4m3": jlp.DelayedScaling(margin=1, fp8_format="E4M3", amax_history_len=1),
    "most recent": jlp.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
RECIPE = RECIPES["default"]


def seen_state(recipe, experts=E, seed=0):
    """The state of a layer that has seen steps: every expert's is another one, some scales are kept."""
    numbers = np.random.default_rng(seed)
    state = {}
    for name, leaf in init_state(recipe, num_experts=experts).items():
        values = numbers.uniform(0.25, 4, leaf.shape).astype(np.float32)
        values[1] = 0.0 if name.endswith("history") else 0.5
        state[name] = jax.device_put(values)
    return state


@functools.cache
def operands(dtype="bfloat16"):
    """x, the kernels, the bias and the gradient of the result."""
    scales = np.asarray([1, 2, 4, 0.5, 8], np.float32)[:, None, None]
    return (
        random_array((ROWS, K), dtype),
        jax.device_put(np.asarray(random_array((E, K, N), "float32", 1)) * scales),
        random_array((E, N), "float32", 2),
        random_array((ROWS, N), dtype, 3),
    )


@functools.partial(jax.jit, static_argnames="recipe")
def step(recipe, x, kernels, bias, dy, sizes, state):
    """y, dx, dw, the gradient of the bias and the new state."""

    def layer(x, kernels, bias, state):
        return jlp.grouped_matmul(x, kernels, sizes, bias, recipe=recipe, state=state)

    y, pullback, after = jax.vjp(layer, x, kernels, bias, state, has_aux=True)
    return (y, *pullback(dy)), after


@functools.partial(jax.jit, static_argnames="recipe")
def step_of_linear(recipe, x, kernel, bias, dy, state):
    def layer(x, kernel, bias, state):
        return jlp.linear(x, kernel, bias, recipe=recipe, state=state)

    y, pullback, _ = jax.vjp(layer, x, kernel, bias, state, has_aux=True)
    return y, *pullback(dy)


def assert_agree(found, expected):
    """All bits but those of the bias's gradient, a sum over rows whose order depends on their number."""
    (*found, of_bias, new), (*expected, expected_of_bias, expected_new) = found, expected
    assert_same_bytes((found, new), (expected, expected_new))
    np.testing.assert_allclose(of_bias, expected_of_bias, rtol=1e-5, atol=1e-4)


def loop_of_linear(recipe, x, kernels, bias, dy, sizes, state):
    x, kernels, bias, dy, state = jax.device_get((x, kernels, bias, dy, state))
    y, dx, dw, dbias = (np.zeros_like(a) for a in (dy, x, kernels, bias))
    news, first = [], 0
    for e, size in enumerate(sizes):
        rows, own = slice(first, first + size), {name: leaf[e] for name, leaf in state.items()}
        y[rows], dx[rows], dw[e], dbias[e], new = step_of_linear(recipe, x[rows], kernels[e], bias[e], dy[rows], own)
        news.append(jax.device_get(new))
        first += size
    return y, dx, dw, dbias, jax.tree.map(lambda *leaves: np.stack(leaves), *news)


class TestBits:
    @pytest.mark.slow
    @by_recipe
    @pytest.mark.parametrize("case", SIZES)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_of_an_expert_are_those_of_linear(self, recipe, case, dtype):
        state, sizes = seen_state(recipe), jnp.asarray(SIZES[case], jnp.int32)
        found, after = step(recipe, *operands(dtype), sizes, state)
        assert_agree(found, loop_of_linear(recipe, *operands(dtype), SIZES[case], state))
        assert_same_bytes(after, state)

    @pytest.mark.slow
    @by_recipe
    def test_of_several_steps_from_the_start(self, recipe):
        x, kernels, bias, dy = operands()
        of_groups, of_linears = init_state(recipe, num_experts=E), init_state(recipe, num_experts=E)
        for i, case in enumerate([(40, 0, 1, 64, 33), (0, 70, 0, 64, 3), (10, 20, 30, 0, 33)]):
            given = 2**i * x, kernels / (i + 1), bias, dy / 4**i
            found, _ = step(recipe, *given, jnp.asarray(case, jnp.int32), of_groups)
            expected = loop_of_linear(recipe, *given, case, of_linears)
            assert_agree(found, expected)
            of_groups, of_linears = found[-1], expected[-1]


class TestAnExpertWithoutRows:
    """It has seen nothing of rows and gradients: amaxes of 0, which keep the scale once the history holds no others."""

    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)

    def test_records_zeros_and_the_amax_of_its_kernel(self):
        state = seen_state(RECIPE)
        (*_, dw, _, new), _ = jax.device_get(step(RECIPE, *operands(), self.sizes, state))
        for name in ("input", "output_grad"):
            history = new[f"{name}_amax_history"]
            assert history[1, 0] == 0 and np.all(history[[0, 2, 3, 4], 0] > 0)
        kernels = np.asarray(operands()[1])
        np.testing.assert_array_equal(new["kernel_amax_history"][:, 0], np.abs(kernels).max(axis=(1, 2)))
        assert not np.any(dw[1])

    def test_keeps_the_scale_of_the_steps_that_had_rows(self):
        state = init_state(RECIPE, num_experts=E)
        full, empty = jnp.asarray([30] * E, jnp.int32), jnp.asarray([30, 0, 30, 30, 30], jnp.int32)
        (*_, state), _ = step(RECIPE, *operands(), full, state)
        (*_, state), _ = step(RECIPE, *operands(), empty, state)
        scale = np.asarray(state["input_scale"])[1]
        for _ in range(5):
            (*_, state), _ = step(RECIPE, *operands(), empty, state)
            np.testing.assert_allclose(np.asarray(state["input_scale"])[1], scale, rtol=1e-6)
        assert not np.any(np.asarray(state["input_amax_history"])[1])

    def test_rows_of_no_expert_are_not_seen(self):
        x, kernels, bias, dy = (np.array(a) for a in operands())
        state = seen_state(RECIPE)
        x[138:], dy[138:] = 1e4, np.nan
        wild = x, kernels, bias, dy
        assert_same_bytes(
            step(RECIPE, *wild, self.sizes, state)[0][-1], step(RECIPE, *operands(), self.sizes, state)[0][-1]
        )

    def test_an_expert_does_not_see_the_others_infinities(self):
        x, kernels, bias, dy = operands()
        state, wild = seen_state(RECIPE), np.array(x)
        wild[3, 5] = np.inf
        new = jax.device_get(step(RECIPE, wild, kernels, bias, dy, self.sizes, state)[0][-1])
        assert not np.isfinite(new["input_amax_history"][0, 0])
        usual = jax.device_get(step(RECIPE, *operands(), self.sizes, state)[0][-1])
        assert_same_bytes(*({name: leaf[1:] for name, leaf in s.items()} for s in (new, usual)))


def mlp_operands(dtype="bfloat16"):
    shapes = (E, K, F), (E, K, F), (E, F, N)
    kernels = [weights(shape, 1 + i) for i, shape in enumerate(shapes)]
    biases = [random_array((E, shape[2]), "float32", 11 + i) for i, shape in enumerate(shapes)]
    states = [seen_state(RECIPE, seed=i) for i in range(3)]
    return random_array((ROWS, K), dtype), kernels, biases, states, random_array((ROWS, N), dtype, 21)


@functools.partial(jax.jit, static_argnames=("function", "options"), compiler_options=EXACT)
def mlp_step(function, x, kernels, biases, states, dy, options=()):
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)

    def run(x, kernels, biases, states):
        return function(x, kernels, sizes, biases, RECIPE, states=states, **dict(options))

    y, pullback, after = jax.vjp(run, x, kernels, biases, states, has_aux=True)
    return (y, *pullback(dy)), after


def separate(x, kernels, sizes, biases, recipe, *, states, activation="swiglu"):
    function = jlp.swiglu if activation == "swiglu" else activation
    last = len(kernels) - 1
    products = [
        functools.partial(jlp.grouped_matmul, rhs=w, group_sizes=sizes, bias=b, recipe=recipe, state=state)
        for w, b, state in zip(kernels, biases, states, strict=True)
    ]
    hidden, after = zip(*(product(x) for product in products[:last]), strict=True)
    y, of_down = products[last](function(*hidden))
    return y, [*after, of_down]


class TestMlp:
    @pytest.mark.parametrize("saved", ["quantized", "recompute"])
    def test_bits_are_those_of_products(self, saved):
        given = mlp_operands("float32")
        (y, dx, *found), after = mlp_step(jlp.grouped_mlp, *given, options=(("saved", saved),))
        (wanted_y, wanted_dx, *wanted), _ = mlp_step(separate, *given)
        assert_same_bytes((y, found), (wanted_y, wanted))
        np.testing.assert_allclose(dx, wanted_dx, rtol=1e-5, atol=1e-5 * np.abs(wanted_dx).max())
        assert_same_bytes(list(after), given[3])

    def test_eight_bits_record_what_was_seen(self):
        given = mlp_operands()
        (y, *_, found), _ = mlp_step(jlp.grouped_mlp, *given, options=(("saved", "8bit"),))
        (wanted_y, *_, wanted), _ = mlp_step(separate, *given)
        assert_same_bytes(y, wanted_y)
        for ours, theirs in zip(found, wanted, strict=True):
            for name in ("input", "kernel"):
                assert_same_bytes(ours[f"{name}_amax_history"], theirs[f"{name}_amax_history"])

    def test_a_function_as_the_activation(self):
        def exp_times(gate, up):
            """Not zero where its operands are: rows in no group must not count."""
            return jnp.exp(jnp.minimum(gate, 1)) * (up + 1)

        given, options = mlp_operands("float32"), (("activation", exp_times),)
        found, wanted = (mlp_step(function, *given, options=options)[0] for function in (jlp.grouped_mlp, separate))
        assert_same_bytes((found[0], found[2:]), (wanted[0], wanted[2:]))
