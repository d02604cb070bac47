"""The amax op: of an array, of its columnwise rotation, or of both in one pass over it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.amax.wanted import Amaxes, largest_over
from jaxlowprec.ops.implementation import Implementation, choose


def native_call(amaxes: Amaxes, x: jax.Array, vmap_method: str | None = None) -> Sequence[Any]:
    """The kernel on x [..., R, C]. `vmap_method`: of `jax.ffi.ffi_call`."""
    results = [jax.ShapeDtypeStruct(x.shape[:-2], jnp.float32)] * amaxes.count
    return jax.ffi.ffi_call("jaxlowprec_amax", results, vmap_method=vmap_method)(x, **amaxes.attributes)


@functools.cache
def amax_op(amaxes: Amaxes, implementation: Implementation):
    """x [..., R, C], or [..., S, R, C] -> the amaxes, float32 [...] each."""
    return wiring.define(
        "jaxlowprec_amax",
        rule=wiring.ShardingRule(
            f"{amaxes.lines} c -> {', '.join(['...'] * amaxes.count)}",
            reductions=amaxes.reductions,
            whole=amaxes.whole,
            **amaxes.sizes,
        ),
        outputs=lambda x: amaxes.outputs(x),
        reference=lambda x: amaxes.reference(x),
        native=lambda x: native_call(amaxes, amaxes.matrix(x)),
        collective=largest_over,
        **choose("quantize", implementation),
    )
