"""What layers of a function are called: their parameters' paths, or given names."""

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp

NVFP4 = jlp.NVFP4BlockScaling()
X = jnp.ones((8, 32))
RULES = jlp.PerLayer((("first/up", None),), NVFP4)
PARAMS = [jnp.full((32, 48), 0.1), jnp.zeros(48), jnp.full((48, 16), 0.1)]
NAMES = ["first/up/kernel", "first/up/bias", "first/value/kernel"]


def two_layers(params, x):
    return ((x @ params[0] + params[1]) @ params[2]).sum()


def container(with_keys):
    """A class of a tree with one child: named `data_array`, as Penzai's NamedArray, or nameless, as Haliax's."""

    class Container:
        def __init__(self, array):
            self.array = array

    key = jax.tree_util.GetAttrKey("data_array")
    if with_keys:
        jax.tree_util.register_pytree_with_keys(
            Container, lambda c: ([(key, c.array)], None), lambda _, children: Container(*children)
        )
    else:
        jax.tree_util.register_pytree_node(
            Container, lambda c: ((c.array,), None), lambda _, children: Container(*children)
        )
    return Container


class TestPaths:
    def test_the_name_of_a_container_is_that_of_its_layer(self):
        named = container(with_keys=False)
        params = {"up": {"weight": named(PARAMS[0])}, "other": named(PARAMS[0])}
        found = jlp.explain(lambda p, x: x @ p["up"]["weight"].array + x @ p["other"].array, NVFP4, params, X)
        assert set(found.formats) == {"up", "other/0"}

    def test_a_named_array_in_a_parameter_has_its_layers_name(self):
        named = container(with_keys=True)

        class Parameter:
            def __init__(self, value):
                self.value = value

        value = jax.tree_util.GetAttrKey("value")
        jax.tree_util.register_pytree_with_keys(
            Parameter, lambda p: ([(value, p.value)], None), lambda _, children: Parameter(*children)
        )
        params = {"up": {"weights": Parameter(named(PARAMS[0]))}, "other": named(PARAMS[0])}
        found = jlp.explain(lambda p, x: x @ p["up"]["weights"].value.array + x @ p["other"].array, NVFP4, params, X)
        assert set(found.formats) == {"up", "other"}

    def test_a_bias_with_several_axes_is_no_layer(self):
        params = {"up": {"kernel": jnp.ones((32, 4, 8)), "bias": jnp.ones((4, 8))}}
        found = jlp.explain(
            lambda p, x: jnp.einsum("td,dhk->thk", x, p["up"]["kernel"]) + p["up"]["bias"], NVFP4, params, X
        )
        assert [row.path for row in found.layers] == ["up"]


class TestGivenNames:
    def test_rules_choose_by_them(self):
        quantized = jlp.quantize_matmuls(two_layers, RULES, names=NAMES)
        found = jlp.explain(quantized, jlp.FROM_CONTEXT, PARAMS, X)
        assert [(row.path, row.note) for row in found.layers] == [
            ("first/up", "left out by the recipe"),
            ("first/value", ""),
        ]

    def test_results_are_those_of_a_tree_with_these_paths(self):
        def of_tree(tree, x):
            first = tree["first"]
            return two_layers([first["up"]["kernel"], first["up"]["bias"], first["value"]["kernel"]], x)

        tree = {"first": {"up": {"kernel": PARAMS[0], "bias": PARAMS[1]}, "value": {"kernel": PARAMS[2]}}}
        ours = jax.jit(jax.grad(jlp.quantize_matmuls(two_layers, RULES, names=NAMES)))(PARAMS, X)
        expected = jax.jit(jax.grad(jlp.quantize_matmuls(of_tree, RULES)))(tree, X)["first"]
        assert (ours[0] == expected["up"]["kernel"]).all() and (ours[2] == expected["value"]["kernel"]).all()

    def test_other_arguments_have_none(self):
        quantized = jlp.quantize_matmuls(lambda x, params: two_layers(params, x), RULES, params="params", names=NAMES)
        assert set(jlp.explain(quantized, jlp.FROM_CONTEXT, X, params=PARAMS).formats) == {"first/up", "first/value"}

    def test_an_argument_may_be_called_model(self):
        quantized = jlp.quantize_matmuls(lambda model, x: two_layers(model, x), RULES, params="model", names=NAMES)
        assert set(jlp.explain(quantized, jlp.FROM_CONTEXT, model=PARAMS, x=X).formats) == {"first/up", "first/value"}

    def test_serving_takes_them(self):
        rules = jlp.PerLayer((("first/up", None),), jlp.Int4QAT(16))
        quantized = jlp.quantize_matmuls(two_layers, rules, names=NAMES)
        served = jlp.quantize_params(quantized, jlp.FROM_CONTEXT, PARAMS, X)
        assert [isinstance(leaf, jlp.QuantizedArray) for leaf in served] == [False, False, True]

    @pytest.mark.parametrize("names", ["kernel", [1, 2, 3], ["", "a", "b"], 5])
    def test_what_is_no_list_of_texts(self, names):
        with pytest.raises(TypeError, match="quantize_matmuls: names=.*needs a list of texts"):
            jlp.quantize_matmuls(two_layers, NVFP4, names=names)

    def test_one_too_few(self):
        with pytest.raises(ValueError, match="2 names, but the parameters have 3 leaves"):
            jlp.quantize_matmuls(two_layers, NVFP4, names=NAMES[:2])(PARAMS, X)


def test_a_summary_counts_what_is_quantised_and_what_stays():
    def loss(params, x):
        for weight in params["blocks"]:
            x = x @ weight
        return (x @ params["head"]).sum() + params["embed"][jnp.arange(3)].sum()

    params = {"blocks": [jnp.ones((32, 32))] * 5, "head": jnp.ones((32, 16)), "embed": jnp.ones((8, 32))}
    rules = jlp.PerLayer((("blocks/[0-2]", None), ("head", None)), jlp.NVFP4BlockScaling())
    explained = jlp.explain(loss, rules, params, jnp.ones((4, 32)))
    left = "left out by the recipe: blocks/0, blocks/1 and 2 more; looked up: embed"
    assert explained.summary == f"2 of 7 matrices are quantised; {left}"
    explained = jlp.explain(lambda w, x: x @ w, jlp.NVFP4BlockScaling(), jnp.ones((32, 16)), jnp.ones((4, 32)))
    assert explained.summary == "1 of 1 matrices are quantised"


def test_a_parameter_of_another_dtype_is_left_for_its_dtype():
    """JAX makes parameters of float64 where jax_enable_x64 is set; complex ones need no setting."""
    explained = jlp.explain(lambda w, x: (x @ w).real, jlp.NVFP4BlockScaling(), jnp.ones((32, 16), complex), X)
    assert [row.note for row in explained.layers] == ["it is complex64; needs bfloat16, float16 or float32"]
