"""LoRA for NNX models: layers with a trainable low-rank adapter beside a frozen kernel, which may be quantised."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlowprec.arguments import shown, whole_number
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.dot_general import axes_in_order
from jaxlowprec.layers.low_rank import Adapter, LoRAKernel, add_adapter, checked_alpha, new_adapter
from jaxlowprec.layers.subscripts import has_matrices
from jaxlowprec.nnx.converting import reason_to_stay
from jaxlowprec.nnx.einsum import Einsum, einsum_axes
from jaxlowprec.nnx.layers import Linear, LinearGeneral, Quantized, _check_model, _Quantizing
from jaxlowprec.ops.checks import float_dtype
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.fields import check_patterns, is_chosen
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE


class _Adapted(_Quantizing):
    """The common part of the layers with an adapter."""

    lora: nnx.LoRA
    lora_alpha: float

    @property
    def adapter(self) -> Adapter:
        """The adapter of the kernel's matrices [..., K, N]."""
        return Adapter(self.lora.lora_a[...], self.lora.lora_b[...], self.lora_alpha)

    def _operands(self, inputs: jax.Array) -> tuple[Any, Any, Any]:
        inputs, kernel, bias = super()._operands(inputs)
        return inputs, LoRAKernel(kernel, self.adapter), bias

    def _added(self, inputs: jax.Array) -> jax.Array:
        """The adapter's product, as Flax computes it."""
        added, scale = self.lora(inputs), self.adapter.scale
        return added if scale == 1 else scale * added


class LoRALinear(_Adapted, Linear, nnx.LoRALinear):
    """`flax.nnx.LoRALinear` under a recipe: a `Linear` with a trainable low-rank adapter.

    The kernel follows the recipe, as that of a `Linear` does, or is loaded quantised (QLoRA); then the adapter is
    multiplied in the dtype of the inputs. Its parameters, `lora.lora_a` and `lora.lora_b`, have the variable type
    `nnx.LoRAParam`: `nnx.Optimizer(model, ..., wrt=nnx.LoRAParam)` trains nothing else. `add_lora` gives the layers of
    a model adapters, and `merge_lora` adds them to the kernels.

    Arguments:
        lora_rank: the rank of the adapter.
        lora_alpha: its strength, divided by the rank; default: the rank, for a strength of 1, as Flax has it.
        recipe, name: see `Linear`.

    Other arguments, their defaults and the parameters are Flax's, and without a recipe so are the bits.

    Raises:
        ValueError: alpha is not a positive number.

    Source: arXiv 2106.09685, 2305.14314.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer = jlp.nnx.LoRALinear(64, 32, lora_rank=4, lora_alpha=8, rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer(jnp.ones((8, 64))).shape
    (8, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_alpha: float | None = None,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        who = type(self).__name__
        lora_rank = whole_number(who, "lora_rank", lora_rank, least=1)
        self.lora_alpha = checked_alpha(who, lora_alpha, lora_rank)
        options = {"lora_rank": lora_rank, "recipe": recipe, "name": name, "rngs": rngs}
        super().__init__(in_features, out_features, **options, **kwargs)

    def _flaxs(self, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        return super()._flaxs(inputs, out_sharding) + self._added(inputs)


class LoRALinearGeneral(_Adapted, LinearGeneral):
    """A `LinearGeneral` with a trainable low-rank adapter, as `add_lora` makes it.

    The adapter is that of the kernel as a matrix [contracted features, other features]. See `LoRALinear`.
    """

    def _flaxs(self, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        y = super()._flaxs(inputs, out_sharding)
        contracted = axes_in_order(type(self).__name__, inputs.ndim, self.axis)
        last = jnp.moveaxis(inputs, contracted, range(inputs.ndim - len(contracted), inputs.ndim))
        added = self._added(last.reshape(*last.shape[: inputs.ndim - len(contracted)], -1))
        return y + added.reshape(y.shape)


class LoRAEinsum(_Adapted, Einsum):
    """An `Einsum` with a trainable low-rank adapter, as `add_lora` makes it.

    The adapter is that of the kernel's matrices [batch..., contracted features, other features]. See `LoRALinear`.
    """

    def _flaxs(self, inputs: jax.Array, einsum_str: str | None, out_sharding: Any) -> jax.Array:
        y = super()._flaxs(inputs, einsum_str, out_sharding)
        subscripts = self._subscripts(einsum_str, inputs.ndim)
        x, kernel, _ = self._operands(inputs)
        return add_adapter(y, subscripts, x, kernel, tuple(self.kernel_shape), self.name)


_ADAPTED: dict[type, type] = {
    Linear: LoRALinear,
    LinearGeneral: LoRALinearGeneral,
    Einsum: LoRAEinsum,
    nnx.Linear: LoRALinear,
    nnx.LinearGeneral: LoRALinearGeneral,
    nnx.Einsum: LoRAEinsum,
}
_PLAIN: dict[type, type] = {ours: plain for plain, ours in _ADAPTED.items() if issubclass(plain, _Quantizing)}


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: float | None = None,
    include: Sequence[str] = (".*",),
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    param_dtype: Any = jnp.bfloat16,
    rngs: nnx.Rngs,
) -> Any:
    """Gives the Linear, LinearGeneral and Einsum layers of a model low-rank adapters, Flax's own layers too.

    The layers are changed in place: they become `LoRALinear`, `LoRALinearGeneral` and `LoRAEinsum`, named by their
    paths, with the same variables and new ones of the type `nnx.LoRAParam`. Kernels may be arrays or loaded
    QuantizedArrays. Results stay the same until the adapters are trained.

    Arguments:
        model: any NNX module.
        rank: of the adapters.
        alpha: their strength, divided by the rank; default: the rank, for a strength of 1.
        include, exclude: regular expressions, searched for in a layer's name or path. A layer gets an adapter if a
            pattern of `include` matches and none of `exclude` does.
        param_dtype: of the adapters.
        rngs: its stream "params" draws `lora_a`, from Flax's initializer; `lora_b` is zero.

    Returns:
        The model.

    Raises:
        TypeError: the model is not an NNX module, or another argument is invalid.
        ValueError: no layer is chosen, a chosen one has an adapter already, or cannot have one.

    Other modules with matrices (experts, convolutions, your own) get none, and no Einsum whose kernel is not a matrix:
    a warning names those that the patterns choose. Embeddings are looked up and get none.

    >>> import jaxlowprec as jlp
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
    >>> model = jlp.nnx.add_lora(model, rank=4, include=(".*/0",), rngs=nnx.Rngs(2))
    >>> [type(layer).__name__ for layer in model.layers]
    ['LoRALinear', 'Linear']
    >>> sum(p.size for p in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)).leaves)
    512
    """
    who = "nnx.add_lora"
    _check_model(who, model)
    rank = whole_number(who, "rank", rank, least=1)
    alpha, dtype = checked_alpha(who, alpha, rank), float_dtype(who, "param_dtype", param_dtype)
    patterns = check_patterns(who, "include", include), check_patterns(who, "exclude", exclude)
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"{who}: rngs={shown(rngs)}; needs nnx.Rngs")
    kinds: Any = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
    found = [(_name(module) or "/".join(map(str, path)), module) for path, module in nnx.iter_modules(model)]
    left = [name for name, module in found if not isinstance(module, kinds) and _has_matrices(module)]
    left += [name for name, module in found if isinstance(module, nnx.Einsum) and not _is_product(module)]
    layers = [(name, layer) for name, layer in found if isinstance(layer, kinds) and name not in left]
    chosen = [(name, layer) for name, layer in layers if is_chosen(name, *patterns)]
    if not chosen:
        names = [name for name, _ in layers]
        raise ValueError(
            f"{who}: include={shown(include)} and exclude choose none of the Linear, LinearGeneral and Einsum layers "
            f"{', '.join(map(repr, names)) or '(none)'}"
        )
    for name, layer in chosen:
        _check_layer(who, name, layer)
    for name, layer in chosen:
        layer.__class__ = _made(layer, name)
        *batch, k, n = _matrices(layer)
        layer.lora_alpha = alpha
        layer.lora = nnx.LoRA(k, rank, n, dtype=layer.dtype, param_dtype=dtype, rngs=rngs)
        if batch := [*_stacked(layer), *batch]:
            adapter = new_adapter(rngs.params(), (*batch, k, n), rank, alpha, dtype)
            layer.lora.lora_a, layer.lora.lora_b = nnx.LoRAParam(adapter.a), nnx.LoRAParam(adapter.b)
    if left := [name for name in left if is_chosen(name, *patterns)]:
        warnings.warn(
            f"{who}: these get no adapter, though include chooses them: {', '.join(map(repr, left))}; they are no "
            "Linear, LinearGeneral or Einsum with a kernel of matrices. To leave them out in silence, pass exclude=",
            stacklevel=2,
        )
    return model


def _name(module: Any) -> str:
    """The name that a module was given; "" if it has none."""
    name = getattr(module, "name", "")
    return name if isinstance(name, str) else ""


def _has_matrices(module: Any) -> bool:
    """Whether a module has weights of its own that could have adapters."""
    if isinstance(module, nnx.Embed | nnx.LayerNorm | nnx.RMSNorm | nnx.BatchNorm | nnx.GroupNorm):
        return False
    own = [v for v in vars(module).values() if type(v) in (nnx.Param, Quantized)]
    return any(has_matrices(v.get_value().shape) for v in own)


def _is_product(layer: nnx.Einsum) -> bool:
    """Whether an Einsum multiplies by its kernel as by matrices."""
    try:
        axes = einsum_axes(layer)
    except ValueError:
        return False
    return bool(axes.contracted and axes.free)


def _made(layer: Any, name: str) -> type:
    """The class of a layer with an adapter. The layer is one of this library's afterwards."""
    if not isinstance(layer, _Quantizing):
        layer.__class__ = next(ours for ours in _PLAIN.values() if issubclass(ours, type(layer)))
        layer._set_up(FROM_CONTEXT, name, None)
    layer.name = layer.name or name
    return _ADAPTED[type(layer)]


def _matrices(layer: Any) -> tuple[int, ...]:
    """The shape [batch..., K, N] of the matrices of one layer's kernel."""
    if isinstance(layer, Einsum):
        return einsum_axes(layer).sizes(layer.kernel_shape)
    k, n = (math.prod(f) if isinstance(f, tuple) else f for f in (layer.in_features, layer.out_features))
    return k, n


def merge_lora(model: Any, *, dtype: Any = None) -> Any:
    """A copy of a model with each adapter's product added to its kernel, in float32 and rounded once.

    The copy has `Linear`, `LinearGeneral` and `Einsum` layers with arrays as kernels; `jaxlowprec.quantize_params`
    under a `WeightQAT` gives them few bits again.

    Arguments:
        model: an NNX module with layers that have adapters.
        dtype: of the merged kernels; default: the kernel's own, or what it was quantised from.

    Raises:
        TypeError: the model is not an NNX module.
        ValueError: it has no adapters.

    >>> import jaxlowprec as jlp
    >>> from flax import nnx
    >>> model = nnx.Sequential(jlp.nnx.LoRALinear(64, 8, lora_rank=4, rngs=nnx.Rngs(0)))
    >>> type(jlp.nnx.merge_lora(model).layers[0]).__name__
    'Linear'
    """
    who = "nnx.merge_lora"
    _check_model(who, model)
    dtype = None if dtype is None else float_dtype(who, "dtype", dtype)
    merged = nnx.merge(*nnx.split(model))
    layers: list[Any] = [layer for _, layer in nnx.iter_modules(merged) if isinstance(layer, _Adapted)]
    if not layers:
        raise ValueError(f"{who}: the model has no layer with an adapter; needs those of jaxlowprec.nnx.add_lora")
    for layer in layers:
        kernel = _merged(layer, dtype)
        metadata = layer.kernel.get_metadata() if isinstance(layer.kernel, nnx.Param) else {}
        layer.kernel = nnx.Param(kernel, **metadata)
        layer.__class__ = _PLAIN[type(layer)]
        del layer.lora, layer.lora_alpha
    return merged


def _merged(layer: Any, dtype: Any) -> jax.Array:
    """The layer's kernel as Flax has it, with its adapter added."""
    kernel = layer.kernel.get_value()
    if isinstance(layer, LoRAEinsum):
        axes = einsum_axes(layer)
        matrices = kernel if isinstance(kernel, QuantizedArray) else axes.matrices(kernel)
        return axes.kernel(LoRAKernel(matrices, layer.adapter).merged(dtype), layer.kernel_shape)
    kernel = LoRAKernel(kernel, layer.adapter).merged(dtype)
    if isinstance(layer, LoRALinearGeneral):
        kernel = kernel.reshape(*_stacked(layer), *layer.in_features, *layer.out_features)
    return kernel


def _check_layer(who: str, name: str, layer: Any) -> None:
    """Raises ValueError for a layer that cannot have an adapter."""
    reason = ""
    if isinstance(layer, _Adapted | nnx.LoRALinear):
        reason = "has an adapter already"
    elif type(layer) not in _ADAPTED:
        reason = f"is a {type(layer).__name__}, a subclass"
    elif not isinstance(layer, _Quantizing) and (why := reason_to_stay(layer)):
        reason = f"stays Flax's: {why}"
    elif isinstance(layer, nnx.LinearGeneral) and layer.batch_axis:
        reason = "has batch_axis="
    if reason:
        raise ValueError(f"{who}: the layer {name!r} {reason}; leave it out with exclude=")


def _stacked(layer: Any) -> tuple[int, ...]:
    """The axes in front of a kernel that `nnx.vmap` made for a stack of layers."""
    kernel = layer.kernel.get_value()
    own = len(_matrices(layer)) if isinstance(kernel, QuantizedArray) else layer._own_axes()
    return kernel.shape[: kernel.ndim - own]
