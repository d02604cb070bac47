"""NNX layers whose parameters carry axes: on a mesh they give what they give on one device.

Quantised bytes agree. A result agrees to float32's rounding, since a split contraction adds its parts in another order.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often, random_array
from tests.low_precision import recipes
from tests.sharding.meshes import assert_same_to_rounding, collectives, mesh_of, place

RULES = (("embed", "a"), ("mlp", "b"), ("heads", "b"), ("experts", "b"))
INIT = nnx.initializers.lecun_normal()
RECIPES = recipes("nvfp4", "mxfp8", "fp8_delayed")
# class, positional and keyword arguments, axes of the kernel and their places on a 2 x 4 mesh, shape of the input
LAYERS = {
    "Linear": ("Linear", (64, 64), {}, ("embed", "mlp"), P("a", "b"), (32, 64)),
    "LinearGeneral": ("LinearGeneral", (64, (4, 16)), {}, ("embed", "heads", None), P("a", "b", None), (2, 16, 64)),
    "LinearGeneral of experts": (
        "LinearGeneral",
        (64, 32),
        {"axis": 2, "batch_axis": {0: 4}},
        ("experts", None, None),
        P("b", None, None),
        (4, 32, 64),
    ),
    "Einsum": (
        "Einsum",
        ("btd,dhk->bthk", (64, 4, 16), (4, 16)),
        {},
        ("embed", "heads", None),
        P("a", "b", None),
        (2, 16, 64),
    ),
    "Einsum of experts": (
        "Einsum",
        ("etk,ekn->etn", (4, 64, 32)),
        {},
        ("experts", "embed", None),
        P("b", "a", None),
        (4, 32, 64),
    ),
}
each_layer = pytest.mark.parametrize(("kind", "args", "options", "axes", "spec", "shape"), LAYERS.values(), ids=LAYERS)
# how a layer is told the axes of its kernel: both forms of Flax 0.12
FORMS = {
    "with_partitioning": lambda axes: {"kernel_init": nnx.with_partitioning(INIT, axes)},
    "kernel_metadata": lambda axes: {"kernel_init": INIT, "kernel_metadata": {"out_sharding": axes}},
}
by_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def plain(kind, args, options):
    return getattr(jlp.nnx, kind)(*args, **options, kernel_init=INIT, rngs=nnx.Rngs(0))


def on_mesh(kind, args, options, axes, form):
    """The layer, its parameters made where they belong: eager sharding, within the mesh and the rules."""
    return nnx.jit(lambda: getattr(jlp.nnx, kind)(*args, **options, **form(axes), rngs=nnx.Rngs(0)))()


def run(layer, x):
    """The output, and gradients of the parameters and of x."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def call(parameters, x):
        y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p, rest)(x), parameters, x)
        return y, *pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return call(parameters, x)


@by_form
@each_layer
class TestMesh:
    @pytest.mark.parametrize("name", often(["nvfp4"], RECIPES))
    def test_outputs_and_gradients_are_those_of_one_device(self, kind, args, options, axes, spec, shape, form, name):
        x, mesh = random_array(shape, "float32"), mesh_of((2, 4))
        with jlp.autocast(RECIPES[name]):
            layer = plain(kind, args, options)
            expected = run(layer, x)
            with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
                sharded = on_mesh(kind, args, options, axes, form)
                assert_same_to_rounding(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (sharded, layer)))
                actual = run(sharded, x)
        assert_same_to_rounding(*map(jax.tree.leaves, (actual, expected)))  # NNX trees differ in their metadata

    def test_parameters_keep_their_places_and_names_through_a_step(self, kind, args, options, axes, spec, shape, form):
        x, mesh = random_array(shape, "float32"), mesh_of((2, 4))
        with jlp.autocast(RECIPES["fp8_delayed"]), jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
            layer = on_mesh(kind, args, options, axes, form)
            graph, parameters = nnx.split(layer)

            @jax.jit(out_shardings=nnx.get_named_sharding(parameters, mesh))
            def step(parameters):
                gradients = jax.grad(lambda p: jnp.sum(nnx.merge(graph, p)(x) ** 2))(parameters)
                return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

            after = nnx.merge(graph, step(parameters))
        for made in (layer, after):
            assert made.kernel.get_metadata("out_sharding") == axes
            value = made.kernel.get_value()
            assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)
            state = jax.tree.leaves(nnx.state(made, jlp.nnx.OverwriteWithGradient))
            assert len(state) == 6 and all(leaf.sharding.is_fully_replicated for leaf in state)

    def test_a_weight_quantised_once_has_the_bytes_of_one_device(self, kind, args, options, axes, spec, shape, form):
        if kind == "Einsum":
            pytest.skip("it quantises at every call")
        x, mesh = random_array(shape, "float32"), mesh_of((2, 4))

        @nnx.jit
        def quantised(layer, x):
            with jlp.nnx.quantized_kernels(layer):
                return layer.quantized.get_value(), layer(x)

        with jlp.autocast(RECIPES["nvfp4"]):
            expected, _ = quantised(plain(kind, args, options), x)
            with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
                layer = on_mesh(kind, args, options, axes, form)
                actual, y = quantised(layer, x)
                with jlp.nnx.quantized_kernels(layer):  # outside jit too
                    assert_same_bytes(layer.quantized.get_value(), expected)
                assert_same_to_rounding(y, nnx.jit(lambda m, x: m(x))(layer, x))
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("name", ["LinearGeneral of experts", "Einsum of experts"])
def test_experts_on_their_own_devices_give_the_same_bytes(name):
    kind, args, options, _, _, shape = LAYERS[name]
    x, mesh = random_array(shape, "float32"), mesh_of((4,))
    layer = plain(kind, args, {**options, **({"use_bias": False} if kind == "LinearGeneral" else {})})
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    def apply(parameters, x):
        return nnx.merge(graph, parameters, rest)(x)

    with jlp.autocast(RECIPES["nvfp4"]):
        expected = layer(x)
        with jax.set_mesh(mesh):
            placed = jax.tree.map(lambda leaf: place(leaf, mesh, P("a")), parameters), place(x, mesh, P("a"))
            compiled = jax.jit(apply).lower(*placed).compile()
            assert_same_bytes(compiled(*placed), expected)
    assert collectives(compiled) == []
