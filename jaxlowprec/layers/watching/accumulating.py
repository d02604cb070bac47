"""Kernels whose gradients are added to arrays that are there already, in the GEMM that computes them.

`models.accumulate_gradients` enters such a block while it traces a loss. Within it a linear layer, or one of experts,
that is given one of the kernels adds its wgrad to the kernel's sum: the gradient of the sum is its new value.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

_current: contextvars.ContextVar[Accumulation | None] = contextvars.ContextVar("accumulation", default=None)


@dataclasses.dataclass
class Sum:
    """Of a kernel's gradient.

    Attributes:
        array: float32, of the kernel's shape; None while layers are looked for.
        quantized: the kernel, quantised before; or None.
        calls: the calls that were given the kernel.
    """

    array: jax.Array | None = None
    quantized: Any = None
    calls: list[Any] = dataclasses.field(default_factory=list)


class Accumulation:
    """Sums by kernel. A kernel is known by its identity: layers are given the very array that the block knows."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Any, Sum]] = {}

    def add(self, kernel: Any, of: Sum) -> None:
        """Layers that are given this kernel use this sum."""
        self._sums[id(kernel)] = kernel, of

    def of(self, kernel: Any) -> Sum | None:
        """The sum of a kernel."""
        found = self._sums.get(id(kernel))
        return None if found is None else found[1]


@contextlib.contextmanager
def accumulating(sums: Accumulation) -> Iterator[None]:
    """Within the block, layers use these sums."""
    token = _current.set(sums)
    try:
        yield
    finally:
        _current.reset(token)


def sum_for(kernel: Any) -> Sum | None:
    """The sum that a layer with this kernel adds its gradient to, if there is one."""
    current = _current.get()
    return None if current is None or kernel is None else current.of(kernel)
