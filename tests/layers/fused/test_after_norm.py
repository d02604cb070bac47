"""A norm and the products that read it as one function: bits of separate layers, and no array in between."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers.fused_mlp import mlp_of
from jaxlowprec.layers.shared_input import layers_of, linears_of
from jaxlowprec.ops.norms.api import checked_norm
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import CASES, EVERY, EXACT, SAVED, traced_calls, weights
from tests.sharding.meshes import by_axis_type, mesh_of, place

K, F, N = 128, 96, 64
SHAPE = (4, 64, K)
OPERANDS = {
    "x": random_array(SHAPE),
    "residual": random_array(SHAPE, seed=1),
    "gamma": random_array((K,), "float32", 2),
    "beta": random_array((K,), "float32", 3),
    "first": [weights((K, F), 4 + i) for i in range(2)],
    "last": weights((F, N), 6),
}
KINDS = {"rms": ("x", "gamma"), "rms + residual": ("x", "residual", "gamma"), "layer": ("x", "gamma", "beta")}
MX = ("mxfp8", "fp8_block")  # whose input is quantised in the norm's pass


def none_of(given):
    return dict.fromkeys(("biases", "quantized_kernels", "names", "states")) | given


def norm_of(kind, operands):
    arrays = (operands[name] if name in KINDS[kind] else None for name in ("x", "residual", "gamma", "beta"))
    return checked_norm(kind.partition(" ")[0], tuple(arrays), 1e-6)


def fused_linears(recipe, kind, operands):
    """The products, and the norm's sum."""
    layers = layers_of("test", operands["first"], EVERY[recipe], None, None, none_of({}))
    ys, total, _ = linears_of("test", norm_of(kind, operands), layers)
    return ys, total


def separate_linears(recipe, kind, operands):
    h, total = norm_of(kind, operands).alone()
    return jlp.linears(h, operands["first"], recipe=EVERY[recipe]), total


def fused_mlp(recipe, kind, operands, saved="quantized"):
    kernels = [*operands["first"], operands["last"]]
    layers = layers_of("test", kernels, EVERY[recipe], None, None, none_of({}))
    return mlp_of("test", norm_of(kind, operands), layers, "swiglu", saved)[0], None


def separate_mlp(recipe, kind, operands, saved="quantized"):
    kernels = [*operands["first"], operands["last"]]
    return jlp.mlp(norm_of(kind, operands).alone()[0], kernels, recipe=EVERY[recipe], saved=saved), None


PAIRS = {"linears": (fused_linears, separate_linears), "mlp": (fused_mlp, separate_mlp)}


def step(function, operands):
    """Results, and gradients of all operands; their own values serve as the gradients of results."""
    results, pullback = jax.vjp(function, operands)
    return results, pullback(results)


def compiled(function):
    return jax.jit(functools.partial(step, function), compiler_options=EXACT)


def operands_of(kind, layers):
    names = (*KINDS[kind], "first", *["last"] * (layers == "mlp"))
    return {name: OPERANDS[name] for name in names}


@functools.cache
def fused_step(recipe, kind, layers):
    return compiled(functools.partial(PAIRS[layers][0], recipe, kind))(operands_of(kind, layers))


# Delayed scaling: see test_delayed_scaling. Layers here have no names, by which recipes would differ.
RECIPES = [name for name in CASES if name != "fp8_delayed" and not isinstance(EVERY[name], jlp.PerLayer)]
KINDS_OF = [  # an MLP's norm has no residual
    (kind, layers) for kind, layers in itertools.product(KINDS, PAIRS) if layers == "linears" or "residual" not in kind
]
over_kinds = pytest.mark.parametrize(("kind", "layers"), KINDS_OF)


@over_kinds
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_separate_layers(recipe, kind, layers):
    separate = compiled(functools.partial(PAIRS[layers][1], recipe, kind))
    assert_same_bytes(fused_step(recipe, kind, layers), separate(operands_of(kind, layers)))


@over_kinds
@pytest.mark.parametrize("recipe", often(MX[:1], [*MX, "nvfp4", "fp8_current", "int4_qat"]))
def test_results_without_a_gradient(recipe, kind, layers):
    """Even where XLA may round less often than it is told to."""
    fused, separate = (functools.partial(f, recipe, kind) for f in PAIRS[layers])
    both = jax.jit(lambda given: (fused(given), separate(given)))
    assert_same_bytes(*both(operands_of(kind, layers)))


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("recipe", often(["nvfp4"], ["nvfp4", *MX]))
def test_an_mlp_keeps_what_it_says(recipe, saved):
    given = operands_of("rms", "mlp")
    found = (compiled(functools.partial(f, recipe, "rms", saved=saved))(given) for f in PAIRS["mlp"])
    assert_same_bytes(*found)


class TestWhatRuns:
    """Counted in the traced program: with a gradient, and without."""

    def calls(self, function, recipe, gradient):
        run = functools.partial(function, recipe, "rms")
        run = functools.partial(step, run) if gradient else run
        return traced_calls(run, operands_of("rms", "linears"))

    @pytest.mark.parametrize("gradient", [True, False])
    @pytest.mark.parametrize("recipe", MX)
    def test_formats_without_a_tensor_scale_take_one_pass(self, recipe, gradient):
        fused, separate = (self.calls(f, recipe, gradient) for f in PAIRS["linears"])
        assert separate["jaxlowprec_rms_norm"] == fused["jaxlowprec_rms_norm_quantize"] == 1
        assert not fused["jaxlowprec_rms_norm"]
        assert fused["jaxlowprec_quantize"] == separate["jaxlowprec_quantize"] - 1

    @pytest.mark.parametrize("gradient", [True, False])
    @pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
    def test_a_norm_brings_its_amaxes(self, recipe, gradient):
        fused, separate = (self.calls(f, recipe, gradient) for f in PAIRS["linears"])
        assert fused["jaxlowprec_rms_norm"] == separate["jaxlowprec_rms_norm"] == 1
        assert fused["jaxlowprec_amax"] == separate["jaxlowprec_amax"] - 1
        assert fused["jaxlowprec_quantize"] == separate["jaxlowprec_quantize"]


@pytest.mark.parametrize(
    ("recipe", "layers"),
    often([("nvfp4", "mlp"), ("mxfp8", "linears")], list(itertools.product(["nvfp4", "mxfp8"], PAIRS)), 2),
)
class TestTransformations:
    def found(self, recipe, layers, change):
        """What both ways give after a change, for a batch of four."""
        given = operands_of("rms", layers)
        given["x"] = random_array((4, *SHAPE), seed=9)
        return [change(functools.partial(f, recipe, "rms"), given) for f in PAIRS[layers]]

    def of_each(self, function, given, x):
        return step(function, given | {"x": x})

    @pytest.mark.slow
    def test_vmap(self, recipe, layers):
        def mapped(function, given):
            return jax.jit(jax.vmap(functools.partial(self.of_each, function, given)))(given["x"])

        fused, separate = self.found(recipe, layers, mapped)
        assert_same_bytes(fused, separate)
        one = compiled(functools.partial(PAIRS[layers][0], recipe, "rms"))
        alone = one(operands_of("rms", layers) | {"x": np.asarray(random_array((4, *SHAPE), seed=9))[1]})
        assert_same_bytes(jax.tree.map(lambda leaf: leaf[1], jax.device_get(fused)), alone)

    @pytest.mark.parametrize("remat", often([True], [False, True]))
    def test_scan(self, recipe, layers, remat):
        def scanned(function, given):
            function = jax.checkpoint(function) if remat else function
            run = functools.partial(self.of_each, function, given)
            return jax.jit(lambda xs: jax.lax.scan(lambda _, x: (None, run(x)), None, xs)[1])(given["x"])

        assert_same_bytes(*self.found(recipe, layers, scanned))

    def test_export(self, recipe, layers):
        run = compiled(functools.partial(PAIRS[layers][0], recipe, "rms"))
        given = operands_of("rms", layers)
        names = set(re.findall(r"custom_call @(\w+)", run.lower(given).as_text()))
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
        exported = jax.export.export(run, disabled_checks=checks)(given)
        loaded = jax.export.deserialize(exported.serialize())
        assert_same_bytes(loaded.call(given), fused_step(recipe, "rms", layers))


PLACES = {
    "tokens": {"x": P("a"), "first": P(), "last": P()},
    "fsdp": {"x": P("a"), "first": P("a"), "last": P("a")},
    "time": {"x": P(None, "a"), "first": P(), "last": P()},
}


@pytest.mark.slow
@by_axis_type
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("layers", PAIRS)
@pytest.mark.parametrize("recipe", often(["nvfp4"], ["nvfp4", "mxfp8"]))
def test_meshes_give_the_bits_of_one_device(recipe, layers, places, axis_type):
    """But for the sums over tokens, which are added up in another order."""
    fused, given = functools.partial(PAIRS[layers][0], recipe, "layer"), operands_of("layer", layers)
    (y, _), (gradients,) = jax.device_get(fused_step(recipe, "layer", layers))
    mesh = mesh_of((4,), axis_type)
    with jax.set_mesh(mesh):
        placed = {
            name: jax.tree.map(lambda leaf, name=name: place(leaf, mesh, places.get(name, P())), value)
            for name, value in given.items()
        }
        found = jax.device_get(compiled(fused)(placed))
    (found_y, _), (found_gradients,) = found
    assert_same_bytes(found_y, y)
    assert_same_bytes(found_gradients.pop("x"), gradients.pop("x"))
    for actual, single in zip(jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True):
        limit = 1e-5 * float(np.abs(single).max())
        np.testing.assert_allclose(actual, single, rtol=1e-5, atol=limit)


@pytest.mark.parametrize("recipe", often(["nvfp4"], ["nvfp4", "mxfp8"]))
def test_within_shard_map(recipe):
    """Each shard is a tensor of its own."""
    given = operands_of("rms", "linears")

    def mapped(pair):
        def run(operands):
            one = functools.partial(pair, recipe, "rms")
            specs = jax.tree.map(lambda _: P(), operands) | {"x": P("a")}
            return jax.shard_map(lambda o: one(o)[0], mesh=mesh_of((4,)), in_specs=(specs,), out_specs=P("a"))(operands)

        return run

    assert_same_bytes(*(compiled(mapped(pair))(given) for pair in PAIRS["linears"]))
