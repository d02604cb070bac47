"""A generator's cache in blocks: the numbers of a cache with places of its own, and one copy of what samples share."""

import numpy as np
import pytest

from jaxlowprec.models.decoder.generate import Generator
from jaxlowprec.models.decoder.pages import Plan
from tests.helpers import often
from tests.models.decoder import tiny

RNG = np.random.default_rng(0)
LONG, SHORT, OTHER = (RNG.integers(0, 256, n).tolist() for n in (21, 9, 16))
GROUPS = [LONG, LONG, SHORT, LONG, SHORT]
CASES = [(f, c) for f in ("llama3", "gemma3", "gpt_oss", "deepseek_v3") for c in ("float32", "float8_e4m3fn")]


@pytest.mark.parametrize(("family", "cache"), often((("llama3", "float8_e4m3fn"),), CASES, 2))
def test_prompts_that_differ_have_the_same_bits(family, cache):
    decoder, prompts = tiny.decoder(family), [LONG, SHORT, OTHER]
    own = Generator(decoder, 64, cache, rings=False)(prompts, 20, temperature=1.0)
    paged = Generator(decoder, 64, cache, block_size=8)(prompts, 20, temperature=1.0)
    assert own.tokens == paged.tokens
    np.testing.assert_array_equal(np.stack(own.log_probabilities), np.stack(paged.log_probabilities))


@pytest.mark.parametrize("block_size", often((16,), (1, 5, 16, 64)))
def test_groups_have_the_numbers_of_sequences_alone(block_size):
    """Prompts are computed once, in a batch of another size, so float32 products are rounded otherwise."""
    decoder = tiny.decoder("llama3")
    own = Generator(decoder, 64, "float32")(GROUPS, 20, temperature=1.0)
    paged = Generator(decoder, 64, "float32", block_size=block_size)(GROUPS, 20, temperature=1.0)
    assert own.tokens == paged.tokens
    assert np.abs(np.stack(own.log_probabilities) - np.stack(paged.log_probabilities)).max() < 1e-5


@pytest.mark.slow
def test_experts_are_those_of_each_sequence():
    decoder = tiny.decoder("qwen3_moe")
    own = Generator(decoder, 64, "float32", routing=True)(GROUPS, 6)
    paged = Generator(decoder, 64, "float32", routing=True, block_size=8, chunk=16)(GROUPS, 6)
    assert own.tokens == paged.tokens
    for one, other in zip(own.routed_experts, paged.routed_experts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_samples_share_is_held_once():
    """8 samples of 64 tokens after a prompt of 192: 12 blocks of 16 that all share, and 4 and one of a part each."""
    decoder, prompts = tiny.decoder("llama3", max_position_embeddings=512), [list(range(192))] * 8
    generator = Generator(decoder, 256, "int8", block_size=16)
    rows = [np.asarray(prompt) for prompt in prompts]
    _, cache, *_ = generator._in_blocks(rows, 64)
    own = Generator(decoder, 256, "int8").prefill(prompts)[1]
    assert cache.layers[0].keys.shape == (12 + 8 * 4, 2, 16, 32)
    assert cache.nbytes / own.nbytes == (12 + 8 * 4) / (8 * 16)


def test_a_plan_covers_what_is_written():
    """Every place of every sequence has a block; blocks that a sequence writes are its own."""
    for size in (1, 3, 8, 32):
        prompts = [np.asarray(prompt) for prompt in (*GROUPS, OTHER, OTHER[:15])]
        plan = Plan.of(prompts, 7, size, 64)
        assert [plan.distinct[o] for o in plan.origin] == [0, 0, 2, 0, 2, 5, 6]
        written = []
        for b, prompt in enumerate(prompts):
            blocks = plan.table[b, [place // size for place in range(len(prompt), len(prompt) + 7)]]
            written.append(set(blocks.tolist()))
            assert min(blocks) >= len(plan.distinct) * plan.shared
        assert sum(map(len, written)) == len(set().union(*written))
        assert plan.table.max() < len(plan.distinct) * plan.shared + len(prompts) * plan.own


@pytest.mark.parametrize("block_size", [0, -1, 1.5, "8"])
def test_block_sizes_that_are_none(block_size):
    with pytest.raises((TypeError, ValueError), match="Generator: block_size="):
        Generator(tiny.decoder("llama3"), 64, block_size=block_size)
