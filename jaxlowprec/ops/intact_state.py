"""Whether the amaxes and scales of delayed scaling are what layers make of them: none is below 0."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.wiring import native


def intact_state(numbers: jax.Array, says: bool) -> jax.Array:
    """float32 [..., n] -> float32 [...]: 1, or NaN where a number is below 0.

    Arguments:
        says: whether such a number is an error on platforms that can stop a program, which are CPUs.
    """
    return _op()(numbers)[0] if says else _by_nan(numbers)


def _by_nan(numbers: jax.Array) -> jax.Array:
    return jnp.where(jnp.any(numbers < 0, axis=-1), jnp.nan, jnp.float32(1))


@functools.cache
def _op():
    def outputs(numbers):
        return [(numbers.shape[:-1], jnp.float32)]

    def or_error(numbers):
        results = [jax.ShapeDtypeStruct(*result) for result in outputs(numbers)]
        return jax.ffi.ffi_call("jaxlowprec_intact_state", results)(numbers)

    return wiring.define(
        "jaxlowprec_intact_state",
        rule=wiring.ShardingRule("... n -> ...", whole=("n",)),
        outputs=outputs,
        reference=lambda numbers: [_by_nan(numbers)],
        native=or_error,
        platforms=[platform for platform in native.platforms() if platform == "cpu"],
    )
