"""The Hadamard op, along rows or columns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.hadamard.reference import rotate
from jaxlowprec.ops.implementation import Implementation, choose


@functools.cache
def hadamard_op(hadamard: Hadamard, vertical: bool, inverse: bool, implementation: Implementation):
    """x [..., R, C] -> the same, transformed along axis -2 if `vertical`, else -1.

    Where signs are drawn, those of each matrix are a second operand, uint32 [..., 4].
    """
    rows = "... (r k) c" if vertical else "... r (c k)"
    signs, whole = (", ... words", ["words"]) if hadamard.drawn else ("", [])

    def outputs(x, *_):
        return [(x.shape, x.dtype)]

    def reference(x, drawn=None):
        if not vertical:
            return [rotate(x, hadamard, inverse, drawn)]
        return [jnp.swapaxes(rotate(jnp.swapaxes(x, -1, -2), hadamard, inverse, drawn), -1, -2)]

    def native(x, *drawn):
        call = jax.ffi.ffi_call("jaxlowprec_hadamard", jax.ShapeDtypeStruct(x.shape, x.dtype))
        fixed = np.zeros(hadamard.size, np.int32) if hadamard.drawn else np.array(hadamard.negative, np.int32)
        return [call(x, *drawn, vertical=vertical, inverse=inverse, signs=fixed)]

    return wiring.define(
        "jaxlowprec_hadamard",
        rule=wiring.ShardingRule(f"{rows}{signs} -> {rows}", whole=whole, k=hadamard.size),
        outputs=outputs,
        reference=reference,
        native=native,
        **choose("hadamard_transform", implementation),
    )
