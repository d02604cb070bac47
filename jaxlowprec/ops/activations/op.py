"""The ops of activations and of their gradients."""

from __future__ import annotations

import functools

import jax

from jaxlowprec import wiring
from jaxlowprec.ops.activations import reference
from jaxlowprec.ops.implementation import Implementation, choose


def _rule(operands: int, results: int) -> wiring.ShardingRule:
    matrix = "... r c"
    return wiring.ShardingRule(f"{', '.join([matrix] * operands)} -> {', '.join([matrix] * results)}")


@functools.cache
def activation_op(kind: str, implementation: Implementation = None):
    """x [..., R, C] and, if it is gated, up -> [..., R, C] in x's dtype; see `reference.activation`."""
    rule = reference.RULES[kind]

    def native(x, *up):
        call = jax.ffi.ffi_call("jaxlowprec_activation", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return [call(x, *up, kind=rule.name)]

    return wiring.define(
        "jaxlowprec_activation",
        rule=_rule(1 + rule.gated, 1),
        outputs=lambda x, *_: [(x.shape, x.dtype)],
        reference=lambda x, *up: [reference.activation(kind, x, *up)],
        native=native,
        **choose("activation", implementation),
    )


@functools.cache
def activation_gradient_op(kind: str, implementation: Implementation = None):
    """dy, x [..., R, C] and, if it is gated, up -> their gradients; see `reference.activation_gradient`."""
    rule = reference.RULES[kind]

    def native(dy, x, *up):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call("jaxlowprec_activation_gradient", [like] * (1 + rule.gated))
        return call(dy, x, *up, kind=rule.name)

    return wiring.define(
        "jaxlowprec_activation_gradient",
        rule=_rule(2 + rule.gated, 1 + rule.gated),
        outputs=lambda _, x, *up: [(x.shape, x.dtype)] * (1 + len(up)),
        reference=lambda dy, x, *up: reference.activation_gradient(kind, dy, x, *up),
        native=native,
        **choose("activation", implementation),
    )
