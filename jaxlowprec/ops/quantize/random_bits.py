"""Random bits of stochastic rounding: two uint32 words of a key for each slice, and Philox4x32-10, which makes bytes of
them (numerics.md 4; Salmon et al., SC 2011).
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arguments import as_array, shown
from jaxlowprec.ops.checks import choose, without_kernels
from jaxlowprec.ops.rounding import magnitude_bits

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Any, ...]
"""uint32 arrays, of JAX or of NumPy, whose shapes broadcast."""
_STREAM_OF_LONGER_KEYS = 13
_KEYLESS = np.asarray((0x6A6C7021, 0x6E766634), np.uint32)


def _multiply_wide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low 32 bits of a * b, by 16-bit halves: there are no 64-bit integers by default."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16), a * jnp.uint32(b)


def _round(_: int, state: tuple[Words, Words]) -> tuple[Words, Words]:
    """The counter and the key after one round."""
    (c0, c1, c2, c3), (k0, k1) = state
    high0, low0 = _multiply_wide(c0, _MULTIPLIERS[0])
    high1, low1 = _multiply_wide(c2, _MULTIPLIERS[1])
    counter = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return counter, (k0 + jnp.uint32(_KEY_STEPS[0]), k1 + jnp.uint32(_KEY_STEPS[1]))


def ten_rounds(counter: Words, key: Words, unroll: int = 1) -> Words:
    """`philox4x32` as a loop, of which so many rounds are one turn."""
    return jax.lax.fori_loop(0, 10, _round, (counter, key), unroll=unroll)[0]


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds on four counter words with a key of two.

    On a CPU they are a loop: it compiles several times faster than its rounds one after the other, and XLA would fuse
    those into a kernel that computes most of them again and again. On a GPU each round of a loop would be a kernel.
    """
    nothing = functools.reduce(jnp.bitwise_or, (*counter, *key)) & 0  # shaped, sharded and varying as the results are
    counter = tuple(c | nothing for c in counter)
    unrolled = functools.partial(ten_rounds, unroll=10)
    return jax.lax.platform_dependent(counter, key, cpu=ten_rounds, default=unrolled)


def words_at(
    words: jax.Array | np.ndarray,
    first: jax.Array | np.ndarray | int = 0,
    second: jax.Array | np.ndarray | int = 0,
    third: jax.Array | np.ndarray | int = 0,
    *,
    stream: int,
) -> jax.Array:
    """Two further words that follow from those of a key: uint32 [..., 2].

    Arguments:
        words: uint32 [..., 2].
        first, second, third: uint32, numbers that tell the results apart; their shapes and that of the keys broadcast.
        stream: one for each purpose, for the same reason.
    """
    return _two_words(
        words, *(np.uint32(c) if isinstance(c, int) else c for c in (first, second, third)), stream=stream
    )


@functools.partial(jax.jit, static_argnames="stream")
def _two_words(words: Any, *counter: Any, stream: int) -> jax.Array:
    shape = np.broadcast_shapes(words.shape[:-1], *map(np.shape, counter))
    counter = tuple(jnp.broadcast_to(c, shape) for c in counter)
    return _words_op(stream)(jnp.broadcast_to(words, (*shape, 2)), *counter)[0]


@functools.cache
def _words_op(stream: int) -> wiring.Op:
    """Keys [..., 2] and three words of counters [...] -> words [..., 2].

    CPUs have a kernel: XLA would compile the rounds anew for each product that rounds stochastically.
    """

    def by_reference(words: jax.Array, *counter: jax.Array) -> Sequence[jax.Array]:
        four = philox4x32((*counter, np.uint32(stream)), (words[..., 0], words[..., 1]))
        return [jnp.stack(four[:2], axis=-1)]

    def by_kernel(words: jax.Array, *counter: jax.Array) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(words.shape, words.dtype)]
        return jax.ffi.ffi_call("jaxlowprec_random_words", results)(words, *counter, stream=np.int32(stream))

    return wiring.define(
        "jaxlowprec_random_words",
        inline=True,
        rule=wiring.ShardingRule("... two, ..., ..., ... -> ... two", whole=("two",)),
        outputs=lambda words, *_: [(words.shape, jnp.uint32)],
        reference=by_reference,
        native=by_kernel,
        **without_kernels(choose("words_at", None), "words", "cuda"),
    )


class Draws(NamedTuple):
    """The arguments of the generator that draws the random bits of an array [..., R, C].

    Attributes:
        words: uint32 [..., 2], of a key.
        lines: uint32 [R], or [..., R]: the rows' indices in the whole array.
        sixteens: uint32 [ceil(C/16)], or with `...`: the indices in the whole array of each 16 elements of a row.
        stream: 0 where rows are quantised, 1 where columns are; for bits of block scales 2 and 3.
    """

    words: jax.Array
    lines: jax.Array
    sixteens: jax.Array
    stream: int


def random_words_of(draws: Draws) -> jax.Array:
    """uint32 [..., R, ceil(C/16), 4]: the words of one call for each row and sixteen."""
    words, lines, sixteens, stream = draws
    key = (words[..., 0, None, None], words[..., 1, None, None])
    counter = (sixteens[..., None, :], lines[..., :, None], np.uint32(stream), np.uint32(0))
    return jnp.stack(philox4x32(counter, key), axis=-1)


def random_bytes(draws: Draws) -> jax.Array:
    """uint8 [..., R, ceil(C/16), 16]."""
    words = random_words_of(draws)
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    return (words[..., None] >> shifts).astype(jnp.uint8).reshape(*words.shape[:-1], 16)


def random_words(who: str, rounding: str, key: Any, batch: tuple[int, ...]) -> jax.Array | None:
    """The two uint32 words of `key=` for each slice of the batch axes, or None for nearest rounding.

    `rounding` is checked: "nearest", "stochastic" or "eden".
    """
    if rounding == "nearest":
        if key is not None:
            raise ValueError(f'{who}: a key was given but rounding is "nearest"; pass rounding="stochastic" or no key')
        return None
    if key is None:
        raise ValueError(f'{who}: rounding="{rounding}" needs key=, such as jax.random.key(0)')
    return key_words(who, key, batch)


def check_key(who: str, key: Any, argument: str = "key") -> None:
    """Raises TypeError unless it is an array, as keys are, or None."""
    if key is not None and not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"{who}: {argument}={shown(key)}; needs a JAX key such as jax.random.key(0)")


def folded(who: str, key: Any, number: int) -> jax.Array:
    """`jax.random.fold_in`. Raises TypeError unless it is one key."""
    check_key(who, key)
    try:
        return jax.random.fold_in(key, number)
    except (TypeError, ValueError):
        raise TypeError(f"{who}: key={shown(key)}; needs one JAX key such as jax.random.key(0)") from None


def key_words(who: str, key: Any, batch: tuple[int, ...], argument: str = "key") -> jax.Array:
    """The two uint32 words of a key, or of one key per slice, as [*batch, 2]. `argument`: what it was given as.

    Keys of JAX's other generators, such as "rbg" and "unsafe_rbg", have four: two are made of them (numerics.md 4).
    """
    check_key(who, key, argument)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else as_array(key) if key.dtype == np.uint32 else key
    if words.dtype == jnp.uint32 and words.shape[-1:] == (4,):
        words = words_at(words[..., :2], words[..., 2], words[..., 3], stream=_STREAM_OF_LONGER_KEYS)
    if words.dtype != jnp.uint32 or words.shape[-1:] != (2,) or words.shape[:-1] not in ((), batch):
        raise TypeError(
            f"{who}: {argument} has dtype {key.dtype} and shape {key.shape}; needs one JAX key, or one for each slice "
            f"of the batch axes {batch}"
        )
    return jnp.broadcast_to(words, (*batch, 2))


def slice_words(words: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Words for each slice of the batch axes: one key would give all of them the same bits."""
    if not batch:
        return words
    index = jnp.arange(math.prod(batch), dtype=jnp.uint32)
    return words_at(words, index, stream=1).reshape(*batch, 2)


def further_words(words: jax.Array, stream: int = 3) -> jax.Array:
    """Other words [..., 2] that follow from those of a key: two operands of one GEMM must not share their bits.

    `stream`: 3 for the input, 4 for the weight, 9 to 11 for the sums of fprop, dgrad and wgrad.
    """
    return words_at(words, stream=stream)


class Randomness(NamedTuple):
    """The source of the random bits of a product's operands, for their rounding or for the signs of their rotation:
    exactly one of the two.

    Attributes:
        words: of a key, uint32 [..., 2]; see `slice_words`.
        seed: uint32 [], see `keyless_seed`, for bits that come from the operand itself.
    """

    words: jax.Array | None = None
    seed: jax.Array | np.ndarray | None = None

    def words_for(self, amax: Callable[[], jax.Array]) -> jax.Array:
        """The two words of each slice of the tensor; its amax is asked for only if there is no key."""
        if self.words is not None:
            return self.words
        assert self.seed is not None
        return keyless_words(amax(), self.seed)

    def words_of_input(self, amax: Callable[[], jax.Array]) -> jax.Array:
        """Random words for quantising the input. Without a key, products that share the input get the same words."""
        return keyless_words(amax(), np.zeros((), np.uint32)) if self.words is None else further_words(self.words)


def keyless_seed(rows: int, columns: int, name: str) -> np.ndarray:
    """uint32 [], of a tensor's shape and its layer's name.

    It is an operand of the traced function and not a static argument: layers that differ only in their names are traced
    once.
    """
    return np.asarray(zlib.crc32(repr(((rows, columns), name)).encode()), np.uint32)


def keyless_words(amax: jax.Array, seed: jax.Array | np.ndarray) -> jax.Array:
    """A 64-bit mix of the bits of a tensor's amax [...] and a seed, for each slice: [..., 2]."""
    bits = magnitude_bits(amax)
    index = jax.lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
    return words_at(_KEYLESS, bits, seed, index, stream=2)
