"""Kernels whose gradients are added to arrays that are there already, in the GEMM that computes them.

`models.accumulate_gradients` enters such a block while it traces a loss. Within it a linear layer, or one of experts,
that is given one of the kernels adds its wgrad to the kernel's sum: the gradient of the sum is its new value. That
holds for what is traced once and differentiated once, together with the loss. Within a loop, a branch, `jax.vmap` or
`jax.shard_map` the new value would be added up or lost, so layers there have no sum.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

_current: contextvars.ContextVar[Accumulation | None] = contextvars.ContextVar("accumulation", default=None)


@dataclasses.dataclass
class Total:
    """The sum that a kernel's gradient is added to, and the calls that were given the kernel.

    Attributes:
        array: float32, of the shape of the matrices that the layer makes of the kernel, see `LayerCall.laid_out`; None
            while layers are looked for.
        quantized: these matrices, quantised before; or None.
        calls: the calls that were given the kernel.
    """

    array: jax.Array | None = None
    quantized: Any = None
    calls: list[Any] = dataclasses.field(default_factory=list)


class Accumulation:
    """Sums by kernel. A kernel is known by its identity: layers are given the very array that the block knows."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[Any, Total]] = {}
        self._trace = _current_trace()

    def add(self, kernel: Any, of: Total) -> None:
        """Layers that are given this kernel use this sum."""
        self._totals[id(kernel)] = kernel, of

    def of(self, kernel: Any) -> Total | None:
        """The sum of a kernel; None within another transformation than the one that the block was entered in."""
        found = self._totals.get(id(kernel))
        return None if found is None or _current_trace() != self._trace else found[1]


def _current_trace() -> Any:
    return get_opaque_trace_state(convention="jaxlowprec")


@contextlib.contextmanager
def accumulating(totals: Accumulation) -> Iterator[None]:
    """Within the block, layers use these sums."""
    token = _current.set(totals)
    try:
        yield
    finally:
        _current.reset(token)


def total_for(kernel: Any) -> Total | None:
    """The sum that a layer with this kernel adds its gradient to, if there is one."""
    current = _current.get()
    return None if current is None or kernel is None else current.of(kernel)
