"""The generator: its tokens and log-probabilities beside those of the pass over the whole text."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder import generate
from jaxlowprec.models.decoder.generate import Generator
from jaxlowprec.models.decoder.model import log_probabilities
from jaxlowprec.ops.kv_cache import EIGHT_BITS
from tests.helpers import often
from tests.models.decoder import tiny

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [200], [17, 99, 31]]
COUNT = 12
BOUND = 1e-5
"""In float32: a pass over many places and a pass over one add up attention and the head's products in other orders."""


def of_whole_text(decoder, prompt, tokens):
    """The log-probabilities of the tokens by one pass over prompt and tokens, and the most likely tokens."""
    text = np.asarray([prompt + tokens])
    scores, likely = scored(decoder, np.pad(text, ((0, 0), (0, -text.size % 32))))
    drawn = slice(len(prompt) - 1, text.size - 1)
    return np.asarray(scores)[0, drawn], np.asarray(likely)[0, drawn]


@nnx.jit
def scored(decoder, text):
    """The log-probabilities of the next tokens, and the most likely ones: one program for texts up to a length."""
    logits = decoder(text)[:, :-1]
    return log_probabilities(logits, text[:, 1:]), logits.argmax(-1)


FAMILIES = ("llama3", "mistral", "qwen3_moe", "phi3", "gemma2", "gemma3", "glm4_moe", "gpt_oss")
LATENT = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module", params=often(("llama3",), (*FAMILIES, *LATENT)))
def decoder(request):
    return tiny.decoder(request.param)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_whole_text(decoder):
    written = Generator(decoder, 32)(PROMPTS, COUNT)
    for prompt, tokens, scores in zip(PROMPTS, written.tokens, written.log_probabilities, strict=True):
        expected, most_likely = of_whole_text(decoder, prompt, tokens)
        assert tokens == most_likely.tolist() and len(tokens) == COUNT
        np.testing.assert_allclose(scores, expected, atol=BOUND, rtol=0)


@pytest.fixture(scope="module")
def llama():
    return tiny.decoder("llama3")


@pytest.fixture(scope="module")
def quantized(llama):
    """INT4 kernels, which bfloat16 activations are multiplied by."""
    return jlp.quantize_params(llama, jlp.Int4QAT(group_size=32))


@pytest.mark.slow
def test_a_longer_span_is_compiled_when_it_is_needed(llama, monkeypatch):
    monkeypatch.setattr(generate, "SMALLEST_SPAN", 16)
    write = Generator(llama, 32)
    assert [write.span(length) for length in (1, 16, 17, 32)] == [16, 16, 32, 32]
    written = write(PROMPTS[:1], COUNT)
    expected, most_likely = of_whole_text(llama, PROMPTS[0], written.tokens[0])
    assert written.tokens[0] == most_likely.tolist()
    np.testing.assert_allclose(written.log_probabilities[0], expected, atol=BOUND, rtol=0)


@pytest.mark.slow
def test_quantised_kernels_write_what_training_scores(llama, quantized):
    """The log-probabilities of a rollout are those of the trainer's own pass, under the recipe."""
    written = Generator(quantized, 32)(PROMPTS, COUNT, temperature=1.0)
    for prompt, tokens, scores in zip(PROMPTS, written.tokens, written.log_probabilities, strict=True):
        with jlp.autocast(jlp.Int4QAT(group_size=32)):
            expected, _ = of_whole_text(llama, prompt, tokens)
        np.testing.assert_allclose(scores, expected, atol=BOUND, rtol=0)


@pytest.fixture(scope="module")
def write(quantized):
    """A generator whose programs several tests share."""
    return Generator(quantized, 32)


@pytest.mark.slow
def test_draws_depend_on_the_sequence_alone(write):
    together = write(PROMPTS, COUNT, temperature=1.0, seeds=[5, 6, 7])
    alone = write(PROMPTS[1:2], COUNT, temperature=1.0, seeds=[6])
    assert together.tokens[1] == alone.tokens[0]
    np.testing.assert_allclose(together.log_probabilities[1], alone.log_probabilities[0], atol=BOUND, rtol=0)
    assert write(PROMPTS[1:2], COUNT, temperature=1.0, seeds=[7]).tokens[0] != alone.tokens[0]
    cold = write(PROMPTS[1:2], COUNT, temperature=1e-4, seeds=[6])
    assert cold.tokens == write(PROMPTS[1:2], COUNT).tokens != alone.tokens


@pytest.mark.slow
def test_a_text_ends_at_a_stop_token(write):
    whole = write(PROMPTS, COUNT).tokens
    stop = whole[0][4]
    written = write(PROMPTS, COUNT, stop=[stop])
    for tokens, full, scores in zip(written.tokens, whole, written.log_probabilities, strict=True):
        assert tokens == (full[: full.index(stop) + 1] if stop in full else full)
        assert len(scores) == len(tokens)


@pytest.mark.parametrize(
    ("cache", "bound"),
    often((("float8_e4m3fn", 0.1),), (("float8_e4m3fn", 0.1), ("int8", 0.02), ("bfloat16", 0.01)), 2),
)
def test_a_smaller_cache_costs_this_much(llama, cache, bound):
    """The largest change of a log-probability, of tokens that the other cache chose."""
    written = Generator(llama, 32, cache)(PROMPTS, COUNT)
    worst = 0.0
    for prompt, tokens, scores in zip(PROMPTS, written.tokens, written.log_probabilities, strict=True):
        worst = max(worst, np.abs(scores - of_whole_text(llama, prompt, tokens)[0]).max())
    print(f"cache in {cache}: log-probabilities change by up to {worst:.4f}")
    assert 0 < worst < bound


@pytest.mark.parametrize(("dtype", "bound"), [("float8_e4m3fn", 2**-4), ("int8", 0.5 / 127)])
def test_8_bit_rows_keep_their_largest_number(dtype, bound):
    rows = np.random.default_rng(0).standard_normal((3, 5, 64), np.float32)
    rows[1, 2] = 0
    q = jlp.quantize(rows, EIGHT_BITS[dtype])
    codes, decoded = np.asarray(q.data), np.asarray(q.dequantize())
    amax = np.abs(rows).max(-1, keepdims=True)
    assert codes.dtype == dtype and (np.abs(decoded - rows) <= bound * amax * 1.001).all()
    np.testing.assert_allclose(np.abs(decoded).max(-1), amax[..., 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "needs a prompt or more"),
        ([[1], []], {}, "one token or more each"),
        ([[256]], {}, "outside of the vocabulary, 0 to 255"),
        ([[1] * 30], {}, "a prompt of 30 tokens and count=4 more; there are places=32"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0; needs 0 or more"),
        ([[1]], {"seeds": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)
def test_a_wrong_request_is_named(llama, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        Generator(llama, 32)(prompts, 4, **options)


LISTS = r"needs a list of tokens, which are ints, for each sequence"


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([1, 2, 3], {}, TypeError, rf"prompts\[0\]=1; {LISTS}"),
        (["a text"], {}, TypeError, rf"prompts\[0\]='a text'; {LISTS}"),
        ([[1, 2], [1.5, 2.0]], {}, TypeError, rf"prompts\[1\]=\[1.5, 2.0\]; {LISTS}"),
        ([[[1], [2, 3]]], {}, TypeError, LISTS),
        (3, {}, TypeError, "prompts=3; needs a list of lists"),
        ([[1]], {"count": 0}, ValueError, "count=0; needs an int from 1 on"),
        ([[1]], {"count": 1.5}, TypeError, "count=1.5; needs an int"),
        ([[1]], {"temperature": "1"}, TypeError, "temperature='1'; needs a number"),
        ([[1]], {"temperature": 1e-40}, ValueError, "temperature=1e-40; needs 0, .*, or 1e-06 or more"),
        ([[1]], {"temperature": float("nan")}, ValueError, "temperature=nan; needs 0 or more"),
        ([[1]], {"seeds": [-1]}, ValueError, r"seeds=\[-1\]; needs ints from 0 to 4294967295"),
        ([[1]], {"seeds": [1.5]}, TypeError, r"seeds=\[1.5\]; needs an int for each prompt"),
        ([[1]], {"seeds": 3}, TypeError, "seeds=3; needs an int for each prompt"),
        ([[1]], {"stop": 2}, TypeError, "stop=2; needs a list of tokens"),
    ],
)
def test_a_request_of_the_wrong_kind_is_named(llama, prompts, options, error, message):
    with pytest.raises(error, match=f"Generator: .*{message}"):
        Generator(llama, 32)(prompts, **({"count": 4} | options))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "needs a prompt or more"),
        ([[]], "one token or more each"),
        ([[256]], "outside of the vocabulary, 0 to 255"),
        ([[1] * 33], "a prompt of 33 tokens; there are places=32"),
    ],
)
def test_what_cannot_be_prefilled_is_named(llama, prompts, message):
    with pytest.raises(ValueError, match=f"Generator.prefill: .*{message}"):
        Generator(llama, 32).prefill(prompts)


@pytest.mark.slow
def test_prompts_may_be_an_array(write):
    lists = write([[1, 2, 3], [4, 5, 6]], 3)
    for array in (np.array([[1, 2, 3], [4, 5, 6]]), jnp.array([[1, 2, 3], [4, 5, 6]])):
        assert write(array, 3).tokens == lists.tokens


@pytest.mark.parametrize(
    ("places", "cache", "message"), [(32, "int4", "cache='int4'; needs one of float32"), (129, None, "1 to 128")]
)
def test_a_wrong_cache_is_named(llama, places, cache, message):
    with pytest.raises(ValueError, match=message):
        Generator(llama, places, cache)


@pytest.mark.slow
def test_a_rollouts_experts_are_replayed_and_new_weights_load():
    """With the experts that wrote the tokens, the trainer's pass has the rollout's log-probabilities."""
    recipe = jlp.Int4QAT(group_size=32)
    first, decoder = (tiny.decoder("qwen3_moe-dense", seed=seed) for seed in (1, 0))
    write = Generator(jlp.quantize_params(first, recipe), 32, routing=True)
    write.load(jlp.quantize_params(decoder, recipe))
    written = write(PROMPTS, COUNT, temperature=1.0)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, written.tokens, strict=True)]
    experts = written.routed_experts
    assert [e.shape for e in experts] == [(len(text) - 1, 1, 2) for text in texts]
    tape = jlp.moe.RoutingTape.from_routed_experts(experts, num_layers=1, k=2, num_experts=4)

    @nnx.jit
    def scored(decoder, tokens, tape):
        hidden, _, said = decoder.hidden(tokens, tape=tape)
        return log_probabilities(decoder.logits(hidden[:, :-1]), tokens[:, 1:]), said[0].tape

    tokens = np.asarray([text + [0] * (max(map(len, texts)) - len(text)) for text in texts], np.int32)
    with jlp.autocast(recipe):
        found, used = scored(decoder, tokens, tape)
        other, _ = scored(decoder, tokens, jlp.moe.RoutingTape((tape.experts + 1) % 4))
    for b, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        drawn = slice(len(prompt) - 1, len(text) - 1)
        np.testing.assert_allclose(found[b, drawn], written.log_probabilities[b], atol=BOUND, rtol=0)
        assert np.abs(other[b, drawn] - written.log_probabilities[b]).max() > 100 * BOUND
        assert (np.asarray(used)[b, : len(text) - 1] == experts[b][:, 0]).all()


def test_what_cannot_be_replayed_or_loaded_is_named(llama, quantized):
    with pytest.raises(ValueError, match=r"routing=True; the llama decoder has no layer with experts"):
        Generator(llama, 32, routing=True)
    with pytest.raises(ValueError, match=r"Generator.load: the decoder's arrays are not those of the first"):
        Generator(llama, 32).load(quantized)
    with pytest.raises(TypeError, match=r"Generator: decoder is a dict; needs a Decoder"):
        Generator({}, 32)
    with pytest.raises(TypeError, match=r"Generator.load: decoder is a int; needs a Decoder"):
        Generator(llama, 32).load(3)
    with pytest.raises(TypeError, match=r"places=32.0; needs an int"):
        Generator(llama, 32.0)
    with pytest.raises(ValueError, match=r"needs a layer for each of 0 with experts"):
        llama.hidden(jnp.zeros((1, 2), jnp.int32), tape=jlp.moe.RoutingTape.afresh(2, (1, 2), 2))
