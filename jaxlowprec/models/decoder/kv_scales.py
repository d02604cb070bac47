"""Static scales of a decoder's caches: found by full passes over a text, and kept in its layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import jaxlowprec as jlp
from jaxlowprec.arguments import a_flag, array, shown
from jaxlowprec.models.decoder.model import Decoder
from jaxlowprec.ops.kv_cache import KVCache

LARGEST = 448.0


@dataclasses.dataclass(frozen=True)
class _Watched(KVCache):
    """A cache that keeps all numbers and notes the largest of each head."""

    found: list[tuple[jax.Array, jax.Array]] = dataclasses.field(default_factory=list, compare=False)

    def as_kept(self, k: jax.Array, v: jax.Array, **_: Any) -> tuple[jax.Array, jax.Array]:
        """See `KVCache`; k and v are [batch, heads, time, features]."""
        self.found.append((jnp.abs(k).max(axis=(0, 2, 3)), jnp.abs(v).max(axis=(0, 2, 3))))
        return k, v


def scale_of(amax: Float[Array, "*A"], *, power_of_two: bool = True) -> Float[Array, "*A"]:
    """Static scales by which numbers up to these do not saturate: amax / 448, or the power of two next above it.

    By a power of two a kernel that divides gives the codes of one that multiplies by the reciprocal.

    Arguments:
        amax: magnitudes, float32. Zeros have the scale 1.
        power_of_two: False for amax / 448 itself.

    Raises:
        TypeError: amax is no array of numbers.
        ValueError: a magnitude is negative or not finite.

    Source: numerics.md 18.

    >>> scale_of(np.float32([448, 449, 0])).tolist()
    [1.0, 2.0, 1.0]
    """
    a_flag("scale_of", power_of_two=power_of_two)
    try:
        given = np.asarray(amax).astype(np.float32, casting="same_kind")
    except (TypeError, ValueError):
        raise TypeError(f"scale_of: amax={shown(amax)}; needs an array of float32") from None
    if not (np.isfinite(given).all() and (given >= 0).all()):
        raise ValueError(f"scale_of: amax={shown(amax)}; needs finite magnitudes, 0 or more")
    exact = np.where(given == 0, np.float32(1), given / np.float32(LARGEST))
    if power_of_two:
        mantissa, exponent = np.frexp(exact)
        exact = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    return jnp.asarray(np.maximum(exact, np.finfo(np.float32).tiny), jnp.float32)


def calibrate(
    decoder: Decoder, tokens: Any, *, per_head: bool = False, power_of_two: bool = True
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Finds the static scales of each layer's keys and values, and puts them into the decoder.

    Full passes in high precision note the largest key, after the rotary embedding, and the largest value. Scales become
    stale while a model trains: calibrate anew before weights are published.

    Arguments:
        decoder: its layers get `k_scale` and `v_scale`, see `Attention`.
        tokens: int32 [batch, time], or several such arrays.
        per_head: a scale for each head of keys instead of one for the layer.
        power_of_two: see `scale_of`.

    Returns:
        The scales of keys and of values, float32 [1] or [key_heads], by the names of layers, such as
        "layers.0.self_attn".

    Raises:
        TypeError: it is no decoder, or tokens are no integers.
        ValueError: there are no tokens, or keys or values are not finite.
    """
    who = "kv.calibrate"
    if not isinstance(decoder, Decoder):
        raise TypeError(f"{who}: decoder is a {type(decoder).__name__}; needs a Decoder")
    a_flag(who, per_head=per_head, power_of_two=power_of_two)
    batches = [array(who, "tokens", b) for b in (tokens if _is_several(tokens) else [tokens])]
    for batch in batches:
        if batch.ndim != 2 or not jnp.issubdtype(batch.dtype, jnp.integer):
            raise TypeError(f"{who}: tokens are {batch.dtype}{list(batch.shape)}; needs integers [batch, time]")
    if not sum(batch.size for batch in batches):
        raise ValueError(f"{who}: tokens are empty; needs a text like those that the cache will hold")
    graph, state = nnx.split(decoder)
    amaxes = [_largest(graph, state, batch) for batch in batches if batch.size]
    amaxes = jax.tree.map(lambda *each: np.max([np.asarray(one) for one in each], axis=0), *amaxes)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for layer, pair in zip(decoder.layers, amaxes, strict=True):
        attention: Any = layer.self_attn
        for kind, amax in zip(("key", "value"), pair, strict=True):
            if not np.isfinite(amax).all():
                raise ValueError(f"{who}: {attention.name} has {kind}s that are not finite; no scale holds them")
        scales = [scale_of(a if per_head else a.max(keepdims=True), power_of_two=power_of_two) for a in pair]
        attention.k_scale, attention.v_scale = (nnx.data(jlp.nnx.KVScale(scale)) for scale in scales)
        found[attention.name] = np.asarray(scales[0]), np.asarray(scales[1])
    return found


def check_scales(who: str, decoder: Decoder, kept: KVCache) -> None:
    """Raises ValueError unless each layer has the static scales that a cache needs."""
    for layer in decoder.layers if kept.static else ():
        attention = layer.self_attn
        for name, scale in attention.static(kept).items():
            values = np.asarray(scale)
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise ValueError(
                    f"{who}: {attention.name}.{name[0]}_scale is {values.tolist()}; needs finite numbers above 0: run "
                    "jaxlowprec.kv.calibrate(decoder, tokens)"
                )


def _is_several(tokens: Any) -> bool:
    return isinstance(tokens, Iterable) and not hasattr(tokens, "ndim")


@functools.partial(jax.jit, static_argnums=0)
def _largest(graph: Any, state: Any, tokens: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """The largest key and value of each layer's heads, float32 [key_heads]."""
    watched = _Watched("float32")
    with jlp.autocast(kv_cache=watched):
        nnx.merge(graph, state).hidden(tokens)
    return [(k.astype(jnp.float32), v.astype(jnp.float32)) for k, v in watched.found]
