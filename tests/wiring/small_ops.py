"""Small ops that tell on the wiring.

`block_sums` returns, besides a result to check, the size of the piece that each device was given, and its sign says
which body ran: native (negative) or reference.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.wiring.defining import ShardingRule, define

BLOCK = 4
RULE = ShardingRule("... r (c k), ..., r -> ... r c, ... r c", k=BLOCK)


def outputs(x, *_):
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return [(shape, jnp.float32), (shape, jnp.int32)]


def body(sign):
    """Sums of blocks along rows, times the slice's gain, plus the row's number; and the piece seen."""

    def run(x, gain, rows):
        sums = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).sum(-1)
        seen = 1000 * sums.shape[-2] + sums.shape[-1]
        return [sums * gain[..., None, None] + rows[:, None], jnp.full(sums.shape, sign * seen, jnp.int32)]

    return run


block_sums = define("block_sums", rule=RULE, outputs=outputs, reference=body(1), native=body(-1), platforms=("cpu",))
reference_only = define("block_sums_reference", rule=RULE, outputs=outputs, reference=body(1))


def integers(shape, seed=0):
    """float32 integers, so that sums are exact in any order."""
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float32)


def operands(shape):
    return integers(shape), integers(shape[:-2], 1), np.arange(shape[-2], dtype=np.float32)


def assert_right(results, args, piece=None):
    """The values, and that the native body saw pieces of (rows, blocks)."""
    x, gain, rows = map(np.asarray, args)
    sums = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).sum(-1)
    np.testing.assert_array_equal(np.asarray(results[0]), sums * gain[..., None, None] + rows[:, None])
    if piece:
        assert set(np.unique(results[1])) == {-(1000 * piece[0] + piece[1])}


def piece_of(x):
    """The (rows, blocks) of x that a device holds."""
    rows, columns = x.sharding.shard_shape(x.shape)[-2:]
    return rows, columns // BLOCK


def tile_outputs(x):
    *batch, rows, columns = x.shape
    return [((*batch, columns, rows), x.dtype), ((*batch, rows // BLOCK, columns // BLOCK), x.dtype)]


def sums_of_tiles(x):
    *batch, rows, columns = x.shape
    return [x.mT, x.reshape(*batch, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).sum((-3, -1))]


tiles = define(
    "tiles",
    rule=ShardingRule("... (r k) (c k) -> ... (c k) (r k), ... r c", k=BLOCK),
    outputs=tile_outputs,
    reference=sums_of_tiles,
)


def matrix_outputs(x, *_):
    return [(x.shape[:-2], jnp.float32)]


maximum = define(
    "maximum",
    rule=ShardingRule("... r c -> ...", reductions=("r", "c")),
    outputs=matrix_outputs,
    reference=lambda x: [jnp.max(x, axis=(-2, -1))],
    collective=jax.lax.pmax,
)
total = define(
    "total",
    rule=ShardingRule("... r c -> ...", reductions=("r", "c")),
    outputs=matrix_outputs,
    reference=lambda x: [x.sum((-2, -1))],
)
biased_total = define(
    "biased_total",
    rule=ShardingRule("... r c, ... -> ...", reductions=("r", "c")),
    outputs=matrix_outputs,
    reference=lambda x, bias: [x.sum((-2, -1)) + bias],
    when_reduced=lambda add_up, x, bias: [add_up(x.sum((-2, -1))) + bias],
)
doubled_with_maximum = define(
    "doubled_with_maximum",
    rule=ShardingRule("... r c -> ... r c, ..., ... r", reductions=("r", "c")),
    outputs=lambda x: [(x.shape, x.dtype), *matrix_outputs(x), (x.shape[:-1], x.dtype)],
    reference=lambda x: [2 * x, jnp.max(x, axis=(-2, -1)), jnp.max(x, axis=-1)],
    collective=jax.lax.pmax,
)
