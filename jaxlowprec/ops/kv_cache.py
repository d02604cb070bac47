"""The formats of caches of keys and values, for generation and for full passes that train what is served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.formats import Float8Tensor, Format
from jaxlowprec.arrays.row_formats import Float8Rows, Int8Rows
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.exact import e4m3_value, nearest, quotient
from jaxlowprec.ops.fake_quantize import fake_quantize
from jaxlowprec.ops.rounding import from_bits, magnitude_bits

FLOATS = ("float32", "bfloat16")
EIGHT_BITS: dict[str, Format] = {"float8_e4m3fn": Float8Rows(rule="cache"), "int8": Int8Rows(rule="cache")}
"""Formats that the names of 8-bit types stand for: vLLM's `fp8_per_token_head` and `int8_per_token_head`."""
_LARGEST, _NAN = 3e38, 0x7F
CACHES = (*FLOATS, *EIGHT_BITS)
"""The names that stand for a KVCache whose keys and values are alike."""


@dataclasses.dataclass(frozen=True)
class KVCache:
    """The formats in which a cache keeps keys and values.

    In 8 bits each token's key, and each value, has a float32 scale in each head, so nothing is calibrated, and a
    token's codes depend on no other token. With heads of 64 a cache takes 0.53 of the memory that bfloat16 needs.

        kept = jlp.KVCache()
        with jlp.autocast(recipe, kv_cache=kept):  # the decoder's full pass reads what the cache keeps
            ...
        Generator(decoder, places, kept)

    With `Float8Tensor()` scales are static, one for a layer or one for each of its heads, as in vLLM's `fp8`:
    `jaxlowprec.kv.calibrate(decoder, tokens)` finds them and puts them into the decoder.

    Arguments:
        key: `Float8Rows` or `Int8Rows` with float32 scales; `Float8Tensor()` of E4M3; or "float32" or "bfloat16" for
            keys that are only cast. The default is the format of vLLM's `fp8_per_token_head`; `Int8Rows(rule="cache")`
            that of `int8_per_token_head`.
        value: of values; None: as of keys.

    Raises:
        ValueError: another format, or scales in 16 bits.

    Source: vLLM 0.32; numerics.md 18.

    >>> KVCache().value
    Float8Rows(element='e4m3', scale_dtype='float32', least_scale=0.0, rule='cache')
    """

    key: Format | str = EIGHT_BITS["float8_e4m3fn"]
    value: Format | str | None = None

    def __post_init__(self) -> None:
        if self.value is None:
            object.__setattr__(self, "value", self.key)
        for name in ("key", "value"):
            given: Any = getattr(self, name)
            by_rows = isinstance(given, Float8Rows | Int8Rows) and given.scale_dtype == "float32"
            if not by_rows and not is_static(given) and not (isinstance(given, str) and given in FLOATS):
                raise ValueError(
                    f"KVCache: {name}={shown(given)}; needs a scale for each token and head, such as "
                    f'Float8Rows(rule="cache") or Int8Rows(rule="cache"); static scales: Float8Tensor(); or one of '
                    f"{', '.join(map(repr, FLOATS))}"
                )

    @property
    def static(self) -> tuple[str, ...]:
        """The names "key" and "value", as far as these have static scales."""
        return tuple(name for name in ("key", "value") if is_static(getattr(self, name)))

    def __str__(self) -> str:
        alike = self.key == self.value
        return f"KVCache({self.key})" if alike else f"KVCache({self.key}, {self.value})"

    @classmethod
    def of(cls, who: str, cache: Any) -> KVCache:
        """A KVCache as it is, or the one that a name of `CACHES` stands for. Raises ValueError."""
        if isinstance(cache, KVCache):
            return cache
        if isinstance(cache, str) and cache in CACHES:
            return cls(EIGHT_BITS.get(cache, cache))
        raise ValueError(f"{who}: cache={shown(cache)}; needs one of {', '.join(CACHES)}, or a KVCache")

    def as_kept(
        self,
        k: Float[Array, "*B head"],
        v: Float[Array, "*B value"],
        *,
        k_scale: Float[Array, "..."] | None = None,
        v_scale: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "*B head"], Float[Array, "*B value"]]:
        """Keys and values as a cache's reader sees them, with a straight-through derivative.

        For a model's full pass: keys after the rotary embedding, and values, before attention reads them.

        Arguments:
            k, v: [..., features], each the key or value of one token in one head; bfloat16, float16 or float32.
            k_scale, v_scale: static scales, where the format has them: float32, positive, of a shape that broadcasts
                against k and v. What is beyond 448 scales saturates.

        Returns:
            float32 arrays of the same shapes. Attention that reads them in less precision differs from one that scales
            codes in float32.

        Raises:
            TypeError: they are not such arrays.
            ValueError: a static scale is missing, or given to a format without.

        >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
        >>> k, v = jlp.KVCache(jlp.Int8Rows(rule="cache"), "bfloat16").as_kept(jnp.array([127, 2.5]), jnp.ones(2))
        >>> k
        Array([127.,   3.], dtype=float32)
        """
        return _as_kept("k", k, self.key, k_scale), _as_kept("v", v, self.value, v_scale)


def is_static(fmt: Any) -> bool:
    """Whether keys or values in a format of `KVCache` have static scales."""
    return isinstance(fmt, Float8Tensor) and fmt.element == "e4m3"


def _as_kept(name: str, rows: jax.Array, fmt: Any, scale: Any) -> jax.Array:
    who = "KVCache.as_kept"
    rows = float_array(who, name, rows)
    if is_static(fmt) != (scale is not None):
        what = "is missing" if scale is None else "was given"
        raise ValueError(f"{who}: {name}_scale {what}; {name} is kept as {fmt}")
    if isinstance(fmt, str):
        return rows.astype(fmt).astype(jnp.float32)
    if scale is not None:
        return _by_static_scale(rows.astype(jnp.float32), float_array(who, f"{name}_scale", scale))
    return fake_quantize(rows.astype(jnp.float32), fmt)


def static_codes(rows: Float[Array, "*B head"], scale: Float[Array, "..."]) -> jax.Array:
    """The bytes, uint8, of E4M3_rne_sat(fl(x / scale)), as vLLM's caches of type `fp8` hold them; NaN stays NaN.

    Zeros have the code 0 whatever their sign.
    """
    bits = magnitude_bits(rows)
    steps = quotient(jnp.minimum(from_bits(bits), _LARGEST), scale)
    code = nearest(steps, Float8Tensor().numbers)
    negative = (jax.lax.bitcast_convert_type(rows, jnp.uint32) >> 31).astype(jnp.int32)
    code = jnp.where(code == 0, 0, code | negative << 7)
    return jnp.where(jnp.isnan(rows) | jnp.isnan(scale), _NAN, code).astype(jnp.uint8)


@jax.custom_jvp
def _by_static_scale(rows: jax.Array, scale: jax.Array) -> jax.Array:
    code = static_codes(rows, scale)
    value = e4m3_value(code & 0x7F) * jnp.where(code >> 7, -scale, scale)
    return jnp.where(code == _NAN, jnp.nan, value)


@_by_static_scale.defjvp
def _straight_through(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    return _by_static_scale(*primals), tangents[0]
