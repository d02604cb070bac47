"""The ops of activations and of their gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxlowprec import wiring
from jaxlowprec.ops.activations import reference
from jaxlowprec.ops.amax.wanted import NO_AMAXES, Amaxes, largest_over
from jaxlowprec.ops.implementation import Implementation, choose


def _rule(operands: int, results: int, amaxes: Amaxes) -> wiring.ShardingRule:
    """Of an op of matrices whose results have amaxes each."""
    matrix = f"{amaxes.lines} c"
    text = f"{', '.join([matrix] * operands)} -> {', '.join([matrix] * results + ['...'] * results * amaxes.count)}"
    return wiring.ShardingRule(text, amaxes.reductions, amaxes.whole, **amaxes.sizes)


def native_call(kind: str, wanted: Amaxes, x: jax.Array, *up: jax.Array) -> list[jax.Array]:
    """The activation of matrices by the kernel, and the wanted amaxes of it."""
    outputs = [(x.shape, x.dtype), *wanted.outputs(x)]
    return _matrices_call("jaxlowprec_activation", wanted, outputs, x, *up, kind=reference.RULES[kind].name)


def native_gradient_call(kind: str, wanted: Amaxes, dy: jax.Array, x: jax.Array, *up: jax.Array) -> list[jax.Array]:
    """The gradients of the operands by the kernel, and the wanted amaxes of each."""
    outputs, name = _gradients(wanted, x, *up), "jaxlowprec_activation_gradient"
    return _matrices_call(name, wanted, outputs, dy, x, *up, kind=reference.RULES[kind].name)


def _gradients(wanted: Amaxes, *operands: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the gradients of operands, and of their amaxes."""
    x, *_ = operands
    return [(x.shape, x.dtype)] * len(operands) + wanted.outputs(x) * len(operands)


@functools.cache
def activation_op(kind: str, implementation: Implementation = None, amaxes: Amaxes | None = None):
    """x [..., R, C] and, if it is gated, up -> [..., R, C] in x's dtype, see `reference.activation`; and the amaxes of
    that result, float32 [...] each."""
    rule, wanted = reference.RULES[kind], amaxes or NO_AMAXES

    def outputs(x, *_):
        return [(x.shape, x.dtype), *wanted.outputs(x)]

    def run_reference(x, *up):
        y = reference.activation(kind, x, *up)
        return [y, *wanted.reference(y)]

    return wiring.define(
        "jaxlowprec_activation",
        rule=_rule(1 + rule.gated, 1, wanted),
        outputs=outputs,
        reference=run_reference,
        native=functools.partial(native_call, kind, wanted),
        collective=largest_over,
        **choose("activation", implementation),
    )


@functools.cache
def activation_gradient_op(kind: str, implementation: Implementation = None, amaxes: Amaxes | None = None):
    """dy, x [..., R, C] and, if it is gated, up -> the gradients of x and up, see `reference.activation_gradient`; and
    the amaxes of the one and of the other, float32 [...] each."""
    rule, wanted = reference.RULES[kind], amaxes or NO_AMAXES

    def run_reference(dy, x, *up):
        gradients = reference.activation_gradient(kind, dy, x, *up)
        return gradients + [amax for gradient in gradients for amax in wanted.reference(gradient)]

    return wiring.define(
        "jaxlowprec_activation_gradient",
        rule=_rule(2 + rule.gated, 1 + rule.gated, wanted),
        outputs=lambda dy, *operands: _gradients(wanted, *operands),
        reference=run_reference,
        native=functools.partial(native_gradient_call, kind, wanted),
        collective=largest_over,
        **choose("activation", implementation),
    )


def _matrices_call(name: str, amaxes: Amaxes, outputs: list[Any], *operands: jax.Array, kind: str) -> list[jax.Array]:
    """The kernel on matrices, one for each tensor whose amaxes are wanted."""
    matrices = [amaxes.matrix(x) for x in operands]
    like = operands[0].shape
    results = [jax.ShapeDtypeStruct(matrices[0].shape if shape == like else shape, dtype) for shape, dtype in outputs]
    found = jax.ffi.ffi_call(name, results)(*matrices, **amaxes.attributes, kind=kind)
    return [x.reshape(shape) for x, (shape, _) in zip(found, outputs, strict=True)]
