"""Shows what a recipe does to each layer of a model, and exports trained models for serving.

A Linen module and a function are traced without computing anything, so recipes that scopes and layers set themselves
are seen. An NNX module is walked, so scopes within its `__call__` are not seen: give such layers a recipe of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

import jaxlowprec.linen
import jaxlowprec.nnx
from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.dot_general import contracts_second_last
from jaxlowprec.layers.layer_call import own_product
from jaxlowprec.layers.linear import kernel_matrices
from jaxlowprec.layers.low_rank import LoRAKernel, without_adapter
from jaxlowprec.layers.watching.seeing import seeing_calls
from jaxlowprec.layers.weight_only import check_whole_blocks, quantize_weight
from jaxlowprec.linen import converting as linen_converting
from jaxlowprec.linen.convolution import kernel_axes, windows_of
from jaxlowprec.models.explanation import HIGH_PRECISION, AppliedRecipe, Explanation
from jaxlowprec.models.quantize_matmuls import QuantizedMatmuls, TracedFunction
from jaxlowprec.models.transform.products import Product
from jaxlowprec.models.transform.weights import Weight, has_matrices
from jaxlowprec.moe.grouped_linear import MODULE_TYPE
from jaxlowprec.nnx import converting as nnx_converting
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, autocast, resolve
from jaxlowprec.recipes.roles import Recipe, Role, Roles
from jaxlowprec.recipes.sums import IN_FLOAT32, Sums
from jaxlowprec.recipes.uses import Use

_GROUPED = (jaxlowprec.linen.GroupedDense, jaxlowprec.nnx.GroupedLinear)
_linen, _nnx = jaxlowprec.linen, jaxlowprec.nnx
_OUR_LINEN = (_linen.Dense, _linen.DenseGeneral, _linen.Einsum, _linen.Conv, _GROUPED[0])
_OURS = (*_OUR_LINEN, _nnx.Linear, _nnx.LinearGeneral, _nnx.Einsum, _nnx.Conv, _GROUPED[1])
_OWN = "its module's own: see jaxlowprec.quantize_matmuls"


def _sums_of(recipe: Recipe | None, is_grouped: bool) -> Sums:
    """How the GEMMs of a layer add up partial sums; those of rows in groups do so in float32."""
    return IN_FLOAT32 if recipe is None or is_grouped else recipe.sums


def explain(model: Any, recipe: Recipe | None = FROM_CONTEXT, *args: Any, **kwargs: Any) -> Explanation:
    """What a recipe does to each layer of a model, or to each product of a function, without computing anything.

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
    return _explained("explain", model, recipe, *args, **kwargs)


def _explained(who: str, model: Any, recipe: Any, *args: Any, **kwargs: Any) -> Explanation:
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


def _of_function(fn: Any, recipe: Any, args: Any, kwargs: Any) -> Explanation:
    """What a recipe does to the products of a function by its parameters."""
    params: tuple[int | str, ...] = (0,)
    if isinstance(given := getattr(fn, "transformation", None), QuantizedMatmuls):
        fn, params, recipe = given.fn, given.params, given.rules if recipe is FROM_CONTEXT else recipe
    rules = resolve("explain", recipe)
    traced = TracedFunction(fn, params, args, kwargs, rules)
    uses: dict[tuple[int, AppliedRecipe], int] = {}
    for product in traced.following.products:
        if not has_matrices(product.shape):  # a vector, such as a score's
            continue
        for group in product.weight.groups:
            for weight in group:
                row = _of_product(traced, product, weight, [other.name for other in group if other != weight], rules)
                uses[weight.leaf, row] = uses.get((weight.leaf, row), 0) + 1
    layers = [_used(row, traced.leaves[leaf].shape, count) for (leaf, row), count in uses.items()]
    seen = {leaf for leaf, _ in uses}
    for number, leaf in enumerate(traced.leaves):
        if leaf.name is not None and number not in seen and has_matrices(leaf.shape):
            lost = traced.following.lost.get(number)
            note = "looked up" if lost == "gather" else f"not followed through {lost}" if lost else "in no product"
            layers.append(AppliedRecipe(leaf.name, leaf.shape, note=note))
    return Explanation(tuple(layers))


def _of_product(
    traced: TracedFunction, product: Product, weight: Weight, others: list[str], rules: Recipe | None
) -> AppliedRecipe:
    """What a recipe does to a parameter in a product, in which others are joined with it."""
    name, note = weight.name, product.reason
    own, use = traced.following.recipe_at(name), traced.following.uses.get(name, Use.UNKNOWN)
    if own is None and not note:
        note = "no recipe" if rules is None else "left out by the recipe"
    by_name = None if rules is None else rules.within(name)
    reason = use.value if own != by_name else ""
    module_type = MODULE_TYPE if product.grouped else "linear"
    roles = HIGH_PRECISION if note or own is None else own.roles(module_type, name)
    if others and not product.weight.computed:
        note = ", ".join(filter(None, [note, f"joined with {silence.listed(others)}"]))
    if not note and rules is not None and (ends := rules.ends(name)):
        note = f"but the first {ends[0]} and last {ends[1]} of its stack"
    leaf = traced.leaves[weight.leaf]
    whole = others or product.weight.shard or product.weight.computed
    row = AppliedRecipe(name, leaf.shape if whole else product.shape, roles, ", ".join(filter(None, [note, reason])))
    return _with_packed(dataclasses.replace(row, sums=_sums_of(own, product.grouped)), leaf.packed)


def _used(row: AppliedRecipe, shape: tuple[int, ...], count: int) -> AppliedRecipe:
    """One row for all equal products by a parameter: such as those of an unrolled loop over experts."""
    if count == 1:
        return row
    note = ", ".join(filter(None, [row.note, f"{count} products"]))
    return dataclasses.replace(row, kernel=shape, note=note)


def quantize_params(
    model: nn.Module | nnx.Module, recipe: Recipe | None = FROM_CONTEXT, *args: Any, **kwargs: Any
) -> Any:
    """The parameters for serving: each kernel that was trained quantised becomes a QuantizedArray.

    These are exactly the kernels that the recipe applies to, with the bits that training multiplied by; nothing else
    changes. The layers accept them without a recipe. A kernel with several axes becomes matrices [batch..., K, N].

    Arguments:
        model: an NNX module; a copy is returned, with kernels in `jaxlowprec.nnx.Quantized` variables. Or a Linen
            module; then the arguments of `model.apply` follow, beginning with the variables, of which a copy is
            returned.
        recipe: `Int4QAT` or `WeightQAT`; default: the context's. Layers with a recipe of their own follow that one.

    Raises:
        TypeError: the model is neither.
        ValueError: no layer was trained for such a weight, or a layer cannot be served in this form.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> trained, recipe = jlp.nnx.Linear(256, 64, rngs=nnx.Rngs(0)), jlp.Int4QAT(group_size=64)
    >>> served = jlp.quantize_params(trained, recipe)
    >>> served.kernel.get_value()
    QuantizedArray(Int4 1x64, shape=(256, 64), dtype=float32, axis=-2, 8.5 KiB, 7.53x smaller)
    >>> x = jnp.ones((4, 256), jnp.bfloat16)
    >>> with jlp.autocast(recipe):
    ...     bool((trained(x) == served(x)).all())
    True
    """
    who = "quantize_params"
    chosen = [layer for layer in _explained(who, model, recipe, *args, **kwargs).layers if layer.roles.ste is not None]
    if not chosen:
        raise ValueError(
            f"{who}: no layer follows a recipe of quantisation-aware training; pass the Int4QAT or WeightQAT that the "
            "model was trained with, and see what jaxlowprec.explain says"
        )
    if isinstance(model, nnx.Module):
        served = nnx.merge(*nnx.split(model))
        layers: dict[str, Any] = {_joined(path): module for path, module in nnx.iter_modules(served)}
        for applied in chosen:
            layer = layers[applied.path]
            layer.kernel = jaxlowprec.nnx.Quantized(_served(who, applied, layer.kernel.get_value()))
        return served
    variables = args[0]
    params = variables["params"]
    for applied in chosen:
        params = _replaced(params, (*applied.path.split("/"), "kernel") if applied.path else ("kernel",), applied)
    return {**variables, "params": params}


def _replaced(tree: Mapping[str, Any], path: tuple[str, ...], applied: AppliedRecipe) -> dict[str, Any]:
    """A tree of parameters whose kernel at that path is quantised."""
    key, *rest = path
    new = _replaced(tree[key], tuple(rest), applied) if rest else _served("quantize_params", applied, tree[key])
    return {**tree, key: new}


def _served(who: str, applied: AppliedRecipe, kernel: Any) -> QuantizedArray | LoRAKernel:
    if isinstance(kernel, LoRAKernel):
        return LoRAKernel(_served(who, applied, kernel.kernel), kernel.adapter)
    if applied.axes is None or applied.roles.weight is None:
        raise ValueError(
            f"{who}: layer {applied.path!r} has a kernel of shape {applied.kernel} that is no [batch..., K, N]; leave "
            "it out with exclude= when training"
        )
    matrices = kernel_matrices(nn.meta.unbox(kernel), *applied.axes)
    check_whole_blocks(who, applied.path, matrices, applied.roles.weight.format)
    return quantize_weight(matrices, applied.roles.weight.format, applied.roles.served_dtype)


def _applied(
    path: str, name: str, layer: Any, kernel: Any, axes: tuple[int, int] | None, converted: tuple[Any] | None = None
) -> AppliedRecipe:
    """What the recipe does to a layer of this name in the current scope; converted: see `linen_converting.rules_of`."""
    if isinstance(kernel, LoRAKernel | QuantizedArray):
        weight = without_adapter(kernel)
        loaded = isinstance(weight, QuantizedArray)
        applied = AppliedRecipe(path, kernel.shape) if loaded else _applied(path, name, layer, weight, axes, converted)
        return _with_packed(applied, kernel)
    if not isinstance(layer, _OURS) and converted is None:
        return AppliedRecipe(path, kernel.shape, note="no jaxlowprec layer")
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
    roles = recipe.roles(MODULE_TYPE if is_grouped else "linear", name)
    if roles.ste is not None and roles.weight is not None and axes is not None:
        try:
            check_whole_blocks("explain", path, _matrices_type(kernel, *axes), roles.weight.format)
        except ValueError as error:
            note = str(error)
    return AppliedRecipe(path, kernel.shape, roles, note, axes, _sums_of(recipe.at(name), is_grouped))


def _with_packed(applied: AppliedRecipe, kernel: Any) -> AppliedRecipe:
    """The same with what is to be said of a kernel that is quantised, or has an adapter, or both."""
    weight, notes = without_adapter(kernel), [applied.note]
    if isinstance(weight, QuantizedArray):
        applied = dataclasses.replace(applied, roles=Roles(None, Role(weight.format), None))
        notes = ["loaded"]
    if isinstance(kernel, LoRAKernel):
        notes.append(f"adapter of rank {kernel.adapter.rank}")
    return dataclasses.replace(applied, note=", ".join(filter(None, notes)))


def _of_windows(applied: AppliedRecipe, layer: Any, *args: Any, **kwargs: Any) -> AppliedRecipe:
    """What the recipe does to a layer with these inputs, if they are known: a convolution has to be a product."""
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
    """What the path of a layer without a name would choose."""
    if by_path is None:
        return "left out"
    return "chosen" if given is None else type(by_path).__name__


def _matrices_type(kernel: Any, batch: int, contracted: int) -> Any:
    """Shape of a kernel as matrices, and its sharding if it already consists of matrices."""
    if kernel.ndim == batch + 2 and contracted == 1:
        return kernel
    return jax.eval_shape(lambda k: kernel_matrices(k, batch, contracted), kernel)


def _joined(path: Any) -> str:
    return "/".join(map(str, path))


def _nnx_layers(model: nnx.Module) -> dict[str, AppliedRecipe]:
    """The layers by their paths."""
    found = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx_converting.LAYERS):
            kernel = (layer.embedding if isinstance(layer, nnx.Embed) else layer.kernel).get_value()
            name, axes = getattr(layer, "name", ""), _nnx_axes(layer, kernel)
            adapter = getattr(layer, "adapter", None)
            kernel = kernel if adapter is None else LoRAKernel(kernel, adapter)
            found[_joined(path)] = _of_windows(_applied(_joined(path), name, layer, kernel, axes), layer)
    return found | {path: AppliedRecipe(path, s, note=_OWN) for path, s in nnx_converting.own_matrices(model).items()}


def _nnx_axes(layer: nnx.Module, kernel: Any) -> tuple[int, int] | None:
    """See `AppliedRecipe.axes`; axes that a transformation put in front count as batch axes."""
    if isinstance(layer, nnx.Linear | jaxlowprec.nnx.GroupedLinear):
        return kernel.ndim - 2, 1
    if isinstance(layer, nnx.LinearGeneral):
        own = len(layer.batch_axis) + len(layer.axis) + len(layer.out_features)
        return kernel.ndim - own + len(layer.batch_axis), len(layer.axis)
    if isinstance(layer, nnx.Conv):
        return kernel_axes(layer, kernel)
    if isinstance(layer, nnx.Einsum) and layer.einsum_str is not None:
        x_ndim = sum(letter.isalpha() for letter in layer.einsum_str.partition(",")[0])
        return _einsum_axes(layer.einsum_str, x_ndim, kernel.ndim, len(layer.kernel_shape))
    return None


def _einsum_axes(subscripts: str, x_ndim: int, kernel_ndim: int, own_ndim: int) -> tuple[int, int] | None:
    """`axes` of an einsum's kernel; its own axes may follow axes of transformations."""
    return (kernel_ndim - 2, 1) if contracts_second_last(subscripts, x_ndim, own_ndim) else None


def _linen_layers(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> dict[str, AppliedRecipe]:
    """The layers by their paths."""
    found: dict[str, AppliedRecipe] = {}
    own: set[str] = set()

    def look(call: Any, call_args: Any, call_kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if linen_converting.is_own(layer):
            own.add(_joined(layer.path))
        if (
            isinstance(layer, linen_converting.LAYERS)
            and context.method_name == "__call__"
            and _joined(layer.path) not in found
        ):
            name = "embedding" if isinstance(layer, nn.Embed) else "kernel"
            kernel = variables["params"]
            for key in (*layer.path, name):
                kernel = kernel[key]
            kernel = nn.meta.unbox(kernel)
            axes = _linen_axes(layer, kernel, *call_args, **call_kwargs) if name == "kernel" else None
            path, converted = _joined(layer.path), linen_converting.rules_of(layer, *call_args, **call_kwargs)
            applied = _applied(path, path, layer, kernel, axes, converted)
            found[path] = _of_windows(applied, layer, *call_args, **call_kwargs)
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


def _linen_axes(
    layer: nn.Module, kernel: Any, inputs: Any, einsum_str: Any = None, **others: Any
) -> tuple[int, int] | None:
    """See `AppliedRecipe.axes`; axes that a transformation put in front count as batch axes."""
    if isinstance(layer, nn.Dense | jaxlowprec.linen.GroupedDense):
        return kernel.ndim - 2, 1
    if isinstance(layer, nn.DenseGeneral):
        axis, features = (1 if isinstance(v, int) else len(v) for v in (layer.axis, layer.features))
        return kernel.ndim - axis - features, axis
    if isinstance(layer, nn.Conv):
        return kernel_axes(layer, kernel)
    if isinstance(layer, nn.Einsum):
        return _einsum_axes(layer.einsum_str or einsum_str or "", inputs.ndim, kernel.ndim, len(layer.shape))
    return None
