"""Texts from a decoder: prompts in one pass, then token after token with a cache.

    write = Generator(load(folder), places=512)
    written = write([[1, 5, 7], [1, 9]], 32)

A sequence's tokens are drawn with its own random key and place, whatever other sequences are in the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlowprec.models.decoder.cache import EIGHT_BITS, Cache
from jaxlowprec.models.decoder.model import Decoder, log_probabilities

SMALLEST_PREFILL, SMALLEST_SPAN = 16, 256
CACHES = ("float32", "bfloat16", *EIGHT_BITS)


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        tokens: for each sequence its new tokens; a token that ends a text is the last one.
        log_probabilities: for each token the logarithm of the probability that the model gives it, at temperature 1.
    """

    tokens: list[list[int]]
    log_probabilities: list[np.ndarray]


class Generator:
    """Writes texts with one decoder.

    Arguments:
        decoder: its kernels may be arrays or QuantizedArrays.
        places: the largest number of tokens of a sequence, its prompt included.
        cache: the dtype of keys and values: "float32", "bfloat16", or for 8 bits and a scale for each token and head
            "float8_e4m3fn" or "int8". None: that of activations.

    Raises:
        ValueError: places or cache are something else.
    """

    def __init__(self, decoder: Decoder, places: int, cache: str | None = None):
        self.config, self.places = decoder.config, places
        self.cache = jnp.dtype(decoder.embed_tokens.dtype).name if cache is None else cache
        if self.cache not in CACHES:
            raise ValueError(f"Generator: cache={cache!r}; needs one of {', '.join(CACHES)}")
        if not 1 <= places <= self.config.longest:
            raise ValueError(f"Generator: places={places}; the model was made for 1 to {self.config.longest}")
        graph, state = nnx.split(decoder)
        self.arrays, tree = jax.tree.flatten(state)  # once: it has hundreds of leaves
        merged = functools.partial(_merged, graph, tree)
        self._prefill = jax.jit(functools.partial(_prefill, merged), donate_argnums=1)
        self._step = jax.jit(functools.partial(_step, merged), donate_argnums=1, static_argnames=("greedy", "span"))
        self._choose = jax.jit(_choose, static_argnames="greedy")

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        stop: Sequence[int] | None = None,
    ) -> Written:
        """Continues each prompt by up to `count` tokens.

        Arguments:
            prompts: tokens, one or more of each sequence.
            temperature: 0: the most likely token; otherwise what logits are divided by before a token is drawn.
            seeds: one number for each sequence, which its draws depend on; default: 0, 1, ...
            stop: tokens that end a text; default: those of the config.

        Raises:
            ValueError: a prompt is empty, has a token outside of the vocabulary, or is too long.
        """
        self._check(prompts, count, temperature, seeds)
        stop = self.config.stop if stop is None else tuple(stop)
        keys = jax.vmap(jax.random.key)(jnp.asarray(range(len(prompts)) if seeds is None else seeds, jnp.uint32))
        greedy, temperature = temperature == 0, jnp.float32(temperature or 1.0)
        logits, cache = self.prefill(prompts)
        chosen = [self._choose(logits, cache.lengths, keys, temperature, greedy=greedy)]
        ended, longest = np.zeros(len(prompts), bool), max(len(prompt) for prompt in prompts)
        while len(chosen) < count:
            if stop:
                ended |= np.isin(np.asarray(chosen[-1][0]), stop)
                if ended.all():
                    break
            span = self.span(longest + len(chosen))
            cache, *found = self._step(self.arrays, cache, chosen[-1][0], keys, temperature, greedy=greedy, span=span)
            chosen.append(found)
        tokens, scores = (np.stack([np.asarray(found[i]) for found in chosen], axis=1) for i in range(2))
        lengths = [_until(row, stop) for row in tokens]
        return Written(
            [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)],
            [row[:n] for row, n in zip(scores, lengths, strict=True)],
        )

    def span(self, length: int) -> int:
        """How many places a step attends to, for sequences of so many tokens or fewer: a power of two, or all.

        A step is compiled for each span. Places after a sequence's last token would cost time and change nothing.
        """
        return min(self.places, max(SMALLEST_SPAN, 1 << (length - 1).bit_length()))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, Cache]:
        """The logits [batch, vocabulary] after each prompt, and a cache with the prompts.

        Prompts are padded at their ends, to a power of two: what is written there is overwritten before it is seen.
        """
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        padded = min(self.places, max(SMALLEST_PREFILL, 1 << (int(lengths.max()) - 1).bit_length()))
        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        cache = Cache.empty(self.config, len(prompts), self.places, self.cache)
        return self._prefill(self.arrays, cache, tokens, lengths)

    def _check(self, prompts: Any, count: int, temperature: float, seeds: Any) -> None:
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("Generator: needs a prompt or more, of one token or more each")
        tokens = [token for prompt in prompts for token in prompt]
        if min(tokens) < 0 or max(tokens) >= self.config.vocabulary:
            raise ValueError(
                f"Generator: prompts have tokens outside of the vocabulary, 0 to {self.config.vocabulary - 1}"
            )
        longest = max(len(prompt) for prompt in prompts)
        if count < 1 or longest + count > self.places:
            raise ValueError(
                f"Generator: a prompt of {longest} tokens and count={count} more; there are places={self.places}: "
                "shorten them, or make a Generator with more places"
            )
        if not temperature >= 0:
            raise ValueError(f"Generator: temperature={temperature}; needs 0 or more")
        if seeds is not None and len(seeds) != len(prompts):
            raise ValueError(f"Generator: {len(seeds)} seeds for {len(prompts)} prompts; needs one each")


def _merged(graph: Any, tree: Any, arrays: list[jax.Array]) -> Decoder:
    return nnx.merge(graph, jax.tree.unflatten(tree, arrays))


def _prefill(merged, arrays, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
    decoder = merged(arrays)
    hidden, cache, _ = decoder.hidden(tokens, cache, span=tokens.shape[1])
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return decoder.logits(last), dataclasses.replace(cache, lengths=lengths)


def _step(merged, arrays, cache: Cache, tokens, keys, temperature, *, greedy: bool, span: int):
    """The cache with the tokens [batch], the next tokens, and their log-probabilities."""
    decoder = merged(arrays)
    hidden, new, _ = decoder.hidden(tokens[:, None], cache, starts=cache.lengths, span=span)
    new = dataclasses.replace(new, lengths=cache.lengths + 1)
    return new, *_choose(decoder.logits(hidden[:, 0]), new.lengths, keys, temperature, greedy=greedy)


def _choose(logits, places, keys, temperature, *, greedy: bool) -> tuple[jax.Array, jax.Array]:
    """A token for each place, and the logarithm of its probability."""
    if greedy:
        tokens = _largest(logits)
    else:
        drawn = jax.vmap(lambda key, place, row: jax.random.categorical(jax.random.fold_in(key, place), row))
        tokens = drawn(keys, places, logits / temperature)
    tokens = tokens.astype(jnp.int32)
    return tokens, log_probabilities(logits, tokens)


def _largest(logits: jax.Array) -> jax.Array:
    """As `jnp.argmax` over the last axis, of numbers: XLA's own loop takes eight times as long on a CPU."""
    size = logits.shape[-1]
    smaller = logits < jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(smaller, size, jnp.arange(size, dtype=jnp.int32)), axis=-1)


def _until(row: np.ndarray, stop: Sequence[int]) -> int:
    """How many tokens there are up to the first that ends a text."""
    ends = np.flatnonzero(np.isin(row, stop or []))
    return int(ends[0]) + 1 if len(ends) else len(row)
