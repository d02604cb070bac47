"""Tensor amax, an operand of quantisation: computed apart from the cast, so that a mesh reduces it before the cast."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.amax.op import amax_op
from jaxlowprec.ops.amax.wanted import Amaxes
from jaxlowprec.ops.implementation import Implementation


def amax(
    x: Float[Array, "*B R C"],
    plain: bool,
    hadamard: Hadamard | None,
    implementation: Implementation = None,
    rows_split: bool = False,
) -> list[Float[Array, "*B"]]:
    """The largest magnitude of each slice in float32, in one pass over x. NaN or infinity anywhere is never lost.

    Arguments:
        x: bfloat16, float16 or float32.
        plain: whether the amax of x itself is wanted; it comes first.
        hadamard: a rotation of size 16 along axis -2; the amax of the rotated x is wanted, too; or None.
        implementation: None, "ffi" or "reference".
        rows_split: x is [..., S, R, C], one tensor whose rows are split into S parts of whole rotations.
    """
    wanted = Amaxes(plain, hadamard, rows_split).of_rows(x.shape[-2])
    return list(amax_op(wanted, implementation)(jax.lax.stop_gradient(x)))
