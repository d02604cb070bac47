"""Tapes: what they are made from, what is rejected and by which name, and how far two agree."""

import base64

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes

RoutingTape = jlp.moe.RoutingTape
GOOD = jnp.asarray([[[[0, 1], [2, 0]], [[3, 1], [-1, -1]]]] * 3, jnp.int32)  # 3 layers, 2 x 2 tokens, k = 2


class TestTape:
    def test_is_a_pytree_that_knows_its_layers(self):
        tape = RoutingTape(GOOD)
        assert [leaf.shape for leaf in jax.tree.leaves(tape)] == [GOOD.shape]
        assert len(tape) == 3 and repr(tape) == "RoutingTape(3 layers, 2x2 tokens, k=2)"
        assert_same_bytes(tape[1], GOOD[1])
        assert_same_bytes(jax.jit(lambda t: t)(tape), tape)

    def test_has_the_layers_that_it_has_and_no_more(self):
        tape = RoutingTape.afresh(3, 4, k=2)
        assert len(list(tape)) == len(tape) == 3
        for layer in (3, -4):
            with pytest.raises(IndexError, match="of 3; needs one from 0 on"):
                tape[layer]

    def test_of_layers_stacks_what_each_used(self):
        assert_same_bytes(RoutingTape.of_layers(list(GOOD)), RoutingTape(GOOD))

    def test_afresh_is_minus_one_everywhere(self):
        tape = RoutingTape.afresh(2, (3, 4), 2)
        assert tape.experts.shape == (2, 3, 4, 2) and jnp.all(tape.experts == jlp.moe.AFRESH)
        tape.check(num_experts=1)


class TestCheck:
    def test_accepts_a_good_tape(self):
        RoutingTape(GOOD).check(4, layers=3, tokens=(2, 2))

    @pytest.mark.parametrize(
        ("row", "needs"),
        [
            ([2, 2], "each expert once"),
            ([0, 4], "ids below 4"),
            ([0, -2], "ids of 0 or more"),
            ([-2, -2], "ids of 0 or more"),
            ([-1, 3], "-1 for the whole row"),
        ],
    )
    def test_names_layer_and_token_of_what_is_no_choice(self, row, needs):
        tape = RoutingTape(GOOD.at[2, 1, 0].set(jnp.asarray(row)))
        with pytest.raises(ValueError, match=rf"layer 2, token \(1, 0\) has experts \[{row[0]}, {row[1]}\].*{needs}"):
            tape.check(4)

    @pytest.mark.parametrize("expected", [{"layers": 2}, {"tokens": 4}, {"tokens": (2, 3)}])
    def test_rejects_another_batch(self, expected):
        with pytest.raises(ValueError, match="replay the batch that was recorded"):
            RoutingTape(GOOD).check(4, **expected)

    def test_rejects_what_is_no_integers_of_layers_and_tokens(self):
        with pytest.raises(TypeError, match="int8; needs int32, int16 or uint8"):
            RoutingTape(GOOD.astype(jnp.int8)).check(4)
        with pytest.raises(ValueError, match=r"needs \[layers, \*tokens, k\]"):
            RoutingTape(GOOD[0, 0]).check(4)

    def test_says_within_jit_that_it_cannot(self):
        with pytest.raises(TypeError, match="not known within jit"):
            jax.jit(lambda e: RoutingTape(e).check(4))(GOOD)


LAYERS, EXPERTS, K = 3, 8, 2


def captured(tokens, seed=0):
    """What an engine says of a sequence: int32 [tokens - 1, layers, k]; layer 0 is dense, zeros."""
    scores = np.random.default_rng(seed).random((tokens - 1, LAYERS, EXPERTS))
    rows = np.argsort(-scores, axis=-1)[..., :K].astype(np.int32)
    rows[:, 0] = 0
    return rows


def tape_of(*sequences, **more):
    options = {"num_layers": LAYERS, "k": K, "num_experts": EXPERTS, "dense_layers": [0]}
    return RoutingTape.from_routed_experts(sequences, **(options | more))


class TestFromRoutedExperts:
    def test_has_the_rows_of_each_sequence_and_minus_one_beyond(self):
        long, short = captured(6), captured(4, seed=1)
        experts = np.asarray(tape_of(long, short).experts)
        assert experts.shape == (2, 2, 6, K) and experts.dtype == np.int32
        for layer in (0, 1):
            np.testing.assert_array_equal(experts[layer, 0, :5], long[:, layer + 1])
            np.testing.assert_array_equal(experts[layer, 1, :3], short[:, layer + 1])
            assert (experts[layer, 0, 5:] == -1).all() and (experts[layer, 1, 3:] == -1).all()

    @pytest.mark.parametrize(
        "form",
        [
            np.ravel,
            np.ndarray.tobytes,
            lambda a: base64.b64encode(a.tobytes()).decode(),
            np.ndarray.tolist,
            lambda a: a.astype(np.int64),
        ],
        ids=["flat", "bytes", "base64", "lists", "int64"],
    )
    def test_takes_every_form_of_the_same_numbers(self, form):
        assert_same_bytes(tape_of(form(captured(6))), tape_of(captured(6)))

    def test_is_as_long_as_asked_for(self):
        assert tape_of(captured(6), length=9).experts.shape == (2, 1, 9, K)
        with pytest.raises(ValueError, match="6 tokens; needs length=6 or more"):
            tape_of(captured(6), length=5)

    def test_of_a_single_token_chooses_afresh(self):
        np.testing.assert_array_equal(tape_of(captured(1)).experts, np.full((2, 1, 1, K), -1))

    def test_a_layer_of_zeros_was_not_captured(self):
        rows = captured(6)
        rows[:, 2] = 0
        with pytest.raises(ValueError, match="sequence 1: layer 2 is all zeros: the engine did not capture it"):
            tape_of(captured(4), rows)

    def test_zeros_are_a_single_choice_only_where_others_differ(self):
        rows = np.asarray([[[0], [0]], [[0], [1]]], np.int32)
        options = {"num_layers": 2, "k": 1, "num_experts": 2, "dense_layers": []}
        with pytest.raises(ValueError, match="layer 0 is all zeros"):
            tape_of(rows, **options)
        other = rows + np.asarray([[[1], [0]]], np.int32)
        assert tape_of(rows, other, **options).experts.shape == (2, 2, 3, 1)

    @pytest.mark.parametrize(
        ("sequence", "options", "error", "message"),
        [
            (captured(6)[:, :2], {}, ValueError, r"shape \(5, 2, 2\); needs \[tokens - 1, 3, 2\]"),
            (captured(6).ravel()[:-1], {}, ValueError, "or as many numbers flat"),
            (captured(6).tobytes()[:-1], {}, ValueError, "119 bytes"),
            ("no base64!", {}, ValueError, "not base64"),
            (captured(6).astype(np.float32), {}, TypeError, "float32; needs int32"),
            (captured(6) + np.int64(2**32), {}, ValueError, "has 42949672.*; needs ids of experts, int32"),
            (captured(6), {"dense_layers": [3]}, ValueError, "dense_layers has 3; needs 0 to 2"),
            (captured(6), {"k": 0}, ValueError, "num_layers=3, k=0; needs 1 or more"),
            (captured(6), {"num_experts": 3}, ValueError, "ids below 3"),
            (np.where(captured(6) > 0, 5, 0), {}, ValueError, "each expert once"),
        ],
    )
    def test_what_does_not_fit_is_named(self, sequence, options, error, message):
        with pytest.raises(error, match=message):
            tape_of(sequence, **options)


class TestOverlap:
    a = RoutingTape(jnp.asarray([[[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]], [[0, 1, 2]] * 4], jnp.int32))
    b = RoutingTape(jnp.asarray([[[0, 1, 2], [5, 4, 3], [6, 1, 2], [-1] * 3], [[3, 4, 5]] * 3 + [[-1] * 3]], jnp.int32))

    def test_counts_sets_orders_and_common_experts_by_layer(self):
        found = jax.jit(jlp.moe.overlap)(self.a, self.b)
        np.testing.assert_array_equal(found.tokens, [3, 3])
        np.testing.assert_allclose(found.same_set, [2 / 3, 0], rtol=1e-6)
        np.testing.assert_allclose(found.same_order, [1 / 3, 0], rtol=1e-6)
        np.testing.assert_allclose(found.intersection, [(1 + 1 + 1 / 3) / 3, 0], rtol=1e-6)

    def test_with_itself_is_whole_and_of_nothing_is_nan(self):
        found = jlp.moe.overlap(self.b, self.b)
        np.testing.assert_array_equal([found.same_set, found.same_order, found.intersection], np.ones((3, 2)))
        nothing = RoutingTape.afresh(2, 4, 3)
        assert jnp.all(jnp.isnan(jlp.moe.overlap(self.a, nothing).same_set))

    def test_takes_tokens_of_several_axes(self):
        shaped = [RoutingTape(t.experts.reshape(2, 2, 2, 3)) for t in (self.a, self.b)]
        assert_same_bytes(jlp.moe.overlap(*shaped), jlp.moe.overlap(self.a, self.b))

    def test_refuses_what_is_not_of_the_same_tokens(self):
        with pytest.raises(ValueError, match="same layers, tokens and k"):
            jlp.moe.overlap(self.a, RoutingTape(self.b.experts[:, :2]))
        with pytest.raises(TypeError, match="needs two tapes"):
            jlp.moe.overlap(self.a, self.b.experts)
