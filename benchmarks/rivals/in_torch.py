"""Arrays between JAX and torch, and torch in its best form. Imports torch when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rivals.sides import THREADS


def tensor(x: jax.Array) -> Any:
    """A bfloat16 array as a tensor with memory of its own."""
    import torch

    torch.set_num_threads(THREADS)
    return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)


def compiled(function: Callable) -> Callable:
    """By torch.compile, for one shape."""
    import torch

    return torch.compile(torch.no_grad()(function), dynamic=False)


def as_bytes(x: Any) -> np.ndarray:
    """A tensor's bytes."""
    import torch

    return x.contiguous().view(torch.uint8).numpy()


def as_floats(x: Any) -> np.ndarray:
    """A tensor's numbers in float32."""
    return x.float().numpy()
