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
    """x [..., R, C] -> the same, transformed along axis -2 if `vertical`, else -1."""
    text = "... (r k) c -> ... (r k) c" if vertical else "... r (c k) -> ... r (c k)"

    def outputs(x):
        return [(x.shape, x.dtype)]

    def reference(x):
        if not vertical:
            return [rotate(x, hadamard, inverse)]
        return [jnp.swapaxes(rotate(jnp.swapaxes(x, -1, -2), hadamard, inverse), -1, -2)]

    def native(x):
        call = jax.ffi.ffi_call("jaxlowprec_hadamard", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return [call(x, vertical=vertical, inverse=inverse, signs=np.array(hadamard.negative, np.int32))]

    return wiring.define(
        "jaxlowprec_hadamard",
        rule=wiring.ShardingRule(text, k=hadamard.size),
        outputs=outputs,
        reference=reference,
        native=native,
        **choose("hadamard_transform", implementation),
    )
