"""Readers of a converted checkpoint find every embedding and head in the form that its config says."""

import itertools
import json
import re

import numpy as np
import pytest

from jaxlowprec.checkpoints.conversion.convert import convert, dequantize
from jaxlowprec.checkpoints.conversion.heads import NOT_LOOKED_UP, is_embedding
from jaxlowprec.checkpoints.conversion.plan import LeftModule
from jaxlowprec.checkpoints.conversion.rules import matching
from jaxlowprec.checkpoints.errors import CheckpointError
from tests.checkpoints.conversion.test_convert import SCHEMES as EVERY
from tests.checkpoints.small_models import CONFIG, llama, read_config, read_tensors, same, write_checkpoint

SCHEMES = {
    name: EVERY[name] for name in ("w4a16", "mxfp4", "fp8_channel", "deepseek_fp8", "modelopt_nvfp4", "gptq", "awq")
}
RULES = {
    "defaults": {},
    "no defaults": {"defaults": ()},
    "the head": {"include": ["lm_head"]},
    "the head by an expression": {"include": ["re:.*head"]},
    "all but the head": {"defaults": (), "ignore": ["lm_head"]},
    "an embedding": {"include": ["re:.*embed_tokens"]},
    "everything": {"include": ["re:.*"]},
}
HEADS = {"none": None, "a copy": 1, "its own": -2}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def model(path, head, tied):
    """A model whose head is its embedding times a number, or is not in the file."""
    tensors = llama(1)
    tensors[HEAD] = tensors[EMBEDDING] * np.asarray(HEADS[head] or 0, tensors[EMBEDDING].dtype)
    if HEADS[head] is None:
        del tensors[HEAD]
    said = {} if tied is None else {"tie_word_embeddings": tied}
    return write_checkpoint(path, tensors, shards=1, config=CONFIG | said), tensors


def left_alone(config):
    """The modules and rules that a config leaves in high precision, as its readers find them."""
    entry = config["quantization_config"]
    if "dynamic" in entry:
        return [rule.replace("-:", "re:", 1) for rule in entry["dynamic"]]
    return next(entry[key] for key in ("ignore", "modules_to_not_convert", "exclude_modules") if key in entry)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", SCHEMES)
def test_readers_find_what_the_config_says(tmp_path, name, rules):
    scheme = SCHEMES[name]
    for n, (head, tied) in enumerate(itertools.product(HEADS, (True, False, None))):
        source, tensors = model(tmp_path / f"{n}", head, tied)
        low, high = tmp_path / f"{n} low", tmp_path / f"{n} high"
        if rules in ("an embedding", "everything"):
            with pytest.raises(CheckpointError, match=r"includes model.embed_tokens, an embedding.*no reader decodes"):
                convert(source, low, scheme, **RULES[rules])
            continue
        report = convert(source, low, scheme, **RULES[rules])
        held, config = read_tensors(low), read_config(low)
        assert same(held[EMBEDDING], tensors[EMBEDDING]) and matching("model.embed_tokens", left_alone(config))
        quantised = "lm_head" in report.changed
        assert quantised == (head != "none" and rules not in ("defaults", "all but the head"))
        assert quantised != (HEAD in held or head == "none") or scheme.required[0] == "weight"
        assert quantised != bool(matching("lm_head", left_alone(config)))
        assert config["quantization_config"].get("lm_head", quantised) == quantised  # GPTQ's
        if config.get("tie_word_embeddings"):  # then the head is the embedding, and nothing else
            assert not quantised and (HEAD not in held or same(held[HEAD], held[EMBEDDING]))
        assert any("says tie_word_embeddings" in warning for warning in report.warnings) == (
            tied is True and (quantised or head == "its own")
        )
        assert any(warning.startswith("heads are quantised (lm_head)") for warning in report.warnings) == quantised
        dequantize(low, high)
        assert read_config(high).get("tie_word_embeddings") == config.get("tie_word_embeddings")


def test_without_defaults_embeddings_are_left_alone_and_listed(tmp_path):
    source, _ = model(tmp_path / "source", "its own", False)
    report = convert(source, tmp_path / "low", SCHEMES["mxfp4"], defaults=())
    assert report.left == [LeftModule("model.embed_tokens", NOT_LOOKED_UP)]


def test_a_tied_head_that_is_the_only_tensor_of_both_stays(tmp_path):
    source, tensors = model(tmp_path / "source", "a copy", True)
    del tensors[EMBEDDING]
    source = write_checkpoint(tmp_path / "other", tensors, shards=1, config=read_config(source))
    with pytest.raises(CheckpointError, match="lm_head is the only tensor of the embedding and the head"):
        convert(source, tmp_path / "low", SCHEMES["w4a16"], include=["lm_head"])
    convert(source, tmp_path / "low", SCHEMES["w4a16"])


def test_a_head_that_was_quantised_apart_is_untied_when_decoded(tmp_path):
    source, _ = model(tmp_path / "source", "a copy", False)
    convert(source, tmp_path / "low", SCHEMES["fp8_channel"], include=["lm_head"])
    config = read_config(tmp_path / "low") | {"tie_word_embeddings": True}
    (tmp_path / "low" / "config.json").write_text(json.dumps(config))
    report = dequantize(tmp_path / "low", tmp_path / "high")
    assert read_config(tmp_path / "high")["tie_word_embeddings"] is False
    assert "lm_head has a weight of its own, which is quantised: it says false now" in report.warnings[0]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "model.layers.0.mlp.gate",
            r"routers are quantised \(model.layers.0.mlp.gate\): vLLM, SGLang and",
        ),
        ("model.layers.0.mlp.shared_expert_gate", "shared experts' gates are quantised .*: vLLM and SGLang hold them"),
        ("model.visual.blocks.0.fc", "vision and audio are quantised .*: engines may hold them in high precision"),
        ("score", "heads are quantised"),
    ],
)
def test_what_the_defaults_leave_alone_is_warned_of(tmp_path, module, message):
    tensors = llama(1) | {f"{module}.weight": llama(1)["lm_head.weight"]}
    source = write_checkpoint(tmp_path / "source", tensors, shards=1)
    assert not convert(source, tmp_path / "low", SCHEMES["mxfp4"]).warnings
    (warning,) = convert(source, tmp_path / "more", SCHEMES["mxfp4"], include=[module]).warnings
    assert re.match(message, warning)


def test_names_of_embeddings():
    tables = ["embed_tokens", "transformer.wte", "wpe", "tok_embeddings", "embed_positions", "model.shared"]
    others = ["embed_out", "unembed", "vision.embedding_projection", "time_embed.0", "lm_head", "shared_expert.up"]
    assert all(map(is_embedding, tables)) and not any(map(is_embedding, others))
