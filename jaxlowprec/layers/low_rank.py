"""Low-rank adapters (LoRA): a frozen weight, usually a quantised one, with a small trainable product added to it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.arguments import array, shown
from jaxlowprec.arrays import serialised
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.layers.subscripts import kernel_axes, parse
from jaxlowprec.ops.checks import FLOATS
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.wiring.sharding_rule import dimensions_of, resharded, sharding_of, sharding_of_product


@serialised.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A low-rank addition to a weight [..., K, N]: `alpha / rank * (a @ b)`.

    Attributes:
        a: [..., K, rank], bfloat16, float16 or float32.
        b: [..., rank, N]; zeros at the start of training, so that the adapted weight begins as the weight.
        alpha: the strength, relative to the rank; no parameter.

    Source: arXiv 2106.09685.
    """

    a: Float[Array, "*B K R"]
    b: Float[Array, "*B R N"]
    alpha: float = dataclasses.field(metadata={"static": True})

    @property
    def rank(self) -> int:
        """The number of columns of a."""
        return self.a.shape[-1]

    @property
    def scale(self) -> float:
        """The factor of a @ b: alpha / rank."""
        return self.alpha / self.rank

    @property
    def mT(self) -> Adapter:
        """The adapter of the transposed weight."""
        return Adapter(self.b.mT, self.a.mT, self.alpha)


@serialised.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAKernel:
    """A weight with an adapter: what `linear`, `dot_general` and the layers take in the place of a weight.

    A product by it is the product by the weight, which follows the recipe if it is not quantised yet, plus
    `alpha / rank * (x @ a) @ b` in the dtype of x.

    Attributes:
        kernel: an array, or a QuantizedArray [..., K, N] quantised along K: a constant to autodiff.
        adapter: its adapter.
    """

    kernel: Any
    adapter: Adapter

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.kernel.shape

    @property
    def ndim(self) -> int:
        """The weight's number of axes."""
        return self.kernel.ndim

    @property
    def size(self) -> int:
        """The weight's number of elements."""
        return self.kernel.size

    @property
    def dtype(self) -> Any:
        """The dtype of the weight, or that which it was quantised from."""
        return self.kernel.dtype

    @property
    def mT(self) -> LoRAKernel:
        """The transposed weight with its adapter."""
        return LoRAKernel(self.kernel.mT, self.adapter.mT)

    def merged(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """The weight plus its adapter's product, added in float32 and rounded once.

        Arguments:
            dtype: of the result; default: the weight's, or what it was quantised from.
        """
        check_adapter("LoRAKernel.merged", self)
        kernel = dequantize(self.kernel, dtype=jnp.float32) if is_quantized(self.kernel) else self.kernel
        a, b = (factor.astype(jnp.float32) for factor in (self.adapter.a, self.adapter.b))
        added = self.adapter.scale * jnp.matmul(a, b, precision="highest")
        return (kernel.astype(jnp.float32) + added.reshape(kernel.shape)).astype(dtype or self.dtype)


def without_adapter(kernel: Any) -> Any:
    """The weight itself, if it has an adapter."""
    return kernel.kernel if isinstance(kernel, LoRAKernel) else kernel


def is_quantized(kernel: Any) -> bool:
    """Whether a weight, perhaps with an adapter, was loaded quantised."""
    return isinstance(without_adapter(kernel), QuantizedArray)


def check_adapter(who: str, kernel: LoRAKernel) -> None:
    """Raises unless the factors are floats whose product has the size of the weight's matrices."""
    adapter = kernel.adapter
    if not isinstance(adapter, Adapter):
        raise TypeError(f"{who}: adapter={shown(adapter)}; needs a jaxlowprec.lora.Adapter")
    a, b = array(who, "adapter.a", adapter.a), array(who, "adapter.b", adapter.b)
    if a.dtype not in FLOATS or b.dtype not in FLOATS:
        raise TypeError(f"{who}: adapter of {a.dtype} and {b.dtype}; needs bfloat16, float16 or float32")
    size = b.size // max(adapter.rank, 1) * a.shape[-2] if min(a.ndim, b.ndim) > 1 else -1
    fits = a.ndim == b.ndim > 1 and a.shape[-1] == b.shape[-2] > 0 and a.shape[:-2] == b.shape[:-2]
    if not fits or size != kernel.size:
        raise ValueError(
            f"{who}: adapter.a {a.shape} and adapter.b {b.shape} for a kernel of shape {kernel.shape}; needs "
            "[..., K, rank] and [..., rank, N] with K x N of the kernel's matrices"
        )


def add_product(y: Float[Array, "..."], x: Float[Array, "*B T K"], adapter: Adapter, name: str) -> Float[Array, "..."]:
    """y plus the product of x and an adapter [*B, K, N], in y's dtype and shape.

    Arguments:
        x: its rows may be split in two axes, [*B, S, T, K].
    """
    with in_profiles(name, "adapter"):
        added = _product(_product(x, adapter.a), adapter.b).reshape(y.shape)
        added = resharded(added, sharding_of(y)).astype(jnp.float32)
        return (y.astype(jnp.float32) + adapter.scale * added).astype(y.dtype)


def _product(x: Float[Array, "*B T K"], factor: Float[Array, "*B K N"]) -> Float[Array, "*B T N"]:
    """Their product in x's dtype."""
    batch = tuple(range(factor.ndim - 2))
    dims = (((x.ndim - 1,), (len(batch),)), (batch, batch))
    out_sharding = sharding_of_product(x, dimensions_of(factor)[-1]) if sharding_of(x) else None
    return jax.lax.dot_general(x, factor.astype(x.dtype), dims, out_sharding=out_sharding)


def add_adapter(
    y: jax.Array, subscripts: str, x: jax.Array, kernel: LoRAKernel, shape: tuple[int, ...] | None, name: str
) -> jax.Array:
    """y plus the einsum of x and the product of the kernel's adapter.

    Arguments:
        shape: that of a layer's kernel, whose adapter is that of its matrices. None: the adapter's product has the
            elements of the kernel in their order, as `LoRAKernel.merged` adds it.
    """
    who = "einsum"
    check_adapter(who, kernel)
    sizes = kernel.shape if shape is None else shape
    (x_names, w_names), out = parse(who, subscripts, x.ndim, len(sizes))
    if shape is not None:
        order = kernel_axes(who, subscripts, x.ndim, len(shape)).order
        w_names, sizes = [w_names[a] for a in order], tuple(shape[a] for a in order)
    (*batch, k, rank), n = kernel.adapter.a.shape, kernel.adapter.b.shape[-1]
    first = len(batch)
    cuts = (c for c in range(first + 1, len(sizes)) if (math.prod(sizes[first:c]), math.prod(sizes[c:])) == (k, n))
    cut = next(cuts, len(sizes))
    if sizes[:first] != tuple(batch) or cut == len(sizes):
        raise ValueError(
            f"{who}: an adapter {kernel.adapter.a.shape} by {kernel.adapter.b.shape} of a kernel of shape {sizes} in "
            f"{subscripts!r}; needs [batch..., K, rank] and [batch..., rank, N] whose K and N are whole axes of it"
        )
    numbers = {n: i for i, n in enumerate([*dict.fromkeys((*x_names, *w_names)), "rank"])}
    x_axes, out_axes, of_rank = [numbers[n] for n in x_names], [numbers[n] for n in out], numbers["rank"]
    of_batch, of_k, of_n = ([numbers[n] for n in part] for part in (w_names[:first], w_names[first:cut], w_names[cut:]))
    with in_profiles(name, "adapter"):
        a, b = (factor.astype(x.dtype) for factor in (kernel.adapter.a, kernel.adapter.b))
        a, b = a.reshape(*sizes[:cut], rank), b.reshape(*sizes[:first], rank, *sizes[cut:])
        a_axes, b_axes = [*of_batch, *of_k, of_rank], [*of_batch, of_rank, *of_n]
        contracts_k = set(of_k) <= set(x_axes) - set(out_axes) and not set(of_n) & set(x_axes)
        if contracts_k and set(of_batch) <= set(x_axes) & set(out_axes):
            rows = [i for i in out_axes if i not in of_n]
            down = jnp.einsum(x, x_axes, a, a_axes, [*rows, of_rank])
            added = jnp.einsum(down, [*rows, of_rank], b, b_axes, out_axes)
        else:  # K of the adapter is not what the product contracts
            added = jnp.einsum(x, x_axes, a, a_axes, b, b_axes, out_axes)
        return (y.astype(jnp.float32) + kernel.adapter.scale * added.astype(jnp.float32)).astype(y.dtype)


def checked_alpha(who: str, alpha: Any, rank: int) -> float:
    """The strength; the rank if it is None."""
    if alpha is None:
        return float(rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"{who}: alpha={shown(alpha)}; needs a positive number")
    return float(alpha)


def new_adapter(
    key: jax.Array, shape: tuple[int, ...], rank: int, alpha: float, dtype: jax.typing.DTypeLike
) -> Adapter:
    """The adapter of a weight [batch..., K, N] before training."""
    *batch, k, n = shape
    uniform = jax.nn.initializers.he_uniform(batch_axis=tuple(range(len(batch))))
    return Adapter(uniform(key, (*batch, k, rank), dtype), jnp.zeros((*batch, rank, n), dtype), alpha)
