"""convert: the linear layers of any NNX model become this library's."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxlowprec.layers.flax_layers import own_product, windows_of
from jaxlowprec.layers.subscripts import has_matrices
from jaxlowprec.nnx.convolution import Conv
from jaxlowprec.nnx.einsum import Einsum, Embed
from jaxlowprec.nnx.grouped import GroupedLinear
from jaxlowprec.nnx.layers import Linear, LinearGeneral, _check_model, _Quantizing
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.fields import Use, use_of
from jaxlowprec.recipes.roles import Recipe

_WHO = "nnx.convert"
_OTHERS = "; a Linen module takes jaxlowprec.linen.convert, a function jaxlowprec.quantize_matmuls"
_OURS: dict[type, Any] = {
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
    nnx.Conv: Conv,
    nnx.Embed: Embed,
}
_CONTAINERS = tuple(getattr(nnx, name) for name in ("Dict", "List", "Sequential") if hasattr(nnx, name))
LAYERS: Any = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.Embed, GroupedLinear)
"""The layers with a kernel or an embedding of their own that `jaxlowprec.explain` has rows for."""


def convert(model: Any, rules: Recipe | None = FROM_CONTEXT) -> Any:
    """Makes the Linear, LinearGeneral, Einsum and Conv layers of a model this library's, wherever they are in it.

    The layers are changed in place: they stay the same objects with the same variables and attributes, so optimizers,
    checkpoints and shardings see no difference. Each is named by its path in the model, such as "blocks/0/up". A layer
    of this library that is there already gets a name, and a recipe, unless it was made with its own. Converting again
    gives the layers other rules, None among them. If a layer is refused, none is changed. So does Embed, whose `attend`
    is the product of a tied head; rows are looked up in high precision.

    Flax's own stay layers that the rules keep in high precision, convolutions that are not matrix products (see
    `Conv`), instances of your own subclasses, and layers with another function for their product (`dot_general=`,
    `dot_general_cls=`, `einsum_op=`, `conv_general_dilated=`); a warning names the latter two. Another names the
    largest matrices that are parameters of your own modules: `jaxlowprec.quantize_matmuls` reaches their products.

    Arguments:
        model: any NNX module.
        rules: the recipe of the layers, or a `PerLayer` of recipes; None: high precision. Default: the layers follow
            the context's (`jaxlowprec.autocast`) whenever they are called.

    Returns:
        The model.

    Raises:
        TypeError: the model is not an NNX module, or rules is no recipe.

    Layers get the state of `DelayedScaling` if their recipe, or that of the context, needs it; otherwise
    `add_delayed_scaling` adds it.

    >>> import jaxlowprec as jlp
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
    >>> rules = jlp.PerLayer(((".*/1", None),), default=jlp.NVFP4BlockScaling())
    >>> [type(layer).__module__ for layer in jlp.nnx.convert(model, rules).layers]
    ['jaxlowprec.nnx.layers', 'flax.nnx.nn.linear']
    """
    _check_model(_WHO, model, other=_OTHERS)
    recipe = resolve(_WHO, rules)
    names, followed, changes, left = [], [], [], {}
    tables = ["/".join(map(str, path)) for path, layer in nnx.iter_modules(model) if isinstance(layer, nnx.Embed)]
    uses = _uses(model)
    kinds: Any = (_Quantizing, *_OURS)
    layer: Any
    for path, layer in list(nnx.iter_modules(model)):
        if not isinstance(layer, kinds):
            continue
        ours = isinstance(layer, _Quantizing)
        name = (layer.name if ours else "") or "/".join(map(str, path))
        if isinstance(layer, nnx.Conv) and windows_of(layer).reason:
            continue
        names.append(name)
        if not ours and (reason := reason_to_stay(layer)):
            left[name] = reason
            continue
        own = rules if rules is FROM_CONTEXT or recipe is None else recipe.at(name)
        if recipe is not None and rules is not FROM_CONTEXT and (use := uses.get(path)) is not None:
            own = recipe.within(name, use)
        if own is not None:
            followed.append(name)
        if own is not None or (ours and layer.converted):
            changes.append((layer, own, name))
    for layer, own, name in changes:
        if isinstance(layer, _Quantizing):
            _again(layer, own, name)
        else:
            layer.__class__ = _OURS[type(layer)]
            layer._set_up(own, name, None)
            layer.converted = True
    if rules is not None:
        reached = silence.ConversionReach(names, followed, left, own_matrices(model), tables)
        nothing = "the model has no Linear, LinearGeneral, Einsum or Conv to convert"
        found = silence.of_conversion(None if rules is FROM_CONTEXT else rules, reached, nothing)
        silence.warn_once(_WHO, rules, found, depth=1)
    return model


def _uses(model: nnx.Module) -> dict[Any, Use]:
    """The uses of Linear layers, by their paths, where their shapes tell."""
    layers = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear | nnx.Embed)}
    vocabulary = max((m.num_embeddings for m in layers.values() if isinstance(m, nnx.Embed)), default=0)
    shapes = {path: (m.in_features, m.out_features) for path, m in layers.items() if isinstance(m, nnx.Linear)}
    found = {}
    for path, shape in shapes.items():
        has_twin = any(p != path and p[:-1] == path[:-1] and other == shape for p, other in shapes.items())
        name = "/".join(map(str, path))
        found[path] = use_of(name, shape, has_twin=has_twin, vocabulary=vocabulary)
    return {path: use for path, use in found.items() if use is not Use.UNKNOWN}


def reason_to_stay(layer: Any) -> str:
    """Why a layer stays Flax's; "" if it need not."""
    if type(layer) not in _OURS:
        return f"a {type(layer).__name__}, a subclass"
    product = own_product(layer)
    return f"{product}= is set" if product else ""


def _again(layer: Any, recipe: Any, name: str) -> None:
    """Gives a layer of this library what it lacks, or what an earlier conversion gave it."""
    layer.name = layer.name or name
    if layer.converted or (layer.recipe is FROM_CONTEXT and recipe is not FROM_CONTEXT):
        before, layer.recipe, layer.converted = layer.recipe, recipe, True
        if recipe != before:
            layer._set_state()


def own_matrices(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters with several axes that are in no layer of Flax's or of this library, by their paths."""
    modules = dict(nnx.iter_modules(model))
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        owner = next(modules[path[:n]] for n in reversed(range(len(path))) if path[:n] in modules)
        is_own = isinstance(owner, _CONTAINERS) or type(owner).__module__.split(".")[0] not in ("flax", "jaxlowprec")
        shape = getattr(variable.get_value(), "shape", ())
        if is_own and not isinstance(owner, LAYERS) and has_matrices(shape):
            found["/".join(map(str, path))] = tuple(shape)
    return found
