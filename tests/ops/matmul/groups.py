"""How tests divide rows into groups."""

import jax.numpy as jnp
import numpy as np

SIZES = {  # of groups; rows; columns. Sizes are operands: cases of one shape are one compilation
    "uneven": ([5, 0, 37, 1, 82, 0, 15], 140, 160),
    "rows in none": ([5, 20, 0, 0, 0, 0, 0], 140, 160),
    "one takes all": ([0, 0, 140, 0, 0, 0, 0], 140, 160),
    "single tokens": ([1] * 7, 140, 160),
    "more than there are": ([30, 100, -4, 400, 0, 0, 1], 140, 160),
    "all empty": ([0] * 7, 140, 160),
    "odd columns": ([3, 0, 20, 9, 0, 1], 33, 33),
    "no rows": ([0, 0], 0, 32),
}
WITH_ROWS = [case for case in SIZES if case != "no rows"]


def groups_of(sizes, rows):
    """(index, first row, last row + 1) of the groups that have any."""
    row, found = 0, []
    for index, size in enumerate(sizes):
        end = row + max(0, min(size, rows - row))
        if end > row:
            found.append((index, row, end))
        row = end
    return found


def words_of(groups):
    return jnp.asarray(np.random.default_rng(7).integers(0, 2**32, (groups, 2), dtype=np.uint32))
