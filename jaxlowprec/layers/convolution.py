"""Convolutions that are matrix products: no element of the input is in two windows, and no window reaches outside.

A row of the product is a window, its elements in the order [spatial axes..., features]: that order decides what a block
is, and the layout of input or kernel does not change it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Windows:
    """How a convolution reads its input. Spatial axes have the kernel's order.

    Attributes:
        sizes: the kernel's sizes.
        strides: the distances between windows.
        padding: pairs of what is added before and after the input.
        input_dilation, kernel_dilation: distances between elements.
        features: the input's features.
        groups, batch_groups: the numbers of groups of features and of rows; 1 if there are none.
        extents: the input's sizes; None if they are not known yet.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    features: int
    groups: int = 1
    batch_groups: int = 1
    extents: tuple[int, ...] | None = None

    @property
    def reason(self) -> str:
        """Why the convolution is not a matrix product, or ""."""
        if self.groups != 1:
            return "a depthwise convolution" if self.groups == self.features else "a grouped convolution"
        if self.batch_groups != 1:
            return "a convolution in groups of the batch"
        if any(n != 1 for n in self.input_dilation):
            return "a transposed convolution"
        if any(n != 1 and size > 1 for n, size in zip(self.kernel_dilation, self.sizes, strict=True)):
            return "a dilated convolution"
        if any(stride < size for stride, size in zip(self.strides, self.sizes, strict=True)):
            return "a convolution with overlapping windows"
        if any(stride > size > 1 for stride, size in zip(self.strides, self.sizes, strict=True)):
            return "a convolution with gaps between its windows"
        return "a padded convolution" if self._reads_padding() else ""

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of windows along each spatial axis."""
        assert self.extents is not None
        axes = zip(self.extents, self.padding, self.sizes, self.strides, strict=True)
        return tuple(max(0, (extent + low + high - size) // stride + 1) for extent, (low, high), size, stride in axes)

    def _ends(self) -> tuple[int, ...]:
        """The element after the last window along each spatial axis."""
        axes = zip(self.counts, self.strides, self.sizes, strict=True)
        return tuple((count - 1) * stride + size if count else 0 for count, stride, size in axes)

    def _reads_padding(self) -> bool:
        if all(pair == (0, 0) for pair in self.padding):
            return False
        if self.extents is None or any(low for low, _ in self.padding):
            return True
        return any(end > extent for end, extent in zip(self._ends(), self.extents, strict=True))

    def patches(self, x: Float[Array, "*batch *spatial features"]) -> Float[Array, "*batch *counts *sizes features"]:
        """The windows of the input; elements after the last window are cut off."""
        spatial, batch = len(self.sizes), x.ndim - len(self.sizes) - 1
        ends, steps = self._ends(), [s if k == 1 else 1 for s, k in zip(self.strides, self.sizes, strict=True)]
        if ends != x.shape[batch:-1] or any(step != 1 for step in steps):
            limits = (*x.shape[:batch], *ends, x.shape[-1])
            x = jax.lax.slice(x, (0,) * x.ndim, limits, (*[1] * batch, *steps, 1))
        pairs = [n for pair in zip(self.counts, self.sizes, strict=True) for n in pair]
        x = x.reshape(*x.shape[:batch], *pairs, x.shape[-1])
        of_windows = range(batch, batch + 2 * spatial)
        order = (*range(batch), *of_windows[::2], *of_windows[1::2], x.ndim - 1)
        return x if order == tuple(range(x.ndim)) else x.transpose(order)


def masked(who: str, kernel: Any, mask: Any) -> Any:
    """The kernel with a layer's mask applied, as Flax applies it."""
    if mask is None:
        return kernel
    if not isinstance(kernel, jax.Array):
        raise ValueError(f"{who}: mask= and a kernel that is quantised or has an adapter; drop one of them")
    if mask.shape != kernel.shape:
        raise ValueError(f"{who}: mask has shape {mask.shape}; needs the kernel's {kernel.shape}")
    return kernel * jnp.asarray(mask)
