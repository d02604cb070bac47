"""Codes of optimizer states: 8 bits for each element and an exponent byte for each 32 of a row (numerics.md 19).

Every byte is made by integer operations on the bits of float32: no division, no rounding of a sum, nothing that a
compiler could contract.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import a_flag, one_of
from jaxlowprec.ops.optimizer_states import (
    BLOCK,
    POISON,
    Coded,
    decode_relative,
    encode_relative,
    largest_of_blocks,
    numbers,
    of_each,
    parts,
)
from jaxlowprec.ops.rounding import INFINITY_BITS, magnitude_bits
from jaxlowprec.optim.draws import half_words, sharding_by
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of

_U32 = jnp.uint32


class StateCode(Protocol):
    """How a leaf of an optimizer's state is stored: `RelativeCode` or `FixedCode`."""

    @property
    def rounding(self) -> str:
        """The rounding of updated states: "nearest" or "stochastic"."""

    @property
    def dtype(self) -> Any:
        """The dtype of codes."""

    def encode(self, x: jax.Array, words: Any = None) -> Coded:
        """The codes and exponents of x [..., C]."""

    def decode(self, q: Coded, dtype: Any = jnp.float32) -> jax.Array:
        """The numbers [..., C] of codes and exponents."""


@dataclasses.dataclass(frozen=True)
class RelativeCode:
    """Numbers whose error is relative to themselves: floats of 8 bits beside their block's exponent.

    For states that are divided by the root of a second moment, and for the second moment itself. Three bits are those
    of a mantissa. The others are an exponent, below that of the block's largest element: 31 octaves without a sign, 15
    with one.

    Arguments:
        signed: a sign and 7 bits; False: 8 bits for numbers that are not negative. A negative one is an error: it makes
            its block NaN.
        rounding: "stochastic", with 16 random bits for each element, or "nearest". With nearest, averages of slow decay
            stand still (numerics.md 19).

    Raises:
        TypeError, ValueError: an argument is none of these.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> code = jlp.optim.RelativeCode(signed=False, rounding="nearest")
    >>> q = code.encode(jnp.array([1.0, 0.3, 1e-30, 0.0]))
    >>> q.codes.tolist(), q.exponents.tolist()
    ([248, 234, 1, 0], [127])
    >>> code.decode(q).tolist()  # a second moment never becomes 0
    [1.0, 0.3125, 5.238689482212067e-10, 0.0]
    """

    signed: bool
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        a_flag("RelativeCode", signed=self.signed)
        one_of("RelativeCode", "rounding", self.rounding, "nearest", "stochastic")

    def __str__(self) -> str:
        return f"{'signed' if self.signed else 'unsigned'} float8 1x{BLOCK}, {self.rounding}"

    @property
    def dtype(self) -> Any:
        """The dtype of codes."""
        return jnp.uint8

    def encode(self, x: jax.Array, words: Any = None) -> Coded:
        """The codes and exponents of x [..., C], bfloat16 or float32.

        Arguments:
            words: uint32 [2], of a key, for stochastic rounding; None rounds to nearest.
        """
        whole = resharded(x, sharding_by(x, BLOCK))
        drawn = half_words(whole, words) if words is not None and self.rounding == "stochastic" else None
        codes, exponents = encode_relative(whole, self.signed, drawn)
        return Coded(resharded(codes, sharding_of(x)), exponents)

    def decode(self, q: Coded, dtype: Any = jnp.float32) -> jax.Array:
        """The numbers [..., C] of codes and exponents, bfloat16 or float32: both hold them exactly."""
        return decode_relative(q, self.signed, dtype)


@dataclasses.dataclass(frozen=True)
class FixedCode:
    """Numbers whose error is relative to the block's largest: integers from -127 to 127, times a power of two.

    For states that are not divided by a second moment, such as Muon's momentum.

    Arguments:
        rounding: "stochastic", with 16 random bits for each element, or "nearest".

    Raises:
        ValueError: the rounding is neither.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> code = jlp.optim.FixedCode("nearest")
    >>> q = code.encode(jnp.array([1.0, -0.3, 1e-30, 0.0]))
    >>> q.codes.tolist(), q.exponents.tolist()
    ([64, -19, 0, 0], [127])
    >>> code.decode(q).tolist()
    [1.0, -0.296875, 0.0, 0.0]
    """

    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        one_of("FixedCode", "rounding", self.rounding, "nearest", "stochastic")

    def __str__(self) -> str:
        return f"int8 1x{BLOCK}, {self.rounding}"

    @property
    def dtype(self) -> Any:
        """The dtype of codes."""
        return jnp.int8

    def encode(self, x: jax.Array, words: Any = None) -> Coded:
        """The codes and exponents of x [..., C], bfloat16 or float32.

        Arguments:
            words: uint32 [2], of a key, for stochastic rounding; None rounds to nearest, ties away from zero.
        """
        given, (b, negative) = x, parts(x := resharded(x, sharding_by(x, BLOCK)))
        # The next exponent if the largest is above 127 units: limited to 127, a slow average could not grow past it.
        largest = largest_of_blocks(b)
        e = jnp.where(largest < INFINITY_BITS, jnp.minimum((largest + 0x1FFFF) >> 23, POISON - 1), POISON)
        exponent = b >> 23
        significand = jnp.where(exponent == 0, _U32(0), (b & 0x7FFFFF) | 0x800000)
        shift = 17 + of_each(e, x.shape[-1]).astype(_U32) - exponent
        significand = significand >> jnp.clip(shift.astype(jnp.int32) - 31, 0, 31).astype(_U32)
        shift = jnp.minimum(shift, 31)
        half = _U32(1) << (shift - 1)
        if words is not None and self.rounding == "stochastic":
            half = (2 * half_words(x, words) + 1) << (shift - 17)
        magnitude = jnp.minimum((significand + half) >> shift, 127).astype(jnp.int32)
        magnitude = jnp.where(of_each(e, x.shape[-1]) == POISON, 0, magnitude)
        code = jnp.where(negative, -magnitude, magnitude).astype(jnp.int8)
        return Coded(resharded(code, sharding_of(given)), e.astype(jnp.uint8))

    def decode(self, q: Coded, dtype: Any = jnp.float32) -> jax.Array:
        """The numbers [..., C] of codes and exponents, bfloat16 or float32: both hold them exactly."""
        code = q.codes.astype(jnp.int32)
        b = magnitude_bits(code.astype(jnp.float32)).astype(jnp.int32)
        exponent = (b >> 23) - 6 + of_each(q.exponents, code.shape[-1]) - 127
        b = jnp.where((code == 0) | (exponent <= 0), 0, (exponent << 23) | (b & 0x7FFFFF)).astype(_U32)
        return numbers(b | jnp.where((code < 0) & (b != 0), _U32(1 << 31), _U32(0)), q, dtype)
