"""Rotary embeddings of positions, with the scalings of published models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": (),
}
_OLDER = {"su": "longrope"}


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    Attributes:
        kind: "default"; "linear": positions divided by `factor`; "llama3": long waves are divided by it (Llama 3.1);
            "yarn": a ramp between dividing and not (arXiv 2309.00071); "longrope": each pair of features has a divisor
            of its own (arXiv 2402.13753).
        theta: the base of the frequencies.
        factor: by how much the context is longer than the original one.
        low, high: llama3: waves longer than original / low are divided, those shorter than original / high are not.
        original: the context before scaling.
        beta_fast, beta_slow: yarn: the rotations within the original context at which the ramp begins and ends.
        truncate: yarn: whether the ramp's ends are whole numbers.
        attention_factor: what cosine and sine are multiplied by.
        score_factor: what DeepSeek's scores are multiplied by beside that.
        short, long: longrope: divisors of texts up to the original context, and of longer ones.
        partial: the share of a head's features that is rotated, the first ones.
        interleaved: whether pairs are of neighbours (2i, 2i + 1), and not (i, i + half).
    """

    kind: str
    theta: float
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    score_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    partial: float = 1.0
    interleaved: bool = False

    @classmethod
    def of(cls, kind: Any, theta: float, found: Mapping[str, Any]) -> Rope:
        """The embedding that `rope_parameters` of a config describes.

        Arguments:
            found: its content; "original_max_position_embeddings" and "longest", the contexts before and after
                scaling.

        Raises:
            ValueError: the kind is unknown, or a number is missing.
        """
        kind = _OLDER.get(kind, kind)
        if kind not in KINDS:
            raise ValueError(f"rope_type is {kind!r}; this decoder knows {', '.join(KINDS)}")
        if missing := [key for key in _NEEDED[kind] if not isinstance(found.get(key), int | float)]:
            raise ValueError(f"rope_type {kind} needs the numbers {', '.join(missing)}")
        if kind == "default":
            return cls(kind, theta)
        original = int(found["original_max_position_embeddings"])
        factor = float(found.get("factor") or found["longest"] / original)
        scaled = cls(kind, theta, factor, original=original)
        if kind == "llama3":
            return dataclasses.replace(
                scaled, low=float(found["low_freq_factor"]), high=float(found["high_freq_factor"])
            )
        if kind == "yarn":
            return scaled._yarn(found)
        return scaled._longrope(found) if kind == "longrope" else scaled

    def _yarn(self, found: Mapping[str, Any]) -> Rope:
        mscale, all_dim = found.get("mscale"), found.get("mscale_all_dim")
        attention = self._mscale(1.0)
        if mscale and all_dim:
            attention = self._mscale(mscale) / self._mscale(all_dim)
        return dataclasses.replace(
            self,
            beta_fast=float(found.get("beta_fast") or 32),
            beta_slow=float(found.get("beta_slow") or 1),
            truncate=bool(found.get("truncate", True)),
            attention_factor=float(found.get("attention_factor", attention)),
            score_factor=self._mscale(all_dim) ** 2 if all_dim else 1.0,
        )

    def _mscale(self, times: float) -> float:
        """YaRN's scale of attention: equation 22, with a factor of the logarithm."""
        return 1.0 if self.factor <= 1 else 0.1 * times * math.log(self.factor) + 1.0

    def _longrope(self, found: Mapping[str, Any]) -> Rope:
        divisors = {}
        for key in ("short_factor", "long_factor"):
            given = found.get(key)
            if not isinstance(given, list) or not all(type(value) in (int, float) and value > 0 for value in given):
                raise ValueError(f"rope_type longrope needs {key}, a list of numbers above 0")
            divisors[key] = tuple(map(float, given))
        attention = 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        return dataclasses.replace(
            self,
            attention_factor=float(found.get("attention_factor", attention)),
            short=divisors["short_factor"],
            long=divisors["long_factor"],
        )

    def rotated_of(self, head: int) -> int:
        """How many of a head's features are rotated."""
        return int(head * self.partial)

    def frequencies(self, head: int, length: int = 0) -> np.ndarray:
        """The angles per place of each pair of features, float32 [rotated / 2], in a text of `length` places."""
        head = self.rotated_of(head)
        plain = 1.0 / self.theta ** (np.arange(0, head, 2, dtype=np.float64) / head)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            waves = 2 * math.pi / plain
            smooth = (self.original / waves - self.low) / (self.high - self.low)
            keep = np.clip(smooth, 0, 1)  # 0 where waves are longer than original / low, 1 where shorter than / high
            plain = (1 - keep) * plain / self.factor + keep * plain
        elif self.kind == "yarn":
            low, high = (self._pair_with(beta, head) for beta in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head - 1)
            ramp = np.clip((np.arange(head // 2) - low) / ((high - low) or 0.001), 0, 1)
            plain = plain / self.factor * ramp + plain * (1 - ramp)
        elif self.kind == "longrope":
            plain = plain / np.asarray(self.long if length > self.original else self.short)
        return plain.astype(np.float32)

    def _pair_with(self, rotations: float, head: int) -> float:
        """The index of the pair that rotates so often within the original context."""
        return head * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

    def tables(self, positions: jax.Array, head: int, length: int = 0) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine, float32 [..., rotated / 2], of positions [...] in a text of `length` places."""
        angles = positions[..., None].astype(jnp.float32) * self.frequencies(head, length)
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor

    def apply(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """x [batch, time, heads, head] with its pairs rotated by their angles [batch, time, rotated / 2]."""
        cos, sin = (table[:, :, None] for table in tables)
        rotated = 2 * cos.shape[-1]
        turned, rest = x[..., :rotated].astype(jnp.float32), x[..., rotated:]
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else jnp.split(turned, 2, axis=-1)
        pairs = [first * cos - second * sin, second * cos + first * sin]
        y = jnp.stack(pairs, -1).reshape(turned.shape) if self.interleaved else jnp.concatenate(pairs, axis=-1)
        return jnp.concatenate([y.astype(x.dtype), rest], axis=-1)
