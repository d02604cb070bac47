"""How far an engine's log-probabilities are from the trainer's, as sums that add up over batches and shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlowprec.arguments import shown
from jaxlowprec.rl.importance import checked, log_ratio

DECADES = range(-6, 2)
PER_DECADE = 4
_POSITIVE = tuple(
    10.0 ** (exponent + part / PER_DECADE)
    for exponent in DECADES
    for part in range(PER_DECADE if exponent < DECADES[-1] else 1)
)
EDGES = (*(-edge for edge in reversed(_POSITIVE)), *_POSITIVE)
"""The edges of bins of log-ratios: -10 to -1e-6 and 1e-6 to 10, four to a decade."""
BINS = len(EDGES) + 1
PROBABILITIES = 10
"""The number of bins of the engine's probability, of equal width."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The result of `mismatch`: sums over tokens. A pytree; `a + b` is the mismatch of both batches.

    The log-ratio of a token is the trainer's log-probability minus the engine's. Properties are means, Python floats;
    they are NaN without a token, and infinite where a sum overflowed. `summary()` has them all.

    Attributes:
        tokens: int32: compared tokens.
        nonfinite: int32: tokens left out, because one of their log-probabilities is NaN or infinite.
        sum_k1, sum_k2, sum_k3: float32 sums of the estimators of the divergence of the engine from the trainer.
        sum_absolute: float32 sum of the magnitudes of log-ratios.
        extreme: int32: tokens whose log-ratio has a magnitude above `threshold`.
        least, largest: float32: the least and the largest log-ratio; inf and -inf without a token.
        log_sum_ratio, log_sum_square: float32 logarithms of the sums of ratios and of their squares.
        counts: int32 [10, 59]: tokens by the engine's probability, in tenths, and by their log-ratio, between `EDGES`.
        threshold: see `mismatch`.
    """

    tokens: Int[Array, ""]
    nonfinite: Int[Array, ""]
    sum_k1: Float[Array, ""]
    sum_k2: Float[Array, ""]
    sum_k3: Float[Array, ""]
    sum_absolute: Float[Array, ""]
    extreme: Int[Array, ""]
    least: Float[Array, ""]
    largest: Float[Array, ""]
    log_sum_ratio: Float[Array, ""]
    log_sum_square: Float[Array, ""]
    counts: Int[Array, "10 59"]
    threshold: float = dataclasses.field(metadata={"static": True})

    def __add__(self, other: Mismatch) -> Mismatch:
        """The mismatch of both batches. Raises ValueError if their thresholds differ."""
        if not isinstance(other, Mismatch):
            return NotImplemented
        if self.threshold != other.threshold:
            raise ValueError(f"Mismatch: thresholds {self.threshold} and {other.threshold}; needs the same to add")
        xp = np if isinstance(self.tokens, np.ndarray | np.generic) else jnp
        join = {"least": xp.minimum, "largest": xp.maximum}
        join |= dict.fromkeys(("log_sum_ratio", "log_sum_square"), xp.logaddexp)
        added = {name: join.get(name, xp.add)(getattr(self, name), getattr(other, name)) for name in _ARRAYS}
        return Mismatch(**added, threshold=self.threshold)

    def over(self, axis_name: Any) -> Mismatch:
        """The mismatch of all devices along a mesh axis, or several; within `jax.shard_map`."""
        found = {}
        for name in _ARRAYS:
            value = getattr(self, name)
            if name == "least":
                found[name] = jax.lax.pmin(value, axis_name)
            elif name == "largest":
                found[name] = jax.lax.pmax(value, axis_name)
            elif name.startswith("log_sum"):
                top = jax.lax.pmax(value, axis_name)
                shift = jnp.where(jnp.isfinite(top), top, 0.0)
                found[name] = shift + jnp.log(jax.lax.psum(jnp.exp(value - shift), axis_name))
            else:
                found[name] = jax.lax.psum(value, axis_name)
        return Mismatch(**found, threshold=self.threshold)

    def on_host(self) -> Mismatch:
        """A copy in NumPy's int64 and float64, to add up a long run without rounding or overflow."""
        arrays = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        wide: Any = {name: a.astype(np.int64 if a.dtype.kind == "i" else np.float64) for name, a in arrays.items()}
        return Mismatch(**wide, threshold=self.threshold)

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON and `from_json`: `summary()`, the sums, and the counts that are not 0."""
        values = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        counts = values.pop("counts").ravel()
        places = {str(place): int(counts[place]) for place in np.flatnonzero(counts)}
        sums = {name: value.item() for name, value in values.items()}
        return {"summary": self.summary(), "sums": sums, "counts": places, "threshold": self.threshold}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Mismatch:
        """The mismatch that `to_json` wrote, on the host.

        Raises:
            ValueError: the content is something else.

        >>> import jax.numpy as jnp, jaxlowprec as jlp
        >>> found = jlp.rl.mismatch(jnp.asarray([-1.0, -2.0]), jnp.asarray([-1.0, -1.5]))
        >>> jlp.rl.Mismatch.from_json(found.to_json()).summary() == found.summary()
        True
        """
        try:
            values: Any = {name: np.asarray(content["sums"][name]) for name in _ARRAYS if name != "counts"}
            counts = values["counts"] = np.zeros((PROBABILITIES, BINS), np.int64)
            for place, count in content["counts"].items():
                counts.flat[int(place)] = count
            return cls(**values, threshold=float(content["threshold"]))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(f"Mismatch.from_json: {shown(content)} ({error!r}); needs what to_json gave") from None

    @property
    def k1(self) -> float:
        """The mean of -log r, where r is a token's ratio: without bias, of either sign."""
        return self._mean(self.sum_k1)

    @property
    def k2(self) -> float:
        """The mean of (log r)^2 / 2: biased, never negative."""
        return self._mean(self.sum_k2)

    @property
    def k3(self) -> float:
        """The mean of r - 1 - log r: without bias, never negative."""
        return self._mean(self.sum_k3)

    @property
    def mean_absolute(self) -> float:
        """The mean magnitude of a log-ratio."""
        return self._mean(self.sum_absolute)

    @property
    def largest_absolute(self) -> float:
        """The largest magnitude of a log-ratio (`train_rollout_logprob_abs_diff`)."""
        return max(abs(float(self.least)), abs(float(self.largest))) if int(self.tokens) else math.nan

    @property
    def extreme_fraction(self) -> float:
        """The share of tokens whose log-ratio has a magnitude above the threshold."""
        return self._mean(self.extreme)

    @property
    def least_ratio(self) -> float:
        """The least ratio of probabilities."""
        return self._ratio(self.least)

    @property
    def largest_ratio(self) -> float:
        """The largest ratio of probabilities."""
        return self._ratio(self.largest)

    @property
    def effective_sample_size(self) -> float:
        """The share of tokens that weighted ones are worth: the squared sum of ratios over tokens and squares."""
        if not int(self.tokens):
            return math.nan
        return math.exp(2 * float(self.log_sum_ratio) - float(self.log_sum_square) - math.log(int(self.tokens)))

    @property
    def histogram(self) -> np.ndarray:
        """int64 [59]: tokens by their log-ratio, between `jaxlowprec.rl.measures.EDGES`, the last ones outside."""
        return np.asarray(self.counts).astype(np.int64).sum(axis=0)

    def summary(self) -> dict[str, float]:
        """All counts and means by their names, as Python numbers, for a log."""
        counts = {name: int(getattr(self, name)) for name in ("tokens", "nonfinite")}
        return counts | {name: getattr(self, name) for name in _MEANS}

    def __repr__(self) -> str:
        if isinstance(self.tokens, jax.core.Tracer) or np.shape(self.tokens) != ():
            return f"Mismatch({self.tokens})"
        return f"Mismatch({int(self.tokens)} tokens, k1={self.k1:.3g}, k3={self.k3:.3g})"

    def _mean(self, total: Any) -> float:
        return float(total) / int(self.tokens) if int(self.tokens) else math.nan

    def _ratio(self, log: Any) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(np.float64(log))) if int(self.tokens) else math.nan


_ARRAYS = tuple(field.name for field in dataclasses.fields(Mismatch) if field.name != "threshold")
_MEANS = (
    *("k1", "k2", "k3", "mean_absolute", "largest_absolute", "extreme_fraction"),
    *("least_ratio", "largest_ratio", "effective_sample_size"),
)


def mismatch(
    trainer: Float[Array, "*B T"],
    engine: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"] | None = None,
    *,
    threshold: float = math.log(2.0),
) -> Mismatch:
    """Measures how far an engine's log-probabilities are from the trainer's. Works within jit; no gradient flows.

    Arguments:
        trainer, engine: log-probabilities of the tokens that the engine drew, at the temperature at which it drew them.
        mask: True where the engine wrote a token; None: everywhere.
        threshold: the magnitude of a log-ratio above which a token is extreme; the default is a ratio of 2 or 1/2.

    Returns:
        Sums, which add up over batches (`+`) and over devices (`over`).

    Raises:
        TypeError: log-probabilities are not floating-point numbers, or the mask is not bool.
        ValueError: shapes differ, or the threshold is not above 0.

    Source: k1, k2 and k3: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. The
    effective sample size is Kish's, of the ratios.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> trainer, engine = jnp.log(jnp.asarray([0.5, 0.9, 0.3])), jnp.log(jnp.asarray([0.5, 0.1, 0.4]))
    >>> found = jlp.rl.mismatch(trainer, engine)
    >>> found, round(found.largest_ratio, 3), round(found.extreme_fraction, 3)
    (Mismatch(3 tokens, k1=-0.637, k3=1.95), 9.0, 0.333)
    >>> (found + found).tokens.item()
    6
    """
    who = "mismatch"
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
        raise ValueError(f"{who}: threshold={shown(threshold)}; needs a number above 0, of a log-ratio")
    trainer, engine, mask = checked(who, trainer, engine, mask)
    ratio = log_ratio(trainer, engine)
    known = mask & jnp.isfinite(ratio)
    ratio = jnp.where(known, ratio, 0.0)
    size = jnp.abs(ratio)

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(known, values, 0), dtype=values.dtype)

    def log_total(values: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(jnp.where(known, values, -jnp.inf))

    places = jnp.searchsorted(jnp.asarray(EDGES, jnp.float32), ratio, side="right")
    probability = jnp.exp(jnp.where(known, engine, 0.0))
    row = jnp.clip((probability * PROBABILITIES).astype(jnp.int32), 0, PROBABILITIES - 1)
    counts = jnp.zeros((PROBABILITIES, BINS), jnp.int32).at[row, places].add(known.astype(jnp.int32))
    return Mismatch(
        tokens=jnp.sum(known, dtype=jnp.int32),
        nonfinite=jnp.sum(mask & ~known, dtype=jnp.int32),
        sum_k1=total(-ratio),
        sum_k2=total(ratio * ratio / 2),
        sum_k3=total(_k3(ratio)),
        sum_absolute=total(size),
        extreme=jnp.sum(known & (size > threshold), dtype=jnp.int32),
        least=jnp.min(jnp.where(known, ratio, jnp.inf), initial=jnp.inf),
        largest=jnp.max(jnp.where(known, ratio, -jnp.inf), initial=-jnp.inf),
        log_sum_ratio=log_total(ratio),
        log_sum_square=log_total(2 * ratio),
        counts=counts,
        threshold=float(threshold),
    )


def _k3(ratio: jax.Array) -> jax.Array:
    """r - 1 - log r for log r = `ratio`. Near 0 as a series: the difference would have no right digit in float32."""
    near = jnp.abs(ratio) < 0.25
    small = jnp.where(near, ratio, 0.0)
    series = jnp.ones_like(ratio)
    for n in (8, 7, 6, 5, 4, 3):  # x^2/2 (1 + x/3 (1 + x/4 (1 + ...)))
        series = 1 + small / n * series
    return jnp.where(near, small * small / 2 * series, jnp.expm1(ratio) - ratio)
