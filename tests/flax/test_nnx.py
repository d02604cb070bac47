"""What only NNX has: arguments of __init__, streams with a count, names that are given, `quantized_kernels`."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, random_array

NNX = LIBRARIES["nnx"]
FULL = jlp.NVFP4BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
BF16 = {"dtype": jnp.bfloat16}


def made(make, *inputs):
    """A module with numbers of numpy."""
    return NNX.model(make, *inputs).module


@pytest.mark.parametrize("kind", ["Linear", "LinearGeneral", "Einsum"])
class TestArguments:
    def parameters(self, kind, method):
        return [inspect.signature(getattr(getattr(m, kind), method)).parameters for m in (nnx, jlp.nnx)]

    def test_names_order_and_defaults_are_flaxs(self, kind):
        flax, ours = self.parameters(kind, "__init__")
        own = {"recipe", "name"}
        assert own <= set(ours) and any(p.kind is p.VAR_KEYWORD for p in ours.values())  # the rest is Flax's
        for name, parameter in ours.items():
            if name not in own and parameter.kind is not parameter.VAR_KEYWORD:
                assert (parameter.kind, parameter.default) == (flax[name].kind, flax[name].default)
        positional = [n for n, p in flax.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional

    def test_of_a_call_are_flaxs(self, kind):
        flax, ours = self.parameters(kind, "__call__")
        assert [(n, p.kind, p.default) for n, p in ours.items()] == [(n, p.kind, p.default) for n, p in flax.items()]

    def test_an_unknown_one_raises(self, kind):
        args = ("td,df->tf", (32, 16)) if kind == "Einsum" else (32, 16)
        with pytest.raises(TypeError, match="margin"):
            getattr(jlp.nnx, kind)(*args, margin=0, rngs=nnx.Rngs(0))


class TestRandomStream:
    x = random_array((16, 32))

    def steps(self, recipe):
        """The layer, and gradients of its kernel in two steps."""
        layer = jlp.nnx.Linear(32, 48, recipe=recipe, rngs=nnx.Rngs(0, sr=1))

        @nnx.jit
        @nnx.grad
        def gradients(layer):
            return (layer(self.x).astype(jnp.float32) ** 2).mean()

        return layer, [gradients(layer)["kernel"][...] for _ in range(2)]

    def test_each_step_has_its_own_bits(self):
        layer, (first, second) = self.steps(FULL)
        assert jnp.any(first != second) and layer.sr.count[...] == 2
        assert_same_bytes(self.steps(FULL)[1], [first, second])

    def test_is_not_used_where_nothing_is_rounded_stochastically(self):
        layer, (first, second) = self.steps(PLAIN)
        assert_same_bytes(first, second)
        assert layer.sr.count[...] == 0

    def test_trains_a_scanned_model(self):
        x = jax.random.normal(jax.random.key(0), (32, 32)).astype(jnp.bfloat16)
        with jlp.autocast(FULL):
            model = NNX.stack(block(), 3, remat=True)(nnx.Rngs(0, sr=1))
            optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

            @nnx.jit
            def step(model, optimizer):
                value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) + x).astype(jnp.float32) ** 2))(model)
                optimizer.update(model, gradients)
                return value

            losses = [float(step(model, optimizer)) for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0]
        assert model.blocks.up.kernel[...].dtype == jnp.float32


def block():
    return NNX.composed(
        lambda block, x: x + block.down(nnx.gelu(block.up(x))),
        up=NNX.maker("Linear", 32, 64, **BF16),
        down=NNX.maker("LinearGeneral", 64, 32, **BF16),
    )


class TestQuantizedKernels:
    x = random_array((16, 32))

    def test_are_reused_with_gradients_to_the_master_weights(self):
        model = made(block(), self.x)

        @nnx.jit
        @nnx.value_and_grad
        def loss(model):
            return (model(self.x).astype(jnp.float32) ** 2).mean()

        with jlp.autocast(FULL):
            expected, fresh = loss(model)
            with jlp.nnx.quantized_kernels(model):
                value, reused = loss(model)
                model.up.kernel[...] = 2 * model.up.kernel[...]
                assert loss(model)[0] == expected  # the kernel of then
            assert loss(model)[0] != expected
        assert value == expected
        assert_same_bytes(jax.tree.leaves(nnx.state(reused)), jax.tree.leaves(nnx.state(fresh)))

    def test_leave_the_models_state_as_it_was(self):
        model = made(block(), self.x)
        before = nnx.graphdef(model)
        with pytest.raises(RuntimeError, match="inside"), jlp.nnx.quantized_kernels(model, FULL):
            parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            assert sorted(parameters["up"]) == ["bias", "kernel"]
            raise RuntimeError("inside")
        assert nnx.graphdef(model) == before

    def test_a_layers_own_recipe_comes_first(self):
        other = jlp.NVFP4BlockScaling(disable_2d_quantization=True)
        model = nnx.List(
            [made(NNX.maker("Linear", 32, 32, recipe=recipe), self.x) for recipe in (None, other, jlp.FROM_CONTEXT)]
        )
        with jlp.nnx.quantized_kernels(model, FULL):
            kept = [getattr(layer._quantized_kernel(), "rowwise", None) for layer in model]
        assert [q and q.format for q in kept] == [None, jlp.NVFP4((1, 16)), jlp.NVFP4((16, 16))]

    def test_need_a_recipe_and_leave_nothing_behind_without(self):
        model = nnx.List(
            [made(NNX.maker("Linear", 32, 32, recipe=recipe), self.x) for recipe in (FULL, jlp.FROM_CONTEXT)]
        )
        with pytest.raises(ValueError, match="quantize_kernel: no recipe"), jlp.nnx.quantized_kernels(model):
            pass
        assert model[0].quantized is None


class TestExperts:
    def layer(self, **options):
        return made(NNX.maker("GroupedLinear", 4, 64, 32, **options))

    def test_metadata_says_where_parameters_lie(self):
        axes = ("experts", "embed", None)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes, eager_sharding=False)
        assert self.layer(kernel_init=init).kernel.get_metadata("out_sharding") == axes
        layer = self.layer(kernel_metadata={"out_sharding": axes, "eager_sharding": False})
        assert layer.kernel.get_metadata("out_sharding") == axes

    def test_an_input_of_another_width_is_named(self):
        with pytest.raises(ValueError, match=r"x \(48, 8\)"):
            self.layer()(jnp.ones((48, 8)), jnp.zeros(4, jnp.int32))

    def test_grouped_layers_are_named_like_any_layer(self):
        model = nnx.Dict(experts=nnx.Dict(up_proj=self.layer(use_bias=False)), gate=self.layer(use_bias=False))
        jlp.nnx.name_layers(model)
        assert model.experts.up_proj.name == "experts/up_proj"
        found = jlp.explain(model, jlp.Int4QAT(group_size=32))
        assert found.formats == {"experts/up_proj": jlp.Int4(32), "gate": None}

    def test_parts_have_names_of_the_blocks(self):
        def block(**options):
            make = NNX.maker("MoE", 8, 64, 32, 2, shared_hidden_features=32, **options)
            return nnx.eval_shape(lambda: make(nnx.Rngs(0)))

        moe = block(name="blocks/3/moe")
        assert moe.experts.up_proj.name == "blocks/3/moe/experts/up_proj"
        assert moe.shared_experts.gate_proj.name == "blocks/3/moe/shared_experts/gate_proj"
        assert moe.router.name == "blocks/3/moe/router" and block().router.name == ""
