"""Linen layers whose parameters carry axes: on a mesh they give what they give on one device.

Quantised bytes agree. A result agrees to float32's rounding, since a split contraction adds its parts in another order.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often, random_array
from tests.low_precision import recipes
from tests.sharding.meshes import assert_same_to_rounding, collectives, mesh_of, place

RULES = (("batch", None), ("embed", "a"), ("mlp", "b"), ("heads", "b"), ("experts", "b"))
INIT = nn.initializers.lecun_normal()
RECIPES = recipes("nvfp4", "mxfp8", "fp8_delayed")
# class, attributes, axes of the kernel and their places on a 2 x 4 mesh, shape of the input
LAYERS = {
    "Dense": (jlp.linen.Dense, {"features": 64}, ("embed", "mlp"), P("a", "b"), (32, 64)),
    "DenseGeneral": (
        jlp.linen.DenseGeneral,
        {"features": (4, 16)},
        ("embed", "heads", None),
        P("a", "b", None),
        (2, 16, 64),
    ),
    "DenseGeneral of experts": (
        jlp.linen.DenseGeneral,
        {"features": 32, "axis": 2, "batch_dims": (0,)},
        ("experts", None, None),
        P("b", None, None),
        (4, 32, 64),
    ),
    "Einsum": (
        jlp.linen.Einsum,
        {"shape": (64, 4, 16), "einsum_str": "btd,dhk->bthk"},
        ("embed", "heads", None),
        P("a", "b", None),
        (2, 16, 64),
    ),
    "Einsum of experts": (
        jlp.linen.Einsum,
        {"shape": (4, 64, 32), "einsum_str": "etk,ekn->etn"},
        ("experts", "embed", None),
        P("b", "a", None),
        (4, 32, 64),
    ),
}
each_layer = pytest.mark.parametrize(("kind", "attributes", "axes", "spec", "shape"), LAYERS.values(), ids=LAYERS)
by_names = pytest.mark.parametrize("logical", [True, False], ids=["logical", "physical"])


def made(kind, attributes, axes, spec, logical):
    wrapped = nn.with_logical_partitioning(INIT, axes) if logical else nn.with_partitioning(INIT, tuple(spec))
    return kind(**attributes, kernel_init=wrapped)


def initial(layer, x, mesh, logical):
    """The variables, made where they belong: Flax's pattern. They are those of one device, bit for bit."""
    abstract = jax.eval_shape(layer.init, jax.random.key(0), x)
    specs = nn.get_partition_spec(abstract)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES) if logical else nn.get_sharding(abstract, mesh)
    return jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x)


def run(layer, variables, x):
    """The output, and gradients of the variables and of x."""

    @jax.jit
    def call(variables, x):
        y, pullback = jax.vjp(layer.apply, variables, x)
        return y, *pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return call(variables, x)


@by_names
@each_layer
class TestMesh:
    @pytest.mark.parametrize("name", often(["nvfp4"], RECIPES))
    def test_outputs_and_gradients_are_those_of_one_device(self, kind, attributes, axes, spec, shape, logical, name):
        layer, x, mesh = made(kind, attributes, axes, spec, logical), random_array(shape, "float32"), mesh_of((2, 4))
        with jlp.autocast(RECIPES[name]):
            variables = layer.init(jax.random.key(0), x)
            expected = run(layer, variables, x)
            sharded = initial(layer, x, mesh, logical)
            assert_same_to_rounding(sharded, variables)
            with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
                actual = run(layer, sharded, x)
        assert_same_to_rounding(actual, expected)

    def test_parameters_keep_their_places_and_names_through_a_step(self, kind, attributes, axes, spec, shape, logical):
        layer, x, mesh = made(kind, attributes, axes, spec, logical), random_array(shape, "float32"), mesh_of((2, 4))

        @jax.jit
        def step(variables, x):
            gradients = jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(variables)
            return jax.tree.map(lambda p, g: p - 0.1 * g, variables, gradients)

        with jlp.autocast(RECIPES["fp8_delayed"]):
            variables = initial(layer, x, mesh, logical)
            with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
                places = jax.tree.map(lambda leaf: leaf.sharding, variables)
                after = jax.jit(step, out_shardings=places)(variables, x)
        for tree in (variables, after):
            kernel = tree["params"]["kernel"]
            assert kernel.names == (axes if logical else tuple(spec))
            assert kernel.value.sharding.is_equivalent_to(NamedSharding(mesh, spec), kernel.value.ndim)
            assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(tree["_overwrite_with_gradient"]))

    def test_a_weight_quantised_once_has_the_bytes_of_one_device(self, kind, attributes, axes, spec, shape, logical):
        if kind is jlp.linen.Einsum:
            pytest.skip("it quantises at every call")
        layer, x, mesh = made(kind, attributes, axes, spec, logical), random_array(shape, "float32"), mesh_of((2, 4))

        def quantised(variables, x):
            y, quantized = jax.jit(lambda v, x: layer.apply(v, x, mutable="quantized"))(variables, x)
            return quantized, y, jax.jit(layer.apply)({**variables, **quantized}, x)

        with jlp.autocast(RECIPES["nvfp4"]):
            expected, *_ = quantised(layer.init(jax.random.key(0), x), x)
            variables = initial(layer, x, mesh, logical)
            with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
                actual, first, later = quantised(variables, x)
        assert_same_bytes(actual, expected)
        assert_same_to_rounding(later, first)


@pytest.mark.parametrize("name", ["DenseGeneral of experts", "Einsum of experts"])
def test_experts_on_their_own_devices_give_the_same_bytes(name):
    kind, attributes, _, _, shape = LAYERS[name]
    layer, x, mesh = kind(**attributes), random_array(shape, "float32"), mesh_of((4,))
    with jlp.autocast(RECIPES["nvfp4"]):
        variables = layer.init(jax.random.key(0), x)
        expected = layer.apply(variables, x)
        with jax.set_mesh(mesh):
            placed = jax.tree.map(lambda leaf: place(leaf, mesh, P("a")), variables), place(x, mesh, P("a"))
            compiled = jax.jit(layer.apply).lower(*placed).compile()
            assert_same_bytes(compiled(*placed), expected)
    assert collectives(compiled) == []
