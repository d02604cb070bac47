"""The places of groups of rows, from sizes that only the device knows.

    group e   rows [start(e), start(e) + count(e)), one group after the other; rows after the last are in no group
    slot      `block` rows of one group, from its first row on; group e's begin at slot e + start(e) // block

No two groups share a slot, and `rows // block + groups` slots are enough however the rows are divided. So the shape of
arrays of slots does not depend on the sizes, at the price of at most one unused slot per group.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

LEAST_TOO_LARGE = 2**31
"""The first number beyond int32."""


def cut_to_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """int32 sizes limited to 0 to `rows`, from integers of any width, which a cast would take modulo 2^32."""
    least, most = (jnp.asarray(n, sizes.dtype) for n in (0, min(rows, jnp.iinfo(sizes.dtype).max)))
    return jnp.clip(sizes, least, most).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of one matrix.

    Attributes:
        start, count: int32 [E]. Sizes below 0 count as 0, and groups end with the rows.
        rows: of the matrix, static.
    """

    start: jax.Array
    count: jax.Array
    rows: int

    @classmethod
    def of(cls, sizes: jax.Array, rows: int) -> Groups:
        """Sizes [E] and the number of rows, T."""
        cut = cut_to_rows(sizes, rows)
        if sizes.shape[0] * rows < LEAST_TOO_LARGE:
            ends = jnp.minimum(jnp.cumsum(cut), rows)
        else:  # the sum of invalid sizes may not fit int32
            ends = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, rows - a), cut)
        start = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        return cls(start, ends - start, rows)

    @property
    def ends(self) -> jax.Array:
        """int32 [E]: where each group's rows end."""
        return self.start + self.count

    def first_slots(self, block: int) -> jax.Array:
        """int32 [E]: where each group's slots begin."""
        return self.start // block + jnp.arange(self.start.shape[0], dtype=jnp.int32)

    def of_rows(self) -> jax.Array:
        """int32 [T]: the group of each row; E for a row in none."""
        return _not_above(self.ends, jnp.arange(self.rows, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots of `block` rows.

    Attributes:
        group: int32 [S], of each slot.
        within: int32 [S]: which slot of its group it is.
        row: int32 [S]: its first row.
        valid: int32 [S]: how many rows it has, 0 where it is unused.
        rows: of the matrix, static.
    """

    group: jax.Array
    within: jax.Array
    row: jax.Array
    valid: jax.Array
    rows: int

    @classmethod
    def of(cls, groups: Groups, block: int) -> Slots:
        """The slots of the groups."""
        first = groups.first_slots(block)
        slot = jnp.arange(count(groups.rows, first.shape[0], block), dtype=jnp.int32)
        group = _not_above(first, slot) - 1
        within = slot - first[group]
        row = groups.start[group] + within * block
        return cls(group, within, row, jnp.clip(groups.ends[group] - row, 0, block), groups.rows)

    def used(self) -> Slots:
        """The slots with rows first, in their order; cut to the number of rows if that is smaller."""
        most = min(self.rows, self.valid.shape[0])
        (where,) = jnp.nonzero(self.valid, size=most, fill_value=self.valid.shape[0])
        found = {
            field: getattr(self, field).at[where].get(mode="fill", fill_value=0)
            for field in ("group", "within", "row", "valid")
        }
        return dataclasses.replace(self, **found)

    def take(self, x: jax.Array, block: int) -> jax.Array:
        """x [T, C] -> [S, block, C], zeros where a slot has no row."""
        if x.shape[0] == 0:
            return jnp.zeros((self.row.shape[0], block, x.shape[1]), x.dtype)
        offset = jnp.arange(block, dtype=jnp.int32)
        rows = jnp.minimum(self.row[:, None] + offset, x.shape[0] - 1)
        there = (offset < self.valid[:, None])[..., None]
        return jnp.where(there, x[rows], jnp.zeros((), x.dtype))


def count(rows: int, experts: int, block: int) -> int:
    """How many slots there are."""
    return rows // block + experts


def _not_above(bounds: jax.Array, values: jax.Array) -> jax.Array:
    """int32: how many of the ascending bounds are not above each value.

    Each value is compared with all bounds, which are few: a binary search is a loop of launches on GPUs.
    """
    return jnp.searchsorted(bounds, values, side="right", method="compare_all").astype(jnp.int32)
