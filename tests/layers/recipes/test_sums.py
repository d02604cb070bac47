"""How devices add up the partial sums of a linear's GEMMs, as a recipe's `sums` says."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.helpers import assert_same_bytes, often, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, name_of, place

KINDS = ("float32", "bfloat16", "bfloat16_stochastic", "quantized")
DRAWN = KINDS[2:]
RECIPES = (jlp.MXFP8BlockScaling, jlp.NVFP4BlockScaling, jlp.Float8BlockScaling, jlp.Float8CurrentScaling)
T, K, N = 256, 512, 512
# x [T, K], kernel [K, N], gradient [T, N], and the results y, dw, dx; the GEMM whose contraction is split
PLACEMENTS = {
    "fprop": ((P(None, "a"), P("a"), P()), (P(), P("a"), P(None, "a"))),
    "fprop, scattered": ((P(None, "a"), P("a"), P("a")), (P("a"), P("a"), P(None, "a"))),
    "dgrad": ((P(), P(None, "a"), P(None, "a")), (P(None, "a"), P(None, "a"), P())),
    "wgrad": ((P("a"), P(), P("a")), (P("a"), P(), P("a"))),
    "wgrad, scattered": ((P("a"), P("a"), P("a")), (P("a"), P("a"), P("a"))),
}
KEY = jax.random.key(5)
RESULTS = {"fprop": 0, "wgrad": 1, "dgrad": 2}
ERRORS = {
    "float32": (0, 1e-6),
    "bfloat16": (1e-4, 4e-3),
    "bfloat16_stochastic": (1e-4, 5e-3),
    "quantized": (0.03, 0.06),
}


@functools.cache
def operands():
    return random_array((T, K), seed=1), random_array((K, N), "float32", seed=2), random_array((T, N), seed=3)


def step(x, w, dy, key):
    y, pullback = jax.vjp(lambda w, x: jlp.linear(x, w, key=key, name="up"), w, x)
    return y, *pullback(dy)


@functools.cache
def compiled_on_mesh(recipe, placement, mesh, keyed, axes):
    """A step and its operands in their places."""
    specs, wanted = (
        [P(*(axes if entry == "a" else entry for entry in spec)) for spec in part] for part in PLACEMENTS[placement]
    )
    with jax.set_mesh(mesh), jlp.autocast(recipe):
        placed = [place(value, mesh, spec) for value, spec in zip(operands(), specs, strict=True)]
        shardings = tuple(NamedSharding(mesh, spec) for spec in wanted)
        return jax.jit(step, out_shardings=shardings).lower(*placed, KEY if keyed else None).compile(), placed


def on_mesh(recipe, placement, mesh, key=KEY, axes="a"):
    """y, dw, dx, and the collectives without those of amaxes."""
    compiled, placed = compiled_on_mesh(recipe, placement, mesh, key is not None, axes)
    results = [np.asarray(v).astype(np.float32) for v in compiled(*placed, key)]
    return results, [(c.kind, c.elements) for c in traffic.collectives(compiled) if c.elements > 64]


def relative(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("recipe", often(RECIPES[:1], RECIPES[:2]), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("kind", often(("bfloat16", "quantized"), KINDS))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_only_the_gemm_whose_contraction_is_split_changes(recipe, kind, placement):
    gemm = placement.partition(",")[0]
    mesh = mesh_of((8,))
    exact, as_ever = on_mesh(recipe(), placement, mesh)
    results, found = on_mesh(recipe(sums=kind), placement, mesh)
    for other, i in RESULTS.items():
        if other != gemm:
            assert_same_bytes(results[i], exact[i])
    least, most = ERRORS[kind]
    if "bfloat16" in kind and gemm != "wgrad":
        most *= 2  # the result is bfloat16, too
    assert least <= relative(results[RESULTS[gemm]], exact[RESULTS[gemm]]) <= most
    kinds = {kind for kind, _ in found}
    if kind == "quantized":
        assert "all-to-all" in kinds and not kinds & {"all-reduce", "reduce-scatter"}
    else:
        assert sorted(found) == sorted(as_ever)


@pytest.mark.parametrize("kind", often(KINDS[1:3], KINDS))
def test_of_a_kernel_n_by_k_are_those_of_its_transposition(kind):
    x, w, dy = operands()

    def wgrad(contracted, x, w, dy):
        dims = (((1,), (contracted,)), ((), ()))
        return jax.vjp(lambda w: jlp.dot_general(x, w, dims, key=KEY), w)[1](dy)[0]

    mesh = mesh_of((8,))
    with jax.set_mesh(mesh), jlp.autocast(jlp.MXFP8BlockScaling(sums=kind)):
        x, dy = (place(value, mesh, P("a")) for value in (x, dy))
        as_it_lies = jax.jit(functools.partial(wgrad, 1))(x, np.swapaxes(w, 0, 1), dy)
        assert_same_bytes(as_it_lies.T, jax.jit(functools.partial(wgrad, 0))(x, w, dy))


def test_a_value_for_each_gemm():
    mesh = mesh_of((8,))
    recipe = jlp.MXFP8BlockScaling(sums=jlp.Sums(wgrad="quantized"))
    for placement, found in (("fprop", {"all-reduce"}), ("wgrad", {"all-to-all", "all-gather"})):
        assert {kind for kind, _ in on_mesh(recipe, placement, mesh)[1]} == found


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("placement", ["fprop", "wgrad, scattered"])
class TestRandomBits:
    @pytest.mark.slow
    def test_of_every_mesh_with_as_many_devices_are_the_same(self, kind, placement):
        recipe = jlp.MXFP8BlockScaling(sums=kind)
        first, _ = on_mesh(recipe, placement, mesh_of((8,)))
        other = [jax.devices()[i] for i in (5, 2, 7, 0, 1, 6, 3, 4)]
        permuted, _ = on_mesh(recipe, placement, mesh_of((8,), devices=other))
        two, _ = on_mesh(recipe, placement, mesh_of((2, 4)), axes=("a", "b"))
        for results in (permuted, two):
            for actual, expected in zip(results, first, strict=True):
                assert_same_bytes(actual, expected)

    @pytest.mark.slow
    def test_follow_the_key_and_without_one_the_operand(self, kind, placement):
        recipe = jlp.MXFP8BlockScaling(sums=kind)
        i = RESULTS[placement.partition(",")[0]]
        found = [on_mesh(recipe, placement, mesh_of((8,)), key)[0][i] for key in (KEY, jax.random.key(6), None, None)]
        assert np.any(found[0] != found[1]) and np.any(found[0] != found[2])
        assert_same_bytes(found[3], found[2])


@pytest.mark.slow
@by_axis_type
@pytest.mark.parametrize("kind", ["bfloat16", "quantized"])
def test_data_and_tensor_parallel_at_once(kind, axis_type):
    """Scattered over one mesh axis and then added up over the other: quantised sums, three times."""
    mesh = mesh_of((2, 4), axis_type)
    x, w, dy = operands()

    def gradient(w, x, dy):
        return jax.vjp(lambda w: jlp.linear(x, w, key=KEY), w)[1](dy)[0]

    def run(recipe):
        with jax.set_mesh(mesh), jlp.autocast(recipe):
            placed = place(w, mesh, P("b")), place(x, mesh, P(("a", "b"))), place(dy, mesh, P(("a", "b")))
            return jax.jit(gradient, out_shardings=NamedSharding(mesh, P("b")))(*placed)

    error = relative(np.asarray(run(jlp.MXFP8BlockScaling(sums=kind))), np.asarray(run(jlp.MXFP8BlockScaling())))
    least, most = {"bfloat16": ERRORS["bfloat16"], "quantized": (0.055, 0.075)}[kind]
    assert least < error < most


@functools.cache
def on_one_device(recipe):
    with jlp.autocast(recipe):
        return jax.jit(step)(*operands(), KEY)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("recipe", often(RECIPES[:1], RECIPES[:2]), ids=lambda cls: cls.__name__)
def test_on_one_device_nothing_changes(recipe, kind):
    assert_same_bytes(on_one_device(recipe(sums=kind)), on_one_device(recipe()))


@pytest.mark.slow
def test_under_vmap_scan_and_remat():
    mesh, recipe = mesh_of((8,)), jlp.NVFP4BlockScaling(sums="quantized")
    x, w = random_array((3, T, K), seed=4), random_array((K, N), "float32", seed=2)
    key = jax.random.key(1)

    def one(x, w):
        return jlp.linear(x, w, key=key)

    def mapped(x, w):
        return jax.vmap(one, (0, None))(x, w)

    def scanned(x, w):
        return jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(one)(x, w)), 0, x)[1]

    def gradient(function):
        return jax.jit(jax.grad(lambda w, x: (function(x, w).astype(jnp.float32) ** 2).sum()))

    with jax.set_mesh(mesh), jlp.autocast(recipe):
        placed = place(x, mesh, P(None, "a")), place(w, mesh, P())
        found = [np.asarray(gradient(f)(placed[1], placed[0])) for f in (mapped, scanned)]
    with jlp.autocast(jlp.NVFP4BlockScaling()):
        exact = np.asarray(gradient(scanned)(w, x))
    for actual in found:
        assert 0.02 < relative(actual, exact) < 0.06


@pytest.mark.slow
def test_an_mlp_that_computes_its_hidden_layer_again():
    """By the same random bits: the gradients are those of an MLP that keeps it."""
    mesh, recipe = mesh_of((8,)), jlp.MXFP8BlockScaling(sums="quantized")
    x, w, dy = random_array((T, K), seed=1), random_array((K, N), "float32", seed=2), random_array((T, K), seed=3)

    def gradients(saved):
        def function(x, *kernels):
            return jlp.mlp(x, kernels, key=KEY, activation="gelu", saved=saved)

        with jax.set_mesh(mesh), jlp.autocast(recipe):
            placed = place(x, mesh, P(None, "a")), place(w, mesh, P("a")), place(w.T, mesh, P())
            return jax.jit(lambda dy, *given: jax.vjp(function, *given)[1](dy))(dy, *placed)

    for actual, expected in zip(gradients("recompute"), gradients("quantized"), strict=True):
        assert_same_bytes(actual, expected)


@pytest.mark.slow
def test_layers_of_flax_draw_from_their_stream():
    """A recipe that only sums at random takes the key of the RNG stream "sr"."""
    mesh, recipe = mesh_of((8,)), jlp.MXFP8BlockScaling(sums="quantized")
    x = random_array((T, K), seed=1)

    def outputs(seed):
        from flax import nnx

        layer = jlp.nnx.Linear(K, N, dtype=jnp.bfloat16, rngs=nnx.Rngs(0, sr=seed))
        layer.kernel[...] = place(layer.kernel[...], mesh, P("a"))
        with jax.set_mesh(mesh), jlp.autocast(recipe):
            return np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, place(x, mesh, P(None, "a"))), np.float32)

    assert np.any(outputs(1) != outputs(2))
    assert_same_bytes(outputs(1), outputs(1))


@pytest.mark.parametrize("kind", often(KINDS[-1:], KINDS[1:]))
def test_experts_add_up_in_float32(kind):
    """Kernels that are split along K: a recipe for a whole model serves its experts, too."""
    mesh = mesh_of((8,))
    x, kernels = random_array((64, K), seed=1), random_array((2, K, N), "float32", seed=2)
    sizes = jnp.array([40, 24], jnp.int32)

    def run(recipe):
        def step(x, kernels):
            y, pullback = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, key=KEY), x, kernels)
            return y, *pullback(jnp.ones_like(y))

        with jax.set_mesh(mesh), jlp.autocast(recipe):
            placed = place(x, mesh, P(None, "a")), place(kernels, mesh, P(None, "a"))
            return jax.jit(step)(*placed)

    for actual, expected in zip(run(jlp.MXFP8BlockScaling(sums=kind)), run(jlp.MXFP8BlockScaling()), strict=True):
        assert_same_bytes(actual, expected)


class TestRecipes:
    @pytest.mark.parametrize("recipe", [*RECIPES, jlp.DelayedScaling, jlp.NVFP4Eden], ids=lambda cls: cls.__name__)
    def test_one_value_is_that_of_all_gemms(self, recipe):
        assert recipe(sums="bfloat16") == recipe(sums=jlp.Sums("bfloat16", "bfloat16", "bfloat16"))
        assert recipe().sums == jlp.Sums("float32", "float32", "float32")
        assert hash(recipe(sums="quantized")) != hash(recipe())

    def test_of_gemms_and_layers_with_recipes_of_their_own(self):
        mixed = jlp.PerGemm(fprop=jlp.NVFP4BlockScaling(sums="bfloat16"), wgrad=jlp.MXFP8BlockScaling(sums="quantized"))
        assert mixed.sums == jlp.Sums("bfloat16", "float32", "quantized")
        rules = jlp.PerLayer((("up", jlp.MXFP8BlockScaling(sums="bfloat16")),), default=jlp.MXFP8BlockScaling())
        assert rules.at("up").sums.fprop == "bfloat16" and rules.at("down").sums.fprop == "float32"
        assert jlp.Custom(lambda role: jlp.MXFP8(), sums="quantized").sums.drawn

    @pytest.mark.parametrize("given", ["float16", 16, None, ("bfloat16",)], ids=name_of)
    def test_what_is_no_kind_of_sum(self, given):
        with pytest.raises(TypeError, match=r'sums=.*; needs "float32", "bfloat16", .*, or jaxlowprec.Sums'):
            jlp.NVFP4BlockScaling(sums=given)
        with pytest.raises((TypeError, ValueError), match="Sums: dgrad="):
            jlp.Sums(dgrad=given)

    def test_other_recipes_have_no_such_field(self):
        assert not {"sums"} & {f.name for cls in (jlp.Int4QAT, jlp.WeightQAT) for f in dataclasses.fields(cls)}


class TestExplain:
    def rows(self, recipe):
        @nnx.eval_shape
        def model():
            model = nnx.Dict(up=jlp.nnx.Linear(64, 64, rngs=nnx.Rngs(0)), plain=nnx.Linear(64, 8, rngs=nnx.Rngs(0)))
            model.experts = jlp.nnx.GroupedLinear(2, 64, 64, rngs=nnx.Rngs(0))
            return model

        header, *rows = (re.split("  +", line) for line in str(jlp.explain(model, recipe)).splitlines())
        place = header.index("sums") if "sums" in header else None
        return {row[0]: place and row[place] for row in rows}

    def test_one_kind(self):
        found = self.rows(jlp.MXFP8BlockScaling(sums="bfloat16"))
        assert found == {"up": "bfloat16", "plain": "-", "experts": "float32"}

    def test_a_kind_for_each_gemm(self):
        found = self.rows(jlp.MXFP8BlockScaling(sums=jlp.Sums(wgrad="quantized")))
        assert found["up"] == "fprop float32, dgrad float32, wgrad quantized"

    def test_only_quantised_gemms_have_them(self):
        recipe = jlp.PerGemm(jlp.MXFP8BlockScaling(sums="bfloat16"), "dequantized", "dequantized")
        assert self.rows(recipe)["up"] == "bfloat16"

    def test_float32_is_not_worth_a_column(self):
        assert set(self.rows(jlp.MXFP8BlockScaling()).values()) == {None}

    def test_rules_of_layers(self):
        rules = jlp.PerLayer((("up", jlp.MXFP8BlockScaling(sums="quantized")), (".*", jlp.MXFP8BlockScaling())))
        model = nnx.Dict(up=jlp.nnx.Linear(64, 64, rngs=nnx.Rngs(0)), down=jlp.nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
        jlp.nnx.name_layers(model)
        kinds = {layer.path: layer.sums.fprop for layer in jlp.explain(model, rules).layers}
        assert kinds == {"up": "quantized", "down": "float32"}

    def test_of_a_function(self):
        def product(params, x):
            return x @ params["kernel"]

        arguments = {"kernel": jnp.ones((64, 64))}, jnp.ones((4, 64))
        (layer,) = jlp.explain(product, jlp.MXFP8BlockScaling(sums="bfloat16"), *arguments).layers
        assert layer.sums == jlp.Sums("bfloat16", "bfloat16", "bfloat16")
