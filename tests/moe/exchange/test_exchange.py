"""Experts by all-to-all: each device has tokens and experts of its own, and everything is as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from jaxlowprec.moe.exchange import AllToAll
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import EXACT
from tests.sharding.meshes import mesh_of

EXPERTS, K, TOKENS, WIDTH = 16, 3, 12, 8  # tokens of each device
FORMS = ("padded", "ragged")


def choices(case, devices):
    """The experts of all tokens."""
    rng = np.random.default_rng(devices)
    tokens = devices * TOKENS
    if case == "one device's experts take all":
        return np.tile(np.arange(K, dtype=np.int32), (tokens, 1))
    found = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)]).astype(np.int32)
    if case == "few":  # most experts, and some devices, have no rows
        found = np.stack([rng.permutation(4)[:K] + 7 for _ in range(tokens)]).astype(np.int32)
    return found


CASES = ("even", "few", "one device's experts take all")


def products(kernels, recipe):
    return lambda rows, sizes: jlp.grouped_matmul(rows, kernels, sizes, recipe=recipe)


def on_one_device(x, kernels, weights, experts, recipe=None):
    where = jlp.moe.dispatch(experts, EXPERTS)
    rows = products(kernels, recipe)(jlp.moe.scatter_to_experts(x, where), where.group_sizes)
    return jlp.moe.combine(rows, weights, where)


def over_devices(mesh, factor=2.0, form="padded", recipe=None, pure=True):
    def local(x, kernels, weights, experts):
        where = jlp.moe.dispatch(experts, EXPERTS)
        groups = AllToAll(where, weights, "a", factor, form)
        return groups.run(products(kernels, recipe), x, [] if pure else None)[0]

    return jax.shard_map(local, mesh=mesh, in_specs=(P("a"),) * 4, out_specs=P("a"))


def step(function):
    """The result and the gradients of tokens, kernels and weights."""

    def run(x, kernels, weights, experts):
        y, pullback = jax.vjp(lambda *learned: function(*learned, experts), x, kernels, weights)
        return y, *pullback(jnp.cos(y))

    return jax.jit(run, compiler_options=EXACT)


@functools.cache
def step_on_one_device(recipe):
    """Compiled once for all choices of experts."""
    return step(functools.partial(on_one_device, recipe=recipe))


@functools.cache
def expected(case, devices, recipe=None, width=WIDTH):
    given = operands(case, devices, width)
    return given, step_on_one_device(recipe)(*given)


def operands(case, devices, width=WIDTH):
    tokens = devices * TOKENS
    return (
        random_array((tokens, width), "float32"),
        random_array((EXPERTS, width, width), "float32", seed=1),
        random_array((tokens, K), "float32", seed=2),
        jnp.asarray(choices(case, devices)),
    )


@functools.cache
def step_over_devices(devices, form):
    return step(over_devices(mesh_of((devices,)), form=form))


@pytest.mark.slow
@pytest.mark.usefixtures("ragged_on_cpus")
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_device(case, form, devices):
    """To the bit, whether or not the usual buffers are large enough."""
    given, wanted = expected(case, devices)
    assert_same_bytes(step_over_devices(devices, form)(*given), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.1, 1.0, 100])
@pytest.mark.parametrize("pure", [True, False])
def test_buffers_of_any_size(factor, pure):
    given, wanted = expected("even", 4)
    assert_same_bytes(step(over_devices(mesh_of((4,)), factor, pure=pure))(*given), wanted)


@pytest.mark.usefixtures("ragged_on_cpus")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "recipe", often([0], [jlp.MXFP8BlockScaling(), jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)]), ids=str
)
def test_under_a_recipe(recipe, form):
    """An expert's blocks and amax are those of all devices' rows."""
    recipe = jlp.MXFP8BlockScaling() if recipe == 0 else recipe
    given, wanted = expected("even", 4, recipe, 64)
    *found, of_weights = step(over_devices(mesh_of((4,)), form=form, recipe=recipe))(*given)
    assert_same_bytes(found, wanted[:-1])
    np.testing.assert_allclose(of_weights, wanted[-1], rtol=1e-5)  # a sum over features, in an order of XLA's


@pytest.mark.slow
def test_under_scan_remat_and_without_tokens():
    given, _ = expected("even", 4)
    x, kernels, weights, experts = given
    function = over_devices(mesh_of((4,)))

    def twice(call):
        def loss(x):
            y, _ = jax.lax.scan(lambda x, _: (call(x, kernels, weights, experts), None), x, None, 2)
            return jnp.sum(jnp.cos(y))

        return jax.jit(jax.grad(loss), compiler_options=EXACT)(x)

    wanted = twice(on_one_device)
    assert_same_bytes(twice(function), wanted)
    assert_same_bytes(twice(jax.checkpoint(function)), wanted)
    assert jax.jit(function)(x[:0], kernels, weights[:0], experts[:0]).shape == (0, WIDTH)


@pytest.mark.slow
def test_only_rows_travel():
    given, _ = expected("even", 8)
    compiled = jax.jit(over_devices(mesh_of((8,)), factor=100)).lower(*given).compile()
    found = {
        (c.kind, dtype) for c in traffic.collectives(compiled) for dtype, dims in c.results if np.prod(dims) > EXPERTS
    }
    assert found == {("all-to-all", "f32")}


class TestBlocks:
    """The layers of both libraries."""

    hidden, width = 64, 64
    each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)

    def block(self, library, **options):
        return library.maker("MoE", EXPERTS, self.width, self.hidden, K, dtype=jnp.bfloat16, **options)

    def x(self):
        return random_array((4, TOKENS, self.width), seed=5)

    def split(self, library, alone, **options):
        exchange = jlp.moe.Exchange("a", **{"kind": "all_to_all"} | options)
        return library.like(alone, self.block(library, exchange=exchange))

    def step(self, model):
        """Of a loss that is a sum over sequences, whatever device has them."""

        def run(tree, x):
            def loss(tree, x):
                y, aux = model.apply(tree, x)
                weights = jnp.cos(jnp.arange(y[0].size)).reshape(y[0].shape)
                return jnp.sum(y.astype(jnp.float32) * weights), (y, aux.tape)

            (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(tree, x)
            return found, gradients

        return run

    @pytest.mark.slow
    @each_library
    @pytest.mark.parametrize("kind", ["all_to_all", "deduplicated"])
    @pytest.mark.parametrize("recipe", [None, jlp.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
    def test_a_step_is_that_of_one_device(self, library, recipe, kind):
        alone, x = library.model(self.block(library), self.x()), self.x()
        specs = jax.tree.map(lambda leaf: P("a") if leaf.ndim == 3 else P(), alone.tree)
        places = (P("a"), P("a")), (specs, P("a"))
        mapped = jax.shard_map(
            self.step(self.split(library, alone, kind=kind)),
            mesh=mesh_of((4,)),
            in_specs=(specs, P("a")),
            out_specs=places,
        )
        with jlp.autocast(recipe, enabled=recipe is not None):
            found, (of_tree, of_x) = jax.jit(mapped, compiler_options=EXACT)(alone.tree, x)
            wanted, (of_whole, of_tokens) = jax.jit(self.step(alone), compiler_options=EXACT)(alone.tree, x)
        assert_same_bytes(found[1], wanted[1])
        near = self.near if kind == "deduplicated" else self.same_but_for_the_router
        near(found[0], wanted[0])
        router, experts = (
            [(path, leaf) for path, leaf in jax.tree.flatten_with_path(of_tree)[0] if (leaf.ndim == 3) == is_expert]
            for is_expert in (False, True)
        )
        whole = dict(jax.tree.flatten_with_path(of_whole)[0])
        assert experts and router
        for path, leaf in experts:
            near(leaf, whole[path])
        for path, leaf in router:
            np.testing.assert_allclose(leaf, whole[path], rtol=1e-4, atol=1e-5 * np.abs(whole[path]).max())
        near(of_x, of_tokens)

    def near(self, actual, expected):
        """Sums of each device's experts are rounded to bfloat16 before they are added up."""
        actual, expected = np.float32(actual), np.float32(expected)
        assert np.linalg.norm(actual - expected) < 0.005 * np.linalg.norm(expected)

    def same_but_for_the_router(self, actual, expected):
        """XLA's product of fewer tokens by the router's kernel may have another last bit, and so may weights."""
        actual, expected = np.float32(actual), np.float32(expected)
        np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=1e-5 * np.abs(expected).max())

    @each_library
    def test_a_tape_is_replayed(self, library):
        alone, x = library.model(self.block(library), self.x()), self.x()
        specs = jax.tree.map(lambda leaf: P("a") if leaf.ndim == 3 else P(), alone.tree)
        split = self.split(library, alone, buffer_factor=4)
        tape = jnp.asarray(choices("few", 4)).reshape(4, TOKENS, K)
        mapped = jax.shard_map(
            lambda tree, x, tape: split.apply(tree, x, tape)[0],
            mesh=mesh_of((4,)),
            in_specs=(specs, P("a"), P("a")),
            out_specs=P("a"),
        )
        with jlp.autocast(jlp.NVFP4BlockScaling()):
            y = jax.jit(mapped, compiler_options=EXACT)(alone.tree, x, tape)
            wanted = jax.jit(lambda tree, x: alone.apply(tree, x, tape)[0], compiler_options=EXACT)(alone.tree, x)
        self.same_but_for_the_router(y, wanted)

    @pytest.mark.slow
    @each_library
    def test_codes_on_the_wire_keep_the_result(self, library):
        alone, x = library.model(self.block(library), self.x()), self.x()
        specs = jax.tree.map(lambda leaf: P("a") if leaf.ndim == 3 else P(), alone.tree)

        def result(wire):
            split = self.split(library, alone, wire=wire)
            options = {"mesh": mesh_of((4,)), "in_specs": (specs, P("a")), "out_specs": P("a")}
            mapped = jax.shard_map(lambda tree, x: split.apply(tree, x)[0], **options)
            return jax.jit(mapped, compiler_options=EXACT)(alone.tree, x)

        with jlp.autocast(jlp.MXFP8BlockScaling()):
            assert_same_bytes(result("codes"), result("rows"))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"axis": None}, TypeError, "axis=None; needs the mesh axis of the experts"),
            ({"axis": ["a"]}, TypeError, r"axis=\['a'\]; needs the mesh axis of the experts"),
            ({"kind": "ring"}, ValueError, "kind='ring'; needs"),
            ({"wire": "codes", "kind": "sum"}, ValueError, 'wire="codes" and kind="sum"; needs kind="all_to_all" or'),
            ({"wire": "bits"}, ValueError, "wire='bits'; needs"),
            ({"buffer_factor": 0}, ValueError, "buffer_factor=0; needs a number above 0"),
            ({"buffer_factor": True}, ValueError, "buffer_factor=True; needs a number above 0"),
            ({"buffer_factor": float("nan")}, ValueError, "buffer_factor=nan; needs a number above 0"),
        ],
    )
    def test_what_cannot_be_is_named(self, options, error, message):
        with pytest.raises(error, match=f"^Exchange: {message}"):
            jlp.moe.Exchange(**{"axis": "a", "kind": "all_to_all"} | options)

    @each_library
    def test_a_kind_is_no_exchange(self, library):
        with pytest.raises(TypeError, match="MoE: exchange='sum'; needs a jaxlowprec.moe.Exchange, or None"):
            library.model(self.block(library, exchange="sum"), self.x())
