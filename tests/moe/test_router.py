"""The router: fresh choices are the top-k, a tape freezes the choice and nothing else, what is no choice is loud."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.moe import published

RouterConfig = jlp.moe.RouterConfig
TOKENS, EXPERTS, K = 64, 8, 3
LOGITS, OTHER_LOGITS = (np.random.default_rng(i).standard_normal((TOKENS, EXPERTS), np.float32) for i in range(2))
each_scoring = pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
each_normalize = pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as they are"])


def scores_of(logits, scoring):
    logits = np.asarray(logits, np.float64)
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def tape_of(*rows):
    """A tape of LOGITS' tokens that begins with these rows; the others choose afresh."""
    tape = np.full((TOKENS, K), -1, np.int32)
    tape[: len(rows)] = np.asarray(rows, np.int32).reshape(-1, K)
    return tape


def route(logits, k, *config, tape=None):
    return jax.device_get(published.route(logits, k, *config, tape=tape))


class TestFreshChoice:
    @each_scoring
    @each_normalize
    def test_is_the_k_best_in_descending_order_with_their_scores(self, scoring, normalize):
        routing = route(LOGITS, K, RouterConfig(scoring, normalize))
        best = np.argsort(-np.asarray(LOGITS), axis=-1, kind="stable")[:, :K]
        assert routing.experts.dtype == jnp.int32 and routing.weights.dtype == jnp.float32
        np.testing.assert_array_equal(routing.experts, best)
        weights = np.take_along_axis(scores_of(LOGITS, scoring), best, -1)
        weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
        np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)

    def test_of_equal_logits_is_the_lower_expert(self):
        np.testing.assert_array_equal(route(jnp.zeros((4, 5)), 2).experts, [[0, 1]] * 4)

    def test_under_vmap_is_that_of_each(self):
        logits = np.stack([LOGITS, OTHER_LOGITS])
        together = jax.device_get(jax.jit(jax.vmap(lambda x: jlp.moe.route(x, K)))(logits))
        for i, one in enumerate((LOGITS, OTHER_LOGITS)):
            assert_same_bytes(jax.tree.map(lambda leaf: leaf[i], together), route(one, K))


class TestReplay:
    def test_of_what_was_recorded_gives_the_same_bits(self):
        recorded = route(LOGITS, K)
        assert_same_bytes(route(LOGITS, K, tape=recorded.experts), recorded)

    def test_keeps_choice_and_order_whatever_the_logits_are(self):
        tape = route(LOGITS, K).experts[:, ::-1]
        routing = route(OTHER_LOGITS, K, tape=tape)
        assert_same_bytes(routing.experts, tape)
        assert np.any(routing.experts != route(OTHER_LOGITS, K).experts)

    @each_scoring
    @each_normalize
    def test_recomputes_the_weights(self, scoring, normalize):
        tape = route(LOGITS, K).experts
        routing = route(OTHER_LOGITS, K, RouterConfig(scoring, normalize), tape=tape)
        weights = np.take_along_axis(scores_of(OTHER_LOGITS, scoring), np.asarray(tape), -1)
        weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
        np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)

    def test_lets_gradients_through_the_weights(self):
        tape = route(LOGITS, K).experts

        def weighted(logits, tape):
            return jnp.sum(jlp.moe.route(logits, K, tape=tape).weights * np.arange(1, K + 1, dtype=np.float32))

        frozen, fresh = (np.asarray(jax.jit(jax.grad(weighted))(LOGITS, t)) for t in (tape, None))
        assert_same_bytes(frozen, fresh)
        assert np.all(np.take_along_axis(frozen, tape, -1) != 0)
        step, value = LOGITS[::-1] / np.float32(100), jax.jit(weighted)
        slope = (value(LOGITS + step, tape) - value(LOGITS - step, tape)) / 2
        np.testing.assert_allclose(slope, np.sum(frozen * step), rtol=1e-2)

    def test_a_row_of_minus_one_chooses_afresh(self):
        fresh = route(LOGITS, K)
        routing = route(LOGITS, K, tape=tape_of((7, 0, 3), (1, 2, 3)))
        np.testing.assert_array_equal(routing.experts[:2], [(7, 0, 3), (1, 2, 3)])
        assert_same_bytes(routing.experts[2:], fresh.experts[2:])
        assert_same_bytes(routing.weights[2:], fresh.weights[2:])
        assert_same_bytes(route(LOGITS, K, tape=tape_of()), fresh)


class TestLoadBalance:
    @pytest.mark.slow
    def test_is_1_for_even_use_and_the_number_of_experts_for_one(self):
        alike = 50 * jnp.eye(4)
        assert route(alike, 1).load_balance_loss == pytest.approx(1)
        assert route(jnp.zeros((6, 4)), 4).load_balance_loss == pytest.approx(1)
        one = jnp.zeros((6, 4)).at[:, 2].set(50)
        assert route(one, 1).load_balance_loss == pytest.approx(4)

    @each_scoring
    def test_is_the_share_of_the_choices_times_the_mean_probability(self, scoring):
        routing = route(LOGITS, K, RouterConfig(scoring))
        scores = scores_of(LOGITS, scoring)
        scores = scores / scores.sum(-1, keepdims=True)
        share = np.bincount(np.asarray(routing.experts).ravel(), minlength=EXPERTS) / (TOKENS * K)
        np.testing.assert_allclose(routing.load_balance_loss, EXPERTS * (share * scores.mean(0)).sum(), rtol=1e-6)

    def test_and_group_sizes_follow_the_replayed_choice(self):
        tape = np.tile(np.asarray([5, 6, 7], np.int32), (TOKENS, 1))
        routing = route(LOGITS, K, tape=tape)
        np.testing.assert_array_equal(routing.group_sizes, [0] * 5 + [TOKENS] * 3)
        expected = EXPERTS * scores_of(LOGITS, "softmax").mean(0)[5:].sum() / 3
        np.testing.assert_allclose(routing.load_balance_loss, expected, rtol=1e-6)

    def test_its_gradient_levels_the_load(self):
        logits = jnp.zeros((6, 4)).at[:, 2].set(1)
        gradient = np.asarray(jax.jit(jax.grad(lambda x: jlp.moe.route(x, 1).load_balance_loss))(logits))
        assert np.all(gradient[:, 2] > 0) and np.all(gradient[:, [0, 1, 3]] < 0)


@pytest.mark.parametrize(
    "row", [(0, 0, 1), (0, 1, EXPERTS), (0, 1, -2), (-1, -1, 3)], ids=["twice", "too large", "negative", "partly -1"]
)
class TestRowsThatAreNoChoice:
    def test_are_nan_in_that_token_and_in_the_loss_within_jit(self, row):
        routing = route(LOGITS, K, tape=tape_of((1, 2, 3), row))
        assert np.all(np.isnan(routing.weights[1])) and np.isnan(routing.load_balance_loss)
        assert np.all(np.isfinite(np.delete(routing.weights, 1, axis=0)))

    def test_leave_the_experts_in_range(self, row):
        routing = route(LOGITS, K, tape=tape_of((1, 2, 3), row))
        assert np.all((routing.experts >= 0) & (routing.experts < EXPERTS))
        assert routing.group_sizes.sum() == TOKENS * K


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jlp.moe.route(LOGITS.astype(jnp.bfloat16), K), TypeError, "bfloat16; needs float32"),
        (lambda: jlp.moe.route(LOGITS[None], K), ValueError, "flatten the leading axes"),
        (lambda: jlp.moe.route(LOGITS, EXPERTS + 1), ValueError, "k is 9 with 8 experts"),
        (lambda: jlp.moe.route(LOGITS, 0), ValueError, "k is 0"),
        (lambda: jlp.moe.route(LOGITS, 2.0), TypeError, "k=2.0; needs an int"),
        (lambda: jlp.moe.route(LOGITS.tolist(), K), TypeError, r"logits=\[.*; needs a float32 array"),
        (
            lambda: jlp.moe.route(LOGITS, K, {"scoring": "sigmoid"}),
            TypeError,
            "route: routing=.*; needs a .*RouterConfig",
        ),
        (lambda: jlp.moe.route(LOGITS, K, tape=tape_of().tolist()), TypeError, "tape is list; needs an int32, int16"),
        (
            lambda: jlp.moe.route(LOGITS, K, tape=tape_of().astype(jnp.int8)),
            TypeError,
            "int8; needs an int32, int16 or uint8",
        ),
        (lambda: jlp.moe.route(LOGITS, 2, tape=tape_of()), ValueError, r"tape has shape \(64, 3\); needs \(64, 2\)"),
    ],
)
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
