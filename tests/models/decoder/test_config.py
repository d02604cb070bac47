"""What a config.json may say, and what it may not."""

import json

import pytest

from jaxlowprec.checkpoints.decoders import folders
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
        folders.load(tmp_path)


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
