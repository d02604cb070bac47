"""Shows what a recipe does to each layer of a model.

A Linen module and a function are traced without computing anything, so recipes that scopes and layers set themselves
are seen. An NNX module is walked, so scopes within its `__call__` are not seen: give such layers a recipe of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jaxlowprec.linen
import jaxlowprec.nnx
from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.flax_layers import conv_axes, own_product, windows_of
from jaxlowprec.layers.low_rank import LoRAKernel, without_adapter
from jaxlowprec.layers.subscripts import KernelAxes, has_matrices, kernel_axes
from jaxlowprec.layers.watched import seeing_calls
from jaxlowprec.layers.weight_only import check_whole_blocks
from jaxlowprec.linen import converting as linen_converting
from jaxlowprec.models.explanation import HIGH_PRECISION, AppliedRecipe, Explanation
from jaxlowprec.models.quantize_matmuls import QuantizedMatmuls, TracedFunction
from jaxlowprec.models.transform.products import Product
from jaxlowprec.models.transform.weights import Weight
from jaxlowprec.moe.grouped_linear import MODULE_TYPE
from jaxlowprec.nnx import converting as nnx_converting
from jaxlowprec.nnx.einsum import einsum_axes
from jaxlowprec.ops.checks import FLOATS
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, autocast, resolve
from jaxlowprec.recipes.fields import IN_FLOAT32, Sums, Use
from jaxlowprec.recipes.roles import Recipe, Role, Roles

_GROUPED = (jaxlowprec.linen.GroupedDense, jaxlowprec.nnx.GroupedLinear)
_linen, _nnx = jaxlowprec.linen, jaxlowprec.nnx
_OUR_LINEN = (_linen.Dense, _linen.DenseGeneral, _linen.Einsum, _linen.Conv, _GROUPED[0])
_OURS = (*_OUR_LINEN, _nnx.Linear, _nnx.LinearGeneral, _nnx.Einsum, _nnx.Conv, _nnx.Embed, _GROUPED[1])
_OWN = "its module's own: see jaxlowprec.quantize_matmuls"


def _sums_of(recipe: Recipe | None, is_grouped: bool) -> Sums:
    """How the GEMMs of a layer add up partial sums; those of rows in groups do so in float32."""
    return IN_FLOAT32 if recipe is None or is_grouped else recipe.sums


def _roles(recipe: Recipe | None, module_type: str, name: str) -> Roles:
    """The roles of a layer's own recipe, whose `backward_override` is that of its two backward GEMMs."""
    if recipe is None:
        return HIGH_PRECISION
    roles, override = recipe.roles(module_type, name), recipe.backward_override
    return roles if override is None else dataclasses.replace(roles, dgrad=override, wgrad=override)


def explain(model: Any, /, recipe: Recipe | None = FROM_CONTEXT, *args: Any, **kwargs: Any) -> Explanation:
    """Explains how a recipe quantises each layer of a model, or each product of a function; computes nothing.

    Arguments:
        model: an NNX module. Or a Linen module; then the arguments of `model.apply` follow, beginning with the
            variables, as arrays or their shapes (`jax.eval_shape`). Or any function as `quantize_matmuls` takes and
            returns it; then its arguments follow, of which the first has the parameters, or those that
            `quantize_matmuls` was told.
        recipe: default: the context's, or that of `quantize_matmuls`.

    Returns:
        A table when printed; `.formats` maps paths to formats. Of a function it has each product by a parameter, and
        the parameters that are in no product.

    Raises:
        TypeError: the model is none of these.

    >>> import jaxlowprec as jlp
    >>> from flax import nnx
    >>> model = nnx.Dict(up=jlp.nnx.Linear(256, 512, rngs=nnx.Rngs(0)), head=nnx.Linear(512, 8, rngs=nnx.Rngs(0)))
    >>> print(jlp.explain(model, jlp.Int4QAT()))
    layer  kernel   weight      input  gradient
    head   512x8    -           -      -         no jaxlowprec layer
    up     256x512  Int4 1x128  -      -
    """
    return explained("explain", model, recipe, *args, **kwargs)


def explained(who: str, model: Any, recipe: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """`explain`, for a function of that name; of modules only, unless that is `explain`."""
    is_module = isinstance(model, nn.Module | nnx.Module)
    if who == "explain" and callable(model) and not is_module and not isinstance(model, type):
        return _of_function(model, recipe, args, kwargs)
    resolved = resolve(who, recipe)
    with autocast(resolved, enabled=resolved is not None, strict=None):
        if isinstance(model, nnx.Module):
            return Explanation(tuple(_nnx_layers(model).values()))
        if isinstance(model, nn.Module):
            if not args or not isinstance(args[0], Mapping) or "params" not in args[0]:
                given = shown(args[0]) if args else "nothing"
                raise TypeError(f"{who}: a Linen module, then {given}; needs its variables, then the model's inputs")
            return Explanation(tuple(_linen_layers(model, *args, **kwargs).values()))
    raise TypeError(f"{who}: model is a {type(model).__name__}; needs a Flax Linen or NNX module, or a function")


def _is_bias(name: str) -> bool:
    """Whether a parameter is a bias, which may have the axes of a matrix, such as [heads, features]."""
    return name.rpartition("/")[2] == "bias"


def _of_function(fn: Any, recipe: Any, args: Any, kwargs: Any) -> Explanation:
    """The explanation of a function's products by its parameters."""
    given = QuantizedMatmuls.of(fn, recipe)
    rules = resolve("explain", given.rules)
    traced = TracedFunction(given.fn, given.params, args, kwargs, rules, given.names)
    uses: dict[tuple[int, AppliedRecipe], int] = {}
    for product in traced.trace.products:
        if not has_matrices(product.shape):  # a vector, such as a score's
            continue
        for group in product.weight.groups:
            for weight in group:
                row = _of_product(traced, product, weight, [other.name for other in group if other != weight], rules)
                uses[weight.leaf, row] = uses.get((weight.leaf, row), 0) + 1
    layers = [_used(row, traced.leaves[leaf].shape, count) for (leaf, row), count in uses.items()]
    seen = {leaf for leaf, _ in uses}
    for number, leaf in enumerate(traced.leaves):
        if leaf.name is not None and number not in seen and has_matrices(leaf.shape) and not _is_bias(leaf.name):
            layers.append(AppliedRecipe(leaf.name, leaf.shape, note=_why_unused(traced, number)))
    return Explanation(tuple(layers))


def _why_unused(traced: TracedFunction, number: int) -> str:
    """Why the parameter of that number is in no product that the trace knows."""
    dtype, lost = traced.value(number).dtype, traced.trace.lost.get(number)
    if jnp.issubdtype(dtype, jnp.inexact) and dtype not in FLOATS:
        return f"it is {dtype}; needs bfloat16, float16 or float32"
    return "looked up" if lost == "gather" else f"not followed through {lost}" if lost else "in no product"


def _of_product(
    traced: TracedFunction, product: Product, weight: Weight, others: list[str], rules: Recipe | None
) -> AppliedRecipe:
    """The recipe as applied to a parameter in a product, in which others are joined with it."""
    name, note = weight.name, product.reason
    own, use = traced.trace.recipe_at(name), traced.trace.uses.get(name, Use.UNKNOWN)
    if own is None and not note:
        note = "no recipe" if rules is None else "left out by the recipe"
    by_name = None if rules is None else rules.within(name)
    reason = use.value if own != by_name else ""
    module_type = MODULE_TYPE if product.grouped else "linear"
    roles = HIGH_PRECISION if note else _roles(own, module_type, name)
    if others and not product.weight.computed:
        note = ", ".join(filter(None, [note, f"joined with {silence.listed(others)}"]))
    if not note and rules is not None and (ends := rules.ends(name)):
        note = f"but the first {ends[0]} and last {ends[1]} of its stack"
    leaf = traced.leaves[weight.leaf]
    whole = others or product.weight.shard or product.weight.computed
    row = AppliedRecipe(name, leaf.shape if whole else product.shape, roles, ", ".join(filter(None, [note, reason])))
    return _with_loaded(dataclasses.replace(row, sums=_sums_of(own, product.grouped)), leaf.loaded)


def _used(row: AppliedRecipe, shape: tuple[int, ...], count: int) -> AppliedRecipe:
    """One row for all equal products by a parameter: such as those of an unrolled loop over experts."""
    if count == 1:
        return row
    note = ", ".join(filter(None, [row.note, f"{count} products"]))
    return dataclasses.replace(row, kernel=shape, note=note)


def _applied(
    path: str, name: str, layer: Any, kernel: Any, axes: KernelAxes | str, converted: tuple[Any] | None = None
) -> AppliedRecipe:
    """The recipe as applied to a layer of this name in the current scope.

    Arguments:
        axes: those of its kernel, or why it has none that could be served.
        converted: see `rules_of`.
    """
    if isinstance(kernel, LoRAKernel | QuantizedArray):
        weight = without_adapter(kernel)
        loaded = isinstance(weight, QuantizedArray)
        applied = AppliedRecipe(path, kernel.shape) if loaded else _applied(path, name, layer, weight, axes, converted)
        return _with_loaded(applied, kernel)
    if not isinstance(layer, _OURS) and converted is None:
        return AppliedRecipe(path, kernel.shape, note="no jaxlowprec layer")
    if isinstance(axes, KernelAxes) and not axes.contracted:
        return AppliedRecipe(path, kernel.shape, note="contracts nothing: no matrix product")
    recipe = resolve("explain", layer.recipe if converted is None else converted[0])
    if recipe is None:
        left_out = converted is not None and converted[0] is None
        return AppliedRecipe(path, kernel.shape, note="left out by the recipe" if left_out else "no recipe")
    if (product := own_product(layer)) and layer.recipe is FROM_CONTEXT:
        return AppliedRecipe(path, kernel.shape, note=f"{product}= is set")
    note = "" if recipe.applies_to(name) else "left out by the recipe"
    if not name and recipe.at(name) != recipe.at(path):
        note = f"nameless; by its path {_choice(recipe.at(name), recipe.at(path))}: see jaxlowprec.nnx.name_layers"
    is_grouped = isinstance(layer, _GROUPED)
    roles = _roles(recipe.at(name), MODULE_TYPE if is_grouped else "linear", name)
    sums = _sums_of(recipe.at(name), is_grouped)
    if isinstance(axes, str):
        return AppliedRecipe(path, kernel.shape, roles, note, unserved=axes, sums=sums)
    if roles.served is not None:
        try:
            check_whole_blocks("explain", path, _matrices_type(kernel, axes), roles.served.format)
        except ValueError as error:
            note = str(error)
    return AppliedRecipe(path, kernel.shape, roles, note, axes, sums=sums)


def _with_loaded(applied: AppliedRecipe, kernel: Any) -> AppliedRecipe:
    """`applied` with notes on a kernel that is quantised, or has an adapter, or both."""
    weight, notes = without_adapter(kernel), [applied.note]
    if isinstance(weight, QuantizedArray):
        applied = dataclasses.replace(applied, roles=Roles(None, Role(weight.format), None), loaded=True)
        notes = ["loaded"]
    if isinstance(kernel, LoRAKernel):
        notes.append(f"adapter of rank {kernel.adapter.rank}")
    return dataclasses.replace(applied, note=", ".join(filter(None, notes)))


def _of_windows(applied: AppliedRecipe, layer: Any, *args: Any, **kwargs: Any) -> AppliedRecipe:
    """`applied` to a layer with these inputs, if they are known: a convolution has to be a matrix product."""
    if not isinstance(layer, nn.Conv | nnx.Conv):
        return applied
    windows = windows_of(layer, *args, **kwargs)
    if windows.reason:
        return AppliedRecipe(applied.path, applied.kernel, note=windows.reason)
    by_extents = layer.padding in ("SAME", "SAME_LOWER") and max(windows.sizes) > 1 and windows.extents is None
    if by_extents and applied.roles != HIGH_PRECISION:
        note = "in high precision where its kernel does not divide the input"
        return dataclasses.replace(applied, note=", ".join(filter(None, [applied.note, note])))
    return applied


def _choice(given: Recipe | None, by_path: Recipe | None) -> str:
    """The choice that the path of a layer without a name would make, in words."""
    if by_path is None:
        return "left out"
    return "chosen" if given is None else type(by_path).__name__


def _matrices_type(kernel: Any, axes: KernelAxes) -> Any:
    """Shape of a kernel as matrices, and its sharding if it already consists of matrices."""
    if axes == KernelAxes.in_front(len(axes.batch), 1, len(axes.batch) + 2):
        return kernel
    return jax.eval_shape(axes.matrices, kernel)


def _joined(path: Any) -> str:
    return "/".join(map(str, path))


def _nnx_layers(model: nnx.Module) -> dict[str, AppliedRecipe]:
    """The layers by their paths."""
    found = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx_converting.LAYERS):
            embeds = isinstance(layer, nnx.Embed)
            kernel = (layer.embedding if isinstance(layer, nnx.Embed) else layer.kernel).get_value()
            adapter = getattr(layer, "adapter", None)
            kernel = kernel if adapter is None else LoRAKernel(kernel, adapter)
            row = _applied(_joined(path), getattr(layer, "name", ""), layer, kernel, _nnx_axes(layer))
            found[_joined(path)] = _embedding(row, "if attend is called") if embeds else _of_windows(row, layer)
    return found | {path: AppliedRecipe(path, s, note=_OWN) for path, s in nnx_converting.own_matrices(model).items()}


_LOOKED_UP = (
    "it is a table that is looked up in high precision, and multiplied as the tied head: leave it out with exclude=, "
    "when training if attend is called"
)


def _embedding(row: AppliedRecipe, product: str = "") -> AppliedRecipe:
    """The row of an embedding. `product`: how it is a tied head's kernel, if it is."""
    note = f"looked up, and multiplied as the tied head {product}" if product else "looked up"
    return dataclasses.replace(row, note=f"{note}: {row.note}" if row.note else note)


def _nnx_axes(layer: nnx.Module) -> KernelAxes | str:
    """The axes of a layer's kernel, or why it has none that could be served."""
    if isinstance(layer, nnx.Linear):
        return KernelAxes.in_front(0, 1, 2)
    if isinstance(layer, jaxlowprec.nnx.GroupedLinear):
        return KernelAxes.in_front(1, 1, 3)
    if isinstance(layer, nnx.LinearGeneral):
        batch, contracted = len(layer.batch_axis), len(layer.axis)
        return KernelAxes.in_front(batch, contracted, batch + contracted + len(layer.out_features))
    if isinstance(layer, nnx.Conv):
        return conv_axes(layer)
    if isinstance(layer, nnx.Einsum):
        try:
            return einsum_axes(layer)
        except ValueError as error:
            return str(error)
    return _LOOKED_UP if isinstance(layer, nnx.Embed) else f"it is a {type(layer).__name__}"


def _linen_layers(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> dict[str, AppliedRecipe]:
    """The layers by their paths."""
    found: dict[str, AppliedRecipe] = {}
    own: set[str] = set()

    def look(call: Any, call_args: Any, call_kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if linen_converting.is_own(layer):
            own.add(_joined(layer.path))
        embeds, method = isinstance(layer, nn.Embed), linen_converting.product_method(layer)
        if not isinstance(layer, linen_converting.LAYERS) or context.method_name not in ("__call__", method):
            return call(*call_args, **call_kwargs)
        path, kernel = _joined(layer.path), variables["params"]
        for key in (*layer.path, "embedding" if embeds else "kernel"):
            kernel = kernel[key]
        kernel = nn.meta.unbox(kernel)
        if context.method_name != method:
            found.setdefault(path, _embedding(AppliedRecipe(path, kernel.shape)))
            return call(*call_args, **call_kwargs)
        axes = _linen_axes(layer, kernel, *call_args, **call_kwargs)
        if path in found and not embeds:  # called again, or from within the call below
            if isinstance(axes, KernelAxes) and found[path].axes not in (None, axes):
                several = "its calls contract different axes of the kernel"
                found[path] = dataclasses.replace(found[path], axes=None, unserved=several)
            return call(*call_args, **call_kwargs)
        converted = linen_converting.rules_of(layer, *call_args, **call_kwargs)
        row = _applied(path, path, layer, kernel, axes, converted)
        found[path] = _embedding(row, "(attend)") if embeds else _of_windows(row, layer, *call_args, **call_kwargs)
        if not isinstance(kernel, QuantizedArray | LoRAKernel):
            # in high precision, so that layers that cannot follow the recipe are seen, too
            ours: Any = next((c for c in _OUR_LINEN if isinstance(layer, c)), None)
            flaxs = call if converted is None else context.orig_method
            call = flaxs if ours is None else super(ours, layer).__call__
        return call(*call_args, **call_kwargs)

    leaves, structure = jax.tree.flatten((variables, args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def apply(arrays: dict[int, Any]) -> Any:
        traced = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        variables, args, kwargs = jax.tree.unflatten(structure, traced)
        return model.apply(variables, *args, **kwargs)

    with nn.intercept_methods(look), seeing_calls():
        jax.eval_shape(apply, arrays)
    matrices = linen_converting.own_matrices(variables["params"], own)
    return found | {path: AppliedRecipe(path, shape, note=_OWN) for path, shape in matrices.items()}


def _linen_axes(layer: nn.Module, kernel: Any, inputs: Any, einsum_str: Any = None, **others: Any) -> KernelAxes | str:
    """The axes of a layer's kernel, or why it has none that could be served."""
    if isinstance(layer, nn.Dense):
        return KernelAxes.in_front(0, 1, 2)
    if isinstance(layer, jaxlowprec.linen.GroupedDense):
        return KernelAxes.in_front(1, 1, 3)
    if isinstance(layer, nn.Conv):
        return conv_axes(layer)
    if isinstance(layer, nn.DenseGeneral):
        batch, axis, features = (
            1 if isinstance(v, int) else len(v) for v in (layer.batch_dims, layer.axis, layer.features)
        )
        return KernelAxes.in_front(batch, axis, batch + axis + features)
    if isinstance(layer, nn.Einsum):
        try:
            return kernel_axes("einsum", layer.einsum_str or einsum_str or "", inputs.ndim, len(layer.shape))
        except ValueError as error:
            return str(error)
    return _LOOKED_UP if isinstance(layer, nn.Embed) else f"it is a {type(layer).__name__}"
