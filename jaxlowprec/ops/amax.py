"""Tensor amax (numerics.md 1), an operand of quantisation.

It is computed apart from the cast, so that a mesh reduces it before the cast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.hadamard import rotate_padded
from jaxlowprec.ops.rounding import (
    INFINITY_BITS,
    MIN_NORMAL_BITS,
    NAN_BITS,
    from_bits,
    magnitude_bits,
    rounded,
    widened,
)
from jaxlowprec.ops.split_rows import merged_rows
from jaxlowprec.ops.tiles import has_tiles, largest_bits


def largest_over(amax: jax.Array, axes: Any) -> jax.Array:
    """The largest amax over mesh axes. Bits are compared: they sort like magnitudes, with NaN above infinity."""
    return from_bits(jax.lax.pmax(magnitude_bits(amax), axes))


@dataclasses.dataclass(frozen=True)
class Amaxes:
    """The wanted amaxes of an array [..., R, C], in this order, float32 [...] each.

    Attributes:
        plain: of the array itself.
        hadamard: of the array after this rotation of size 16 along axis -2; None: not wanted.
        rows_split: the array is [..., S, R, C], one tensor whose rows are split into S parts of whole rotations.
        whole_rows: R is not a multiple of the rotation, so rows cannot be split; see `of_rows`.
    """

    plain: bool = True
    hadamard: Hadamard | None = None
    rows_split: bool = False
    whole_rows: bool = False

    def of_rows(self, rows: int) -> Amaxes:
        """The amaxes of arrays with that many rows: sets `whole_rows`."""
        return dataclasses.replace(self, whole_rows=self.hadamard is not None and rows % BLOCK != 0)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.plain) + int(self.hadamard is not None)

    @property
    def lines(self) -> str:
        """The axes [..., R] of the array in a sharding rule."""
        return ("... s " if self.rows_split else "... ") + ("(r k)" if self.hadamard and not self.whole_rows else "r")

    @property
    def reductions(self) -> tuple[str, ...]:
        """The axes that amaxes are taken over, by name in a sharding rule: all but those that it leaves whole."""
        if not self.count:
            return ()
        return (*(["s"] if self.rows_split else []), *([] if self.whole_rows else ["r"]), "c")

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of fixed size of a sharding rule."""
        return {"k": BLOCK} if self.hadamard and not self.whole_rows else {}

    @property
    def whole(self) -> tuple[str, ...]:
        """The axes of a sharding rule that cannot be split."""
        return ("r",) if self.whole_rows else ()

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of a native call."""
        mask = np.uint32(self.hadamard.mask if self.hadamard else 0).view(np.int32)
        return {"plain": self.plain, "rotated": self.hadamard is not None, "sign_mask": mask}

    def outputs(self, x: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of those of an array like x."""
        return [(x.shape[: -3 if self.rows_split else -2], jnp.float32)] * self.count

    def matrix(self, x: jax.Array) -> jax.Array:
        """x as [..., R, C]: one tensor in one matrix."""
        return merged_rows(x) if self.rows_split else x

    def reference(self, x: jax.Array) -> list[jax.Array]:
        """The amaxes of x, in pure JAX."""
        if not self.count:
            return []
        x = self.matrix(x)
        plain = [amax_of_matrices(x)] if self.plain else []
        return plain + ([rotated_amax(x, self.hadamard)] if self.hadamard else [])


NO_AMAXES = Amaxes(plain=False)


def amax_of_matrices(x: jax.Array) -> jax.Array:
    """[..., R, C] -> float32 [...]: the largest magnitude; subnormals are 0, NaN the quiet NaN and above all."""
    return amax_of_bits(magnitude_bits(widened(x)).max(axis=(-2, -1), initial=0))


def amax_of_bits(bits: jax.Array) -> jax.Array:
    """The amax of the bits of the largest magnitude."""
    bits = jnp.where(bits > INFINITY_BITS, NAN_BITS, bits)
    return from_bits(jnp.where(bits < MIN_NORMAL_BITS, 0, bits))


def rotated_amax(x: jax.Array, hadamard: Hadamard) -> jax.Array:
    """The amax after the rotation along axis -2, rounded to x's dtype."""
    return amax_of_matrices(
        rotate_padded(rounded(jnp.swapaxes(x, -1, -2)), hadamard)
    )  # x may be a product in the same program


def tpu_call(amaxes: Amaxes, x: jax.Array) -> list[jax.Array]:
    """The amaxes of x by the kernel for TPUs, where XLA would make several passes."""
    x = amaxes.matrix(x)
    if amaxes.hadamard is None or not has_tiles(x):
        return dataclasses.replace(amaxes, rows_split=False).reference(x)
    rotations = [None] * amaxes.plain + [amaxes.hadamard]
    return [amax_of_bits(bits) for bits in largest_bits(x, rotations)]


def native_call(amaxes: Amaxes, x: jax.Array, vmap_method: str | None = None) -> Sequence[Any]:
    """The kernel on x [..., R, C]. `vmap_method`: of `jax.ffi.ffi_call`."""
    results = [jax.ShapeDtypeStruct(x.shape[:-2], jnp.float32)] * amaxes.count
    return jax.ffi.ffi_call("jaxlowprec_amax", results, vmap_method=vmap_method)(x, **amaxes.attributes)


@functools.cache
def amax_op(amaxes: Amaxes, implementation: Implementation) -> wiring.Op:
    """x [..., R, C], or [..., S, R, C] -> the amaxes, float32 [...] each."""
    return wiring.define(
        "jaxlowprec_amax",
        inline=True,
        rule=wiring.ShardingRule(
            f"{amaxes.lines} c -> {', '.join(['...'] * amaxes.count)}",
            reductions=amaxes.reductions,
            whole=amaxes.whole,
            **amaxes.sizes,
        ),
        outputs=lambda x: amaxes.outputs(x),
        reference=lambda x: amaxes.reference(x),
        native=lambda x: native_call(amaxes, amaxes.matrix(x)),
        on_one_device={"tpu": functools.partial(tpu_call, amaxes)},
        collective=largest_over,
        **choose("quantize", implementation),
    )


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
        implementation: None, "ffi", "portable" or "reference": see `quantize`.
        rows_split: x is [..., S, R, C], one tensor whose rows are split into S parts of whole rotations.
    """
    wanted = Amaxes(plain, hadamard, rows_split).of_rows(x.shape[-2])
    return list(amax_op(wanted, implementation)(jax.lax.stop_gradient(x)))
