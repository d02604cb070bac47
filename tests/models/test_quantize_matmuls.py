"""quantize_matmuls: a function without this library's layers has the bytes of the same one with them."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often, random_array
from tests.sharding.meshes import mesh_of, place

pytestmark = pytest.mark.sampled(5)

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
X = random_array((16, 32))
PARAMS = {"up": {"kernel": random_array((32, 48), "float32", 1)}, "down": {"w": random_array((48, 32), "float32", 2)}}
STACKED = jax.tree.map(lambda leaf: np.stack([leaf, -leaf, leaf / 2, leaf]), jax.device_get(PARAMS))


def forms(product):
    """Functions of parameters and activations, by name; product(x, weight, name) multiplies."""

    def plain(params, x):
        hidden = jnp.tanh(product(x, params["up"]["kernel"], "up"))
        return product(hidden, params["down"]["w"], "down")

    def scan(params, x):
        return lax.scan(lambda carry, layer: (jnp.tanh(plain(layer, carry)), carry[0]), x, params, reverse=True)

    def scan_of_remat(params, x):
        body = jax.checkpoint(lambda carry, layer: (jnp.tanh(plain(layer, carry)), None), prevent_cse=False)
        return lax.scan(body, x, params, unroll=2)[0]

    def fori_over_the_pair(params, x):
        return lax.fori_loop(0, 3, lambda _, pair: (pair[0], jnp.tanh(plain(*pair))), (params, x))[1]

    def indexed(params, x):
        body = lambda i, x: jnp.tanh(plain(jax.tree.map(lambda leaf: leaf[i], params), x))  # noqa: E731
        return lax.fori_loop(0, 4, body, x)

    def while_(params, x):
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(plain(params, c[0])), c[1] + 1), (x, 0))[0]

    def cond(params, x):
        one = lax.cond(x[0, 0] > 0, lambda: plain(params, x), lambda: plain(params, -x))
        return one + lax.switch(1, [lambda: x, lambda: plain(params, x), lambda: -x])

    def platform(params, x):
        return lax.platform_dependent(params, x, cpu=plain, default=lambda params, x: -plain(params, x))

    def remat(params, x):
        return jax.checkpoint(plain, policy=jax.checkpoint_policies.dots_saveable)(params, x)

    def nested_jit(params, x):
        return jax.jit(lambda params, x: jax.jit(plain)(params, x) + x)(params, x)

    local = locals()
    return {name: local[name] for name in local if name not in ("product", "plain")} | {"plain": plain}


THEIRS = forms(lambda x, w, name: x @ w.astype(x.dtype))
OF_STACKS = ("scan", "scan_of_remat", "indexed")
SOMETIMES = ("while_", "platform", "indexed", "fori_over_the_pair")


def ours(recipe):
    return forms(lambda x, w, name: jlp.linear(x, w, recipe=recipe, name=name))


def nameless(x, w, name=""):
    return jlp.linear(x, w, recipe=NVFP4)


def params_of(form):
    return STACKED if form in OF_STACKS else PARAMS


@functools.cache
def of_layers(recipe, form):
    """The results and gradients of a form of layers, which several tests compare with."""
    return with_gradients(ours(recipe)[form])(params_of(form), X)


def with_gradients(function):
    """A jitted function's result and gradients."""

    def loss(params, x):
        y = function(params, x)
        return sum(jnp.sum(jnp.cos(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def casting_first(function):
    """The function, given parameters that a jitted function has cast."""
    cast = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf.astype(jnp.bfloat16)))
    return lambda params, x: function(cast(params), x)


class TestBytes:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("form", often(set(THEIRS) - set(SOMETIMES), THEIRS))
    def test_are_those_of_the_layers(self, form):
        args = params_of(form), X
        if form in ("while_", "indexed"):  # these have no gradient, or a slow one
            run, expected = jax.jit, jax.jit(ours(NVFP4)[form])(*args)
        else:
            run, expected = with_gradients, of_layers(NVFP4, form)
        assert_same_bytes(run(jlp.quantize_matmuls(THEIRS[form], NVFP4))(*args), expected)
        if form in ("plain", "scan"):
            assert_same_bytes(run(jlp.quantize_matmuls(casting_first(THEIRS[form]), NVFP4))(*args), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("scaled", "master"),
        [
            (lambda w: 0.5 * w, lambda w: 0.5 * w),
            (lambda w: (w / 3).astype(jnp.bfloat16), lambda w: w / 3),
            (lambda w: w.astype(jnp.bfloat16) * 3, lambda w: w * 3),
        ],
        ids=["times a scalar", "divided, then cast", "cast, then times a scalar"],
    )
    def test_a_scaled_parameter_is_quantised_scaled(self, scaled, master):
        """As in reparametrisations by a layer's width: in the parameter's dtype, whatever it is cast to."""
        w = PARAMS["up"]["kernel"]
        theirs = jlp.quantize_matmuls(lambda w, x: x @ scaled(w).astype(x.dtype), MXFP8)
        ours = lambda w, x: jlp.linear(x, master(w), recipe=MXFP8)  # noqa: E731
        assert_same_bytes(with_gradients(theirs)(w, X), with_gradients(ours)(w, X))

    def test_under_vmap_each_slice_is_a_tensor(self):
        x = random_array((3, 16, 32))
        run = lambda f: jax.jit(jax.vmap(f, (None, 0)))(PARAMS, x)  # noqa: E731
        assert_same_bytes(run(jlp.quantize_matmuls(THEIRS["plain"], NVFP4)), run(ours(NVFP4)["plain"]))

    @pytest.mark.slow
    def test_a_vmap_in_the_function_is_one_product(self):
        """Its rows have one amax, as those of a layer that is given [2, 8, 32]."""
        x = X.reshape(2, 8, 32)
        theirs = jlp.quantize_matmuls(jax.vmap(THEIRS["plain"], (None, 0)), NVFP4)
        assert_same_bytes(jax.jit(theirs)(PARAMS, x), jax.jit(ours(NVFP4)["plain"])(PARAMS, x))

    def test_without_a_recipe_they_are_the_functions(self):
        expected = with_gradients(THEIRS["plain"])(PARAMS, X)
        for rules in (None, jlp.PerLayer(((".*", None),), NVFP4), jlp.FROM_CONTEXT):
            assert_same_bytes(with_gradients(jlp.quantize_matmuls(THEIRS["plain"], rules))(PARAMS, X), expected)

    @pytest.mark.slow
    def test_rules_choose_by_the_parameters_paths(self):
        rules = jlp.PerLayer((("down", None),), NVFP4)
        theirs = with_gradients(jlp.quantize_matmuls(THEIRS["plain"], rules))(PARAMS, X)
        assert_same_bytes(theirs, with_gradients(ours(rules)["plain"])(PARAMS, X))

    def test_a_scope_decides_by_default(self):
        function = jax.jit(jlp.quantize_matmuls(THEIRS["plain"]))
        with jlp.autocast(MXFP8):
            assert_same_bytes(function(PARAMS, X), jax.jit(ours(MXFP8)["plain"])(PARAMS, X))
        assert_same_bytes(function(PARAMS, X), jax.jit(THEIRS["plain"])(PARAMS, X))


def product_of(subscripts, x_ndim=2):
    """The einsum of a parameter as its first operand."""
    return lambda w, x: jnp.einsum(subscripts, w.astype(x.dtype), x)


class TestProducts:
    @pytest.mark.parametrize(
        ("subscripts", "w", "x"),
        [
            ("kn,tk->nt", (32, 48), (16, 32)),
            ("nk,tk->tn", (48, 32), (16, 32)),
            ("bkn,btk->bnt", (2, 32, 48), (2, 16, 32)),
            ("khd,btk->bthd", (32, 3, 16), (2, 8, 32)),
            ("hdk,bthd->btk", (3, 16, 32), (2, 8, 3, 16)),
        ],
        ids=str,
    )
    def test_a_parameter_as_the_first_operand(self, subscripts, w, x):
        w, x = random_array(w, "float32", 1), random_array(x)
        first, second, result = subscripts.replace("->", ",").split(",")
        swapped = functools.partial(jlp.einsum, f"{second},{first}->{result}", recipe=NVFP4, name="")
        actual = jax.jit(jlp.quantize_matmuls(product_of(subscripts), NVFP4))(w, x)
        assert_same_bytes(actual, jax.jit(lambda w, x: swapped(x, w))(w, x))

    def test_rows_in_groups(self):
        kernels, sizes = random_array((3, 32, 48), "float32", 1), jnp.array([5, 0, 11])
        function = jlp.quantize_matmuls(lambda p, x: lax.ragged_dot(x, p["e"]["w"].astype(x.dtype), sizes), NVFP4)
        expected = jax.jit(lambda: jlp.grouped_matmul(X, kernels, sizes, recipe=NVFP4, name="e"))()
        assert_same_bytes(jax.jit(function)({"e": {"w": kernels}}, X), expected)

    @pytest.mark.slow
    def test_moved_and_cut_parameters(self):
        """One array holds everything, as after `jax.flatten_util.ravel_pytree`."""
        flat, restore = jax.flatten_util.ravel_pytree(PARAMS)
        function = jlp.quantize_matmuls(lambda flat, x: THEIRS["plain"](restore(flat), x), NVFP4)
        expected = with_gradients(lambda flat, x: forms(nameless)["plain"](restore(flat), x))(flat, X)
        assert_same_bytes(with_gradients(function)(flat, X), expected)
        moved = jlp.quantize_matmuls(lambda w, x: x @ w.reshape(48, 32).T[:, 8:40].astype(x.dtype), NVFP4)
        w = PARAMS["up"]["kernel"]
        expected = jax.jit(lambda w, x: nameless(x, w.reshape(48, 32).T[:, 8:40]))(w, X)
        assert_same_bytes(jax.jit(moved)(w, X), expected)

    def test_a_tied_embedding_is_looked_up_as_it_is(self):
        table, tokens = {"embed": random_array((40, 32), "float32", 3)}, jnp.arange(16)

        def tied(params, product):
            x = jnp.take(params["embed"], tokens, axis=0).astype(jnp.bfloat16)
            return product(x, params["embed"].T)

        theirs = jlp.quantize_matmuls(lambda params: tied(params, lambda x, w: x @ w.astype(x.dtype)), NVFP4)
        expected = jax.jit(lambda t: tied(t, lambda x, w: jlp.linear(x, w, recipe=NVFP4, name="embed")))(table)
        assert_same_bytes(jax.jit(theirs)(table), expected)

    def test_integers_and_two_parameters_stay(self):
        params = {"a": random_array((16, 32), "float32"), "b": random_array((32, 16), "float32"), "c": jnp.eye(8, 4)}

        def function(params, x):
            whole = jax.lax.dot_general(x, params["c"].astype(jnp.int32), (((1,), (0,)), ((), ())))
            return params["a"] @ params["b"], whole

        x = jnp.ones((4, 8), jnp.int32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same_bytes(jlp.quantize_matmuls(function, NVFP4)(params, x), function(params, x))
        notes = {layer.path: layer.note for layer in jlp.explain(function, NVFP4, params, x).layers}
        assert notes["b"] == "both operands are parameters"
        assert notes["c"] == "not followed through convert_element_type"


class TestStacks:
    RULES = jlp.PerLayer((), NVFP4, stacks=((".*", 1, 2),))

    @pytest.mark.slow
    def test_run_in_pieces_give_the_unrolled_model(self):
        x, params = X.astype(jnp.float32), STACKED

        def unrolled(params, x):
            first = []
            for i in reversed(range(4)):
                first.append(x[0])
                layer = jax.tree.map(lambda leaf, i=i: leaf[i], params)
                x = jnp.tanh(ours(NVFP4 if i == 1 else None)["plain"](layer, x))
            return x, jnp.stack(first[::-1])

        theirs = with_gradients(jlp.quantize_matmuls(THEIRS["scan"], self.RULES))(params, x)
        assert_same_bytes(theirs, with_gradients(unrolled)(params, x))

    def test_layers_of_a_stack_that_no_scan_runs_stay(self):
        function = jlp.quantize_matmuls(THEIRS["indexed"], self.RULES)
        with pytest.warns(UserWarning, match="no layer followed PerLayer"):
            assert_same_bytes(jax.jit(function)(STACKED, X), jax.jit(THEIRS["indexed"])(STACKED, X))
        assert "not run by a scan" in str(jlp.explain(function, jlp.FROM_CONTEXT, STACKED, X))

    def test_the_librarys_own_layers_do_not_know_their_place(self):
        with pytest.raises(ValueError, match="only quantize_matmuls knows a layer's place"):
            jlp.linear(X, PARAMS["up"]["kernel"], recipe=self.RULES)


class Block(nnx.Module):
    def __init__(self, linear, rngs):
        options = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.up, self.down = linear(32, 48, **options), linear(48, 32, **options)
        self.norm, self.dropout = nnx.BatchNorm(48, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jnp.tanh(self.norm(self.up(x))).astype(jnp.bfloat16)))


@pytest.mark.slow
def test_an_nnx_model_learns_and_counts_as_with_our_layers():
    def loss(model, x):
        return jnp.square(model(x).astype(jnp.float32)).mean()

    theirs, ours = Block(nnx.Linear, nnx.Rngs(0)), Block(jlp.nnx.Linear, nnx.Rngs(0))
    jlp.nnx.name_layers(ours)
    result = nnx.jit(nnx.value_and_grad(jlp.quantize_matmuls(loss, NVFP4)))(theirs, X)
    with jlp.autocast(NVFP4):
        expected = nnx.jit(nnx.value_and_grad(loss))(ours, X)
    assert_same_bytes(jax.tree.leaves(result), jax.tree.leaves(expected))
    assert_same_bytes(nnx.state(theirs, nnx.BatchStat), nnx.state(ours, nnx.BatchStat))
    assert theirs.dropout.rngs.count.get_value() == ours.dropout.rngs.count.get_value() == 1


def test_a_linen_model_has_the_bits_of_our_layers():
    def model(dense):
        return nn.Sequential([dense(48, use_bias=False, name="up"), jnp.tanh, dense(32, use_bias=False, name="down")])

    theirs, ours = (model(functools.partial(dense, dtype=jnp.bfloat16)) for dense in (nn.Dense, jlp.linen.Dense))
    variables = theirs.init(jax.random.key(0), X)
    found = with_gradients(jlp.quantize_matmuls(theirs.apply, NVFP4))(variables, X)
    with jlp.autocast(NVFP4):
        assert_same_bytes(found, with_gradients(ours.apply)(variables, X))


class TestMeshes:
    def placed(self, mesh):
        specs = {"up": {"kernel": P("a", "b")}, "down": {"w": P("b", "a")}}
        return jax.tree.map(lambda leaf, spec: place(leaf, mesh, spec), PARAMS, specs), place(X, mesh, P("a"))

    def test_automatic_mode(self):
        with jax.set_mesh(mesh := mesh_of((2, 2))):
            args = self.placed(mesh)
            theirs, expected = (
                with_gradients(f)(*args) for f in (jlp.quantize_matmuls(THEIRS["plain"], NVFP4), ours(NVFP4)["plain"])
            )
        assert_same_bytes(jax.device_get(theirs), jax.device_get(expected))

    @pytest.mark.slow
    def test_explicit_mode(self):
        """FSDP: weights are gathered, the result of the second product is reduced to the batch's sharding."""

        def gathered(params):
            up, down = params["up"]["kernel"], params["down"]["w"]
            return jax.sharding.reshard(up, P(None, "b")), jax.sharding.reshard(down, P("b", None))

        def theirs(params, x):
            up, down = (w.astype(x.dtype) for w in gathered(params))
            return jnp.einsum("th,hd->td", jnp.tanh(jnp.einsum("dh,td->th", up, x)), down, out_sharding=P("a"))

        def of_layers(params, x):
            up, down = gathered(params)
            hidden = jnp.tanh(jlp.linear(x, up, recipe=NVFP4, name="up"))
            return jlp.linear(hidden, down, recipe=NVFP4, name="down", out_sharding=P("a"))

        with jax.set_mesh(mesh := mesh_of((2, 2), AxisType.Explicit)):
            args = self.placed(mesh)
            found, expected = (with_gradients(f)(*args) for f in (jlp.quantize_matmuls(theirs, NVFP4), of_layers))
        assert_same_bytes(jax.device_get(found), jax.device_get(expected))

    @pytest.mark.slow
    def test_shard_map(self):
        mesh = mesh_of((4,))

        def mapped(function):
            specs = {"mesh": mesh, "in_specs": (P(), P("a")), "out_specs": P("a")}
            return lambda params, x: jax.shard_map(function, **specs)(params, x)

        theirs = with_gradients(jlp.quantize_matmuls(casting_first(mapped(THEIRS["plain"])), NVFP4))(PARAMS, X)
        expected = with_gradients(mapped(ours(NVFP4)["plain"]))(PARAMS, X)
        assert_same_bytes(jax.device_get(theirs), jax.device_get(expected))


class TestDelayedScaling:
    RECIPE = jlp.DelayedScaling(amax_history_len=3)
    KEY = jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT

    def of_layers(self, states, params, x):
        linear = functools.partial(jlp.linear, recipe=self.RECIPE)
        hidden, _ = linear(x, params["up"]["kernel"], name="up", state=states["up"])
        return linear(jnp.tanh(hidden), params["down"]["w"], name="down", state=states["down"])[0]

    @pytest.mark.slow
    def test_results_and_new_states_are_those_of_the_layers(self):
        function = jlp.quantize_matmuls(THEIRS["plain"], self.RECIPE)
        states = function.init_state(PARAMS, X)
        assert states.keys() == {self.KEY} and states[self.KEY].keys() == {"up", "down"}
        expected, theirs = dict(states[self.KEY]), states
        for _ in range(2):  # the second step has the scales of the first
            run = with_gradients(lambda states, x: function(PARAMS, x, scaling_state=states))
            found, (theirs, of_x) = run(theirs, X)
            (of_layers, (expected, of_x_of_layers)) = with_gradients(
                lambda states, x: self.of_layers(states, PARAMS, x)
            )(expected, X)
            assert_same_bytes((found, theirs[self.KEY], of_x), (of_layers, expected, of_x_of_layers))

    @pytest.mark.slow
    def test_a_stack_has_the_largest_amax_of_its_layers(self):
        function = jlp.quantize_matmuls(THEIRS["scan_of_remat"], self.RECIPE)
        states = function.init_state(STACKED, X)
        _, (new, _) = with_gradients(lambda states, x: function(STACKED, x, scaling_state=states))(states, X)
        largest = jnp.abs(STACKED["up"]["kernel"]).max()
        assert new[self.KEY]["up"]["kernel_amax_history"].tolist() == [largest, 0, 0]

    def test_experts_have_states_of_their_own(self):
        kernels, sizes = random_array((3, 32, 16), "float32", 7), jnp.asarray([5, 0, 9], jnp.int32)
        function = jlp.quantize_matmuls(lambda p, x: lax.ragged_dot(x, p["e"]["w"].astype(x.dtype), sizes), self.RECIPE)
        states = function.init_state({"e": {"w": kernels}}, X)
        assert states[self.KEY]["e"]["kernel_amax_history"].shape == (3, 3)

        def layer(states, x):
            return jlp.grouped_matmul(x, kernels, sizes, recipe=self.RECIPE, name="e", state=states)[0]

        run = with_gradients(lambda states, x: function({"e": {"w": kernels}}, x, scaling_state=states))
        found, (new, of_x) = run(states, X)
        expected, (of_layer, of_x_of_layer) = with_gradients(layer)(states[self.KEY]["e"], X)
        assert_same_bytes((found, new[self.KEY]["e"], of_x), (expected, of_layer, of_x_of_layer))

    @pytest.mark.parametrize("state", [None, {}, {KEY: {"up": {}}}])
    def test_a_missing_state_is_named(self, state):
        function = jlp.quantize_matmuls(THEIRS["plain"], self.RECIPE)
        with pytest.raises(ValueError, match="no amax histories for down.*make it by the function's init_state"):
            function(PARAMS, X, scaling_state=state)


class TestExplain:
    def test_every_product_and_parameter(self):
        def function(params, x):
            y = lax.scan(lambda c, w: (jnp.tanh(c @ w.astype(c.dtype)), None), x, params["layers"])[0]
            y = lax.conv(y[None, None], params["conv"].astype(y.dtype), (1, 1), "SAME")[0, 0]
            return y @ params["head"].astype(y.dtype)

        params = {"layers": jnp.ones((2, 32, 32)), "head": jnp.ones((32, 8)), "conv": jnp.ones((1, 1, 3, 3))}
        rules = jlp.PerLayer((("head", None),), MXFP8)
        expected = """
layer   kernel   weight           input            gradient
layers  32x32    MXFP8 E4M3 1x32  MXFP8 E4M3 1x32  MXFP8 E4M3 1x32
conv    1x1x3x3  -                -                -                a convolution with overlapping windows
head    32x8     -                -                -                left out by the recipe"""
        shapes = jax.eval_shape(lambda: (params, X))
        for explained in (
            jlp.explain(function, rules, *shapes),
            jlp.explain(function, rules, params, X),
            jlp.explain(jlp.quantize_matmuls(function, rules), jlp.FROM_CONTEXT, params, X),
        ):
            assert str(explained) == expected.strip()

    def test_an_unrolled_loop_has_one_row_for_each_parameter(self):
        def function(params, x):
            experts = sum(jnp.tanh(x @ params["up"][i]) @ params["down"][i] for i in range(4))
            return experts @ params["tied"], experts @ params["tied"].T

        params = {"up": jnp.ones((4, 32, 64)), "down": jnp.ones((4, 64, 32)), "tied": jnp.ones((32, 32))}
        found = jlp.explain(function, MXFP8, params, X)
        assert [(row.path, row.kernel, row.note) for row in found.layers] == [
            ("up", (4, 32, 64), "4 products"),
            ("down", (4, 64, 32), "4 products"),
            ("tied", (32, 32), "2 products"),
        ]

    def test_within_shard_map_a_parameter_has_its_own_shape(self):
        mesh = mesh_of((2, 2))

        def function(params, x):
            split = jax.shard_map(
                lambda x, up, same: jax.lax.all_gather(x @ up, "b", axis=1, tiled=True) @ same,
                mesh=mesh,
                in_specs=(P("a"), P(None, "b"), P()),
                out_specs=P("a"),
                check_vma=False,
            )
            return split(x, params["up"], params["same"])

        params = {"up": jnp.ones((32, 64)), "same": jnp.ones((64, 32))}
        found = jlp.explain(function, MXFP8, params, X)
        assert [(row.path, row.kernel) for row in found.layers] == [("up", (32, 64)), ("same", (64, 32))]


class TestSilence:
    def test_a_recipe_that_no_layer_follows_warns_once(self):
        function = jlp.quantize_matmuls(lambda p, x: x + p["up"], jlp.MXFP8BlockScaling(fp8_format="HYBRID"))
        with pytest.warns(UserWarning, match="no layer followed MXFP8BlockScaling.*'up'.*explain says why") as said:
            function({"up": jnp.ones((4, 4))}, 1.0)
            function({"up": jnp.ones((4, 4))}, 1.0)
        assert len(said) == 1

    def test_one_that_is_quantised_already_is_told_so(self):
        once = jlp.quantize_matmuls(THEIRS["plain"], MXFP8)
        with pytest.warns(UserWarning, match="plain is quantised already.*transform its __wrapped__"):
            assert_same_bytes(jlp.quantize_matmuls(once, NVFP4)(PARAMS, X), once(PARAMS, X))

    def test_a_rule_that_matches_nothing_names_the_nearest(self):
        rules = jlp.PerLayer((("op", None),), MXFP8)
        with pytest.warns(UserWarning, match="the rule 'op' of PerLayer matches no layer; the nearest names are 'up'"):
            jlp.quantize_matmuls(THEIRS["plain"], rules)(PARAMS, X)

    def test_a_rule_for_a_parameter_in_no_product_is_named(self):
        rules = jlp.PerLayer((("table", NVFP4),), MXFP8)
        with pytest.warns(UserWarning, match="the rule 'table' of PerLayer is for 'table', in no matrix product"):
            jlp.quantize_matmuls(lambda p, x: x @ p["up"] + p["table"], rules)({"up": X.T, "table": jnp.eye(16)}, X)

    def test_in_a_scope_the_scope_asks_when_it_is_left(self, recwarn):
        """The function's own layers follow the scope, and no parameter is in a plain product."""
        function = jlp.quantize_matmuls(lambda w, x: jlp.linear(x, w))
        with jlp.autocast(jlp.Float8BlockScaling(w_block_scaling_dim=1), strict=True):
            function(jnp.ones((128, 128)), X[:, :1] * jnp.ones((16, 128)))
        with (
            pytest.raises(ValueError, match="no layer followed Float8BlockScaling"),
            jlp.autocast(jlp.Float8BlockScaling(use_f32_scales=True), strict=True),
        ):
            jlp.quantize_matmuls(lambda w, x: x + w.sum())(jnp.ones((4, 4)), 1.0)
        assert not recwarn


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    """A model as Equinox has them."""

    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            ((3,), {}, TypeError, "fn=3; needs a function"),
            ((nnx.Linear(4, 4, rngs=nnx.Rngs(0)),), {}, TypeError, r"fn is a Linear, .* use jaxlowprec.nnx.convert\("),
            (
                (nn.Dense(4),),
                {},
                TypeError,
                r"fn is a Dense, which holds its parameters; use jaxlowprec.linen.convert\(",
            ),
            ((Tree(X),), {}, TypeError, r"fn is a Tree, .* use quantize_matmuls\(lambda model, x: model\(x\)\)"),
            ((len, 3), {}, TypeError, "recipe=3; needs a recipe"),
            ((len, None), {"params": 1.5}, TypeError, "params=1.5; needs an argument's position or name"),
            ((len, None), {"params": ()}, TypeError, "needs an argument's position or name"),
            ((len, None), {"params": True}, TypeError, "needs an argument's position or name"),
        ],
    )
    def test_arguments(self, arguments, options, error, message):
        with pytest.raises(error, match=f"quantize_matmuls: .*{message}"):
            jlp.quantize_matmuls(*arguments, **options)

    def test_a_partial_of_data_is_a_function(self):
        partial = jax.tree_util.Partial(lambda x, params: THEIRS["plain"](params, x), X)
        assert_same_bytes(
            jlp.quantize_matmuls(partial, NVFP4)(PARAMS), jlp.quantize_matmuls(THEIRS["plain"], NVFP4)(PARAMS, X)
        )

    @pytest.mark.parametrize("params", [2, -3, "weights"])
    def test_params_that_name_no_argument(self, params):
        with pytest.raises(
            ValueError, match="2 positional arguments and the keywords .*needs the position or the name"
        ):
            jlp.quantize_matmuls(THEIRS["plain"], NVFP4, params=params)(PARAMS, X)

    def test_params_by_name_and_several(self):
        expected = jax.jit(ours(NVFP4)["plain"])(PARAMS, X)
        for params in ("params", [-2], ("params",)):
            assert_same_bytes(jax.jit(jlp.quantize_matmuls(THEIRS["plain"], NVFP4, params=params))(PARAMS, X), expected)
        assert_same_bytes(jax.jit(jlp.quantize_matmuls(THEIRS["plain"], NVFP4))(params=PARAMS, x=X), expected)

    def test_a_function_that_cannot_be_traced(self):
        def branches(w, x):
            return x @ w if x.sum() > 0 else x

        with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
            jlp.quantize_matmuls(branches, NVFP4)(jnp.ones((4, 4)), jnp.ones((4, 4)))
        assert "has to be traceable by jax.jit" in raised.value.__notes__[-1]


@pytest.mark.parametrize("kind", ["plain", "scan"])
def test_the_program_is_the_hand_written_one(kind):
    def text(function):
        program = jax.jit(function).lower(STACKED if kind == "scan" else PARAMS, X).as_text()
        return re.sub("@jit_\\w+", "@jit", program)

    assert text(jlp.quantize_matmuls(THEIRS[kind], NVFP4)) == text(ours(NVFP4)[kind])


@pytest.mark.slow
def test_other_arguments_are_not_traced():
    def function(w, x, how, scale):
        assert how == "tanh" and isinstance(scale, float)
        return np.float32(scale) * getattr(jnp, how)(x @ w.astype(x.dtype))

    y = jlp.quantize_matmuls(function, NVFP4)(PARAMS["up"]["kernel"], X, "tanh", 2.0)
    assert y.shape == (16, 48)
