"""tokenizer.json as llama.cpp's metadata, where llama.cpp is known to split text into the same tokens.

Two kinds of tokenizer.json map: byte-level BPE whose regular expression is one of llama.cpp's by name ("gpt2"), and BPE
with bytes as a fallback that was made from SentencePiece ("llama"). Of the second kind llama.cpp merges the pair whose
result has the highest score. Scores are made from the merges' ranks, if the merges are what scores can say.

Source: conversion/base.py, llama-vocab.cpp of llama.cpp; convert_slow_tokenizer.py of transformers.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.written_whole import read_json_object
from jaxlowprec.checkpoints.gguf.header import Value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
NO_TOKENIZER: Mapping[str, Value] = {"tokenizer.ggml.model": "none"}
"""The keys by which llama.cpp's library loads a model without a tokenizer; programs then give it numbers of tokens."""

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PRE = {
    (rf"{_WORDS}\p{{N}}{{1,3}}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}\p{{N}}|{_REST}", False): "qwen2",
}
"""llama.cpp's names of regular expressions, with whether whole words that are tokens are not merged."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_UNUSED_SCORE = -1000.0


class Unfit(Exception):
    """Why a tokenizer has no exact form in llama.cpp's metadata."""


def tokenizer_metadata(
    folder: pathlib.Path, config: Mapping[str, Any], size: int
) -> tuple[dict[str, Value], list[str]]:
    """The metadata of a folder's tokenizer, and warnings.

    Arguments:
        folder: a checkpoint's folder.
        config: its config.json.
        size: rows of the embedding; tokens beyond the tokenizer's are marked as unused.

    Returns:
        `NO_TOKENIZER` and a warning that says why, if llama.cpp would split text into other tokens.

    Raises:
        CheckpointError: a file is not JSON.
    """
    path = folder / "tokenizer.json"
    try:
        if not path.is_file():
            raise Unfit(f"{path} is not there")
        content = read_json_object(path)
        more = folder / "tokenizer_config.json"
        settings = read_json_object(more) if more.is_file() else {}
        found = _model(content, size)
        found |= _special(content, settings, config, size)
        template = folder / "chat_template.jinja"
        chat = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
        if isinstance(chat, str):
            found["tokenizer.chat_template"] = chat
        return found, []
    except (Unfit, LookupError, TypeError, AttributeError, ValueError, StopIteration) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error) if isinstance(error, Unfit) else f"{path} lacks what a tokenizer has ({brief(str(error))})"
        return dict(NO_TOKENIZER), [
            f"no tokenizer is written: {reason}; the library of llama.cpp loads the model and takes numbers of tokens, "
            "but llama-cli and llama-server need a tokenizer: convert_hf_to_gguf.py --vocab-only makes a file of one"
        ]


def _model(content: Mapping[str, Any], size: int) -> dict[str, Value]:
    """Tokens, their types, and merges or scores."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise Unfit(f"tokenizer.json holds {brief(model['type'])}; BPE is written")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise Unfit(f"tokenizer.json has {field}, which llama.cpp does not know")
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens, types = _tokens(content, size)
    found: dict[str, Value] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.asarray(types, np.int32),
    }
    if model.get("byte_fallback"):
        scores = _scores(model["vocab"], [(left, right) for left, right in merges], tokens, types)
        space = {"tokenizer.ggml.add_space_prefix": _space_prefix(content)}
        return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **found, **space, **scores}
    named = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre(content)}
    return {**named, **found, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}


def _tokens(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    model = content["model"]
    tokens = {number: text for text, number in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    if model.get("byte_fallback"):
        types |= {number: BYTE for number, text in tokens.items() if re.fullmatch("<0x[0-9A-F]{2}>", text)}
        if model.get("unk_token") in model["vocab"]:
            types[model["vocab"][model["unk_token"]]] = UNKNOWN
    for added in content.get("added_tokens", ()):
        number, text = added["id"], added["content"]
        tokens[number] = text
        if types.get(number) != UNKNOWN:
            types[number] = CONTROL if added["special"] else USER_DEFINED
    if odd := next((t for t in tokens.items() if type(t[0]) is not int or not isinstance(t[1], str)), None):
        raise Unfit(f"tokenizer.json has the token {brief(odd[1])} of number {brief(odd[0])}")
    if not tokens or max(tokens) >= size or min(tokens) < 0:
        raise Unfit(f"tokenizer.json has tokens up to {max(tokens, default=None)}, the embedding has {size} rows")
    if len(set(tokens.values())) != len(tokens):
        raise Unfit("tokenizer.json has two tokens of the same text")
    return (
        [tokens.get(number, f"[PAD{number}]") for number in range(size)],
        [types.get(number, UNUSED) for number in range(size)],
    )


def _pre(content: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule that splits text into words."""
    normalizer = content.get("normalizer")
    if normalizer and normalizer["type"] != "NFC":
        raise Unfit(f"tokenizer.json normalises text by {brief(normalizer['type'])}, which llama.cpp does not do")
    given: Any = content["pre_tokenizer"]
    steps = given["pretokenizers"] if given["type"] == "Sequence" else [given]
    kinds = [step["type"] for step in steps]
    ignores = bool(content["model"].get("ignore_merges", False))
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"] and not ignores:
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True) and not steps[1]["add_prefix_space"]:
        pattern = steps[0]["pattern"].get("Regex")
        isolated = steps[0]["behavior"] == "Isolated" and not steps[0].get("invert")
        if isolated and (pattern, ignores) in _PRE:
            return _PRE[pattern, ignores]
    raise Unfit(f"tokenizer.json splits text by a rule that is none of gpt-2, {', '.join(_PRE.values())}")


def _space_prefix(content: Mapping[str, Any]) -> bool:
    """Whether text gets a space in front, for a tokenizer that was made from SentencePiece."""
    normalizer: Any = content.get("normalizer")
    words: Any = content.get("pre_tokenizer")
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepends = {"type": "Prepend", "prepend": _SPACE}
    if words is None and normalizer == {"type": "Sequence", "normalizers": [prepends, replaces]}:
        return True
    if words is None and normalizer == replaces:
        return False
    if (
        normalizer is None
        and words["type"] == "Metaspace"
        and words["replacement"] == _SPACE
        and not words.get("split")
    ):
        return bool(words["prepend_scheme"] != "never")
    raise Unfit("tokenizer.json treats spaces in another way than SentencePiece does")


def _scores(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Value]:
    """Scores that make llama.cpp merge in the order of the merges' ranks.

    That is possible if all merges with one result stand together, and if every two tokens whose texts make a token may
    be merged.
    """
    rank_of: dict[str, int] = {}
    before = None
    for rank, (left, right) in enumerate(merges):
        if left + right != before and left + right in rank_of:
            raise Unfit(f"the merges that give {brief(left + right)} stand apart, which scores cannot say")
        before = left + right
        rank_of.setdefault(before, rank)
    allowed = set(merges)
    pieces = {text for text, number in vocab.items() if types[number] == NORMAL}
    lengths = sorted({len(text) for text in pieces} - {0})  # few, however long a token is
    for text in pieces:
        for at in itertools.takewhile(len(text).__gt__, lengths):
            if text[:at] in pieces and text[at:] in pieces and (text[:at], text[at:]) not in allowed:
                raise Unfit(
                    f"{brief(text)} is not merged from {brief(text[:at])} and {brief(text[at:])}, as scores would"
                )
    if lost := next((text for text in rank_of if text not in pieces), None):
        raise Unfit(f"a merge gives {brief(lost)}, which is no normal token")
    last = -float(len(merges))
    values = [-float(rank_of[text]) if text in rank_of else last for text in tokens]
    kept = [
        value if kind == NORMAL else _UNUSED_SCORE if kind != BYTE else 0.0
        for value, kind in zip(values, types, strict=True)
    ]
    return {"tokenizer.ggml.scores": np.asarray(kept, np.float32)}


def _special(
    content: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], size: int
) -> dict[str, Value]:
    """The numbers of special tokens, and whether texts begin and end with them."""
    number_of = {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    found: dict[str, Value] = {}
    numbers: dict[str, int] = {}
    for kind in _SPECIAL:
        named = settings.get(f"{kind}_token")
        named = named.get("content") if isinstance(named, Mapping) else named
        said = config.get(f"{kind}_token_id")
        said = said[0] if isinstance(said, list) and said else said
        number = number_of.get(named, said) if isinstance(named, str) else said
        if type(number) is int and 0 <= number < size:
            numbers[kind] = number
    first, last = _around(content.get("post_processor"))
    for kind, token in (("bos", first), ("eos", last)):
        if token is not None and number_of[token] != numbers.setdefault(kind, number_of[token]):
            raise Unfit(f"texts get {brief(token)} at an end, which is not the {kind} token")
        told = content.get("post_processor") is None and settings.get(f"add_{kind}_token") is True
        found[f"tokenizer.ggml.add_{kind}_token"] = token is not None or told
    return found | {f"tokenizer.ggml.{_SPECIAL[kind]}_token_id": np.uint32(number) for kind, number in numbers.items()}


def _around(processor: Any) -> tuple[str | None, str | None]:
    """The tokens that the tokenizer puts before and behind a text."""
    if processor is None:
        return None, None
    steps = processor["processors"] if processor["type"] == "Sequence" else [processor]
    first = last = None
    for step in steps:
        if step["type"] == "TemplateProcessing":
            single = step["single"]
            at = next(i for i, piece in enumerate(single) if "Sequence" in piece)
            if at > 1 or len(single) - at > 2:
                raise Unfit("texts get more than one token at an end")
            first = single[0]["SpecialToken"]["id"] if at else None
            last = single[-1]["SpecialToken"]["id"] if len(single) - at == 2 else None
        elif step["type"] != "ByteLevel":
            raise Unfit(f"tokenizer.json ends with {brief(step['type'])}, which llama.cpp does not do")
    return first, last
