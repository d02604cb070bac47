"""Caches with static scales: found by calibration, kept in the decoder, read by full passes and by generators."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.cache import Cache
from jaxlowprec.models.decoder.generate import Generator
from jaxlowprec.models.decoder.model import loss
from tests.helpers import often
from tests.models.decoder import tiny
from tests.models.decoder.test_kv_cache import k3, scored, written

STATIC = jlp.KVCache(jlp.Float8Tensor())
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 32))


def calibrated(family, **options):
    decoder = tiny.decoder(family)
    jlp.kv.calibrate(decoder, TOKENS, **options)
    return decoder


@pytest.mark.parametrize(
    ("family", "per_head"),
    often(
        (("llama3", True),), [(f, p) for f in ("llama3", "gemma3", "gpt_oss", "deepseek_v3") for p in (False, True)], 2
    ),
)
def test_a_full_pass_reads_what_the_cache_keeps(family, per_head):
    decoder = calibrated(family, per_head=per_head)
    texts, engine = written(decoder, STATIC)
    plain, kept = scored(decoder, texts), scored(decoder, texts, STATIC)
    assert k3(plain, engine) > 1e-6
    *without_flips, last = sorted(np.abs(kept - engine).reshape(len(texts), -1).max(axis=1))
    assert max(without_flips) < 1e-5 and last < 1e-3


def test_scales_are_of_the_largest_numbers():
    decoder, found = tiny.decoder("llama3"), []

    class Seen(jlp.KVCache):
        def as_kept(self, k, v, **_):
            found.append((np.asarray(k), np.asarray(v)))
            return k, v

    with jlp.autocast(kv_cache=Seen("float32")):
        decoder.hidden(jnp.asarray(TOKENS))
    for per_head in (False, True):
        axes = (0, 2, 3) if per_head else None
        exact = jlp.kv.calibrate(decoder, [TOKENS[:1], TOKENS[1:]], per_head=per_head, power_of_two=False)
        powers = jlp.kv.calibrate(decoder, TOKENS, per_head=per_head)
        assert list(exact) == ["layers.0.self_attn", "layers.1.self_attn"]
        for layer, pair in enumerate(found):
            for i, numbers in enumerate(pair):
                amax = np.atleast_1d(np.abs(numbers).max(axis=axes))
                one, power = exact[f"layers.{layer}.self_attn"][i], powers[f"layers.{layer}.self_attn"][i]
                np.testing.assert_allclose(one, amax / 448, rtol=1e-5)
                assert (np.log2(power) % 1 == 0).all() and (power >= one).all() and (power < 2 * one).all()
        np.testing.assert_array_equal(decoder.layers[1].self_attn.v_scale[...], powers["layers.1.self_attn"][1])


def test_codes_are_those_of_a_division():
    """vLLM's kernels of caches of type `fp8` divide by the scale and saturate."""
    rng = np.random.default_rng(1)
    k = (rng.standard_normal((3, 7, 64)) * np.exp2(rng.integers(-20, 20, (3, 7, 64)))).astype(np.float32)
    k[0, 0, :4] = np.inf, -np.inf, 0, -0.0
    scale = np.float32([0.013, 2.0, 1e-3])[:, None, None]
    codes = np.clip(k / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    kept, _ = STATIC.as_kept(jnp.asarray(k), jnp.asarray(k), k_scale=jnp.asarray(scale), v_scale=jnp.asarray(scale))
    np.testing.assert_array_equal(np.asarray(kept), codes.astype(np.float32) * scale)
    nan, _ = STATIC.as_kept(jnp.asarray([jnp.nan, 1.0]), jnp.ones(2), k_scale=jnp.ones(1), v_scale=jnp.ones(1))
    assert np.isnan(nan[0]) and nan[1] == 1


def test_a_cache_needs_half_the_memory_of_bfloat16():
    config = tiny.decoder("llama3").config
    sizes = [Cache.empty(config, 2, 64, kept).nbytes for kept in (STATIC, "bfloat16")]
    assert 2 * sizes[0] == sizes[1]


def test_scales_are_no_parameters():
    decoder = calibrated("llama3")
    graph, state = nnx.split(decoder)

    def value(state):
        with jlp.autocast(kv_cache=STATIC):
            return loss(nnx.merge(graph, state), jnp.asarray(TOKENS))[0]

    gradients = jax.jit(jax.grad(value))(state)
    assert not gradients["layers"][0]["self_attn"]["k_scale"][...].any()
    assert gradients["layers"][0]["self_attn"]["k_proj"]["kernel"][...].any()
    assert "k_scale" not in nnx.state(decoder, nnx.Param)["layers"][0]["self_attn"]


def test_newer_scales_are_loaded_with_their_weights():
    decoder = calibrated("llama3", power_of_two=False)
    generator = Generator(decoder, 32, STATIC)
    first = generator([[1, 2, 3]], 8).log_probabilities[0]
    jlp.kv.calibrate(decoder, TOKENS * 0, power_of_two=False)
    generator.load(decoder)
    assert (generator([[1, 2, 3]], 8).log_probabilities[0] != first).any()


class TestBadInput:
    def test_scales_that_are_missing(self):
        with pytest.raises(ValueError, match=r"layers.0.self_attn: KVCache\(.*\) keeps keys by static .*kv.calibrate"):
            Generator(tiny.decoder("llama3"), 32, STATIC)
        with pytest.raises(ValueError, match="k_scale is missing; k is kept as Float8Tensor"):
            STATIC.as_kept(jnp.ones(4), jnp.ones(4))
        with pytest.raises(ValueError, match="v_scale was given; v is kept as bfloat16"):
            jlp.KVCache("bfloat16").as_kept(jnp.ones(4), jnp.ones(4), v_scale=jnp.ones(1))

    @pytest.mark.parametrize("value", [-1.0, 0.0, np.nan])
    def test_scales_that_are_no_scales(self, value):
        decoder = calibrated("llama3")
        decoder.layers[1].self_attn.v_scale[...] = jnp.full(1, value)
        with pytest.raises(ValueError, match=r"layers.1.self_attn.v_scale is \[.*\]; needs finite numbers above 0"):
            Generator(decoder, 32, STATIC)

    @pytest.mark.parametrize(
        ("tokens", "error", "message"),
        [
            (np.ones((2, 3)), TypeError, r"tokens are float.*needs integers \[batch, time\]"),
            (np.ones(3, int), TypeError, r"needs integers \[batch, time\]"),
            (np.ones((0, 3), int), ValueError, "tokens are empty"),
            ([], ValueError, "tokens are empty"),
        ],
    )
    def test_tokens(self, tokens, error, message):
        with pytest.raises(error, match=message):
            jlp.kv.calibrate(tiny.decoder("llama3"), tokens)

    def test_amaxes(self):
        with pytest.raises(ValueError, match="needs finite magnitudes, 0 or more"):
            jlp.kv.scale_of(np.float32([1, -1]))
        with pytest.raises(TypeError, match="decoder is a dict; needs a Decoder"):
            jlp.kv.calibrate({}, TOKENS)
