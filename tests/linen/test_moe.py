"""Grouped layers and the block of experts of Linen: those of NNX with the same parameters, bit for bit."""

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.moe.stack import RECIPES, each_recipe
from tests.sharding.meshes import mesh_of, place

EXPERTS, WIDTH, HIDDEN, K = 8, 64, 32, 2
X = jax.random.normal(jax.random.key(0), (8, 16, WIDTH), jnp.bfloat16)
SIZES = jnp.asarray([30, 0, 1, 40, 20, 0, 37, 0], jnp.int32)


def parameters_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def weighted(y):
    return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))


def gradients(function, parameters, x):
    """The value, what else the function gives, and gradients of the parameters and of x."""
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(parameters, x)


def nnx_gradients(module, function, x):
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    value, (of_parameters, of_x) = gradients(lambda p, x: function(nnx.merge(graph, p, rest), x), parameters, x)
    return value, (nnx.to_pure_dict(of_parameters), of_x)


@each_recipe
class TestAgainstNNX:
    def test_the_grouped_layer_has_its_bits_and_gradients(self, recipe):
        rows = X.reshape(-1, WIDTH)
        options = {"dtype": jnp.bfloat16, "bias_init": nn.initializers.normal(1.0), "recipe": recipe}
        theirs = jlp.nnx.GroupedLinear(EXPERTS, WIDTH, HIDDEN, rngs=nnx.Rngs(0), **options)
        ours = jlp.linen.GroupedDense(EXPERTS, HIDDEN, **options)

        def total(y):
            return weighted(y), y

        assert_same_bytes(
            gradients(lambda params, x: total(ours.apply({"params": params}, x, SIZES)), parameters_of(theirs), rows),
            nnx_gradients(theirs, lambda module, x: total(module(x, SIZES)), rows),
        )

    def test_the_block_has_its_bits_and_gradients(self, recipe):
        options = {"shared_hidden_features": 32, "dtype": jnp.bfloat16, "load_balance_coef": 0.3, "recipe": recipe}
        theirs = jlp.nnx.MoE(EXPERTS, WIDTH, HIDDEN, top_k=K, rngs=nnx.Rngs(0), **options)
        jlp.nnx.name_layers(theirs)  # keyless bits are those of a layer's name, which Linen knows
        ours = jlp.linen.MoE(EXPERTS, HIDDEN, K, **options)

        def total(y, aux):
            return weighted(y) + aux.load_balance_loss, (y, aux)

        assert_same_bytes(
            gradients(lambda params, x: total(*ours.apply({"params": params}, x)), parameters_of(theirs), X),
            nnx_gradients(theirs, lambda module, x: total(*module(x)), X),
        )


class TestLayers:
    def test_have_the_parameters_of_nnx(self):
        moe = jlp.linen.MoE(EXPERTS, HIDDEN, K, shared_hidden_features=48)
        theirs = jlp.nnx.MoE(EXPERTS, WIDTH, HIDDEN, top_k=K, shared_hidden_features=48, rngs=nnx.Rngs(0))
        with jlp.autocast(jlp.NVFP4BlockScaling()):
            ours = moe.init(jax.random.key(0), X)
        assert set(ours) == {"params"}
        shapes = [
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), t) for t in (ours["params"], parameters_of(theirs))
        ]
        assert shapes[0] == shapes[1]

    def test_of_a_grouped_dense_are_checked(self):
        layer = jlp.linen.GroupedDense(EXPERTS, HIDDEN)
        variables = layer.init(jax.random.key(0), X.reshape(-1, WIDTH), SIZES)
        with pytest.raises(ValueError, match=r"GroupedDense: x \(8, 16, 64\)"):
            layer.apply(variables, X, SIZES)
        with pytest.raises(flax.errors.ScopeParamShapeError, match="kernel"):
            jlp.linen.GroupedDense(EXPERTS, HIDDEN + 1).apply(variables, X.reshape(-1, WIDTH), SIZES)

    def test_carry_the_names_of_their_axes(self):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("experts", "embed", None))
        moe = jlp.linen.MoE(EXPERTS, HIDDEN, K, kernel_init=init)
        params = moe.init(jax.random.key(0), X)["params"]
        assert params["experts"]["up_proj"]["kernel"].names == ("experts", "embed", None)
        plain = moe.apply({"params": nn.meta.unbox(params)}, X)
        assert_same_bytes(moe.apply({"params": params}, X), plain)
        with jlp.autocast(RECIPES["mxfp8"]):
            moe.apply({"params": params}, X)

    @pytest.mark.parametrize(("k", "message"), [(9, "MoE: top_k=9 of num_experts=8"), (0, "top_k=0")])
    def test_of_impossible_sizes_are_named(self, k, message):
        with pytest.raises(ValueError, match=message):
            jlp.linen.MoE(EXPERTS, HIDDEN, k).init(jax.random.key(0), X)

    def test_are_explained_with_their_paths(self):
        moe = jlp.linen.MoE(EXPERTS, HIDDEN, K, shared_hidden_features=32)
        variables = moe.init(jax.random.key(0), X)
        found = jlp.explain(moe, jlp.Int4QAT(group_size=32), variables, X)
        assert found.formats == {"router": None} | {
            f"{where}/{part}": jlp.Int4(32)
            for where in ("experts", "shared_experts")
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        assert {applied.axes for applied in found.layers if applied.path.startswith("experts")} == {(1, 1)}

    @pytest.mark.parametrize("name", ["int4_qat", "nvfp4_qat"])
    def test_are_served_with_the_bits_of_training(self, name):
        moe = jlp.linen.MoE(EXPERTS, HIDDEN, K, shared_hidden_features=32, dtype=jnp.bfloat16)
        variables = moe.init(jax.random.key(0), X)
        served = jlp.quantize_params(moe, RECIPES[name], variables, X)
        kernel = served["params"]["experts"]["down_proj"]["kernel"]
        assert isinstance(kernel, jlp.QuantizedArray) and kernel.shape == (EXPERTS, HIDDEN, WIDTH)
        with jlp.autocast(RECIPES[name]):
            expected = jax.jit(moe.apply)(variables, X)
        assert_same_bytes(jax.jit(lambda v, x: moe.apply(v, x))(served, X), expected)

    def test_under_delayed_scaling_say_what_to_do(self):
        moe = jlp.linen.MoE(EXPERTS, HIDDEN, K)
        with jlp.autocast(jlp.DelayedScaling()):
            variables = moe.init(jax.random.key(0), X)
            assert set(variables) == {"params"}
            with pytest.raises(ValueError, match="Float8CurrentScaling"):
                moe.apply(variables, X)


class Model(nn.Module):
    """Blocks run by nn.scan, a tape beside the parameters, recomputed in the backward pass where asked for."""

    layers: int = 2
    remat: bool = False

    @nn.compact
    def __call__(self, x, tape=None):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, tape):
                y, aux = jlp.linen.MoE(EXPERTS, HIDDEN, K, dtype=jnp.bfloat16, name="moe")(x, tape)
                return x + y, aux

        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True, "sr": True}, length=self.layers)
        return scan(name="layers")(x, None if tape is None else tape.experts)


@pytest.mark.parametrize(  # often in the form that has most in it
    "remat, name",
    [
        pytest.param(False, "bf16", id="-bf16", marks=pytest.mark.slow),
        pytest.param(False, "nvfp4", id="-nvfp4", marks=pytest.mark.slow),
        pytest.param(True, "bf16", id="remat-bf16", marks=pytest.mark.slow),
        pytest.param(True, "nvfp4", id="remat-nvfp4"),
    ],
)
def test_under_nn_scan_a_tape_is_recorded_and_replayed(name, remat):
    model = Model(remat=remat)
    variables = model.init(jax.random.key(0), X)
    with jlp.autocast(RECIPES[name], enabled=RECIPES[name] is not None):

        def loss(variables, tape):
            y, aux = model.apply(variables, X, tape, rngs={"sr": jax.random.key(1)})
            return weighted(y) + aux.load_balance_loss.sum(), jlp.moe.RoutingTape(aux.tape)

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        afresh = jlp.moe.RoutingTape.afresh(2, X.shape[:-1], K)
        recorded = step(variables, afresh)
        tape = recorded[0][1]
        assert tape.experts.shape == (2, 8, 16, K)
        assert_same_bytes(step(variables, tape), recorded)
        plain = Model(remat=not remat)
        other = jax.jit(
            jax.value_and_grad(lambda v: weighted(plain.apply(v, X, tape, rngs={"sr": jax.random.key(1)})[0]))
        )
        one = jax.jit(
            jax.value_and_grad(lambda v: weighted(model.apply(v, X, tape, rngs={"sr": jax.random.key(1)})[0]))
        )
        with_remat, without = other(variables), one(variables)
    if name == "bf16":  # XLA fuses another backward pass; under nvfp4 a code that flips then makes more of it
        for a, e in zip(jax.tree.leaves(with_remat), jax.tree.leaves(without), strict=True):
            a, e = np.float32(a), np.float32(e)
            assert np.linalg.norm(a - e) <= 1e-6 * np.linalg.norm(e)


def test_within_shard_map_each_device_keeps_its_experts():
    x, mesh = X.astype(jnp.float32), mesh_of((2, 4))
    moe, alone = (jlp.linen.MoE(EXPERTS, HIDDEN, K, expert_axis=axis) for axis in ("b", None))
    variables = alone.init(jax.random.key(0), x)
    specs = jax.tree.map(lambda leaf: P("b") if leaf.ndim == 3 else P(), variables)

    def call(variables, x):
        y, aux = moe.apply(variables, x)
        return y, aux.tape

    y, tape = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(specs, P("a")), out_specs=P("a")))(
        jax.tree.map(lambda leaf, spec: place(leaf, mesh, spec), variables, specs), place(x, mesh, P("a"))
    )
    expected, aux = alone.apply(variables, x)
    assert_same_bytes(jax.device_get(tape), aux.tape)
    np.testing.assert_allclose(y, expected, atol=2e-6)
