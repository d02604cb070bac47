"""Checks of what a generator is asked for. Every message says what was given and what is needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlowprec.arguments import shown, whole_number
from jaxlowprec.models.decoder.cache import Cache, RingCache, TokenPlaces
from jaxlowprec.models.decoder.kv_scales import check_scales
from jaxlowprec.models.decoder.model import Decoder, log_probabilities
from jaxlowprec.models.decoder.pages import Plan, paged
from jaxlowprec.ops.kv_cache import KVCache

COLDEST = 1e-6
"""The smallest temperature above 0: quotients of logits by a smaller one may be infinite."""

SMALLEST_PREFILL, SMALLEST_SPAN = 16, 256


def token_rows(who: str, prompts: Any, vocabulary: int, places: int, count: int = 0) -> list[np.ndarray]:
    """The tokens of each prompt, which have room for `count` more.

    Raises:
        TypeError: they are no tokens.
        ValueError: there are none, they are outside of the vocabulary, or too many.

    >>> token_rows("example", [[1, 5], [2]], vocabulary=8, places=4)
    [array([1, 5]), array([2])]
    >>> token_rows("example", [1, 5], vocabulary=8, places=4)
    Traceback (most recent call last):
    TypeError: example: prompts[0]=1; needs a list of tokens, which are ints, for each sequence, such as [[1, 5], [2]]
    """
    if hasattr(prompts, "ndim"):  # an array: its rows would come from the device one by one
        prompts = np.asarray(prompts)
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, np.ndarray) and not prompts.ndim:
        raise TypeError(f"{who}: prompts={shown(prompts)}; needs a list of lists of tokens, such as [[1, 5], [2]]")
    rows = [_row(who, i, prompt) for i, prompt in enumerate(prompts)]
    if not rows or not all(map(len, rows)):
        raise ValueError(f"{who}: needs a prompt or more, of one token or more each")
    if min(row.min() for row in rows) < 0 or max(row.max() for row in rows) >= vocabulary:
        raise ValueError(f"{who}: prompts have tokens outside of the vocabulary, 0 to {vocabulary - 1}")
    longest = max(map(len, rows))
    if longest + count > places:
        more = f" and count={count} more" if count else ""
        raise ValueError(
            f"{who}: a prompt of {longest} tokens{more}; there are places={places}: shorten them, or make a Generator "
            "with more places"
        )
    return rows


def _row(who: str, i: int, prompt: Any) -> np.ndarray:
    try:
        row = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        row = np.asarray(None)
    if row.ndim == 1 and (row.dtype.kind in "iu" or not row.size):
        return row
    raise TypeError(
        f"{who}: prompts[{i}]={shown(prompt)}; needs a list of tokens, which are ints, for each sequence, such as "
        "[[1, 5], [2]]"
    )


def number_of_tokens(who: str, count: Any) -> int:
    """How many tokens are wanted. Raises TypeError, ValueError."""
    return whole_number(who, "count", count, 1)


def temperature_of(who: str, temperature: Any) -> float:
    """A temperature. Raises TypeError, ValueError.

    >>> temperature_of("example", 1e-40)
    Traceback (most recent call last):
    ValueError: example: temperature=1e-40; needs 0, for the most likely token, or 1e-06 or more
    """
    try:
        if isinstance(temperature, str):
            raise TypeError
        number = float(temperature)
    except (TypeError, ValueError):
        raise TypeError(f"{who}: temperature={shown(temperature)}; needs a number") from None
    if not number >= 0:
        raise ValueError(f"{who}: temperature={number}; needs 0 or more")
    if 0 < number < COLDEST:
        raise ValueError(f"{who}: temperature={number}; needs 0, for the most likely token, or {COLDEST} or more")
    return number


def seeds_of(who: str, seeds: Any, prompts: int) -> np.ndarray:
    """The seed of each prompt; None: 0, 1, ... Raises TypeError, ValueError."""
    found = np.arange(prompts) if seeds is None else np.asarray(seeds)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{who}: seeds={shown(seeds)}; needs an int for each prompt")
    if len(found) != prompts:
        raise ValueError(f"{who}: {len(found)} seeds for {prompts} prompts; needs one each")
    if found.min() < 0 or found.max() >= 2**32:
        raise ValueError(f"{who}: seeds={shown(seeds)}; needs ints from 0 to {2**32 - 1}")
    return found.astype(np.uint32)


def stops_of(who: str, stop: Any) -> tuple[int, ...]:
    """The tokens that end a text. Raises TypeError."""
    found = np.asarray(stop)
    if found.ndim == 1 and (found.dtype.kind in "iu" or not found.size):
        return tuple(found.tolist())
    raise TypeError(f"{who}: stop={shown(stop)}; needs a list of tokens, such as [2]")


@dataclasses.dataclass(frozen=True)
class Generation:
    """The generated tokens of each sequence.

    Attributes:
        tokens: for each sequence its new tokens; a token that ends a text is the last one.
        log_probabilities: for each token the logarithm of the probability that the model gives it, at temperature 1.
        routed_experts: with `routing=True`, for each sequence int32 [tokens - 1, layers with experts, k]: the experts
            of its tokens, the prompt's included; the last token is never run. `RoutingTape.from_routed_experts` takes
            them.
    """

    tokens: list[list[int]]
    log_probabilities: list[np.ndarray]
    routed_experts: list[np.ndarray] | None = None


class Generator:
    """Writes texts with one decoder.

    Arguments:
        decoder: its kernels may be arrays or QuantizedArrays.
        places: the largest number of tokens of a sequence, its prompt included.
        cache: what keys and values are kept as, a `KVCache`; or their dtype: "float32", "bfloat16", or for 8 bits and a
            scale for each token and head "float8_e4m3fn" or "int8". None: the dtype of activations.
        routing: whether to return the experts of every token, for a trainer that replays them.
        rings: whether layers with a sliding window keep only as many tokens as it has, see `RingCache`. The sums of
            attention are in another order then.
        chunk: the most tokens of a prompt that one pass computes; a longer prompt is computed in several, which need
            less memory.
        block_size: tokens of a block of a paged cache. Prompts that are equal, such as a group's in GRPO, are computed
            once, and share the memory of their whole blocks. Layers with a window keep all tokens then. None: each
            sequence has places of its own.

    Raises:
        TypeError, ValueError: an argument is something else, or there are no experts to return.
    """

    def __init__(
        self,
        decoder: Decoder,
        places: int,
        cache: KVCache | str | None = None,
        *,
        routing: bool = False,
        rings: bool = True,
        chunk: int = 2048,
        block_size: int | None = None,
    ):
        self.config = _require_decoder("Generator", decoder).config
        self.places = whole_number("Generator", "places", places)
        cache = jnp.dtype(decoder.embed_tokens.dtype).name if cache is None else cache
        self.cache = KVCache.of("Generator", cache)
        check_scales("Generator", decoder, self.cache)
        if not 1 <= places <= self.config.longest:
            raise ValueError(f"Generator: places={places}; the model was made for 1 to {self.config.longest}")
        if routing and not any(self.config.sparse):
            raise ValueError(f"Generator: routing=True; the {self.config.family} decoder has no layer with experts")
        if whole_number("Generator", "chunk", chunk) < SMALLEST_PREFILL:
            raise ValueError(f"Generator: chunk={chunk}; needs {SMALLEST_PREFILL} or more")
        if block_size is not None and whole_number("Generator", "block_size", block_size) < 1:
            raise ValueError(f"Generator: block_size={block_size}; needs 1 or more")
        self.routing, self.rings, self.chunk, self.block_size = routing, rings, chunk, block_size
        graph, state = nnx.split(decoder)
        self.arrays, tree = jax.tree.flatten(state)  # once: it has hundreds of leaves
        self._tree: Any = tree
        merged = functools.partial(_merged, graph, tree)
        prefill = functools.partial(_prefill, merged, routing)
        self._prefill = jax.jit(prefill, donate_argnums=1, static_argnames=("begin", "span", "ends"))
        step = functools.partial(_step, merged, routing)
        self._step = jax.jit(step, donate_argnums=1, static_argnames=("greedy", "span"))
        self._choose = jax.jit(_choose, static_argnames="greedy")
        self._paged = jax.jit(paged, static_argnames=("size", "shared", "own"))

    def load(self, decoder: Decoder) -> None:
        """Writes with another decoder's weights from now on, such as a newer version's. Nothing is compiled again.

        Raises:
            TypeError: it is no `Decoder`. ValueError: its arrays have other names, shapes or dtypes.
        """
        check_scales("Generator.load", _require_decoder("Generator.load", decoder), self.cache)
        arrays, tree = jax.tree.flatten(nnx.state(decoder))
        if tree != self._tree or [(a.shape, a.dtype) for a in arrays] != [(a.shape, a.dtype) for a in self.arrays]:
            raise ValueError(
                "Generator.load: the decoder's arrays are not those of the first one; needs the same config, dtypes "
                "and formats, or a new Generator"
            )
        self.arrays = arrays

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        stop: Sequence[int] | None = None,
    ) -> Generation:
        """Continues each prompt by up to `count` tokens.

        Arguments:
            prompts: tokens, one or more of each sequence: lists, or an array [batch, tokens].
            temperature: 0: the most likely token; otherwise, from 1e-6 on, what logits are divided by before a token is
                drawn.
            seeds: an int of 32 bits for each sequence, which its draws depend on; default: 0, 1, ...
            stop: tokens that end a text; default: those of the config.

        Raises:
            TypeError: prompts that are no lists of tokens; another argument of the wrong kind.
            ValueError: a prompt is empty, has a token outside of the vocabulary, or is too long; another argument is
                out of range.
        """
        count = number_of_tokens("Generator", count)
        rows = token_rows("Generator", prompts, self.config.vocabulary, self.places, count)
        stop = self.config.stop if stop is None else stops_of("Generator", stop)
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds_of("Generator", seeds, len(rows))))
        temperature = temperature_of("Generator", temperature)
        greedy, temperature = temperature == 0, jnp.float32(temperature or 1.0)
        logits, cache, *routed = self._prefilled(rows) if self.block_size is None else self._in_blocks(rows, count)
        chosen = [self._choose(logits, cache.lengths, keys, temperature, greedy=greedy)]
        ended, longest = np.zeros(len(rows), bool), max(map(len, rows))
        while len(chosen) < count:
            if stop:
                ended |= np.isin(np.asarray(chosen[-1][0]), stop)
                if ended.all():
                    break
            span = self.span(longest + len(chosen))
            given = self.arrays, cache, chosen[-1][0], keys, temperature
            cache, *found = self._step(*given, greedy=greedy, span=span)
            chosen.append(found)
            routed += found[2:]
        tokens, scores = (np.stack([np.asarray(found[i]) for found in chosen], axis=1) for i in range(2))
        lengths = [_until(row, stop) for row in tokens]
        return Generation(
            [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)],
            [row[:n] for row, n in zip(scores, lengths, strict=True)],
            _experts_of(routed, list(map(len, rows)), lengths) if self.routing else None,
        )

    def span(self, length: int) -> int:
        """How many places a step attends to, for sequences of so many tokens or fewer: a power of two, or all.

        A step is compiled for each span. Places after a sequence's last token would cost time and change nothing.
        """
        return min(self.places, _power_of_two(length, SMALLEST_SPAN))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, Cache]:
        """The logits [batch, vocabulary] after each prompt, and a cache with the prompts.

        Prompts are padded at their ends, to a power of two: what is written there is overwritten before it is seen.

        Raises:
            TypeError, ValueError: as for a call.
        """
        rows = token_rows("Generator.prefill", prompts, self.config.vocabulary, self.places)
        logits, cache, *_ = self._prefilled(rows)
        return logits, cache

    def _in_blocks(self, prompts: Sequence[np.ndarray], count: int) -> Any:
        """`_prefilled` of the distinct prompts, and their cache in blocks, with room for `count` tokens."""
        assert self.block_size is not None
        longest = max(map(len, prompts))
        plan = Plan.of(prompts, count, self.block_size, self.span(longest + count))
        distinct = [prompts[b] for b in plan.distinct]
        held = min(self.places, _power_of_two(longest, SMALLEST_PREFILL))
        logits, cache, *routed = self._prefilled(distinct, held)
        sizes = {"size": self.block_size, "shared": plan.shared, "own": plan.own}
        cache = self._paged(cache, plan.origin, plan.first, plan.table, **sizes)
        return logits[plan.origin], cache, *(experts[:, plan.origin] for experts in routed)

    def _prefilled(self, prompts: Sequence[np.ndarray], held: int | None = None) -> Any:
        """See `prefill`; and the prompts' experts, if they are wanted. `held`: see `Cache.empty`."""
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        longest, begin = int(lengths.max()), 0
        experts: list[jax.Array] = []
        rings, places = self.rings and held is None, held or self.places
        cache = Cache.empty(self.config, len(prompts), self.places, self.cache, rings=rings, held=held)
        last = jnp.zeros((len(prompts), self.config.width), jnp.float32)
        while begin < longest:
            time = min(self.chunk, places - begin, _power_of_two(longest - begin, SMALLEST_PREFILL))
            tokens = np.zeros((len(prompts), time), np.int32)
            for row, prompt in zip(tokens, prompts, strict=True):
                part = prompt[begin : begin + time]
                row[: len(part)] = part
            span = min(places, _power_of_two(begin + time)) if begin else time
            given = self.arrays, cache, tokens, lengths, last
            last, cache, *routed = self._prefill(*given, begin=begin, span=span, ends=begin + time >= longest)
            begin, experts = begin + time, experts + routed
        return last, cache, *([jnp.concatenate(experts, axis=2)] if experts else [])


def _require_decoder(who: str, decoder: Any) -> Decoder:
    if isinstance(decoder, Decoder):
        return decoder
    raise TypeError(
        f"{who}: decoder is a {type(decoder).__name__}; needs a Decoder, such as decoders.load(folder) makes"
    )


def _merged(graph: Any, tree: Any, arrays: list[jax.Array]) -> Decoder:
    return nnx.merge(graph, jax.tree.unflatten(tree, arrays))


def _prefill(merged, routing: bool, arrays, cache: Cache, tokens, lengths, last, *, begin: int, span: int, ends: bool):
    """Runs one part of the prompts.

    Returns the head's input after each prompt that ends in this part, or its logits if all have ended; the cache with
    the part; and with `routing` its experts.
    """
    decoder, time = merged(arrays), tokens.shape[1]
    starts = jnp.full_like(lengths, begin) if begin else None
    rings = any(isinstance(layer, RingCache) for layer in cache.layers)
    counts = jnp.clip(lengths - begin, 0, time) if rings else None
    hidden, cache, said = decoder.hidden(tokens, cache, TokenPlaces(starts, span, counts))
    place = (lengths - 1 - begin)[:, None]
    here = jnp.take_along_axis(hidden, jnp.clip(place, 0, time - 1)[..., None], axis=1)[:, 0]
    last = jnp.where((place >= 0) & (place < time), here, last.astype(here.dtype))
    cache = dataclasses.replace(cache, lengths=lengths)
    return decoder.logits(last) if ends else last, cache, *_experts(said, routing)


def _step(merged, routing: bool, arrays, cache: Cache, tokens, keys, temperature, *, greedy: bool, span: int):
    """The cache with the tokens [batch], the next tokens, their log-probabilities, and with `routing` the experts."""
    decoder = merged(arrays)
    hidden, new, said = decoder.hidden(tokens[:, None], cache, TokenPlaces(cache.lengths, span))
    new = dataclasses.replace(new, lengths=cache.lengths + 1)
    chosen = _choose(decoder.logits(hidden[:, 0]), new.lengths, keys, temperature, greedy=greedy)
    return new, *chosen, *_experts(said, routing)


def _experts(said: list[Any], routing: bool) -> list[jax.Array]:
    """The experts int32 [layers with experts, batch, time, k] of a pass, or nothing."""
    return [jnp.stack([aux.tape for aux in said])] if routing else []


def _choose(logits, places, keys, temperature, *, greedy: bool) -> tuple[jax.Array, jax.Array]:
    """A token for each place, and the logarithm of its probability."""
    if greedy:
        tokens = _largest(logits)
    else:
        drawn = jax.vmap(lambda key, place, row: jax.random.categorical(jax.random.fold_in(key, place), row))
        tokens = drawn(keys, places, logits / temperature)
    tokens = tokens.astype(jnp.int32)
    return tokens, log_probabilities(logits, tokens)


def _experts_of(routed: list[jax.Array], prompts: list[int], lengths: list[int]) -> list[np.ndarray]:
    """Each sequence's `routed_experts`: those of its prompt and of its new tokens but the last.

    Arguments:
        routed: of the prompts, and of each step.
        prompts, lengths: how many tokens each prompt has, and how many are new.
    """
    first, *steps = (np.asarray(experts) for experts in routed)
    rest = np.concatenate([first[:, :, :0], *steps], axis=2)
    return [
        np.ascontiguousarray(np.swapaxes(np.concatenate([first[:, b, :prompt], rest[:, b, : new - 1]], axis=1), 0, 1))
        for b, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
    ]


def _power_of_two(length: int, least: int = 1) -> int:
    """The least power of two that is neither below `length` nor below `least`."""
    return max(least, 1 << (length - 1).bit_length())


def _largest(logits: jax.Array) -> jax.Array:
    """`jnp.argmax` over the last axis, without NaN: XLA's own loop takes eight times as long on a CPU."""
    size = logits.shape[-1]
    smaller = logits < jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(smaller, size, jnp.arange(size, dtype=jnp.int32)), axis=-1)


def _until(row: np.ndarray, stop: Sequence[int]) -> int:
    """How many tokens there are up to the first that ends a text."""
    ends = np.flatnonzero(np.isin(row, stop or []))
    return int(ends[0]) + 1 if len(ends) else len(row)
