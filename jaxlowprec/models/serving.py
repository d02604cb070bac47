"""quantize_params: the parameters of a trained model or function as they are served, its kernels quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import jax
from flax import linen as nn
from flax import nnx

import jaxlowprec.nnx
from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.low_rank import LoRAKernel, is_quantized
from jaxlowprec.layers.weight_only import check_whole_blocks, quantize_weight
from jaxlowprec.models.explain import AppliedRecipe, explained
from jaxlowprec.models.quantize_matmuls import QuantizedMatmuls, TracedFunction
from jaxlowprec.models.transform.modules import ModuleTree
from jaxlowprec.models.transform.products import Product
from jaxlowprec.moe.grouped_linear import MODULE_TYPE
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.roles import Recipe, Roles

_WHO = "quantize_params"
_Module = TypeVar("_Module", bound=nnx.Module)


@overload
def quantize_params(model: _Module, recipe: Recipe | None = FROM_CONTEXT, *args: Any, **kwargs: Any) -> _Module: ...


@overload
def quantize_params(
    model: nn.Module | Callable[..., Any], recipe: Recipe | None = FROM_CONTEXT, *args: Any, **kwargs: Any
) -> Any: ...


def quantize_params(
    model: nn.Module | nnx.Module | Callable[..., Any], recipe: Recipe | None = FROM_CONTEXT, *args: Any, **kwargs: Any
) -> Any:
    """The parameters for serving: each kernel that was trained quantised becomes a QuantizedArray.

    These are exactly the kernels that the recipe applies to, with the bits that training multiplied by; nothing else
    changes. Layers, and functions of `quantize_matmuls`, accept them without a recipe. An embedding of an NNX module
    keeps its table, whose rows are looked up, and gets the recipe, so that `attend` gives the numbers of training; a
    warning names the table if it may be a tied head. In Linen the table of a head that is called is refused.

    A layer's kernel with several axes becomes matrices [batch..., K, N], whose K are the axes that the layer contracts,
    in the order of its input's axes: that of "BTD,NDH->BTNH" becomes [D, N H]. A function's parameter keeps its shape:
    it is quantised along its last axis or its second last one, which all its products have to contract.

    Arguments:
        model: an NNX module; a copy is returned, with kernels in `jaxlowprec.nnx.Quantized` variables. Or a Linen
            module; then the arguments of `model.apply` follow, beginning with the variables, of which a copy is
            returned. Or any function as `quantize_matmuls` takes and returns it; then its arguments follow, of which
            the parameters are returned: the first one, or what `quantize_matmuls` was told; a tuple of several.
        recipe: `Int4QAT` or `WeightQAT`; default: the context's, or that of `quantize_matmuls`. Layers with a recipe of
            their own follow that one.

    Raises:
        TypeError: the model is none of these.
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

    >>> apply = jlp.quantize_matmuls(lambda params, x: x @ params["up"].T, recipe)
    >>> params = {"up": jnp.ones((64, 256))}
    >>> bool((apply(jlp.quantize_params(apply, recipe, params, x), x) == apply(params, x)).all())
    True
    """
    if callable(model) and not isinstance(model, nn.Module | nnx.Module | type):
        return _of_function(model, recipe, args, kwargs)
    layers = explained(_WHO, model, recipe, *args, **kwargs).layers
    chosen = [layer for layer in layers if layer.roles.served is not None]
    if isinstance(model, nnx.Module):
        return _served_module(model, recipe, chosen)
    _check_some(chosen)
    variables = args[0]
    params = variables["params"]
    for applied in chosen:
        params = _replaced(params, (*applied.path.split("/"), "kernel") if applied.path else ("kernel",), applied)
    return {**variables, "params": params}


def _served_module(model: nnx.Module, recipe: Any, chosen: list[AppliedRecipe]) -> nnx.Module:
    """A copy of an NNX module whose kernels are quantised, and whose tables stay with the recipe of their `attend`."""
    served = nnx.merge(*nnx.split(model))
    modules: dict[str, Any] = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(served)}
    tables = [applied for applied in chosen if isinstance(modules[applied.path], nnx.Embed)]
    _check_some(kernels := [applied for applied in chosen if applied not in tables])
    for applied in kernels:
        layer = modules[applied.path]
        layer.kernel = jaxlowprec.nnx.Quantized(_served(applied, layer.kernel.get_value()))
    rules = resolve(_WHO, recipe)
    for applied in tables:
        layer = modules[applied.path]
        layer.recipe = rules if layer.recipe is FROM_CONTEXT else layer.recipe
    found = [_TABLE.format(silence.listed(heads))] if (heads := _tied_heads(modules, tables)) else []
    silence.warn_once(_WHO, rules, found, depth=2)  # type: ignore[arg-type]
    return served


_TABLE = (
    "the table of {} stays in high precision, because its rows are looked up; if the model calls its attend, that "
    "multiplies by the quantised table as in training, but who reads a checkpoint multiplies by the table itself: "
    "leave it out with exclude= when training"
)


def _tied_heads(modules: dict[str, Any], tables: list[AppliedRecipe]) -> list[str]:
    """The tables that may be multiplied by: those of the vocabulary, in a model without a linear head of that shape."""
    rows = max((m.num_embeddings for m in modules.values() if isinstance(m, nnx.Embed)), default=0)
    linear = {(m.out_features, m.in_features) for m in modules.values() if isinstance(m, nnx.Linear)}
    return [applied.path for applied in tables if applied.kernel[0] == rows and applied.kernel not in linear]


def _check_some(chosen: Any) -> None:
    if not chosen:
        raise ValueError(
            f"{_WHO}: no layer follows a recipe of quantisation-aware training; pass the Int4QAT or WeightQAT that the "
            "model was trained with, and see what jaxlowprec.explain says"
        )


def _replaced(tree: Mapping[str, Any], path: tuple[str, ...], applied: AppliedRecipe) -> dict[str, Any]:
    """A tree of parameters whose kernel at that path is quantised."""
    key, *rest = path
    if not rest and key not in tree:
        raise _refused(applied)
    new = _replaced(tree[key], tuple(rest), applied) if rest else _served(applied, tree[key])
    return {**tree, key: new}


def _served(applied: AppliedRecipe, kernel: Any) -> QuantizedArray | LoRAKernel:
    """A layer's kernel as matrices, quantised."""
    if isinstance(kernel, LoRAKernel):
        if applied.axes is not None and applied.axes.order != tuple(range(len(applied.axes.order))):
            raise ValueError(
                f"{_WHO}: layer {applied.path!r} has an adapter of its kernel {kernel.shape}, whose matrices have the "
                f"axes {applied.axes.order}; quantise it without the adapter, or merge that before"
            )
        return LoRAKernel(_served(applied, kernel.kernel), kernel.adapter)
    if applied.axes is None or applied.roles.weight is None:
        raise _refused(applied)
    matrices = applied.axes.matrices(nn.meta.unbox(kernel))
    check_whole_blocks(_WHO, applied.path, matrices, applied.roles.weight.format)
    return quantize_weight(matrices, applied.roles.weight.format, applied.roles.served_dtype)


def _refused(applied: AppliedRecipe) -> ValueError:
    return ValueError(
        f"{_WHO}: layer {applied.path!r} has a kernel of shape {applied.kernel} that is not served quantised: "
        f"{applied.unserved}; leave it out with exclude= when training"
    )


def _of_function(fn: Any, recipe: Any, args: Any, kwargs: Any) -> Any:
    """The parameters of a function for serving."""
    if not args and not kwargs:
        raise TypeError(f"{_WHO}: {shown(fn)} without arguments; needs a function, and its arguments after the recipe")
    given = QuantizedMatmuls.of(fn, recipe)
    rules = resolve(_WHO, given.rules)
    traced = TracedFunction(given.fn, given.params, args, kwargs, rules, given.names)
    roles: dict[int, Roles] = {}
    for product in traced.trace.products:
        for single in product.weight.singles if not product.reason else ():
            own = traced.trace.recipe_at(single.name)
            if own is None or is_quantized(traced.leaves[single.leaf].loaded):
                continue
            found = own.roles(MODULE_TYPE if product.grouped else "linear", single.name)
            if found.served is not None:
                roles[single.leaf] = found
    _check_some(roles)
    trace = traced.trace_if_loaded(set(roles))
    new = {}
    for leaf, found in roles.items():
        products = [product for product in trace.products if product.weight.leaf == leaf]
        new[leaf] = _served_leaf(traced, leaf, products, trace.lost.get(leaf), found)
    replaced = traced.parameters(new)
    if any(isinstance(tree, ModuleTree) for tree in replaced):
        raise TypeError(f"{_WHO}: the function's parameters are an NNX module; pass the module itself, converted")
    return replaced[0] if len(given.params) == 1 else tuple(replaced)


def _served_leaf(traced: TracedFunction, leaf: int, products: list[Product], lost: str | None, roles: Roles) -> Any:
    """A function's parameter, quantised along the axis that all its products contract."""
    given: Any = traced.value(leaf)
    name, fmt = traced.leaves[leaf].name, roles.forms("weight")[1].format  # type: ignore[union-attr]
    axes = {product.loaded_axis for product in products}
    reason = next((product.reason for product in products if product.reason), "")
    if traced.has_ends(leaf):
        reason = "the first and last layers of its stack stay in high precision, so it is not quantised as a whole"
    elif lost is not None:
        reason = f"the function also uses it in {lost}, which would get other numbers than in training"
    elif not reason and axes not in ({-1}, {-2}):
        reason = "its products contract different axes, -2 and -1"
        if None in axes:
            reason = "one of its products contracts neither its last axis nor its second last one"
    if reason:
        raise ValueError(
            f"{_WHO}: the parameter {name!r} of shape {given.shape} is not served quantised: {reason}; leave it out "
            "with exclude= when training"
        )
    (axis,) = axes

    def quantized(kernel: Any) -> Any:
        if isinstance(kernel, LoRAKernel):
            return LoRAKernel(quantized(kernel.kernel), kernel.adapter)
        matrices = kernel if axis == -2 else kernel.mT
        check_whole_blocks(_WHO, str(name), matrices, fmt)
        served = quantize_weight(matrices, fmt, roles.served_dtype)
        return served if axis == -2 else served.mT

    return quantized(given if isinstance(given, LoRAKernel) else jax.numpy.asarray(given))
