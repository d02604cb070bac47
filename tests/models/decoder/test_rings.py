"""Caches of layers with a sliding window, which keep as many tokens as the window has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.models.decoder.cache import Cache, LayerCache, RingCache, TokenPlaces, latest
from jaxlowprec.models.decoder.generate import Generator
from jaxlowprec.ops.kv_cache import KVCache
from tests.models.decoder import tiny
from tests.models.decoder.test_generate import BOUND, of_whole_text

WINDOW = 7
PROMPTS = [list(range(1, 41)), [200], [17, 99, 31, 5, 6, 7, 8, 9]]
COUNT = 12


@pytest.fixture(scope="module")
def mistral():
    """Each layer has a window."""
    return tiny.decoder("mistral")


@pytest.mark.slow
def test_a_ring_is_as_large_as_its_window(mistral):
    config = mistral.config
    ring, dense = (Cache.empty(config, 3, 64, "float32", rings=rings) for rings in (True, False))
    assert all(type(layer) is RingCache and layer.keys.shape[2] == WINDOW for layer in ring.layers)
    assert all(type(layer) is LayerCache and layer.keys.shape[2] == 64 for layer in dense.layers)
    assert ring.nbytes * 64 == dense.nbytes * WINDOW and ring.places == dense.places == 64
    assert type(Cache.empty(config, 3, WINDOW, "float32").layers[0]) is LayerCache


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2048, 16])
def test_a_ring_writes_what_a_dense_cache_does(mistral, chunk):
    """Sums of attention have other orders, hence a bound; prompts and answers are longer than the window."""
    written = Generator(mistral, 64, chunk=chunk)(PROMPTS, COUNT)
    dense = Generator(mistral, 64, rings=False)(PROMPTS, COUNT)
    assert written.tokens == dense.tokens
    for b, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(written.log_probabilities[b], dense.log_probabilities[b], atol=BOUND, rtol=0)
        expected, most_likely = of_whole_text(mistral, prompt, written.tokens[b])
        assert written.tokens[b] == most_likely.tolist()
        np.testing.assert_allclose(written.log_probabilities[b], expected, atol=BOUND, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cache"),
    [("gemma2", None), ("gpt_oss", None), ("deepseek_v3", None), ("qwen2-window", "int8"), ("llama3", "int8")],
)
def test_prompts_in_parts_and_rings_beside_whole_layers(family, cache):
    decoder = tiny.decoder(family)
    prompts = [[token % 250 + 1 for token in prompt] for prompt in PROMPTS]
    written = Generator(decoder, 64, cache, chunk=16, routing=any(decoder.config.sparse))(prompts, COUNT)
    dense = Generator(decoder, 64, cache, rings=False, routing=any(decoder.config.sparse))(prompts, COUNT)
    assert written.tokens == dense.tokens
    bound = BOUND if cache is None else 0.05  # a code may be the next one where a sum's last bit differs
    for found, expected in zip(written.log_probabilities, dense.log_probabilities, strict=True):
        np.testing.assert_allclose(found, expected, atol=bound, rtol=0)
    if written.routed_experts is not None and cache is None:
        for found, expected in zip(written.routed_experts, dense.routed_experts, strict=True):
            np.testing.assert_array_equal(found, expected)


@jax.jit
def extended(cache, k, v, starts=None, counts=None):
    return cache.extended(k, v, TokenPlaces(starts, None, counts))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_of_a_ring_are_the_latest_tokens_to_the_bit(dtype):
    """Two parts with padding and then single tokens, beside a cache that keeps every token."""
    random = np.random.default_rng(0)
    batch, heads, head, places = 3, 2, 4, 32
    lengths, time = np.asarray([13, 2, 9]), 8

    def rows(kind, count):
        empty = [jnp.zeros((batch, heads, count, head), dtype) for _ in range(2)]
        scales = [jnp.zeros((batch, heads, count)) if dtype == "int8" else None for _ in range(2)]
        return kind(*empty, *scales, kept=KVCache.of("test", dtype))

    ring, dense = rows(RingCache, WINDOW), rows(LayerCache, places)
    for begin in (0, time):
        k, v = (jnp.asarray(random.standard_normal((batch, time, heads, head)), jnp.float32) for _ in range(2))
        starts = None if begin == 0 else jnp.full(batch, begin, jnp.int32)
        counts = jnp.asarray(np.clip(lengths - begin, 0, time), jnp.int32)
        before = ring
        ring, seen, at = extended(ring, k, v, starts, counts)
        dense, _, _ = extended(dense, k, v, starts, counts)
        if begin:
            assert seen.keys.shape[2] == WINDOW + time and at.shape == (batch, WINDOW + time)
            assert (at[:, WINDOW:] == begin + np.arange(time)).all()
            assert (np.asarray(seen.keys[:, :, :WINDOW]) == np.asarray(before.keys)).all()
    for step in range(10):
        k, v = (jnp.asarray(random.standard_normal((batch, 1, heads, head)), jnp.float32) for _ in range(2))
        starts = jnp.asarray(lengths + step, jnp.int32)
        ring, seen, at = extended(ring, k, v, starts)
        dense, _, _ = extended(dense, k, v, starts)
        assert seen.keys.shape == ring.keys.shape and (np.sort(at)[:, -1] == lengths + step).all()
        for b, row in np.argwhere(np.asarray(at) >= 0):
            for found, expected in zip(jax.tree.leaves(ring), jax.tree.leaves(dense), strict=True):
                assert (np.asarray(found)[b, :, row] == np.asarray(expected)[b, :, at[b, row]]).all()
        assert (np.asarray(at).min(axis=1) >= lengths + step - WINDOW + 1).all()


def test_the_place_of_each_row():
    at = np.asarray(latest(jnp.arange(-1, 20), WINDOW))
    for last, row in zip(range(-1, 20), at, strict=True):
        assert sorted(row) == list(range(last - WINDOW + 1, last + 1)) and (row % WINDOW == np.arange(WINDOW)).all()


def test_a_chunk_of_nothing_is_refused(mistral):
    with pytest.raises(ValueError, match="chunk=0; needs 16 or more"):
        Generator(mistral, 32, chunk=0)
