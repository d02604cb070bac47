"""How an op meets JAX and the compiled library."""

from jaxlowprec.wiring.defining import (
    IN_THEIR_DTYPE,
    Adder,
    AddUp,
    Body,
    Elsewhere,
    Op,
    Partials,
    Shapes,
    align_varying,
    as_bytes,
    define,
    from_bytes,
    further_axes,
    varying_axes,
)
from jaxlowprec.wiring.sharding_rule import ShardingRule

__all__ = [
    "IN_THEIR_DTYPE",
    "AddUp",
    "Adder",
    "Body",
    "Elsewhere",
    "Op",
    "Partials",
    "Shapes",
    "ShardingRule",
    "align_varying",
    "as_bytes",
    "define",
    "from_bytes",
    "further_axes",
    "varying_axes",
]
