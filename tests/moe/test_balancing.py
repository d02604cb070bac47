"""What levels the load: the update of the selection bias, and the losses of the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.moe.published import EXPERTS, Config, best, bias_for, logits, route, scores_of
from tests.sharding.meshes import mesh_of

update = jlp.moe.update_selection_bias
RATE = np.float32(2**-7)


class TestSelectionBias:
    def test_is_raised_below_the_mean_load_and_lowered_above(self):
        rng = np.random.default_rng(0)
        counts, bias = rng.integers(0, 9, (5, EXPERTS)), rng.normal(size=(5, EXPERTS)).astype(np.float32)
        counts[0] = 4  # all of the mean load
        counts[1, :2] += np.asarray([-counts[1].sum() % EXPERTS, 0])  # a whole mean
        expected = bias + RATE * np.sign(counts.mean(-1, keepdims=True) - counts).astype(np.float32)
        actual = jax.jit(update)(jnp.asarray(bias), jnp.asarray(counts, jnp.int32), rate=RATE)
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(actual[0], bias[0])

    def test_counts_that_float32_rounds_are_compared_exactly(self):
        counts = np.full(4, 2**29 - 1)
        counts[0] -= 3
        actual = update(jnp.zeros(4), jnp.asarray(counts, jnp.int32), rate=1.0)
        np.testing.assert_array_equal(actual, [1, -1, -1, -1])

    def test_counts_are_summed_over_the_devices_of_a_mesh(self):
        counts = jnp.asarray([[5, 0, 1], [0, 5, 0], [0, 0, 5], [1, 0, 0]], jnp.int32)

        def step(bias, counts):
            return update(bias, counts[0], rate=RATE, axis_name="a")

        split = jax.shard_map(step, mesh=mesh_of((4,)), in_specs=(P(), P("a")), out_specs=P())
        actual = jax.jit(split)(jnp.zeros(3), counts)
        np.testing.assert_array_equal(actual, update(jnp.zeros(3), counts.sum(0), rate=RATE))
        np.testing.assert_array_equal(actual, [-RATE, RATE, -RATE])

    def test_has_no_gradient(self):
        counts = jnp.arange(4, dtype=jnp.int32)
        assert not np.any(jax.grad(lambda bias: jnp.sum(update(bias, counts, rate=RATE) ** 2))(jnp.ones(4)))

    @pytest.mark.parametrize(
        "config",
        [Config("sigmoid", selection_bias=True), Config(groups=4, groups_per_token=2, selection_bias=True)],
        ids=["sigmoid", "softmax in groups"],
    )
    def test_feeds_a_starved_expert_and_levels_the_load(self, config):
        x = jnp.asarray(logits(tokens=512) / 4)
        bias = jnp.zeros(EXPERTS).at[3].set(-0.5).at[4].set(0.5)

        @jax.jit
        def step(bias, rate):
            sizes = route(x, 4, config, bias=bias).group_sizes
            return update(bias, sizes, rate=rate), sizes

        _, first = step(bias, 0.0)
        assert first[3] == 0 and first[4] > 4 * first.mean()
        for i in range(200):
            bias, sizes = step(bias, 0.02 if i < 100 else 0.002)
        assert np.max(np.abs(sizes - sizes.mean())) < 0.25 * sizes.mean()

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((jnp.zeros(4, jnp.bfloat16), jnp.zeros(4, jnp.int32), 0.1), TypeError, "bias is bfloat16; needs float32"),
            ((jnp.zeros(4), jnp.zeros(4), 0.1), TypeError, "group_sizes are float32; needs integers"),
            (
                (jnp.zeros(4), jnp.zeros(5, jnp.int32), 0.1),
                ValueError,
                r"\(4,\) and group_sizes \(5,\); needs the same",
            ),
            ((jnp.zeros(4), jnp.zeros(4, jnp.int32), -0.1), ValueError, "rate=-0.1; needs a finite number of 0"),
            ((jnp.zeros(4), jnp.zeros(4, jnp.int32), jnp.ones(4)), ValueError, "rate=.*; needs a finite number"),
        ],
    )
    def test_a_wrong_argument_is_named(self, arguments, error, message):
        with pytest.raises(error, match=f"^update_selection_bias: .*{message}"):
            update(*arguments[:2], rate=arguments[2])

    def test_an_axis_outside_of_a_mesh_is_named(self):
        with pytest.raises(ValueError, match=r"update_selection_bias: axis_name='a'; needs an axis of the mesh"):
            update(jnp.zeros(4), jnp.zeros(4, jnp.int32), rate=0.1, axis_name="a")


def balance_by_hand(x, k, scoring, length, counted=None):
    """DeepSeek-V3's equations 17 to 20, sequence by sequence, without the coefficient."""
    values = []
    for i in range(0, len(x), length):
        scores = scores_of(x[i : i + length], scoring)
        chosen = [best(row, k) for row in scores] if counted is None else counted[i : i + length]
        f = np.bincount(np.ravel(chosen), minlength=EXPERTS) * EXPERTS / (k * length)
        p = (scores / scores.sum(-1, keepdims=True)).mean(0)
        values.append((f * p).sum())
    return np.mean(values)


class TestSequenceBalance:
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
    @pytest.mark.parametrize("length", [1, 12, 48])
    def test_is_the_papers(self, scoring, length):
        x = logits()
        routing = route(jnp.asarray(x), 4, Config(scoring), sequence_length=length)
        expected = balance_by_hand(x, 4, scoring, length)
        np.testing.assert_allclose(routing.sequence_balance_loss, expected, rtol=1e-5)
        whole = balance_by_hand(x, 4, scoring, len(x))
        np.testing.assert_allclose(routing.load_balance_loss, whole, rtol=1e-5)

    def test_sees_an_imbalance_that_the_batch_hides(self):
        x = 50 * jnp.repeat(jnp.eye(4), 6, axis=0)  # each sequence uses an expert of its own
        routing = route(x, 1, sequence_length=6)
        assert routing.load_balance_loss == pytest.approx(1) and routing.sequence_balance_loss == pytest.approx(4)

    def test_counts_by_the_scores_and_not_by_the_bias(self):
        x, config = logits(), Config("sigmoid", selection_bias=True)
        routing = route(jnp.asarray(x), 4, config, bias=jnp.asarray(bias_for(config)), sequence_length=12)
        expected = balance_by_hand(x, 4, "sigmoid", 12)
        np.testing.assert_allclose(routing.sequence_balance_loss, expected, rtol=1e-5)
        used = balance_by_hand(x, 4, "sigmoid", 12, np.asarray(routing.experts))
        assert abs(expected - used) > 1e-3

    def test_counts_the_experts_that_groups_allow(self):
        config = Config(groups=8, groups_per_token=2, group_score="max")
        x = logits()
        routing = route(jnp.asarray(x), 4, config, sequence_length=12)
        expected = balance_by_hand(x, 4, "softmax", 12, np.asarray(routing.experts))
        np.testing.assert_allclose(routing.sequence_balance_loss, expected, rtol=1e-5)

    def test_counts_the_experts_of_a_tape(self):
        x, config = logits(), Config("sigmoid", selection_bias=True)
        tape = route(jnp.asarray(logits(seed=7)), 4).experts
        routing = route(jnp.asarray(x), 4, config, bias=jnp.zeros(EXPERTS), tape=tape, sequence_length=12)
        expected = balance_by_hand(x, 4, "sigmoid", 12, np.asarray(tape))
        np.testing.assert_allclose(routing.sequence_balance_loss, expected, rtol=1e-5)
        spoilt = route(jnp.asarray(x), 4, tape=tape.at[0, 0].set(tape[0, 1]), sequence_length=12)
        assert np.isnan(spoilt.sequence_balance_loss)

    def test_its_gradient_goes_through_the_probabilities(self):
        x = logits() / 8
        gradient = jax.grad(lambda x: route(x, 4, Config("sigmoid"), sequence_length=12).sequence_balance_loss)(
            jnp.asarray(x)
        )
        step = np.random.default_rng(1).normal(size=x.shape) * 2.0**-12
        slope = (balance_by_hand(x + step, 4, "sigmoid", 12) - balance_by_hand(x - step, 4, "sigmoid", 12)) / 2
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * step), slope, rtol=1e-2)


class TestZLoss:
    def test_is_the_mean_square_of_the_logarithm_of_the_sum(self):
        x = logits()
        expected = np.mean(np.log(np.exp(x.astype(np.float64)).sum(-1)) ** 2)
        np.testing.assert_allclose(route(jnp.asarray(x), 2).z_loss, expected, rtol=1e-6)

    def test_its_gradient_makes_logits_smaller(self):
        gradient = jax.grad(lambda x: route(x, 2).z_loss)(jnp.asarray(logits()))
        assert np.all(gradient >= 0) and np.all(np.isfinite(gradient))

    def test_of_no_token_all_losses_are_zero(self):
        routing = route(jnp.zeros((0, 4)), 2, sequence_length=3)
        assert (routing.z_loss, routing.load_balance_loss, routing.sequence_balance_loss) == (0, 0, 0)
