"""Tapes of fewer bytes: int16 and uint8 beside int32.

-1, which chooses afresh, is 255 in uint8. With 256 experts 255 is an expert, too, but if k is 2 or more, a row of only
255 is not a choice, as the experts of a row differ. With k = 1 a tape of uint8 takes 254 experts; 254 marks invalid
rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import a_dtype

AFRESH = -1
"""Sentinel of a tape: the token chooses its experts afresh. A row is all AFRESH or has none."""

_INVALID = -2  # in any dtype not an expert, or one that stands twice in its row
DTYPES = ("int32", "int16", "uint8")


def is_tape_dtype(dtype: Any) -> bool:
    """Whether a tape may have this dtype."""
    return str(dtype) in DTYPES


def tape_dtype(who: str, dtype: Any) -> np.dtype:
    """The dtype of a tape. Raises TypeError or ValueError if tapes do not have it."""
    found = a_dtype(who, "dtype", dtype)
    if not is_tape_dtype(found):
        raise ValueError(f"{who}: dtype={found}; needs int32, int16 or uint8")
    return found


def check_fits(who: str, dtype: Any, num_experts: int, k: int) -> None:
    """Raises ValueError unless every choice of k experts can stand in a tape of this dtype."""
    most = {"int32": 2**31 - 1, "int16": 2**15, "uint8": 256 if k > 1 else 254}[str(dtype)]
    if num_experts > most:
        raise ValueError(
            f"{who}: {num_experts} experts with k={k} and a tape of {dtype}, which takes {most}; needs "
            f"{'int16' if num_experts <= 2**15 else 'int32'}"
        )


def fetched(tape: Any) -> Any:
    """The tape in the device's memory, if it is a JAX array in the host's."""
    if isinstance(tape, jax.Array) and jax.typeof(tape).memory_space == jax.memory.Space.Host:
        return jax.device_put(tape, jax.memory.Space.Device)
    return tape


def widened(tape: Any) -> Any:
    """The int32 numbers of a tape, a NumPy or a JAX array."""
    xp, tape = np if isinstance(tape, np.ndarray) else jnp, fetched(tape)
    if tape.dtype == np.int32:
        return tape
    wide = tape.astype(np.int32)
    if tape.dtype == np.uint8:
        wide = xp.where((wide == 255).all(-1, keepdims=True), AFRESH, wide)
    return wide


def narrowed(tape: Any, dtype: np.dtype, num_experts: int) -> Any:
    """The numbers of int32 as another dtype that takes so many experts. Invalid rows stay invalid."""
    if dtype == np.int32:
        return tape
    xp = np if isinstance(tape, np.ndarray) else jnp
    replayed, afresh = (rows[..., None] for rows in replayable(tape, num_experts))
    return xp.where(replayed, tape, xp.where(afresh, AFRESH, _INVALID)).astype(dtype)


def replayable(tape: Any, num_experts: int) -> tuple[Any, Any]:
    """Masks of the rows of an int32 tape that are a choice of experts, and of those that choose afresh.

    All other rows are errors. `tape` is a NumPy or a JAX array.
    """
    xp = np if isinstance(tape, np.ndarray) else jnp
    ordered = xp.sort(tape, axis=-1)
    different = (ordered[..., 1:] != ordered[..., :-1]).all(-1)
    chosen = different & ((tape >= 0) & (tape < num_experts)).all(-1)
    return chosen, (tape == AFRESH).all(-1)
