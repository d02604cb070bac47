"""The operations, one folder each. Public here: norms and activations, by the names that `__all__` lists.

>>> import jax.numpy as jnp, jaxlowprec as jlp
>>> jlp.ops.swiglu(jnp.ones((2, 16)), jnp.ones((2, 16))).shape
(2, 16)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlowprec.ops.activations.api import geglu, gelu, relu_squared, silu, swiglu
    from jaxlowprec.ops.norms.api import layer_norm, rms_norm

__all__ = ["geglu", "gelu", "layer_norm", "relu_squared", "rms_norm", "silu", "swiglu"]


def __getattr__(name: str) -> Any:
    """Imports a public function when it is first used: rooms below import parts of this one."""
    if name in __all__:
        folder = "norms" if name.endswith("_norm") else "activations"
        return getattr(importlib.import_module(f"jaxlowprec.ops.{folder}.api"), name)
    raise AttributeError(f"module 'jaxlowprec.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
