"""What is called with hostile arguments: functions with arguments that fit them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import moe
from tests.hostile.recipes.values import RECIPES, value


@dataclasses.dataclass(frozen=True)
class Call:
    """Something public.

    Attributes:
        who: what errors call it; others that it calls on the user's behalf follow. "*": anybody, for what is JAX's or
            Flax's own function where there is no recipe.
        function: takes arguments by name.
        fitting: arguments that fit; the names are those of values.
        others: what may be given besides.
        traced: it can be called within `jax.eval_shape`.
    """

    who: tuple[str, ...]
    function: Callable[..., Any]
    fitting: dict[str, Any]
    others: tuple[str, ...] = ()
    traced: bool = True


def _call(function, /, *who, others=None, name=None, traced=True, **fitting):
    name = name or function.__name__
    parameters = inspect.signature(function).parameters if others is None else others
    return Call((name, *who), function, fitting, tuple(p for p in parameters if p not in fitting), traced)


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
    return _call(_used(make), "linear", "quantize", *who, others=fields, name=make.__name__, **fitting)


def _factory(answer):
    recipe = jlp.Custom(lambda role: answer)
    return jlp.linear(jnp.ones((16, 128)), jnp.ones((128, 32)), recipe=recipe)


def _layer(call, layer):
    """Calls of a layer; errors may come from what it calls, from JAX and from Flax."""
    who = ("linear", "dot_general", "einsum", "promotion", "*")
    return _call(call, *who, name=layer.__name__, inputs="x", recipe="MXFP8BlockScaling()")


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
    _call(_used(jlp.Role), others=("format", "rounding", "hadamard"), name="Role", format="MXFP8()"),
    _call(
        _used(jlp.Roles),
        others=("ste", "served_dtype", "fprop", "dgrad", "wgrad"),
        name="Roles",
        input="Role",
        weight="Role",
        gradient="Role",
    ),
    _call(_used(jlp.PerGemm), "linear", others=("fprop", "dgrad", "wgrad"), name="PerGemm"),
    _call(jlp.recipe_schedule, phases="phases"),
    _made(jlp.OsciReset, recipe="NVFP4BlockScaling()"),
    _call(
        lambda params, step: _RESET.update(params, _RESET.init({"up": value("x")}), step),
        "OsciReset",
        name="update",
        params="parameters",
        step="3",
    ),
    _call(
        lambda recipe, step, total_steps: jlp.recipe_schedule({0: recipe}, total_steps=total_steps).at(step),
        "RecipeSchedule",
        name="recipe_schedule",
        recipe="PerGemm",
        step="3",
        total_steps="16",
    ),
    _call(_used(jlp.Custom), "linear", others=("backward_override",), name="Custom", factory="a function"),
    _call(_factory, "Custom", "linear", "scaled_matmul", answer="None"),
    _call(jlp.quantize, "Hadamard", x="x", fmt="NVFP4()"),
    _call(jlp.quantize_both, "quantize", "Hadamard", x="x", fmt="NVFP4()"),
    _call(jlp.dequantize, q="in NVFP4 1x16"),
    _call(jlp.fake_quantize, x="x", fmt="NVFP4()"),
    _call(jlp.hadamard_transform, "Hadamard", x="x"),
    _call(jlp.scaled_matmul, lhs="x", rhs="in NVFP4 1x16"),
    _call(jlp.scaled_matmul, lhs="in NVFP4 1x16", rhs="in NVFP4 1x16"),
    _call(jlp.linear, x="x", kernel="x.T", recipe="NVFP4BlockScaling()"),
    _call(jlp.linear, x="x", kernel="columns in Int4"),
    _call(jlp.linear, x="x", kernel="x.T", recipe="DelayedScaling()", state="state"),
    _call(jlp.quantize_kernel, kernel="x.T", recipe="MXFP8BlockScaling()"),
    _call(jlp.dot_general, "*", lhs="x", rhs="x.T", dimension_numbers=_DIMENSIONS, recipe="MXFP8BlockScaling()"),
    _call(
        lambda *, a, b, subscripts, **o: jlp.einsum(subscripts, a, b, **o),
        "*",
        name="einsum",
        recipe="MXFP8BlockScaling()",
        subscripts="'ab,bc'",
        a="x",
        b="x.T",
        others=("key", "name", "state", "precision", "preferred_element_type", "out_sharding"),
    ),
    _call(jlp.grouped_matmul, lhs="x", rhs="cube.mT", group_sizes="int32", recipe="None"),
    _call(jlp.ragged_dot, "grouped_matmul", lhs="x", rhs="cube.mT", group_sizes="int32"),
    _call(jlp.all_gather_quantized, q="in NVFP4 1x16", axis_name="'x'"),
    _call(jlp.all_to_all_quantized, q="in NVFP4 1x16", axis_name="'x'"),
    _call(jlp.reduce_scatter_quantized, x="x", axis_name="'x'", key="key"),
    _call(jlp.all_reduce_quantized, x="x", axis_name="'x'", key="key"),
    _call(jlp.autocast, recipe="None", enabled="False"),
    _call(
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
    _call(lambda dtype: value("in NVFP4 1x16").dequantize(dtype), "dequantize", name="QuantizedArray", dtype="None"),
    _call(jlp.layouts.swizzle, scale="scales"),
    _call(jlp.layouts.unswizzle, swizzled="swizzled scales", rows="16", columns="1"),
    _call(jlp.layouts.gemm_scales, q="in NVFP4 1x16"),
    _call(jlp.layouts.logical_scales, scales="swizzled scales", fmt="MXFP8()", rows="16", columns="32"),
    _call(jlp.layouts.to_compact, q="columns in MXFP8"),
    _call(jlp.layouts.from_compact, "QuantizedArray", data="codes", scale="scales", fmt="MXFP8()"),
    _call(jlp.traffic.collectives, compiled="''"),
    _call(jlp.delayed_scaling.init_state, recipe="DelayedScaling()"),
    _call(jlp.delayed_scaling.add_gradients, "promotion", a="x", b="x"),
    _call(jlp.delayed_scaling.combined_by_max, function="a function"),
    _call(jlp.delayed_scaling.overwrite_with_gradient, inner="None"),
    _call(lambda model, recipe: jlp.explain(model, recipe), name="explain", model="model", recipe="None"),
    _call(
        lambda recipe, arguments: jlp.explain(_DENSE, recipe, arguments, jnp.ones((2, 4))),
        name="explain",
        recipe="None",
        arguments="None",
    ),
    _call(jlp.quantize_params, model="model", recipe="None"),
    _call(jlp.nnx.add_delayed_scaling, traced=False, model="model", recipe="DelayedScaling()"),
    _call(jlp.nnx.name_layers, traced=False, model="model"),
    _call(jlp.nnx.quantized_kernels, model="model", recipe="None"),
    _linen(jlp.linen.Dense, features=8),
    _linen(jlp.linen.DenseGeneral, features=8),
    _linen(jlp.linen.Einsum, shape=(32, 8), einsum_str="...a,ab->...b"),
    _nnx(jlp.nnx.Linear, 32, 8),
    _nnx(jlp.nnx.LinearGeneral, 32, 8),
    _nnx(jlp.nnx.Einsum, "...a,ab->...b", (32, 8)),
    _call(_nnx_moe, "linear", "grouped_matmul", "GroupedLinear", "route", name="MoE", others=_MOE, x="x", tape="None"),
    _call(moe.route, "RouterConfig", logits="x", k="2"),
    _made(moe.RouterConfig),
    _call(moe.update_selection_bias, bias="x", group_sizes="x as int32", rate="0.5"),
    _call(moe.dispatch, experts="tape of one layer", num_experts="16"),
    _call(moe.scatter_to_experts, x="x", where="dispatch"),
    _call(moe.combine, rows="x", weights="x", where="dispatch"),
    _call(moe.overlap, a="tape", b="tape"),
    _call(_AFRESH, "RoutingTape", layers="2", tokens="16", k="2"),
    _call(moe.RoutingTape.of_layers, "RoutingTape", layers="()"),
    _call(_ROUTED, "routed_experts", sequences="[]", num_layers="2", k="2", num_experts="16"),
    _call(
        lambda experts, **options: moe.RoutingTape(experts).check(**options),
        "RoutingTape",
        name="RoutingTape",
        others=("layers", "tokens"),
        experts="x as int32",
        num_experts="16",
    ),
    _call(
        lambda experts, **options: moe.RoutingTape(experts).to_routed_experts(**options),
        "to_routed_experts",
        name="RoutingTape",
        others=("num_layers", "dense_layers", "lengths", "form", "dtype"),
        experts="x as int32",
    ),
)
