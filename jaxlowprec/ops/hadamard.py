"""The random Hadamard transform as a differentiable function (numerics.md 3); its signs are given, or drawn from a key
(numerics.md 15).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import a_flag, as_array
from jaxlowprec.arrays.hadamard import DEFAULT_SIGNS, Hadamard
from jaxlowprec.ops.checks import Implementation, check_implementation, choose, float_array, last_axis
from jaxlowprec.ops.quantize.random_bits import key_words, philox4x32
from jaxlowprec.ops.rounding import narrowed, widened

STREAM, STREAM_OF_DGRAD = 4, 5
"""The third counter word of signs, and of those of dgrad's operands. Streams 0 and 1 round codes; 2 and 3 scales."""


def hadamard_transform(
    x: Float[Array, "*B R C"],
    *,
    axis: int = -1,
    size: int = 16,
    signs: tuple[int, ...] | Literal["drawn"] | None = DEFAULT_SIGNS,
    inverse: bool = False,
    implementation: Implementation = None,
    sign_key: jax.Array | None = None,
) -> Float[Array, "*B R C"]:
    """`((x * signs) @ H) / sqrt(size)` on each `size` consecutive elements of an axis.

    Computed in float32 and rounded once to x's dtype. Its inverse (`inverse=True`: first H, then the signs) is its
    transpose, which is also its gradient.

    Arguments:
        x: bfloat16, float16 or float32, of one or more dimensions.
        axis: the last or second last axis; its length is a multiple of `size`.
        size: 16, 32, 64, 128 or 256.
        signs: see `Hadamard`; None for plain H, "drawn" for those of `sign_key`.
        inverse: undo the transform.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.
        sign_key: of drawn signs, and only of those: see `quantize`.

    Raises:
        TypeError: x is not a float array of those dtypes, or the key is not usable.
        ValueError: an axis, size, signs, sign_key or length that does not fit.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    Source: numerics.md 3 and 15; arXiv 2509.25149, section 4.2.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x = jnp.arange(1.0, 17.0)
    >>> jlp.hadamard_transform(x)[:4]
    Array([-15.5,  -7.5,   7.5,  -0.5], dtype=float32)
    """
    who = "hadamard_transform"
    hadamard = Hadamard(size, signs)
    x = float_array(who, "x", x)
    axis = last_axis(who, axis, x.ndim)
    check_implementation(who, implementation)
    a_flag(who, inverse=inverse)
    if x.shape[axis] % size:
        raise ValueError(
            f"{who}: axis {axis} has {x.shape[axis]} elements; needs a multiple of size={size}: pad it with jnp.pad"
        )
    matrix = x[None] if x.ndim == 1 else x
    source = sign_source(who, hadamard, sign_key, matrix.shape[:-2])
    drawn = None if source is None else signs_of(source, matrix.shape[:-2])
    y = _transform(hadamard, axis == -2, inverse, implementation, matrix, drawn)
    return y[0] if x.ndim == 1 else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _transform(
    hadamard: Hadamard,
    vertical: bool,
    inverse: bool,
    implementation: Implementation,
    x: jax.Array,
    drawn: jax.Array | None,
) -> jax.Array:
    op = hadamard_op(hadamard, vertical, inverse, implementation)
    return op(x, *([] if drawn is None else [drawn]))[0]


def _forward(
    hadamard: Hadamard,
    vertical: bool,
    inverse: bool,
    implementation: Implementation,
    x: jax.Array,
    drawn: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    return _transform(hadamard, vertical, inverse, implementation, x, drawn), drawn


def _backward(
    hadamard: Hadamard,
    vertical: bool,
    inverse: bool,
    implementation: Implementation,
    drawn: jax.Array | None,
    dy: jax.Array,
) -> tuple[jax.Array, None]:
    return _transform(hadamard, vertical, not inverse, implementation, dy, drawn), None


_transform.defvjp(_forward, _backward)


@functools.cache
def hadamard_op(hadamard: Hadamard, vertical: bool, inverse: bool, implementation: Implementation) -> wiring.Op:
    """x [..., R, C] -> the same, transformed along axis -2 if `vertical`, else -1.

    Where signs are drawn, those of each matrix are a second operand, uint32 [..., 4].
    """
    rows = "... (r k) c" if vertical else "... r (c k)"
    signs, whole = (", ... words", ["words"]) if hadamard.drawn else ("", [])

    def outputs(x: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [(x.shape, x.dtype)]

    def reference(x: jax.Array, drawn: jax.Array | None = None) -> Sequence[jax.Array]:
        if not vertical:
            return [rotate(x, hadamard, inverse, drawn)]
        return [jnp.swapaxes(rotate(jnp.swapaxes(x, -1, -2), hadamard, inverse, drawn), -1, -2)]

    def native(x: jax.Array, *drawn: jax.Array) -> Sequence[jax.Array]:
        call = jax.ffi.ffi_call("jaxlowprec_hadamard", jax.ShapeDtypeStruct(x.shape, x.dtype))
        fixed = np.zeros(hadamard.size, np.int32) if hadamard.drawn else np.array(hadamard.negative, np.int32)
        return [call(x, *drawn, vertical=vertical, inverse=inverse, signs=fixed)]

    return wiring.define(
        "jaxlowprec_hadamard",
        rule=wiring.ShardingRule(f"{rows}{signs} -> {rows}", whole=whole, k=hadamard.size),
        outputs=outputs,
        reference=reference,
        native=native,
        **choose("hadamard_transform", implementation),
    )


def butterfly(each: list[jax.Array]) -> list[jax.Array]:
    """16 arrays times H, elementwise: pairs (a, b) -> (a + b, a - b) at strides 1, 2, 4 and 8."""
    for stride in (1, 2, 4, 8):
        each = [each[i ^ stride] - each[i] if i & stride else each[i] + each[i ^ stride] for i in range(16)]
    return each


def _butterfly(v: jax.Array) -> jax.Array:
    """v H along the last axis, of 16 numbers or more: pairs (a, b) -> (a + b, a - b) at strides 1, 2, 4, ...

    Strides below 16 take 16 slices: as dimensions of 1, 2 and 4 they would leave vector units idle.
    """
    n = v.shape[-1]
    parts = v.reshape(*v.shape[:-1], n // 16, 16)
    each = butterfly([parts[..., i] for i in range(16)])
    v, stride = jnp.stack(each, axis=-1).reshape(v.shape), 16
    while stride < n:
        pairs = v.reshape(*v.shape[:-1], n // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = jnp.stack([a + b, a - b], axis=-2).reshape(v.shape)
        stride *= 2
    return v


def rotate(x: jax.Array, hadamard: Hadamard, inverse: bool = False, drawn: jax.Array | None = None) -> jax.Array:
    """x [..., K] rotated along its last axis, K a multiple of the transform's size; rounded to x's dtype.

    `drawn`: for x [..., R, K] and a transform of drawn signs, those of each matrix, uint32 [..., 4].
    """
    return rotate_float32(widened(x), hadamard, inverse, x.dtype, drawn).astype(x.dtype)


def rotate_float32(
    x: jax.Array, hadamard: Hadamard, inverse: bool, dtype: Any = jnp.float32, drawn: jax.Array | None = None
) -> jax.Array:
    """`rotate` of float32 numbers, rounded to `dtype` but left in float32."""
    size = hadamard.size
    if drawn is None:
        signs = jnp.asarray(np.where(hadamard.negative, -1.0, 1.0), jnp.float32)
    else:
        signs = factors(drawn, size)[..., None, None, :]
    v = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    v = _butterfly(v if inverse else v * signs) * jnp.float32(size**-0.5)
    v = (v * signs if inverse else v).reshape(x.shape)
    return v if dtype == jnp.float32 else narrowed(v, dtype)


def rotate_padded(x: jax.Array, hadamard: Hadamard) -> jax.Array:
    """x [..., K] padded with zeros to whole transforms, then rotated."""
    pad = hadamard.padded(x.shape[-1]) - x.shape[-1]
    return rotate(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]), hadamard)


def sign_source(
    who: str, hadamard: Hadamard | None, key: Any, batch: tuple[int, ...], parts: tuple[int, ...] = ()
) -> jax.Array | None:
    """The checked `sign_key=`, of which `signs_of` makes signs; None where the rotation has no drawn signs.

    Arguments:
        key: a JAX key, or the signs of another array, uint32 [..., 4].
        batch: the batch axes.
        parts: the axis after them where rows are split into parts, which have the same signs.

    Returns:
        uint32 [..., 2] or [..., 4], whose leading axes broadcast to [*batch, *parts].

    Raises:
        TypeError: the key is not usable.
        ValueError: the key is missing, or has no use.
    """
    if hadamard is None or not hadamard.drawn:
        if key is not None:
            raise ValueError(
                f'{who}: sign_key= was given, but the rotation is {hadamard}; pass Hadamard(signs="drawn"), or no '
                "sign_key"
            )
        return None
    if key is None:
        raise ValueError(
            f"{who}: the rotation is {hadamard}, which needs sign_key=, such as jax.random.key(0): the same for both "
            "operands of a GEMM"
        )
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.shape[-1:] == (4,):
        if key.shape[:-1] not in ((), batch, (*batch, *parts)):
            raise TypeError(
                f"{who}: sign_key has the signs of batch axes {key.shape[:-1]}; needs one vector, or one for each "
                f"slice of the batch axes {batch}"
            )
        source = as_array(key)
    else:
        source = key_words(who, key, batch, "sign_key")
    return jnp.expand_dims(source, -2) if parts and source.shape[:-1] == batch else source


@functools.partial(jax.jit, static_argnames="lead")
def signs_of(source: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """The signs of each matrix [*lead, R, C], uint32 [*lead, 4]: sign i is negative where bit i % 32 of word i / 32 is
    set.

    Arguments:
        source: see `sign_source`.
    """
    if source.shape[-1] == 2:
        source = drawn_signs(source)
    return jnp.broadcast_to(source, (*lead, 4))


def drawn_signs(words: jax.Array, stream: int = STREAM) -> jax.Array:
    """The signs of the two words of a key: uint32 [..., 2] -> [..., 4]."""
    zero = jnp.zeros_like(words[..., 0])
    return jnp.stack(philox4x32((zero, zero, zero + stream, zero), (words[..., 0], words[..., 1])), axis=-1)


def factors(signs: jax.Array, size: int) -> jax.Array:
    """float32 [..., size]: 1 or -1 for each element of a transform."""
    index = np.arange(size)
    bits = signs[..., index // 32] >> np.uint32(index % 32)
    return jnp.where(bits & 1, -1.0, 1.0).astype(jnp.float32)
