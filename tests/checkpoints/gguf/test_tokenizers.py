"""A tokenizer is written where llama.cpp splits text in the same way, and left out with the reason elsewhere."""

import json

import numpy as np
import pytest

from jaxlowprec.checkpoints.gguf.tokenizers import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, tokenizer_metadata
from tests.checkpoints.gguf.models import WORDS, byte_level, from_sentencepiece

SIZE = 300


def metadata(path, content, settings=None, config=None, size=SIZE):
    """What is written for a tokenizer.json, and warnings."""
    (path / "tokenizer.json").write_text(json.dumps(content))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_metadata(path, config or {}, size)


def test_bytes_tokens_merges_and_special_tokens(tmp_path):
    found, warnings = metadata(tmp_path, byte_level(), {"eos_token": {"content": "<|end|>"}, "chat_template": "{{x}}"})
    assert not warnings
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == SIZE and tokens[256:264] == ["he", "ll", "hell", "hello", "Ġw", "12", "<|begin|>", "<|end|>"]
    assert types[:262].tolist() == [NORMAL] * 262 and types[262:264].tolist() == [CONTROL] * 2
    assert set(types[264:].tolist()) == {UNUSED} and tokens[264] == "[PAD264]"
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "llama-bpe"
    assert found["tokenizer.ggml.merges"][3] == "hell o" and found["tokenizer.chat_template"] == "{{x}}"
    assert found["tokenizer.ggml.bos_token_id"] == 262 and found["tokenizer.ggml.eos_token_id"] == 263
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.add_eos_token"] is False


def test_scores_say_the_ranks_of_merges(tmp_path):
    content = from_sentencepiece()
    found, warnings = metadata(tmp_path, content, config={"eos_token_id": [2, 5]})
    assert (
        not warnings and found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True
    )
    score = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"].tolist(), strict=True))
    assert [score[word] for word in WORDS] == sorted((score[word] for word in WORDS), reverse=True)
    assert score["h"] < score[WORDS[-1]] and score["<s>"] == -1000
    types = found["tokenizer.ggml.token_type"].tolist()
    assert types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and found["tokenizer.ggml.eos_token_id"] == 2
    assert found["tokenizer.ggml.scores"].dtype == np.float32


def change(content, where, value):
    *path, last = where.split("/")
    place = content
    for key in path:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    return content


UNFIT = {
    "another model": (byte_level, "model/type", "Unigram", "holds 'Unigram'; BPE"),
    "another expression": (
        byte_level,
        "pre_tokenizer/pretokenizers/0/pattern",
        {"Regex": ".+"},
        "none of gpt-2, llama",
    ),
    "merges of whole words": (byte_level, "model/ignore_merges", False, "none of gpt-2, llama-bpe"),
    "another normalizer": (byte_level, "normalizer", {"type": "NFKC"}, "normalises text by 'NFKC'"),
    "dropout": (byte_level, "model/dropout", 0.1, "has dropout"),
    "another end": (byte_level, "post_processor", {"type": "BertProcessing"}, "ends with 'BertProcessing'"),
    "no merges": (byte_level, "model", {"type": "BPE"}, "lacks what a tokenizer has"),
    "another space": (from_sentencepiece, "normalizer/normalizers/0/prepend", "_", "treats spaces in another way"),
    "merges apart": (from_sentencepiece, "model/merges/0", ["▁hell", "o"], "stand apart"),
    "a merge that is missing": (from_sentencepiece, "model/merges", [["l", "l"]], "is not merged from"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_others_are_left_out_with_the_reason(tmp_path, case):
    make, where, value, reason = UNFIT[case]
    found, (warning,) = metadata(tmp_path, change(make(), where, value))
    assert found == {"tokenizer.ggml.model": "none"}
    assert "no tokenizer is written" in warning and reason in warning and "llama-server need a tokenizer" in warning


def test_more_tokens_than_rows_and_no_tokenizer(tmp_path):
    _, (warning,) = tokenizer_metadata(tmp_path, {}, SIZE)
    assert "tokenizer.json is not there" in warning
    _, (warning,) = metadata(tmp_path, byte_level(), size=200)
    assert "tokens up to 263, the embedding has 200 rows" in warning
    _, (warning,) = metadata(tmp_path, byte_level(), {"bos_token": "<|end|>"})
    assert "texts get '<|begin|>' at an end, which is not the bos token" in warning
