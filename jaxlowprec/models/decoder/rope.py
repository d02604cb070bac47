"""Rotary embeddings of positions, with the scalings of published models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "llama3", "yarn")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_UNSUPPORTED = ("mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    Attributes:
        kind: "default"; "linear": positions divided by `factor`; "llama3": long waves are divided by it (Llama 3.1);
            "yarn": a ramp between dividing and not (arXiv 2309.00071).
        theta: the base of the frequencies.
        factor: by how much the context is longer than the original one.
        low, high: llama3: waves longer than original / low are divided, those shorter than original / high are not.
        original: the context before scaling.
        beta_fast, beta_slow: yarn: the rotations within the original context at which the ramp begins and ends.
        truncate: yarn: whether the ramp's ends are whole numbers.
        attention_factor: what cosine and sine are multiplied by.
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

    @classmethod
    def of(cls, kind: Any, theta: float, found: Mapping[str, Any]) -> Rope:
        """The embedding that `rope_parameters` of a config describes.

        Raises:
            ValueError: the kind is unknown, or a number is missing.
        """
        if kind not in KINDS:
            raise ValueError(f"rope_type is {kind!r}; this decoder knows {', '.join(KINDS)}")
        if missing := [key for key in _NEEDED[kind] if not isinstance(found.get(key), int | float)]:
            raise ValueError(f"rope_type {kind} needs the numbers {', '.join(missing)}")
        if given := [key for key in _UNSUPPORTED if found.get(key) is not None]:
            raise ValueError(f"{given[0]} is not supported")
        if kind == "default":
            return cls(kind, theta)
        factor = float(found["factor"])
        scaled = cls(kind, theta, factor, original=int(found["original_max_position_embeddings"]))
        if kind == "llama3":
            return dataclasses.replace(
                scaled, low=float(found["low_freq_factor"]), high=float(found["high_freq_factor"])
            )
        if kind == "yarn":
            attention = found.get("attention_factor")
            if attention is None:
                attention = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
            return dataclasses.replace(
                scaled,
                beta_fast=float(found.get("beta_fast") or 32),
                beta_slow=float(found.get("beta_slow") or 1),
                truncate=bool(found.get("truncate", True)),
                attention_factor=float(attention),
            )
        return scaled

    def frequencies(self, head: int) -> np.ndarray:
        """The angles per place of each pair of features, float32 [head / 2]."""
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
        return plain.astype(np.float32)

    def _pair_with(self, rotations: float, head: int) -> float:
        """The index of the pair that rotates so often within the original context."""
        return head * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

    def tables(self, positions: jax.Array, head: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine, float32 [..., head / 2], of positions [...]."""
        angles = positions[..., None].astype(jnp.float32) * self.frequencies(head)
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor


def rotated(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [batch, time, heads, head] with the pairs (i, i + head / 2) rotated by their angles [batch, time, head / 2]."""
    cos, sin = (table[:, :, None] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
