"""Which amaxes are wanted of an array: for the amax op, and for ops that give the amaxes of their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.amax import reference
from jaxlowprec.ops.rounding import from_bits, magnitude_bits
from jaxlowprec.ops.split_rows import merged_rows


def largest_over(amax, axes):
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
        """Those of arrays with that many rows."""
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
        """For a native call."""
        mask = np.uint32(self.hadamard.mask if self.hadamard else 0).view(np.int32)
        return {"plain": self.plain, "rotated": self.hadamard is not None, "sign_mask": mask}

    def outputs(self, x: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of those of an array like x."""
        return [(x.shape[: -3 if self.rows_split else -2], jnp.float32)] * self.count

    def matrix(self, x: jax.Array) -> jax.Array:
        """x as [..., R, C]: one tensor in one matrix."""
        return merged_rows(x) if self.rows_split else x

    def reference(self, x: jax.Array) -> list[jax.Array]:
        """Those of x, in pure JAX."""
        if not self.count:
            return []
        x = self.matrix(x)
        plain = [reference.amax(x)] if self.plain else []
        return plain + ([reference.rotated_amax(x, self.hadamard)] if self.hadamard else [])


NO_AMAXES = Amaxes(plain=False)
