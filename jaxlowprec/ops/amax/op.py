"""The amax op: of an array, of its columnwise rotation, or of both in one pass over it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.amax import reference
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.rounding import from_bits, magnitude_bits
from jaxlowprec.ops.split_rows import merged_rows


def largest_over(amax, axes):
    """The largest amax over mesh axes. Bits are compared: they sort like magnitudes, with NaN above infinity."""
    return from_bits(jax.lax.pmax(magnitude_bits(amax), axes))


def native_call(plain: bool, hadamard: Hadamard | None, x: jax.Array, vmap_method: str | None = None) -> Sequence[Any]:
    """The kernel on x [..., R, C]. `vmap_method`: of `jax.ffi.ffi_call`."""
    mask = np.uint32(hadamard.mask if hadamard else 0).view(np.int32)
    results = [jax.ShapeDtypeStruct(x.shape[:-2], jnp.float32)] * (int(plain) + int(hadamard is not None))
    call = jax.ffi.ffi_call("jaxlowprec_amax", results, vmap_method=vmap_method)
    return call(x, plain=plain, rotated=hadamard is not None, sign_mask=mask)


@functools.cache
def amax_op(plain: bool, hadamard: Hadamard | None, whole_rows: bool, rows_split: bool, implementation: Implementation):
    """x [..., R, C] -> float32 [...]: `plain`, then after the rotation along axis -2 where `hadamard` is given.

    `whole_rows`: rows cannot be split, as R is not a multiple of the rotation. `rows_split`: x is [..., S, R, C].
    """
    count = int(plain) + int(hadamard is not None)
    results = ", ".join(["..."] * count)
    x_axes, reduced = ("... s", ("s",)) if rows_split else ("...", ())
    if hadamard is None:
        rule = wiring.ShardingRule(f"{x_axes} r c -> {results}", reductions=(*reduced, "r", "c"))
    elif whole_rows:
        rule = wiring.ShardingRule(f"{x_axes} r c -> {results}", reductions=(*reduced, "c"), whole=("r",))
    else:
        rule = wiring.ShardingRule(f"{x_axes} (r k) c -> {results}", reductions=(*reduced, "r", "c"), k=BLOCK)

    def outputs(x):
        return [(x.shape[: -3 if rows_split else -2], jnp.float32)] * count

    def run_reference(x):
        x = merged_rows(x) if rows_split else x
        plain_amax = [reference.amax(x)] if plain else []
        return plain_amax + ([reference.rotated_amax(x, hadamard)] if hadamard else [])

    def run_native(x):
        return native_call(plain, hadamard, merged_rows(x) if rows_split else x)

    return wiring.define(
        "jaxlowprec_amax",
        rule=rule,
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        collective=largest_over,
        **choose("quantize", implementation),
    )
