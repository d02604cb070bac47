"""Routers as DeepSeek, GLM, Kimi, Qwen and others have them: by hand, and as transformers computes them."""

import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often
from tests.moe.published import EXPERTS, MODELS, Config, bias_for, chosen_by_hand, logits, route
from tests.sharding.meshes import mesh_of

each_model = pytest.mark.parametrize("model", often(["DeepSeek-V3", "DeepSeek-V2", "DeepSeek-V4", "gpt-oss"], MODELS))


class TestByHand:
    @pytest.mark.parametrize("model", MODELS)
    def test_experts_and_weights(self, model):
        config, k = MODELS[model]
        x, bias = logits(), bias_for(config)
        routing = route(x, k, config, bias=bias)
        experts, weights = chosen_by_hand(x, k, config, bias)
        np.testing.assert_array_equal(routing.experts, experts)
        np.testing.assert_allclose(routing.weights, weights, rtol=3e-6)
        assert routing.experts.dtype == jnp.int32 and routing.weights.dtype == jnp.float32

    @each_model
    def test_a_replayed_choice_ignores_bias_and_groups(self, model):
        config, k = MODELS[model]
        x, bias = logits(), bias_for(config)
        fresh = route(x, k, config, bias=bias)
        other_bias = None if bias is None else -bias
        replayed = route(x, k, config, bias=other_bias, tape=fresh.experts)
        assert_same_bytes((replayed.experts, replayed.weights), (fresh.experts, fresh.weights))

    @pytest.mark.sampled(3)
    @each_model
    def test_gradients_are_those_of_the_scores_and_reach_no_bias(self, model):
        config, k = MODELS[model]
        x, bias = logits(tokens=6), bias_for(config)

        def weighted(x, bias):
            return jnp.sum(route(x, k, config, bias=bias).weights * jnp.cos(jnp.arange(k)))

        gradient = jax.jit(jax.grad(weighted))(x, bias)
        direction = np.random.default_rng(3).normal(size=x.shape)
        step = 2.0**-10 * direction  # smaller than what separates two logits: the choice stays
        by_hand = [chosen_by_hand(x + sign * step, k, config, bias)[1] for sign in (1, -1)]
        slope = np.sum((by_hand[0] - by_hand[1]) * np.cos(np.arange(k))) / 2**-9
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=2e-3, atol=1e-4)
        if bias is not None:
            assert not np.any(jax.jit(jax.grad(weighted, argnums=1))(x, bias))

    @pytest.mark.sampled(5)
    @each_model
    def test_under_vmap_and_shard_map_is_that_of_each(self, model):
        config, k = MODELS[model]
        x, bias = logits(), bias_for(config)
        halves = jnp.asarray(x).reshape(2, -1, EXPERTS)

        def call(x):
            found = route(x, k, config, bias=bias)
            return found.experts, found.weights

        alone = [jax.jit(call)(half) for half in halves]
        together = jax.jit(jax.vmap(call))(halves)
        split = jax.jit(jax.shard_map(call, mesh=mesh_of((2,)), in_specs=P("a"), out_specs=P("a")))(x)
        for i in range(2):
            assert_same_bytes(jax.tree.map(lambda leaf: leaf[i], together)[0], alone[i][0])
            np.testing.assert_allclose(together[1][i], alone[i][1], rtol=1e-6)
        assert_same_bytes(jax.device_get(split[0]), np.concatenate([experts for experts, _ in alone]))


class TestHostile:
    def test_of_equal_scores_the_lower_group_and_expert_come_first(self):
        config = Config("sigmoid", groups=4, groups_per_token=2, selection_bias=True)
        routing = route(np.zeros((3, 8), np.float32), 3, config, bias=np.zeros(8, np.float32))
        np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 3)
        np.testing.assert_allclose(routing.weights, np.full((3, 3), 1 / 3), rtol=1e-6)

    @pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus"])
    @pytest.mark.parametrize("group_score", ["top2_sum", "max"])
    def test_nan_stays_in_its_token(self, scoring, group_score):
        config = Config(scoring, groups=4, groups_per_token=2, group_score=group_score, selection_bias=True)
        x, bias = logits(), bias_for(config)
        whole = jax.device_get(route(x, 4, config, bias=bias))
        spoilt = x.copy()
        spoilt[5], spoilt[9, 3] = np.nan, np.nan
        routing = jax.device_get(route(spoilt, 4, config, bias=bias))
        assert np.all(np.isnan(routing.weights[5])) and np.any(np.isnan(routing.weights[9]))
        rest = np.setdiff1d(np.arange(len(x)), [5, 9])
        assert_same_bytes((routing.experts[rest], routing.weights[rest]), (whole.experts[rest], whole.weights[rest]))
        for row in routing.experts:
            assert len(set(row)) == 4 and row.min() >= 0 and row.max() < EXPERTS

    @pytest.mark.slow
    @pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus"])
    def test_extreme_logits_give_finite_weights_and_gradients(self, scoring):
        x = np.tile(np.asarray([-3e38, -200.0, -100.0, -20.0, 0.0, 20.0, 200.0, 3e38], np.float32), (2, 1))
        x[1] = -300.0 - np.arange(8)
        for normalize in (True, None) if scoring == "softmax_of_chosen" else (True, False):
            config = Config(scoring, normalize)

            def first(x, config=config):
                routing = route(x, 3, config)
                return jnp.sum(routing.weights[:, 0]) + routing.sequence_balance_loss

            value, gradient = jax.jit(jax.value_and_grad(first))(x)
            assert np.isfinite(value) and np.all(np.isfinite(gradient))

    def test_every_expert_may_be_chosen(self):
        config = Config("sigmoid", groups=4, groups_per_token=4, selection_bias=True)
        x = logits()
        routing = route(x, EXPERTS, config, bias=np.linspace(5, -5, EXPERTS, dtype=np.float32))
        np.testing.assert_array_equal(np.sort(routing.experts), np.tile(np.arange(EXPERTS), (len(x), 1)))
        np.testing.assert_array_equal(routing.group_sizes, np.full(EXPERTS, len(x)))

    def test_a_bias_may_starve_an_expert_but_changes_no_weight(self):
        config = Config("sigmoid", normalize=False, selection_bias=True)
        x, bias = logits(), np.zeros(EXPERTS, np.float32)
        bias[[3, 7]] = -1e3, 1e3
        routing = route(x, 4, config, bias=bias)
        assert routing.group_sizes[3] == 0 and routing.group_sizes[7] == len(x)
        expected = 1 / (1 + np.exp(-np.take_along_axis(x, np.asarray(routing.experts), -1).astype(np.float64)))
        np.testing.assert_allclose(routing.weights, expected, rtol=1e-6)

    def test_softmax_of_chosen_survives_a_tape_of_unlikely_experts(self):
        x = np.asarray([[0.0, -200.0, -201.0, 5.0]], np.float32)
        tape = np.asarray([[1, 2]], np.int32)
        weights = route(x, 2, Config("softmax_of_chosen"), tape=tape).weights
        np.testing.assert_allclose(weights, [[0.7310586, 0.2689414]], rtol=1e-6)
        likely = logits()
        a, b = (route(likely, 4, Config(scoring)).weights for scoring in ("softmax", "softmax_of_chosen"))
        np.testing.assert_allclose(a, b, rtol=3e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scoring": "max"}, ValueError, "scoring='max'; needs"),
        ({"normalize": 1}, TypeError, "normalize=1; needs True or False"),
        ({"selection_bias": None}, TypeError, "selection_bias=None; needs True or False"),
        ({"scoring": "softmax_of_chosen", "normalize": False}, ValueError, 'needs scoring="softmax"'),
        ({"scale": 0.0}, ValueError, "scale=0.0; needs a finite number above 0"),
        ({"groups": 0}, ValueError, "groups=0; needs an int from 1 on"),
        ({"groups": 4, "groups_per_token": 5}, ValueError, "groups_per_token=5 of groups=4; needs 1 to 4"),
        ({"group_score": "sum"}, ValueError, "group_score='sum'; needs"),
        ({"z_loss_coef": float("inf")}, ValueError, "z_loss_coef=inf; needs a finite number"),
    ],
)
def test_a_wrong_config_is_named(options, error, message):
    with pytest.raises(error, match=f"^RouterConfig: .*{message}"):
        Config(**options)


BIAS = jnp.zeros(EXPERTS)


@pytest.mark.parametrize(
    ("k", "options", "given", "message"),
    [
        (4, {"groups": 5}, {}, "route: 32 experts in groups=5; needs a multiple of 5"),
        (2, {"groups": 32, "groups_per_token": 4}, {}, 'one expert each.*or group_score="max"'),
        (
            9,
            {"groups": 8, "groups_per_token": 2},
            {},
            "k=9 experts of groups_per_token=2 groups of 4, which have 8",
        ),
        (2, {"selection_bias": True}, {}, "bias=None with selection_bias=True; needs both or neither"),
        (2, {}, {"bias": BIAS}, "with selection_bias=False; needs both or neither"),
        (2, {"selection_bias": True}, {"bias": BIAS[:4]}, r"bias has shape \(4,\); needs \(32,\)"),
        (2, {}, {"sequence_length": 7}, "48 tokens in sequences of sequence_length=7; needs a multiple of it"),
    ],
)
def test_what_does_not_fit_the_experts_is_named(k, options, given, message):
    with pytest.raises(ValueError, match=message):
        jlp.moe.route(jnp.asarray(logits()), k, Config(**options), **given)


class TestTransformers:
    """The routers of Hugging Face's models, by their own code."""

    @pytest.fixture(autouse=True)
    def library(self):
        self.torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
        pytest.importorskip("transformers", reason="transformers is not installed")

    def theirs(self, module, name, settings, x, bias, **options):
        """The weight of each expert for each token, by a router whose product is the identity."""
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        if not hasattr(modeling, name):
            pytest.skip(f"this version of transformers has no {name}")
        router = getattr(modeling, name)(types.SimpleNamespace(**settings, hidden_size=EXPERTS))
        with self.torch.no_grad():
            for parameter in router.parameters():
                if parameter.shape == (EXPERTS, EXPERTS):
                    parameter.copy_(self.torch.eye(EXPERTS))
                else:
                    parameter.zero_()
            for buffer in router.buffers():
                buffer.copy_(self.torch.from_numpy(bias))
            _, weights, experts = router(self.torch.from_numpy(x), **options)
        dense = np.zeros((len(x), EXPERTS))
        np.put_along_axis(dense, experts.numpy(), weights.numpy().astype(np.float64), -1)
        return dense

    def assert_agree(self, dense, x, k, config, bias=None):
        routing = route(x, k, config, bias=bias)
        ours = np.zeros_like(dense)
        np.put_along_axis(ours, np.asarray(routing.experts), np.asarray(routing.weights), -1)
        np.testing.assert_array_equal(ours > 0, dense > 0)
        np.testing.assert_allclose(ours, dense, rtol=3e-6)

    @pytest.mark.parametrize("groups", [1, 8])
    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("deepseek_v3", "DeepseekV3TopkRouter"),
            ("glm4_moe", "Glm4MoeTopkRouter"),
            ("kimi_linear", "KimiLinearTopkRouter"),
            ("bailing_hybrid", "BailingHybridTopkRouter"),
        ],
    )
    def test_deepseek_v3_glm_kimi_and_ling(self, module, name, normalize, groups):
        chosen = 4 if groups > 1 else 1
        config = Config("sigmoid", normalize, 2.5, groups, chosen, selection_bias=True)
        x, bias = logits(), bias_for(config)
        settings = {"num_experts_per_tok": 8, "num_local_experts": EXPERTS, "routed_scaling_factor": 2.5}
        settings |= {"n_group": groups, "topk_group": chosen, "norm_topk_prob": normalize}
        self.assert_agree(self.theirs(module, name, settings, x, bias), x, 8, config, bias)

    @pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
    def test_deepseek_v2(self, method):
        groups = {"groups": 8, "groups_per_token": 3, "group_score": "max"} if method != "greedy" else {}
        x = logits()
        settings = {"num_experts_per_tok": 6, "num_experts": EXPERTS, "routed_scaling_factor": 16.0}
        settings |= {"topk_method": method, "n_group": 8, "topk_group": 3}
        theirs = self.theirs("deepseek_v2", "DeepseekV2TopkRouter", settings, x, None)
        self.assert_agree(theirs, x, 6, Config(normalize=False, scale=16.0, **groups))

    def test_deepseek_v4(self):
        config, k = MODELS["DeepSeek-V4"]
        x, bias = logits(), bias_for(config)
        settings = {"num_experts_per_tok": k, "num_local_experts": EXPERTS, "routed_scaling_factor": 1.5}
        settings |= {"scoring_func": "sqrtsoftplus"}
        self.assert_agree(self.theirs("deepseek_v4", "DeepseekV4TopKRouter", settings, x, bias), x, k, config, bias)

    @pytest.mark.parametrize("normalize", [True, False])
    def test_qwen3(self, normalize):
        x = logits()
        settings = {"num_experts_per_tok": 8, "num_experts": EXPERTS, "norm_topk_prob": normalize}
        theirs = self.theirs("qwen3_moe", "Qwen3MoeTopKRouter", settings, x, None)
        self.assert_agree(theirs, x, 8, Config(normalize=normalize))

    def test_gpt_oss(self):
        x = logits()
        settings = {"num_experts_per_tok": 4, "num_local_experts": EXPERTS}
        self.assert_agree(
            self.theirs("gpt_oss", "GptOssTopKRouter", settings, x, None), x, 4, Config("softmax_of_chosen")
        )

    def test_minimax_m2(self):
        config, k = MODELS["MiniMax-M2"]
        x, bias = logits(), bias_for(config)
        settings = {"num_experts_per_tok": k, "num_local_experts": EXPERTS}
        of_torch = self.torch.from_numpy(bias)
        theirs = self.theirs("minimax_m2", "MiniMaxM2TopKRouter", settings, x, bias, e_score_correction_bias=of_torch)
        self.assert_agree(theirs, x, k, config, bias)
