"""Importance weights, beside float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp

WEIGHTS = [jlp.rl.truncated_weights, jlp.rl.masked_weights]


def batch(seed=0, shape=(6, 9), spread=1.0):
    """Log-probabilities by trainer and engine, and a mask that leaves no token of the last sequence."""
    random = np.random.default_rng(seed)
    engine = -random.exponential(size=shape).astype(np.float32)
    trainer = np.minimum(engine + spread * random.standard_normal(shape).astype(np.float32), 0)
    mask = random.random(shape) < 0.7
    mask[-1] = False
    return trainer, engine, mask


def ratios(trainer, engine, mask, per):
    """The ratios in float64."""
    log = np.where(mask, trainer.astype(np.float64) - engine, 0)
    if per == "token":
        return np.exp(log)
    total = log.sum(-1, keepdims=True)
    if per == "sequence_mean":
        total = total / np.maximum(mask.sum(-1, keepdims=True), 1)
    return np.broadcast_to(np.exp(total), log.shape)


@pytest.mark.parametrize("per", ["token", "sequence", "sequence_mean"])
def test_weights_are_ratios_within_their_bounds(per):
    trainer, engine, mask = batch(shape=(60, 9))
    ratio = ratios(trainer, engine, mask, per)
    truncated = jlp.rl.truncated_weights(trainer, engine, mask, cap=1.2, per=per)
    np.testing.assert_allclose(truncated, np.where(mask, np.minimum(ratio, 1.2), 0), rtol=3e-6)
    masked = jlp.rl.masked_weights(trainer, engine, mask, low=0.8, high=1.2, per=per)
    kept = mask & (ratio >= 0.8) & (ratio <= 1.2)
    np.testing.assert_allclose(masked, np.where(kept, ratio, 0), rtol=3e-6)
    assert kept.any() and (mask & ~kept).any() and (ratio[mask] > 1.2).any()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_equal_log_probabilities_weigh_one_to_the_bit(weights):
    _, engine, mask = batch()
    for per in ("token", "sequence", "sequence_mean"):
        assert (np.asarray(weights(engine, engine, mask, per=per)) == mask).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_gradient_flows_and_jit_changes_nothing(weights):
    trainer, engine, mask = batch()
    gradient = jax.grad(lambda trainer: jnp.sum(trainer * weights(trainer, engine, mask)))(trainer)
    np.testing.assert_array_equal(gradient, weights(trainer, engine, mask))
    np.testing.assert_array_equal(jax.jit(weights)(trainer, engine, mask), gradient)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_ratios_beyond_float32_stay_in_bounds(weights):
    trainer, engine = np.float32([-1.0, -500.0, -1.0]), np.float32([-500.0, -1.0, -1.0])
    found = np.asarray(weights(trainer, engine, per="token"))
    largest = 2.0 if weights is jlp.rl.truncated_weights else 0.0
    np.testing.assert_allclose(found, [largest, 0.0, 1.0], rtol=1e-6)
    long = np.full((1, 4000), -1.0, np.float32)
    assert np.isfinite(weights(long + 0.5, long, per="sequence")).all()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        (np.nan, -1.0, np.nan),
        (-1.0, np.nan, np.nan),
        (-1.0, -np.inf, np.nan),  # the engine cannot have drawn it
        (-np.inf, -np.inf, np.nan),
        (np.inf, -1.0, np.nan),
        (-np.inf, -1.0, 0.0),
    ],
)
def test_what_is_not_finite_never_becomes_a_weight(weights, trainer, engine, expected):
    trainer, engine = np.float32([trainer, -1.0]), np.float32([engine, -1.0])
    np.testing.assert_array_equal(weights(trainer, engine), np.float32([expected, 1.0]))
    np.testing.assert_array_equal(weights(trainer, engine, np.asarray([False, True])), [0.0, 1.0])
    np.testing.assert_array_equal(weights(trainer, engine, per="sequence"), np.float32([expected] * 2))


def test_low_zero_leaves_only_large_ratios_out():
    trainer, engine = np.float32([-9.0, -1.0, -1.0]), np.float32([-1.0, -1.0, -9.0])
    found = np.asarray(jlp.rl.masked_weights(trainer, engine, low=0, high=2))
    np.testing.assert_allclose(found, [np.exp(-8), 1, 0], rtol=1e-6)


A = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jlp.rl.truncated_weights(A, A[:1]), ValueError, r"engine \(1, 3\).* needs one shape"),
        (lambda: jlp.rl.truncated_weights(A, A, A), TypeError, "mask is float32; needs bool"),
        (lambda: jlp.rl.masked_weights(A, A.astype(int)), TypeError, "needs log-probabilities in floating point"),
        (lambda: jlp.rl.truncated_weights(A, A, cap=0), ValueError, "cap=0; needs a number above 0"),
        (lambda: jlp.rl.truncated_weights(A, A, cap=float("nan")), ValueError, "cap=nan; needs"),
        (lambda: jlp.rl.truncated_weights(A, A, cap="2"), TypeError, "cap='2'; needs a number"),
        (lambda: jlp.rl.masked_weights(A, A, low=2, high=1), ValueError, "low=2, high=1; needs 0 <= low < high"),
        (lambda: jlp.rl.masked_weights(A, A, per="answer"), ValueError, "per='answer'; needs"),
        (lambda: jlp.rl.truncated_weights(A[0, 0], A[0, 0]), ValueError, r"needs one shape \[\.\.\., tokens\]"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
