"""Custom: a recipe that is a function from role to format."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import QuantizerRole, Role
from tests.helpers import assert_same_bytes, random_array

X, W = random_array((32, 64)), random_array((64, 48), "float32", 1)


def mxfp8(role):
    return jlp.MXFP8()


def without(role, *, tensor):
    return None if role.tensor_type == tensor else jlp.MXFP8()


class Asked:
    """A factory that remembers what it was asked."""

    def __init__(self, answer=lambda role: jlp.MXFP8()):
        self.roles, self.answer = [], answer

    def __call__(self, role):
        self.roles.append(role)
        return self.answer(role)


class TestQuestions:
    def test_are_one_for_each_operand(self):
        asked = Asked()
        jlp.Custom(asked).roles("linear", "up")
        assert asked.roles == [QuantizerRole("linear", t, "up") for t in ("input", "weight", "grad_output")]

    def asked_by(self, call):
        asked = Asked()
        call(jlp.Custom(asked))
        return {(role.module_type, role.name) for role in asked.roles}

    def test_name_the_layer(self):
        plain = (((1,), (0,)), ((), ()))
        assert self.asked_by(lambda r: jlp.linear(X, W, recipe=r, name="up")) == {("linear", "up")}
        assert self.asked_by(lambda r: jlp.dot_general(X, W, plain, recipe=r, name="a")) == {("linear", "a")}
        assert self.asked_by(lambda r: jlp.einsum("tk,kn->tn", X, W, recipe=r)) == {("linear", "")}
        assert self.asked_by(lambda r: jlp.quantize_kernel(W, r, name="up")) == {("linear", "up")}

    def test_name_the_layers_of_a_linen_model(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = jlp.linen.DenseGeneral(64, name="up")(jlp.linen.Dense(64, name="in")(x))
                return jlp.linen.Einsum((64, 16), "td,df->tf", name="out")(x)

        variables = Model().init(jax.random.key(0), X)

        def apply(recipe):
            with jlp.autocast(recipe):
                Model().apply(variables, X, mutable="quantized")

        assert self.asked_by(apply) == {("linear", "in"), ("linear", "up"), ("linear", "out")}

    def test_name_the_layers_of_an_nnx_model(self):
        rngs = nnx.Rngs(0)
        layers = (
            jlp.nnx.Linear(64, 16, name="up", rngs=rngs),
            jlp.nnx.LinearGeneral(64, 16, name="up", rngs=rngs),
            jlp.nnx.Einsum("td,df->tf", (64, 16), name="up", rngs=rngs),
        )

        def apply(layer, recipe):
            with jlp.autocast(recipe), jlp.nnx.quantized_kernels(layer):
                layer(X)

        for layer in layers:
            assert self.asked_by(functools.partial(apply, layer)) == {("linear", "up")}


class TestAnswers:
    def test_a_format_is_a_role_that_rounds_to_nearest(self):
        assert jlp.Custom(mxfp8).roles() == jlp.Roles(*[Role(jlp.MXFP8())] * 3)

    def test_a_role_is_itself_and_none_keeps_the_operand(self):
        role = Role(jlp.NVFP4(), "stochastic", jlp.Hadamard())
        answers = {"input": Role(jlp.NVFP4(), hadamard=jlp.Hadamard()), "weight": None, "grad_output": role}
        roles = jlp.Custom(lambda role: answers[role.tensor_type]).roles()
        assert (roles.input, roles.weight, roles.gradient) == tuple(answers.values())

    def test_the_roles_of_a_recipe_give_that_recipe_byte_for_byte(self):
        roles = jlp.NVFP4BlockScaling().roles()
        by_type = {"input": roles.input, "weight": roles.weight, "grad_output": roles.gradient}
        custom = jlp.Custom(lambda role: by_type[role.tensor_type])

        def run(recipe):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), X, W)
            return y, pullback(random_array((32, 48), seed=2))

        assert_same_bytes(run(custom), run(jlp.NVFP4BlockScaling()))

    @pytest.mark.parametrize("answer", ["mxfp8", jlp.MXFP8, True, jlp.NVFP4BlockScaling()], ids=repr)
    def test_anything_else_raises_with_the_question(self, answer):
        with pytest.raises(TypeError, match="factory answered .* to QuantizerRole.*'input'.*; needs a format, a Role"):
            jlp.Custom(lambda role: answer).roles()

    @pytest.mark.parametrize("tensor_type", ["input", "weight"])
    def test_only_gradients_round_stochastically(self, tensor_type):
        def factory(role):
            return Role(jlp.MXFP8(), "stochastic" if role.tensor_type == tensor_type else "nearest")

        with pytest.raises(
            ValueError, match=f"Custom: .*{tensor_type}.* rounds stochastic; that is only for grad_output"
        ):
            jlp.Custom(factory).roles()


class TestRecipe:
    def test_is_equal_and_hashes_by_its_function(self):
        assert jlp.Custom(mxfp8) == jlp.Custom(mxfp8) and hash(jlp.Custom(mxfp8)) == hash(jlp.Custom(mxfp8))
        assert jlp.Custom(mxfp8) != jlp.Custom(lambda role: jlp.MXFP8())
        assert jlp.Custom(mxfp8) != jlp.Custom(mxfp8, backward_override="dequantized")

    @pytest.mark.parametrize("factory", [None, 3, {"weight": jlp.MXFP8()}, jlp.MXFP8()], ids=repr)
    def test_needs_a_function(self, factory):
        with pytest.raises(TypeError, match="Custom: factory=.*; needs a hashable function of a QuantizerRole"):
            jlp.Custom(factory)

    def test_needs_a_hashable_one(self):
        class Unhashable(Asked):
            __hash__ = None

        with pytest.raises(TypeError, match="needs a hashable function"):
            jlp.Custom(Unhashable())

    def test_checks_its_backward_override(self, monkeypatch):
        with pytest.raises(ValueError, match="Custom: backward_override='none'"):
            jlp.Custom(mxfp8, "none")
        monkeypatch.setenv("JAXLOWPREC_BACKWARD_OVERRIDE", "high_precision")
        assert jlp.Custom(mxfp8).backward_override == "high_precision"

    def test_is_traced_once_for_equal_functions_and_anew_for_another(self):
        seen = []

        @jax.jit
        def f(x, w):
            seen.append(jlp.current_recipe())
            return jlp.linear(x, w)

        other = jlp.Custom(functools.partial(without, tensor="weight"))
        for recipe in (jlp.Custom(mxfp8), jlp.Custom(mxfp8), other):
            with jlp.autocast(recipe):
                y = f(X, W)
        assert seen == [jlp.Custom(mxfp8), other]
        assert_same_bytes(y, jlp.linear(X, W, recipe=None))


class TestLayersInHighPrecision:
    """A factory that answers None by the layer's name: kernels are reused in the others."""

    def test_have_no_quantised_kernel_in_linen(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jlp.linen.Dense(16, name="head")(jlp.linen.Dense(64, name="body")(x))

        recipe = jlp.Custom(lambda role: None if role.name == "head" else jlp.MXFP8())
        variables = Model().init(jax.random.key(0), X)
        with jlp.autocast(recipe):
            y, quantized = Model().apply(variables, X, mutable="quantized")
            assert list(quantized["quantized"]) == ["body"]
            assert_same_bytes(Model().apply(variables | quantized, X), y)
            assert_same_bytes(Model().apply(variables, X), y)

    def test_have_no_quantised_kernel_in_nnx(self):
        body = jlp.nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        head = jlp.nnx.LinearGeneral(64, 16, name="head", rngs=nnx.Rngs(0))
        recipe = jlp.Custom(lambda role: None if role.name == "head" else jlp.MXFP8())
        with jlp.autocast(recipe), jlp.nnx.quantized_kernels(nnx.List([body, head])):
            assert body.quantized is not None and head.quantized is None
            y = head(body(X))
            assert jnp.all(jnp.isfinite(y))
        with jlp.autocast(recipe):
            assert_same_bytes(head(body(X)), y)


class TestOperandsThatNoGemmReads:
    """A GEMM is quantised if both of its operands are: a factory may quantise tensors in vain."""

    @pytest.mark.parametrize("tensor", ["input", "weight", "grad_output"])
    def test_are_said_once_and_not_explained_as_quantised(self, tensor):
        recipe = jlp.Custom(lambda role: jlp.MXFP8() if role.tensor_type == tensor else None)
        what = "gradient" if tensor == "grad_output" else tensor
        with pytest.warns(UserWarning, match=f"linear: the recipe quantises the {what} but no GEMM, .* high precision"):
            y = jlp.linear(X, W, recipe=recipe)
        with warnings.catch_warnings(action="error"):
            assert_same_bytes(y, jlp.linear(X, W, recipe=recipe))
        assert_same_bytes(y, jlp.linear(X, W, recipe=None))
        layer = jlp.nnx.Linear(64, 48, rngs=nnx.Rngs(0))
        assert "MXFP8" not in str(jlp.explain(layer, recipe))

    def test_are_said_of_rows_in_groups(self):
        recipe = jlp.Custom(lambda role: jlp.MXFP4() if role.tensor_type == "weight" else None)
        with pytest.warns(UserWarning, match="grouped_matmul: the recipe quantises the weight but no GEMM"):
            jlp.grouped_matmul(X, W[None], jnp.array([32]), recipe=recipe)

    def test_are_not_said_where_one_gemm_reads_them(self):
        recipe = jlp.Custom(functools.partial(without, tensor="input"))
        assert_same_bytes(jlp.linear(X, W, recipe=recipe), jlp.linear(X, W, recipe=None))
        table = str(jlp.explain(jlp.nnx.Linear(64, 48, rngs=nnx.Rngs(0)), recipe))
        assert "fprop -, dgrad MXFP8" in table and ", wgrad -" in table
