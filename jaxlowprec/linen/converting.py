"""convert: the linear layers of any Linen module compute as this library's."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jaxlowprec.arguments import shown
from jaxlowprec.layers.flax_layers import own_product, windows_of
from jaxlowprec.layers.subscripts import has_matrices
from jaxlowprec.linen.convolution import Conv, conv
from jaxlowprec.linen.grouped import GroupedDense
from jaxlowprec.linen.layers import Dense, DenseGeneral, Einsum, attend, base_call, dense, dense_general, layer_einsum
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.fields import Use, use_of
from jaxlowprec.recipes.roles import Recipe

_WHO = "linen.convert"
_OTHERS = "; an NNX module takes jaxlowprec.nnx.convert, a function jaxlowprec.quantize_matmuls"
_OURS: dict[type, Any] = {nn.Dense: Dense, nn.DenseGeneral: DenseGeneral, nn.Einsum: Einsum, nn.Conv: Conv}
LAYERS: Any = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.Embed, GroupedDense)
"""The layers with a kernel or an embedding of their own that `jaxlowprec.explain` has rows for."""
_CALLS: dict[type, Any] = {
    nn.Dense: dense,
    nn.DenseGeneral: dense_general,
    nn.Einsum: layer_einsum,
    nn.Conv: conv,
    nn.Embed: attend,
}


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """The conversion behind a converted class: a Module class whose layers follow these rules.

    Attributes:
        names: every layer that has been called, because what nn.jit has traced does not call it again.
        followed: those that have followed the rules.
        left: those of the latest call that stay Flax's although the rules would reach them, each with the reason.
        own: the paths of the modules that have been called and are none of Flax's.
        tables: the numbers of rows of the embeddings that have been called.
    """

    module: type
    rules: Any
    names: set[str] = dataclasses.field(default_factory=set, compare=False)
    followed: set[str] = dataclasses.field(default_factory=set, compare=False)
    left: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    own: set[str] = dataclasses.field(default_factory=set, compare=False)
    tables: set[int] = dataclasses.field(default_factory=set, compare=False)


_BEFORE = "_before_conversion"  # the name of a converted class's attribute: the class of the module as it was
_in_force = jax.make_user_context(None)
"""The conversion whose module is being called. As part of jit's cache key, it keeps apart what `nn.jit` has traced with
and without it."""


def convert(module: Any, rules: Recipe | None = FROM_CONTEXT) -> Any:
    """Converts a module: its Dense, DenseGeneral, Einsum and Conv layers compute as this library's, wherever they are.

    Parameters, their initial values, collections and RNGs are the module's own, and so are its methods: what is saved
    for one is loaded by the other. A layer is named by its path in the model, such as "block_0/mlp/up".

    So does the product of a tied head, `Embed.attend`; rows are looked up in high precision.

    Flax's own stay layers that the rules keep in high precision, convolutions that are not matrix products (see
    `Conv`), instances of your own subclasses, and layers with another function for their product (`dot_general=`,
    `dot_general_cls=`, `conv_general_dilated=`); a warning names the latter two. Another names the largest matrices
    that are parameters of your own modules: `jaxlowprec.quantize_matmuls` reaches their products.

    Arguments:
        module: a Linen module that is not bound: as it is made outside other modules, before `init` or `apply`.
        rules: the recipe of the layers, or a `PerLayer` of recipes; None: high precision. Default: the context's
            (`jaxlowprec.autocast`) in each call. Layers of this library with a recipe of their own keep that.

    Returns:
        A module with the same fields, of a subclass of its class; of a module that was converted before, with these
        rules in place of the earlier ones. Layers follow the rules while a method of it runs;
        a submodule that is taken out of `bind` and called by itself is Flax's.

    Raises:
        TypeError: module is not a Linen module, or rules is no recipe.
        ValueError: the module is bound, or inside another one.

    With `DelayedScaling`, `init` also makes the collection "_overwrite_with_gradient", as for this library's layers.
    A loop that carries what `apply` returns keeps it by
    `mutable=["cache", "_overwrite_with_gradient"]`.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import linen as nn
    >>> model = jlp.linen.convert(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)]), jlp.NVFP4BlockScaling())
    >>> variables = model.init(jax.random.key(0), jnp.ones((4, 32)))
    >>> print(jlp.explain(model, jlp.FROM_CONTEXT, variables, jnp.ones((4, 32))))
    layer     kernel  weight       input       gradient
    layers_0  32x64   NVFP4 16x16  NVFP4 1x16  NVFP4 1x16
    layers_2  64x8    NVFP4 16x16  NVFP4 1x16  NVFP4 1x16
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_WHO}: module={shown(module)}; needs a Linen module, made of its class{_OTHERS}")
    resolve(_WHO, rules)
    if module.parent is not None:
        raise ValueError(
            f"{_WHO}: this {type(module).__name__} is bound or inside another module; convert the whole model, where "
            "it is made"
        )
    kind: Any = getattr(type(module), _BEFORE, type(module))
    values = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    if rules is None:
        return module if kind is type(module) else kind(**values)
    if kind in _OURS and not _reason(module):
        return _OURS[kind](**values, recipe=rules)
    return _converted(kind, rules)(**values)


@functools.cache  # so that converting twice gives equal modules, for which jit traces once
def _converted(module: Any, rules: Any) -> Any:
    """The subclass whose methods run under the conversion."""
    conversion = _Conversion(module, rules)
    methods: dict[str, Any] = {}
    flaxs = {name for base in nn.Module.__mro__ for name in vars(base)} - {"setup"}
    for name, method in inspect.getmembers_static(module, inspect.isfunction):
        if name == "__call__" or not (name in flaxs or name.startswith("__")):
            methods[name] = _under(conversion, method)
    return type(module.__name__, (module,), methods | {"__module__": module.__module__, _BEFORE: module})


def _under(conversion: _Conversion, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its layers converted."""

    @functools.wraps(method)
    def converted(*args: Any, **kwargs: Any) -> Any:
        with _in_force(conversion):
            return method(*args, **kwargs)

    @functools.wraps(method)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if _in_force.value is not None:
            return converted(*args, **kwargs)
        conversion.left.clear()
        with nn.intercept_methods(_intercept):
            result = converted(*args, **kwargs)
        if method.__name__ == "__call__":  # other methods need not reach every layer
            silence.warn_once(_WHO, conversion.rules, _complaints(conversion, args[0]), depth=1)
        return result

    return outermost


def _intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """A method's call; that of a linear layer is computed as this library's."""
    layer, method = context.module, context.method_name
    if (conversion := _in_force.value) is not None:
        conversion.own.update(["/".join(layer.path)] if is_own(layer) else [])
        conversion.tables.update([layer.num_embeddings] if isinstance(layer, nn.Embed) else [])
    followed = rules_of(layer, *args, **kwargs) if method == product_method(layer) else None
    if followed is None:
        return call(*args, **kwargs)
    kind: Any = next(flax for flax in _CALLS if isinstance(layer, flax))
    flaxs = base_call(_OURS[kind], layer) if isinstance(layer, tuple(_OURS.values())) else call
    return _CALLS[kind](layer, followed[0], flaxs, *args, **kwargs)


def product_method(layer: nn.Module) -> str:
    """The method in which a layer multiplies by its parameter."""
    return "attend" if isinstance(layer, nn.Embed) else "__call__"


def rules_of(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any] | None:
    """The rules that a layer follows in this call because its model was converted, in a tuple; None if it does not."""
    conversion = _in_force.value
    if conversion is None or not isinstance(layer, (*_CALLS,)):
        return None
    name, rules = "/".join(layer.path), conversion.rules
    if isinstance(layer, nn.Conv) and windows_of(layer, *args, **kwargs).reason:
        return None
    conversion.names.add(name)
    if isinstance(layer, tuple(_OURS.values())) and layer.recipe is not FROM_CONTEXT:
        rules = layer.recipe
    elif reason := _reason(layer):
        conversion.left[name] = reason
        return None
    recipe, use = resolve(_WHO, rules), Use.UNKNOWN
    if isinstance(layer, nn.Dense) and args:
        shape = np.shape(args[0])[-1], layer.features
        use = use_of(name, shape, vocabulary=max(conversion.tables, default=0))
    own = None if recipe is None else recipe.within(name, use)
    if rules is FROM_CONTEXT or own is not None:
        conversion.followed.add(name)
    return (rules if rules is FROM_CONTEXT or use is Use.UNKNOWN else own,)


def _reason(layer: Any) -> str:
    """Why a layer stays Flax's; "" if it need not."""
    if type(layer) not in (*_CALLS, *_OURS.values()):
        return f"a {type(layer).__name__}, a subclass"
    product = own_product(layer)
    return f"{product}= is set" if product else ""


def is_own(module: nn.Module) -> bool:
    """Whether a module is none of Flax's or this library's, nor a subclass of a layer that `convert` names."""
    kind = getattr(type(module), _BEFORE, type(module))
    return kind.__module__.split(".")[0] not in ("flax", "jaxlowprec") and not isinstance(module, LAYERS)


def own_matrices(params: Any, modules: Collection[str], path: str = "") -> dict[str, tuple[int, ...]]:
    """The shapes of parameters with several axes, by their paths, of those of these modules that are in a subtree.

    Arguments:
        params: the parameters of the module at `path`.
        modules: paths of modules.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, value in nn.meta.unbox(params).items() if isinstance(params, Mapping) else ():
        inner = f"{path}/{name}" if path else name
        if isinstance(value, Mapping):
            found |= own_matrices(value, modules, inner)
        elif path in modules and has_matrices(getattr(value, "shape", ())):
            found[inner] = tuple(value.shape)
    return found


def _complaints(conversion: _Conversion, module: nn.Module) -> list[str]:
    """Complaints about layers that the conversion has not reached."""
    own = own_matrices(module.variables.get("params", {}), conversion.own, "/".join(module.path))
    reached = silence.ConversionReach(conversion.names, conversion.followed, conversion.left, own)
    nothing = f"{conversion.module.__name__} has called no Dense, DenseGeneral, Einsum or Conv to convert"
    return silence.of_conversion(None if conversion.rules is FROM_CONTEXT else conversion.rules, reached, nothing)
