"""What a config.json may say, and what it may not."""

import dataclasses
import json
import os

import numpy as np
import pytest

from jaxlowprec.checkpoints import decoders
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.rope import KINDS
from tests.models.decoder import tiny


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; this decoder needs one of llama, mistral"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this decoder needs silu, not gelu"),
        ({"hidden_size": None}, "hidden_size is None; this decoder needs a whole number, 1 or more"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads=4"),
        ({"head_dim": 33}, "head_dim is 33; this decoder needs an even number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, f"rope_type is 'dynamic'.*{', '.join(KINDS)}"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs the numbers low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one object for all layers"),
        ({"partial_rotary_factor": 0.5}, "rotary embeddings of whole heads"),
    ],
)
def test_what_the_decoder_lacks_is_named(changed, message):
    with pytest.raises(ValueError, match=message) as refused:
        DecoderConfig.of(tiny.config("llama2", **changed), "m/config.json")
    assert str(refused.value).startswith("m/config.json: ")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "has no config.json"), ("{", "needs a JSON object"), ("[]", "holds list")]
)
def test_a_broken_config_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        decoders.load(tmp_path)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json: has no config.json; needs a Hugging Face model folder"):
        decoders.load(tmp_path / "config.json")


def test_windows_are_those_of_the_layers():
    found = DecoderConfig.of(tiny.config("qwen2-window"))
    assert found.windows == (None, 5)
    assert DecoderConfig.of(tiny.config("mistral")).windows == (7, 7)
    assert DecoderConfig.of(tiny.config("qwen3", sliding_window=5)).windows == (None, None)


def test_older_files_say_the_same(tmp_path):
    new = tiny.config("llama3")
    scaling = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert DecoderConfig.of_folder(tmp_path) == DecoderConfig.of(new)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "needs the numbers factor"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "longrope or none for Phi"),
        ("phi3", {"head_dim": 64}, "have 16 and 16 numbers; a head has 32 pairs"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "needs long_factor, a list"),
        ("phi4-mini", {"partial_rotary_factor": 2.0, "rope_parameters": None}, "a number above 0, up to 1"),
        ("gemma2", {"hidden_activation": "relu"}, "gelu_pytorch_tanh or gelu_new, not relu"),
        ("gemma2", {"use_bidirectional_attention": True}, "attention to earlier tokens only"),
        ("gemma3", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1; this decoder needs a number above"),
        ("gemma3", {"layer_types": ["full_attention"]}, "full_attention or sliding_attention for each of 2 layers"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; this decoder needs sigmoid"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; this decoder needs 4 or less"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "greedy or group_limited_greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "weights that are not scaled to sum to 1"),
        ("deepseek_v2", {"mlp_bias": True}, "layers without biases"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "experts in every layer after the dense ones"),
        ("deepseek_v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; this decoder needs an even number"),
    ],
)
def test_what_a_family_lacks_is_named(family, changed, message):
    with pytest.raises(ValueError, match=message) as refused:
        DecoderConfig.of(tiny.config(family, **changed), "m/config.json")
    assert str(refused.value).startswith("m/config.json: ")


PUBLISHED = {
    "microsoft/Phi-4-mini-instruct": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "google/gemma-3-1b-it": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 26,
        "vocab_size": 262144,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "openai/gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "n_routed_experts": 256,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
    },
}
"""What of published config.json files decides the function."""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("microsoft/Phi-4-mini-instruct", lambda c: (c.rope.rotated_of(c.head), c.rope.factor) == (96, 32)),
        ("google/gemma-3-1b-it", lambda c: c.windows[:6] == (512,) * 5 + (None,) and c.tied and len(c.ropes) == 2),
        ("openai/gpt-oss-20b", lambda c: c.windows[:2] == (128, None) and c.experts.number == 32),
        ("deepseek-ai/DeepSeek-V3", lambda c: c.cached == ((1, 64), (1, 512)) and sum(c.sparse) == 58),
    ],
)
def test_published_configs_are_read(model, expected):
    assert expected(DecoderConfig.of(PUBLISHED[model]))


def test_kimi_is_a_deepseek():
    ours, kimi = (DecoderConfig.of(tiny.config("deepseek_v3", model_type=name)) for name in ("deepseek_v3", "kimi_k2"))
    assert dataclasses.replace(kimi, family="deepseek_v3") == ours


def test_long_texts_have_divisors_of_their_own():
    rope = DecoderConfig.of(tiny.config("phi4-mini")).rope
    short, long = rope.frequencies(32, 16), rope.frequencies(32, 17)
    np.testing.assert_allclose(short * rope.short, long * rope.long, rtol=1e-6)
    assert len(short) == 12 and (short[1:] > long[1:]).all()


def test_the_scale_of_deepseeks_scores():
    """YaRN's factor for the longer context is squared: equation 22 of arXiv 2309.00071, times mscale_all_dim."""
    found = DecoderConfig.of(PUBLISHED["deepseek-ai/DeepSeek-V3"])
    assert found.rope.attention_factor == 1 and abs(found.score_scale - 192**-0.5 * 1.3688879454**2) < 1e-9


ODD = (
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    True,
    -1,
    0,
    0.5,
    2**31,
    2**63,
    10**400,
    1e400,
    float("nan"),
    [[]],
    [{}],
    10**5000,
)
"""Values that no config of a model has for most of its keys."""


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_value_of_any_kind_is_read_or_refused_in_a_sentence(name):
    """Quickly, too: no size is believed before it is compared with one."""
    config = tiny.config(name)
    nested = [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
    cases = [{key: value} for key in config for value in ODD]
    cases += [{key: {**config[key], inner: value}} for key, inner in nested for value in ODD]
    for case in cases:
        try:
            DecoderConfig.of(config | case, "m/config.json")
        except ValueError as error:
            assert str(error).startswith("m/config.json: ") and len(str(error)) < 1000, case


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama2", {"num_hidden_layers": 16384}),
        ("mixtral", {"num_local_experts": 2**31 - 1}),
        ("gpt_oss", {"num_local_experts": 2**31 - 1}),
    ],
)
def test_a_count_that_the_folder_does_not_hold_is_refused_first(tmp_path, family, changed):
    tiny.folder(tmp_path / "m", family)
    said = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(said | changed))
    with pytest.raises(
        ValueError, match=r"config.json says \d+ (layers|experts in all layers); the folder has \d+ tensors"
    ):
        decoders.load(tmp_path / "m")


def test_a_pipe_in_place_of_a_config_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="has no config.json"):
        DecoderConfig.of_folder(tmp_path)
