"""nnx.convert: Flax's layers become this library's in place, wherever they are."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.flax.libraries import filled
from tests.helpers import assert_same_bytes, random_array

pytestmark = pytest.mark.sampled(5)

LAYERS = {  # class, positional and keyword arguments, shape of the input
    "linear bf16": ("Linear", (32, 48), {"dtype": jnp.bfloat16}, (16, 32)),
    "linear bf16 parameters": ("Linear", (32, 48), {"param_dtype": jnp.bfloat16, "use_bias": False}, (16, 32)),
    "general": ("LinearGeneral", (32, (4, 12)), {"dtype": jnp.bfloat16}, (4, 8, 32)),
    "general batched": ("LinearGeneral", (32, 24), {"axis": 2, "batch_axis": {0: 3}}, (3, 16, 32)),
    "einsum": ("Einsum", ("btd,dhk->bthk", (32, 4, 12), (4, 12)), {}, (4, 8, 32)),
}
each_layer = pytest.mark.parametrize(("kind", "args", "options", "shape"), LAYERS.values(), ids=LAYERS)

RECIPE = jlp.NVFP4BlockScaling()
DELAYED = jlp.DelayedScaling(amax_history_len=3)
X = random_array((2, 4, 32))


class OwnLinear(nnx.Linear):
    """A user's."""


class Model(nnx.Module):
    """Layers in every place where a module can be."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 32, rngs=rngs, decode=False)
        self.blocks = nnx.List([nnx.Dict(up=nnx.Linear(32, 32, rngs=rngs)) for _ in range(2)])
        self.cell = nnx.RNN(nnx.GRUCell(32, 32, rngs=rngs))
        self.tied = self.blocks[0]["up"]
        self.out = nnx.Einsum("btd,dk->btk", (32, 32), rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block["up"](x)
        return self.out(self.cell(self.attention(self.tied(x), x)))


def abstract():
    """A model without numbers, which is all that names and kinds of layers need."""
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


PATHS = [*(f"attention/{n}" for n in ("key", "out", "query", "value")), "blocks/0/up", "blocks/1/up"]
PATHS += ["cell/cell/dense_h", "cell/cell/dense_i", "out"]


def ours_in(model):
    kinds = (jlp.nnx.Linear, jlp.nnx.LinearGeneral, jlp.nnx.Einsum)
    return {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, kinds)}


def flax_layer(kind, args, options, **more):
    return getattr(nnx, kind)(*args, **options, **more, rngs=nnx.Rngs(0))


class TestModel:
    def test_every_layer_is_found_and_named_by_its_path(self):
        model = abstract()
        assert jlp.nnx.convert(model) is model
        assert sorted(ours_in(model)) == sorted(PATHS)
        assert all(layer.name == path for path, layer in ours_in(model).items())
        assert model.tied is model.blocks[0]["up"]

    @pytest.mark.slow
    def test_names_are_those_of_quantize_matmuls(self):
        def forward(model, x):
            return model(x)

        found = jlp.explain(jlp.quantize_matmuls(forward, RECIPE), RECIPE, abstract(), X)
        assert {name for name, fmt in found.formats.items() if fmt} == set(PATHS)

    def test_variables_are_the_same_objects_in_the_same_places(self):
        model = abstract()
        before = nnx.to_flat_state(nnx.state(model))
        variables = {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
        jlp.nnx.convert(model, RECIPE)
        after = {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
        assert all(after[path] is v for path, v in variables.items()) and after.keys() == variables.keys()
        assert [path for path, _ in nnx.to_flat_state(nnx.state(model))] == [path for path, _ in before]

    def test_without_a_recipe_results_are_flaxs(self):
        model = filled(lambda: Model(nnx.Rngs(0)))
        expected = nnx.jit(lambda m: m(X))(model)
        assert_same_bytes(nnx.jit(lambda m: m(X))(jlp.nnx.convert(model)), expected)

    def test_rules_choose_recipes_and_leave_layers_flaxs(self):
        rules = jlp.PerLayer((("attention/.*", jlp.MXFP8BlockScaling()), ("blocks/0/.*", None)), RECIPE)
        model = jlp.nnx.convert(abstract(), rules)
        assert type(model.tied) is nnx.Linear and set(PATHS) - set(ours_in(model)) == {"blocks/0/up"}
        kinds = {path: type(layer.recipe) for path, layer in ours_in(model).items()}
        assert kinds["attention/out"] is jlp.MXFP8BlockScaling and kinds["out"] is jlp.NVFP4BlockScaling

    def test_high_precision_changes_nothing(self):
        assert not ours_in(jlp.nnx.convert(abstract(), None))


@each_layer
class TestLayers:
    def test_a_converted_layer_computes_as_the_librarys(self, kind, args, options, shape):
        converted = jlp.nnx.convert(nnx.List([flax_layer(kind, args, options)]))[0]
        ours = getattr(jlp.nnx, kind)(*args, **options, name="0", rngs=nnx.Rngs(0))
        x, run = random_array(shape), nnx.jit(lambda layer, x: layer(x))
        with jlp.autocast(RECIPE):
            assert_same_bytes(run(converted, x), run(ours, x))

    def test_attributes_and_sharding_stay(self, kind, args, options, shape):
        with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
            initial = nnx.with_partitioning(nnx.initializers.ones, ("x",))
            layer = flax_layer(kind, args, options, kernel_init=initial)
        before, kernel = dict(vars(layer)), layer.kernel.get_metadata()
        jlp.nnx.convert(layer, RECIPE)
        own = {"_pytree__nodes", "_pytree__state"}
        assert {name: vars(layer)[name] for name in before.keys() - own} == {n: before[n] for n in before.keys() - own}
        assert layer.kernel.get_metadata() == kernel and "x" in str(kernel)


class TestWhatIsLeft:
    def test_a_subclass_and_an_own_product_stay_and_are_named(self):
        def product(*args, **kwargs):
            return jax.lax.dot_general(*args, **kwargs)

        own = nnx.Linear(8, 8, dot_general=product, rngs=nnx.Rngs(0))
        model = nnx.Dict(a=OwnLinear(8, 8, rngs=nnx.Rngs(0)), b=own, c=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        with pytest.warns(
            UserWarning, match=r"stay Flax's: 'a' \(a OwnLinear, a subclass\), 'b' \(dot_general= is set"
        ):
            jlp.nnx.convert(model)
        assert list(ours_in(model)) == ["c"] and type(model["a"]) is OwnLinear and model["b"].dot_general is product

    @pytest.mark.parametrize("rules", [jlp.FROM_CONTEXT, jlp.Int4QAT(exclude=("out",))], ids=["context", "rules"])
    def test_nothing_converted_warns(self, rules):
        model = nnx.Dict(norm=nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
        if rules is not jlp.FROM_CONTEXT:
            model["out"] = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        with pytest.warns(UserWarning, match=r"nnx.convert: (the model has no Linear|no layer followed Int4QAT)"):
            jlp.nnx.convert(model, rules)

    def test_a_rule_that_matches_nothing_warns(self):
        with pytest.warns(UserWarning, match="the rule 'block_0/.*' of PerLayer matches no layer.*'blocks/0/up'"):
            jlp.nnx.convert(abstract(), jlp.PerLayer((("block_0/.*", None),), RECIPE))

    @pytest.mark.parametrize("model", [{}, nnx.Linear, lambda x: x])
    def test_what_is_no_model_raises(self, model):
        with pytest.raises(TypeError, match=r"nnx\.convert: .* needs an NNX .*takes jaxlowprec\.linen\.convert"):
            jlp.nnx.convert(model)

    def test_what_is_no_recipe_raises(self):
        with pytest.raises(TypeError, match=r"nnx\.convert: recipe='nvfp4'"):
            jlp.nnx.convert(abstract(), "nvfp4")

    def test_layers_of_the_library_get_what_they_lack(self):
        given = ({}, {"name": "mine"}, {"recipe": None})
        model = nnx.List([jlp.nnx.Linear(8, 8, **options, rngs=nnx.Rngs(0)) for options in given])
        jlp.nnx.convert(model, DELAYED)
        assert [(layer.name, layer.recipe) for layer in model] == [("0", DELAYED), ("mine", DELAYED), ("2", None)]
        assert [layer._overwrite_with_gradient is None for layer in model] == [False, False, True]


class TestDelayedScaling:
    def test_layers_get_a_state_and_compute_as_the_librarys(self):
        converted = jlp.nnx.convert(nnx.List([nnx.Linear(32, 16, rngs=nnx.Rngs(0))]), DELAYED)[0]
        ours = jlp.nnx.Linear(32, 16, recipe=DELAYED, name="0", rngs=nnx.Rngs(0))
        run = nnx.jit(nnx.value_and_grad(lambda m: m(X).sum()))
        assert_same_bytes(jax.tree.leaves(run(converted)), jax.tree.leaves(run(ours)))

    def test_the_scopes_recipe_gives_a_state(self):
        with jlp.autocast(DELAYED, strict=None):
            assert jlp.nnx.convert(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))._overwrite_with_gradient is not None

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["linear bf16", "general batched", "einsum"])
    def test_stacked_layers_have_a_state_each(self, kind):
        name, args, options, _ = LAYERS[kind]

        @nnx.vmap(in_axes=0)
        def stack(key):
            return getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(key))

        layer = jlp.nnx.convert(stack(jax.random.split(jax.random.key(0), 4)), DELAYED)
        shapes = {v.shape for v in layer._overwrite_with_gradient.values()}
        assert shapes == {(4, 3), (4, 1)}

    @pytest.mark.slow
    def test_a_scan_over_stacked_layers_keeps_their_states_apart(self):
        @nnx.vmap(in_axes=0)
        def stack(key):
            return nnx.Linear(32, 32, rngs=nnx.Rngs(key))

        layers = jlp.nnx.convert(stack(jax.random.split(jax.random.key(0), 3)), DELAYED)

        def loss(layers):
            body = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return body(X.astype(jnp.float32), layers).sum()

        new = nnx.jit(nnx.grad(loss))(layers)["_overwrite_with_gradient"]["kernel_amax_history"][...]
        assert_same_bytes(new[:, 0], jnp.abs(layers.kernel[...]).max((1, 2)))


class TestAgain:
    """Converting a model that was converted before."""

    def test_gives_other_rules(self):
        model, mxfp8 = jlp.nnx.convert(Model(nnx.Rngs(0)), RECIPE), jlp.MXFP8BlockScaling()
        expected = jlp.nnx.convert(Model(nnx.Rngs(0)), mxfp8)
        again = jlp.nnx.convert(model, mxfp8)
        assert again is model and {layer.recipe for layer in ours_in(model).values()} == {mxfp8}
        assert_same_bytes(nnx.jit(lambda m: m(X))(again), nnx.jit(lambda m: m(X))(expected))
        jlp.nnx.convert(model, None)
        assert {layer.recipe for layer in ours_in(model).values()} == {None}
        plain = Model(nnx.Rngs(0))
        assert_same_bytes(nnx.jit(lambda m: m(X))(model), nnx.jit(lambda m: m(X))(plain))

    def test_layers_that_new_rules_leave_out_stay(self):
        model = jlp.nnx.convert(abstract(), RECIPE)
        rules = jlp.PerLayer(((".*blocks.*", None),), default=RECIPE)
        jlp.nnx.convert(model, rules)
        in_high = {path for path, layer in ours_in(model).items() if layer.recipe is None}
        assert in_high == {"blocks/0/up", "blocks/1/up"}

    def test_layers_that_were_made_with_a_recipe_keep_it(self):
        layer = jlp.nnx.Linear(32, 32, recipe=DELAYED, rngs=nnx.Rngs(0))
        model = nnx.Dict(a=layer, b=nnx.Linear(32, 32, rngs=nnx.Rngs(1)))
        for rules in (RECIPE, jlp.MXFP8BlockScaling()):
            jlp.nnx.convert(model, rules)
            assert (model["a"].recipe, model["b"].recipe) == (DELAYED, rules)

    def test_states_are_those_that_the_new_rules_need(self):
        def states(model):
            return nnx.state(model, jlp.nnx.OverwriteWithGradient)

        model = jlp.nnx.convert(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), DELAYED)
        assert len(jax.tree.leaves(states(model))) == 6
        before = states(model)
        jlp.nnx.convert(model, jlp.DelayedScaling(amax_history_len=3))  # an equal one
        assert_same_bytes(jax.tree.leaves(states(model)), jax.tree.leaves(before))
        assert not jax.tree.leaves(states(jlp.nnx.convert(model, RECIPE)))

    def test_a_refused_layer_leaves_the_model_as_it_was(self):
        model = nnx.Dict(adapter=nnx.Linear(32, 32, rngs=nnx.Rngs(0)), layers=nnx.Linear(32, 32, rngs=nnx.Rngs(1)))
        rules = jlp.PerLayer.keep_ends(RECIPE, first=1, last=1, block="layers")
        with pytest.raises(ValueError, match="'layers' is in a stack"):
            jlp.nnx.convert(model, rules)
        assert ours_in(model) == {}
