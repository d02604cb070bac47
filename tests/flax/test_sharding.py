"""Layers of Linen and NNX whose parameters carry axes: on a mesh they give what they give on one device.

Quantised bytes agree. A result agrees to float32's rounding, since a split contraction adds its parts in another order.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT
from tests.flax.libraries import LIBRARIES, LinenModel, NnxModel, joined
from tests.helpers import assert_same_bytes, often, random_array
from tests.low_precision import recipes
from tests.sharding.meshes import assert_same_to_rounding, collectives, mesh_of, place

pytestmark = pytest.mark.sampled(5)

RULES = (("batch", None), ("embed", "a"), ("mlp", "b"), ("heads", "b"), ("experts", "b"))
INIT = nn.initializers.lecun_normal()
RECIPES = recipes("nvfp4", "mxfp8", "fp8_delayed")
# class, positional and keyword arguments, axes of the kernel and their places on a 2 x 4 mesh, shape of the input
LAYERS = {
    "linear": ("Linear", (64, 64), {}, ("embed", "mlp"), P("a", "b"), (32, 64)),
    "general": ("LinearGeneral", (64, (4, 16)), {}, ("embed", "heads", None), P("a", "b", None), (2, 16, 64)),
    "general of experts": (
        "LinearGeneral",
        (64, 32),
        {"axis": 2, "batch_axis": {0: 4}},
        ("experts", None, None),
        P("b", None, None),
        (4, 32, 64),
    ),
    "einsum": (
        "Einsum",
        ("btd,dhk->bthk", (64, 4, 16), (4, 16)),
        {},
        ("embed", "heads", None),
        P("a", "b", None),
        (2, 16, 64),
    ),
    "einsum of experts": (
        "Einsum",
        ("etk,ekn->etn", (4, 64, 32)),
        {},
        ("experts", "embed", None),
        P("b", "a", None),
        (4, 32, 64),
    ),
}


class OnLinen:
    """Kernels with names of logical axes, or of the mesh's."""

    forms = ("logical", "physical")
    rules = staticmethod(nn.logical_axis_rules)

    def options(self, form, axes, spec):
        init = nn.with_logical_partitioning(INIT, axes) if form == "logical" else nn.with_partitioning(INIT, (*spec,))
        return {"kernel_init": init}

    def made(self, make, form, x, mesh):
        """The model, its arrays made where they belong: Flax's pattern."""
        module = make()
        abstract = jax.eval_shape(module.init, jax.random.key(0), x)
        if form == "logical":
            shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
        else:
            shardings = nn.get_sharding(abstract, mesh)
        variables = jax.jit(module.init, out_shardings=shardings)(jax.random.key(0), x)
        return LinenModel(module, joined(variables["params"], variables.get(OVERWRITE_WITH_GRADIENT, {})))

    def places(self, model, mesh):
        return jax.tree.map(lambda leaf: leaf.sharding, model.tree)

    def check_names(self, model, tree, form, axes, spec):
        assert tree["kernel"].names == (axes if form == "logical" else (*spec,))

    def quantised(self, model, tree, x):
        """The kernel quantised for many calls, and the output."""
        y, quantized = model.apply(tree, x, mutable="quantized")
        return jax.tree.leaves(quantized), y


class OnNnx:
    """Kernels with names of logical axes, by both forms of Flax 0.12."""

    forms = ("with_partitioning", "kernel_metadata")
    rules = staticmethod(nnx.logical_axis_rules)

    def options(self, form, axes, spec):
        if form == "with_partitioning":
            return {"kernel_init": nnx.with_partitioning(INIT, axes)}
        return {"kernel_init": INIT, "kernel_metadata": {"out_sharding": axes}}

    def made(self, make, form, x, mesh):
        """The model, its arrays made where they belong: eager sharding."""
        with jax.set_mesh(mesh), self.rules(RULES):
            return NnxModel(nnx.jit(lambda: make(nnx.Rngs(0)))())

    def places(self, model, mesh):
        with jax.set_mesh(mesh), self.rules(RULES):
            return nnx.to_pure_dict(nnx.get_named_sharding(model.state, mesh))

    def check_names(self, model, tree, form, axes, spec):
        assert model.module_of(tree).kernel.get_metadata("out_sharding") == axes

    def quantised(self, model, tree, x):
        module = model.module_of(tree)
        with jlp.nnx.quantized_kernels(module):
            return jax.tree.leaves(module.quantized.get_value()), module(x)


ON = {"linen": OnLinen(), "nnx": OnNnx()}
CASES = [(library, name, form) for library in LIBRARIES for name in LAYERS for form in ON[library].forms]
EACH = [(library, name, ON[library].forms[i % 2]) for library in LIBRARIES for i, name in enumerate(LAYERS)]
each_layer = pytest.mark.parametrize(("library", "name", "form"), often(EACH, CASES, 3))  # often in one form


def alone(library, name):
    """The model on one device, and inputs."""
    kind, args, options, *_, shape = LAYERS[name]
    library, x = LIBRARIES[library], random_array(shape, "float32")
    make = library.maker(kind, *args, **options, kernel_init=INIT)
    model = library.model(make, x)
    model.tree = library.initial(make, x).compile()(jax.random.key(0))
    return model, x


def sharded(library, name, form, x, mesh):
    """The model on a mesh."""
    (kind, args, options, axes, spec, _), on = LAYERS[name], ON[library]
    return on.made(LIBRARIES[library].maker(kind, *args, **options, **on.options(form, axes, spec)), form, x, mesh)


def same_leaves(actual, expected):
    """Trees differ in Linen's boxes."""
    assert_same_to_rounding(*map(jax.tree.leaves, (actual, expected)))


class TestMesh:
    @pytest.mark.parametrize(
        ("library", "name", "form", "recipe"),
        often([(*case, "nvfp4") for case in EACH], [(*case, recipe) for case in CASES for recipe in RECIPES], 4),
    )
    def test_outputs_and_gradients_are_those_of_one_device(self, library, name, form, recipe):
        mesh = mesh_of((2, 4))
        with jlp.autocast(RECIPES[recipe]):
            model, x = alone(library, name)
            expected = model.run(x)
            split = sharded(library, name, form, x, mesh)
            same_leaves(split.tree, model.tree)
            with jax.set_mesh(mesh), ON[library].rules(RULES):
                actual = split.run(x)
        same_leaves(actual, expected)

    @each_layer
    def test_parameters_keep_their_places_and_names_through_a_step(self, library, name, form):
        *_, axes, spec, shape = LAYERS[name]
        x, mesh, on = random_array(shape, "float32"), mesh_of((2, 4)), ON[library]
        with jlp.autocast(RECIPES["fp8_delayed"]):
            model = sharded(library, name, form, x, mesh)

            @functools.partial(jax.jit, out_shardings=on.places(model, mesh))
            def step(tree):
                gradients = jax.grad(lambda tree: jnp.sum(model.apply(tree, x) ** 2))(tree)
                return jax.tree.map(lambda p, g: p - 0.1 * g, tree, gradients)

            with jax.set_mesh(mesh), on.rules(RULES):
                trees = model.tree, step(model.tree)
        for tree in trees:
            on.check_names(model, tree, form, axes, spec)
            (kernel,) = jax.tree.leaves(tree["kernel"])
            assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, spec), kernel.ndim)
            state = jax.tree.leaves(tree[OVERWRITE_WITH_GRADIENT])
            assert len(state) == 6 and all(leaf.sharding.is_fully_replicated for leaf in state)

    @pytest.mark.parametrize(
        ("library", "name", "form"),
        often([e for e in EACH if "einsum" not in e[1]], [case for case in CASES if "einsum" not in case[1]], 3),
    )
    def test_a_weight_quantised_once_has_the_bytes_of_one_device(self, library, name, form):
        mesh, on = mesh_of((2, 4)), ON[library]

        def quantised(model):
            return jax.jit(functools.partial(on.quantised, model))(model.tree, x)

        with jlp.autocast(RECIPES["nvfp4"]):
            model, x = alone(library, name)
            expected, _ = quantised(model)
            split = sharded(library, name, form, x, mesh)
            with jax.set_mesh(mesh), on.rules(RULES):
                actual, y = quantised(split)
                once = split.quantized_once(x)  # outside jit too
                assert_same_to_rounding(jax.jit(once.apply)(once.tree, x), y)
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("name", ["general of experts", "einsum of experts"])
def test_experts_on_their_own_devices_give_the_same_bytes(library, name):
    kind, args, options, *_, shape = LAYERS[name]
    if library.name == "nnx" and kind == "LinearGeneral":
        options = options | {"use_bias": False}
    x, mesh = random_array(shape, "float32"), mesh_of((4,))
    model = library.model(library.maker(kind, *args, **options), x)
    with jlp.autocast(RECIPES["nvfp4"]):
        expected = jax.jit(model.apply)(model.tree, x)
        with jax.set_mesh(mesh):
            placed = jax.tree.map(lambda leaf: place(leaf, mesh, P("a")), (model.tree, x))
            compiled = jax.jit(model.apply).lower(*placed).compile()
            assert_same_bytes(compiled(*placed), expected)
    assert collectives(compiled) == []


def test_explain_notes_a_group_that_would_lie_on_two_shards(library):
    x = random_array((8, 32))
    layer = library.maker("Linear", 32, 32)
    model = library.model(library.composed(lambda model, x: model.up(x), up=layer), x)
    model.tree["up"]["kernel"] = place(model.tree["up"]["kernel"], mesh_of((4,)), P("a"))
    (up,) = model.explain(jlp.Int4QAT(group_size=16), x).layers
    assert "K = 32, in shards of 8" in up.note
