"""What is called with hostile arguments: functions with arguments that fit them."""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import moe
from tests.hostile.recipes.call import call_of
from tests.hostile.recipes.model_calls import MODEL_CALLS
from tests.hostile.recipes.values import RECIPES, value


def _used(make):
    """A format, role or recipe, made and then used."""

    @functools.wraps(make, updated=())
    def call(**arguments):
        made = make(**arguments)
        hash(made), repr(made), made == made  # noqa: B015 (what is not to raise)
        if isinstance(made, jlp.Recipe):
            state = jlp.delayed_scaling.init_state(made) if made.delayed else None
            x, kernel = jnp.ones((16, 128)), jnp.ones((128, 32))
            jax.grad(lambda x: jnp.sum(jax.tree.leaves(jlp.linear(x, kernel, recipe=made, state=state))[0]))(x)
        if isinstance(made, type(made)) and hasattr(made, "has_tensor_scale"):
            jlp.dequantize(jlp.quantize(jnp.ones((16, 128)), made))

    return call


def _made(make, *who, **fitting):
    fields = tuple(field.name for field in dataclasses.fields(make))
    return call_of(_used(make), "linear", "quantize", *who, others=fields, name=make.__name__, **fitting)


def _factory(answer):
    recipe = jlp.Custom(lambda role: answer)
    return jlp.linear(jnp.ones((16, 128)), jnp.ones((128, 32)), recipe=recipe)


def _layer(call, layer):
    """Calls of a layer; errors may come from what it calls, from JAX and from Flax."""
    who = ("linear", "dot_general", "einsum", "promotion", "*")
    return call_of(call, *who, name=layer.__name__, inputs="x", recipe="MXFP8BlockScaling()")


def _linen(layer, **arguments):
    """A Linen layer's parameters, and what it makes of an input."""

    def call(inputs, recipe):
        made = layer(recipe=recipe, **arguments)
        return made.apply(made.init(jax.random.key(0), jnp.ones((16, 32))), inputs)

    return _layer(call, layer)


def _nnx(layer, *sizes, **arguments):
    def call(inputs, recipe, name=""):
        return layer(*sizes, recipe=recipe, name=name, rngs=nnx.Rngs(0), **arguments)(inputs)

    return _layer(call, layer)


def _nnx_moe(x, tape=None, **arguments):
    block = jlp.nnx.MoE(
        **({"num_experts": 4, "top_k": 2} | arguments), in_features=32, hidden_features=32, rngs=nnx.Rngs(0)
    )
    return block(x, tape=tape)


_MOE = (
    "top_k",
    "num_experts",
    "gated",
    "routing",
    "exchange",
    "fsdp_axis",
    "recipe",
    "name",
)
_OF_MOE = ("linear", "grouped_matmul", "GroupedLinear", "route", "all_gather_kernel", "dot_general")
_DIMENSIONS = "(((1,), (0,)), ((), ()))"
_DENSE = flax.linen.Dense(4)
_RESET = jlp.OsciReset(jlp.NVFP4BlockScaling(), every=8, window=4)
_AFRESH, _ROUTED = moe.RoutingTape.afresh, moe.RoutingTape.from_routed_experts

CALLS = (
    *(
        _made(fmt)
        for fmt in (jlp.NVFP4, jlp.MXFP8, jlp.MXFP4, jlp.Float8Block, jlp.Float8Tensor, jlp.Int4, jlp.Hadamard)
    ),
    *(_made(recipe, "QParams", "Int4") for recipe in RECIPES if recipe is not jlp.WeightQAT),
    _made(jlp.WeightQAT, weight_format="MXFP8()"),
    *(_made(part) for part in (jlp.QParams, jlp.MMParams)),
    call_of(_used(jlp.Role), others=("format", "rounding", "hadamard"), name="Role", format="MXFP8()"),
    call_of(
        _used(jlp.Roles),
        others=("ste", "served_dtype", "fprop", "dgrad", "wgrad"),
        name="Roles",
        input="Role",
        weight="Role",
        gradient="Role",
    ),
    call_of(_used(jlp.PerGemm), "linear", others=("fprop", "dgrad", "wgrad"), name="PerGemm"),
    call_of(jlp.recipe_schedule, phases="phases"),
    _made(jlp.OsciReset, recipe="NVFP4BlockScaling()"),
    call_of(
        lambda params, step: _RESET.update(params, _RESET.init({"up": value("x")}), step),
        "OsciReset",
        name="update",
        params="parameters",
        step="3",
    ),
    call_of(
        lambda recipe, step, total_steps: jlp.recipe_schedule({0: recipe}, total_steps=total_steps).at(step),
        "RecipeSchedule",
        name="recipe_schedule",
        recipe="PerGemm",
        step="3",
        total_steps="16",
    ),
    call_of(_used(jlp.Custom), "linear", others=("backward_override",), name="Custom", factory="a function"),
    call_of(_factory, "Custom", "linear", "scaled_matmul", answer="None"),
    call_of(jlp.quantize, "Hadamard", x="x", fmt="NVFP4()"),
    call_of(jlp.quantize_both, "quantize", "Hadamard", x="x", fmt="NVFP4()"),
    call_of(jlp.dequantize, q="in NVFP4 1x16"),
    call_of(jlp.fake_quantize, x="x", fmt="NVFP4()"),
    call_of(jlp.hadamard_transform, "Hadamard", x="x"),
    call_of(jlp.scaled_matmul, lhs="x", rhs="in NVFP4 1x16"),
    call_of(jlp.scaled_matmul, lhs="in NVFP4 1x16", rhs="in NVFP4 1x16"),
    call_of(jlp.linear, x="x", kernel="x.T", recipe="NVFP4BlockScaling()"),
    call_of(jlp.linear, x="x", kernel="columns in Int4"),
    call_of(jlp.linear, x="x", kernel="x.T", recipe="DelayedScaling()", state="state"),
    call_of(jlp.quantize_kernel, kernel="x.T", recipe="MXFP8BlockScaling()"),
    call_of(jlp.dot_general, "*", lhs="x", rhs="x.T", dimension_numbers=_DIMENSIONS, recipe="MXFP8BlockScaling()"),
    call_of(
        lambda *, a, b, subscripts, **o: jlp.einsum(subscripts, a, b, **o),
        "*",
        name="einsum",
        recipe="MXFP8BlockScaling()",
        subscripts="'ab,bc'",
        a="x",
        b="x.T",
        others=("key", "name", "state", "precision", "preferred_element_type", "out_sharding"),
    ),
    call_of(jlp.grouped_matmul, lhs="x", rhs="cube.mT", group_sizes="int32", recipe="None"),
    call_of(jlp.ragged_dot, "grouped_matmul", lhs="x", rhs="cube.mT", group_sizes="int32"),
    call_of(jlp.all_gather_quantized, q="in NVFP4 1x16", axis_name="'x'"),
    call_of(jlp.all_to_all_quantized, q="in NVFP4 1x16", axis_name="'x'"),
    call_of(jlp.reduce_scatter_quantized, x="x", axis_name="'x'", key="key"),
    call_of(jlp.all_reduce_quantized, x="x", axis_name="'x'", key="key"),
    call_of(jlp.autocast, recipe="None", enabled="False"),
    call_of(
        jlp.QuantizedArray,
        data="x",
        scale="x",
        amax="None",
        zero_point="None",
        format="MXFP8()",
        matrix_shape="(16, 32)",
        dtype="a dtype",
        axis="-1",
        hadamard="None",
    ),
    call_of(lambda dtype: value("in NVFP4 1x16").dequantize(dtype), "dequantize", name="QuantizedArray", dtype="None"),
    call_of(jlp.layouts.swizzle, scale="scales"),
    call_of(jlp.layouts.unswizzle, swizzled="swizzled scales", rows="16", columns="1"),
    call_of(jlp.layouts.gemm_scales, q="in NVFP4 1x16"),
    call_of(jlp.layouts.logical_scales, scales="swizzled scales", fmt="MXFP8()", rows="16", columns="32"),
    call_of(jlp.layouts.to_compact, q="columns in MXFP8"),
    call_of(jlp.layouts.from_compact, "QuantizedArray", data="codes", scale="scales", fmt="MXFP8()"),
    call_of(jlp.traffic.collectives, compiled="''"),
    call_of(jlp.delayed_scaling.init_state, recipe="DelayedScaling()"),
    call_of(jlp.delayed_scaling.add_gradients, "promotion", a="x", b="x"),
    call_of(jlp.delayed_scaling.combined_by_max, function="a function"),
    call_of(jlp.delayed_scaling.overwrite_with_gradient, inner="None"),
    call_of(
        lambda model, recipe: jlp.explain(model, recipe),
        "quantize_matmuls",
        name="explain",
        model="model",
        recipe="None",
    ),
    call_of(
        lambda recipe, arguments: jlp.explain(_DENSE, recipe, arguments, jnp.ones((2, 4))),
        name="explain",
        recipe="None",
        arguments="None",
    ),
    call_of(jlp.quantize_params, model="model", recipe="None"),
    call_of(jlp.nnx.add_delayed_scaling, traced=False, model="model", recipe="DelayedScaling()"),
    call_of(jlp.nnx.name_layers, traced=False, model="model"),
    call_of(jlp.nnx.quantized_kernels, model="model", recipe="None"),
    _linen(jlp.linen.Dense, features=8),
    _linen(jlp.linen.DenseGeneral, features=8),
    _linen(jlp.linen.Einsum, shape=(32, 8), einsum_str="...a,ab->...b"),
    _nnx(jlp.nnx.Linear, 32, 8),
    _nnx(jlp.nnx.LinearGeneral, 32, 8),
    _nnx(jlp.nnx.Einsum, "...a,ab->...b", (32, 8)),
    call_of(_nnx_moe, *_OF_MOE, name="MoE", others=_MOE, x="x", tape="None"),
    call_of(moe.route, "RouterConfig", logits="x", k="2"),
    _made(moe.RouterConfig),
    call_of(moe.update_selection_bias, bias="x", group_sizes="x as int32", rate="0.5"),
    call_of(moe.dispatch, experts="tape of one layer", num_experts="16"),
    call_of(moe.scatter_to_experts, x="x", where="dispatch"),
    call_of(moe.combine, rows="x", weights="x", where="dispatch"),
    call_of(moe.overlap, a="tape", b="tape"),
    call_of(_AFRESH, "RoutingTape", layers="2", tokens="16", k="2"),
    call_of(moe.RoutingTape.of_layers, "RoutingTape", layers="()"),
    call_of(_ROUTED, "routed_experts", sequences="[]", num_layers="2", k="2", num_experts="16"),
    call_of(
        lambda experts, **options: moe.RoutingTape(experts).check(**options),
        "RoutingTape",
        name="RoutingTape",
        others=("layers", "tokens"),
        experts="x as int32",
        num_experts="16",
    ),
    call_of(
        lambda experts, **options: moe.RoutingTape(experts).to_routed_experts(**options),
        "to_routed_experts",
        name="RoutingTape",
        others=("num_layers", "dense_layers", "lengths", "form", "dtype"),
        experts="x as int32",
    ),
    *MODEL_CALLS,
)
