"""Caches in 8 bits: the full pass that trains reads keys and values as the cache that serves keeps them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.cache import Cache
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.generate import Generator
from jaxlowprec.models.decoder.model import loss
from tests.helpers import OF_CACHES, often, run_python
from tests.models.decoder import equal_bits, tiny
from tests.models.decoder.test_generate import COUNT, PROMPTS, of_whole_text

FP8, INT8 = OF_CACHES
FAMILIES = ("llama3", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3")  # full, windows, sinks, experts, latents


def written(decoder, cache, **options):
    """Prompts and what a generator with this cache writes after each, and the log-probabilities [tokens] of all."""
    found = Generator(decoder, 32, cache, **options)(PROMPTS, COUNT)
    return list(zip(PROMPTS, found.tokens, strict=True)), np.concatenate(found.log_probabilities)


def scored(decoder, texts, kv_cache=None):
    """The log-probabilities by full passes."""
    with jlp.autocast(kv_cache=kv_cache) if kv_cache else jlp.autocast(enabled=False):
        return np.concatenate([of_whole_text(decoder, *text)[0] for text in texts])


def k3(trainer, engine):
    mask = jnp.ones(trainer.shape, bool)
    return float(jlp.rl.mismatch(jnp.asarray(trainer), jnp.asarray(engine), mask).k3)


@pytest.fixture(scope="module")
def llama():
    return tiny.decoder("llama3")


@pytest.mark.parametrize(
    ("family", "cache"),
    often((("llama3", "float8_e4m3fn"),), [(f, c) for f in FAMILIES for c in ("float8_e4m3fn", "int8")], 2),
)
def test_a_full_pass_reads_what_the_cache_keeps(family, cache):
    """Sums in other orders may flip a code of one text, because its number lies between two codes."""
    decoder = tiny.decoder(family)
    texts, engine = written(decoder, cache)
    plain, kept = scored(decoder, texts), scored(decoder, texts, cache)
    print(f"{family}, {cache}: k3 {k3(plain, engine):.1e} becomes {k3(kept, engine):.1e}")
    assert np.abs(plain - engine).max() > 1e-3 and k3(plain, engine) > 1e-7
    *without_flips, last = sorted(np.abs(kept - engine).reshape(len(texts), -1).max(axis=1))
    assert max(without_flips) < 1e-5 and last < 1e-3 and k3(kept, engine) < (1e-10 if last < 1e-4 else 1e-7)


@pytest.mark.slow
def test_keys_and_values_in_formats_of_their_own(llama):
    kept = jlp.KVCache(INT8, jlp.Float8Rows("e5m2"))
    texts, engine = written(llama, kept)
    assert np.abs(scored(llama, texts, kept) - engine).max() < 1e-4
    for other in (jlp.KVCache(INT8), jlp.KVCache("float32", jlp.Float8Rows("e5m2")), jlp.KVCache("bfloat16")):
        assert np.abs(scored(llama, texts, other) - engine).max() > 1e-3


@pytest.mark.slow
def test_bits_in_bfloat16_without_excess_precision():
    """XLA may keep more digits than bfloat16 has between two operations, and does so elsewhere in a smaller program."""
    flags = "--xla_allow_excess_precision=false"
    found = json.loads(run_python("-m", "tests.models.decoder.equal_bits", XLA_FLAGS=flags).stdout)
    print({name: f"{100 * share['equal']:.0f} % equal, k3 {share['k3']:.1e}" for name, share in found.items()})
    assert min(share["equal"] for share in found.values()) > 0.5
    floor, *eight_bits = (sum(found[f"{w} {cache}"]["k3"] for w in ("bfloat16", "int4")) for cache in equal_bits.CACHES)
    assert max(eight_bits) < 1.3 * floor


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"chunk": 16}, {"rings": False}], ids=str)
def test_a_prompt_is_quantised_once(options):
    """A prompt in several parts, and rows of a ring that move, keep their codes."""
    decoder = tiny.decoder("mistral")
    texts, engine = written(decoder, jlp.KVCache(), **options)
    assert np.abs(scored(decoder, texts, jlp.KVCache()) - engine).max() < 1e-4


def test_gradients_pass_straight_through(llama):
    tokens = jnp.asarray([PROMPTS[0] + [200, 17, 99, 31]])
    graph, state = nnx.split(llama)

    def gradient(state):
        found = jax.grad(lambda state: loss(nnx.merge(graph, state), tokens)[0])(state)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found)])

    plain = jax.jit(gradient)(state)
    with jlp.autocast(kv_cache=jlp.KVCache()):
        found = jax.jit(gradient)(state)
    cosine = float(plain @ found / jnp.linalg.norm(plain) / jnp.linalg.norm(found))
    assert 0.99 < cosine < 1 - 1e-6
    k, v = (jnp.linspace(-1, 1, 64).reshape(2, 32) for _ in range(2))
    ones = jax.grad(lambda k: jlp.KVCache().as_kept(k, v)[0].sum())(k)
    assert (np.asarray(ones) == 1).all()


@pytest.mark.parametrize("fmt", OF_CACHES, ids=str)
def test_memory_of_heads_of_64(fmt):
    config = DecoderConfig.of(tiny.config("qwen3"))
    assert config.head == 64
    kept, halves = (Cache.empty(config, 2, 128, cache).nbytes for cache in (jlp.KVCache(fmt), "bfloat16"))
    assert kept / halves == (64 + 4) / 128


def test_a_scope_says_what_is_kept():
    assert jlp.current_kv_cache() is None
    with jlp.autocast(jlp.Int4QAT(), kv_cache="int8", strict=None):
        assert jlp.current_kv_cache() == jlp.KVCache(INT8)
        with jlp.autocast(enabled=False):
            assert jlp.current_kv_cache() is None
        assert jlp.current_kv_cache() == jlp.KVCache(INT8) and jlp.current_recipe() == jlp.Int4QAT()
    assert jlp.current_kv_cache() is None


def test_what_nothing_reads_is_said():
    unread = jlp.KVCache("bfloat16", jlp.Float8Rows("e5m2", least_scale=2.0**-9))
    with (
        pytest.raises(ValueError, match="autocast: nothing read keys and values as"),
        jlp.autocast(kv_cache=unread, strict=True),
    ):
        pass


class TestBadInput:
    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.Float8Tensor("e5m2"), jlp.Int8Rows("bfloat16"), "int8", 8, None])
    def test_formats_of_a_cache(self, fmt):
        with pytest.raises(
            ValueError, match="KVCache: key=.*needs a scale for each token and head, such as Float8Rows"
        ):
            jlp.KVCache(fmt)
        if fmt is not None:
            with pytest.raises(ValueError, match="KVCache: value="):
                jlp.KVCache(value=fmt)

    @pytest.mark.parametrize("cache", ["float16", "fp8", jlp.MXFP8(), 8])
    def test_names_of_caches(self, llama, cache):
        for who, make in (
            ("Generator", lambda: Generator(llama, 32, cache)),
            ("autocast", lambda: jlp.autocast(kv_cache=cache)),
            ("Cache", lambda: Cache.empty(llama.config, 1, 8, cache)),
        ):
            with pytest.raises(ValueError, match=f"{who}: cache=.*needs one of float32, .*int8, or a KVCache"):
                make()

    def test_a_scope_that_quantises_nothing(self):
        with pytest.raises(ValueError, match="enabled=False with kv_cache="):
            jlp.autocast(enabled=False, kv_cache=jlp.KVCache())

    def test_keys_that_are_no_floats(self):
        with pytest.raises(TypeError, match="KVCache.as_kept: v has dtype int32"):
            jlp.KVCache().as_kept(jnp.ones(4), jnp.ones(4, jnp.int32))
