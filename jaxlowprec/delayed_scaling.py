"""The state of `DelayedScaling`, and how it passes through gradients and optimizers."""

from jaxlowprec.layers.delayed_scaling import (
    OVERWRITE_WITH_GRADIENT,
    TENSORS,
    add_gradients,
    combined_by_max,
    init_state,
    is_state,
)
from jaxlowprec.layers.overwriting import keep_unused, overwrite_with_gradient

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "TENSORS",
    "add_gradients",
    "combined_by_max",
    "init_state",
    "is_state",
    "keep_unused",
    "overwrite_with_gradient",
]
