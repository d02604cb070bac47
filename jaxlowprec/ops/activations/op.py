"""The ops of activations and of their gradients."""

from __future__ import annotations

import functools

from jaxlowprec import wiring
from jaxlowprec.ops.activations import reference


def _rule(operands: int, results: int) -> wiring.ShardingRule:
    matrix = "... r c"
    return wiring.ShardingRule(f"{', '.join([matrix] * operands)} -> {', '.join([matrix] * results)}")


@functools.cache
def activation_op(kind: str):
    """x [..., R, C] and, if it is gated, up -> [..., R, C] in x's dtype; see `reference.activation`."""
    gated = reference.RULES[kind].gated
    return wiring.define(
        "jaxlowprec_activation",
        rule=_rule(1 + gated, 1),
        outputs=lambda x, *_: [(x.shape, x.dtype)],
        reference=lambda x, *up: [reference.activation(kind, x, *up)],
    )


@functools.cache
def activation_gradient_op(kind: str):
    """dy, x [..., R, C] and, if it is gated, up -> their gradients; see `reference.activation_gradient`."""
    gated = reference.RULES[kind].gated
    return wiring.define(
        "jaxlowprec_activation_gradient",
        rule=_rule(2 + gated, 1 + gated),
        outputs=lambda _, x, *up: [(x.shape, x.dtype)] * (1 + len(up)),
        reference=lambda dy, x, *up: reference.activation_gradient(kind, dy, x, *up),
    )
