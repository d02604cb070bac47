"""The mapping of a checkpoint by its config: the rules of its family, completed by what the config says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.families import other_trainers
from jaxlowprec.checkpoints.families.families import FAMILIES, Family
from jaxlowprec.checkpoints.families.parts import fused_qkv, fused_qkv_bias, with_stacked
from jaxlowprec.checkpoints.trees.layout import parsed
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping

Source = Literal["hugging_face", "maxtext", "tunix", "flax_gemma"]

_FOREIGN: Mapping[tuple[str, str], TreeMapping] = {
    ("maxtext", "LlamaForCausalLM"): other_trainers.MAXTEXT_LLAMA,
    **{("maxtext", f"{name}ForCausalLM"): other_trainers.MAXTEXT_QWEN for name in ("Qwen2", "Qwen3", "Qwen3Moe")},
    ("maxtext", "Gemma3ForCausalLM"): other_trainers.MAXTEXT_GEMMA3,
    **{
        ("tunix", f"{name}ForCausalLM"): other_trainers.TUNIX_DECODER
        for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
    },
    **{("tunix", f"{name}ForCausalLM"): other_trainers.TUNIX_GEMMA for name in ("Gemma2", "Gemma3")},
    **{("flax_gemma", f"{name}ForCausalLM"): other_trainers.FLAX_GEMMA for name in ("Gemma2", "Gemma3")},
}
"""Mappings for trees of other programs, by the program and the architecture."""

_PAGE = "docs/how-to/models.md"


def mapping_for(config: Mapping[str, Any], tree: Source = "hugging_face", *, norm_offset: float = 0.0) -> TreeMapping:
    """The mapping for a checkpoint's config.json.

    To the family's rules it adds what the config says: whether the head is tied to the embedding, the vocabulary's size
    (a tree may have more rows, which files lack), the numbers of heads, and where layers with experts begin.

    Arguments:
        config: the content of config.json.
        tree: whose names and layouts the tree has: Hugging Face's names without "model." (as matrices or with axes of
            heads, stacked or not), or those of "maxtext", "tunix" or "flax_gemma".
        norm_offset: what the tree's norms have more than the file's: 1 for a Gemma whose leaves are 1 + weight.

    Raises:
        CheckpointError: no family has the architecture, or not for such a tree; a size in the config is not a positive
            integer.

    >>> config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "tie_word_embeddings": True}
    >>> [rule.tied_to for rule in mapping_for(config).rules if rule.path == "lm_head.kernel"]
    ['model.embed_tokens.weight']
    """
    family = family_of(config)
    sizes = _sizes(family, config)
    mapping = family.mapping if tree == "hugging_face" else _foreign(config, tree)
    rules = list(mapping.rules)
    if tree == "hugging_face":
        rules += _from_config(family, rules, sizes, config)
    left_out = family.mapping.left_out
    layers = _size(config, "num_hidden_layers")
    if family.draft_layers and layers is not None:
        left_out = (*left_out, _later_layers(layers))
    tied = bool(config.get("tie_word_embeddings", family.tied))
    made = (_completed(rule, sizes, tied, norm_offset) for rule in rules)
    return TreeMapping(tuple(made), left_out)


def _from_config(family: Family, rules: list[Rule], sizes: Mapping[str, int], config: Mapping[str, Any]) -> list[Rule]:
    """Rules that follow from a config: for layers that are stacked in two parts, and for fused heads."""
    heads = sizes.get("H"), sizes.get("G")
    fused: tuple[Rule, ...] = ()
    if family.splits_qkv and None not in heads:
        fused = (fused_qkv(sizes["H"], sizes["G"]), fused_qkv_bias(sizes["H"], sizes["G"]))
    if family.dense_first is None:
        return list(with_stacked(fused))
    first = _size(config, family.dense_first, least=0) or 0
    layers = (*(rule for rule in rules if "{i}" in rule.paths[0]), *fused)
    dense, sparse = with_stacked(layers, "dense_layers"), with_stacked(layers, "moe_layers", first)
    return [*fused, *dense[len(layers) :], *sparse[len(layers) :]]


def _foreign(config: Mapping[str, Any], tree: str) -> TreeMapping:
    name = config["architectures"][0]
    if (tree, name) not in _FOREIGN:
        known = "; ".join(f"{program}: {architecture}" for program, architecture in _FOREIGN)
        raise CheckpointError(
            f"mapping_for: tree={tree!r} with {name}; known are {known}. For others, write a TreeMapping: {_PAGE} "
            "shows how"
        )
    return other_trainers.completed(_FOREIGN[tree, name], config)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json's first architecture. Raises CheckpointError if it is not known.

    >>> family_of({"architectures": ["Phi3ForCausalLM"]}).title
    'Phi-3, Phi-4'
    """
    given = config.get("architectures")
    names = given if isinstance(given, list | tuple) else []
    for family in FAMILIES:
        if names and names[0] in family.architectures:
            return family
    known = "; ".join(f"{family.title} ({', '.join(family.architectures)})" for family in FAMILIES)
    raise CheckpointError(
        f"mapping_for: the config's architectures is {brief(given)}; known are {known}. For other models, write a "
        f"TreeMapping: {_PAGE} shows how"
    )


def _completed(rule: Rule, sizes: Mapping[str, int], tied: bool, norm_offset: float) -> Rule:
    """A rule with what a config adds to it."""
    axes = {axis for one in parsed(rule.layout or "->") for group in one.left for axis in group}
    known = tuple((axis, size) for axis, size in sizes.items() if axis in axes and not _joins(rule, axis))
    rule = dataclasses.replace(rule, sizes=(*rule.sizes, *known), padded=("V",) if "V" in dict(known) else ())
    if rule.names == ("lm_head.weight",) and tied:
        rule = dataclasses.replace(rule, tied_to="model.embed_tokens.weight")
    if norm_offset and not rule.offset and rule.paths[0].endswith("scale"):
        rule = dataclasses.replace(rule, offset=norm_offset)
    return rule


def _joins(rule: Rule, axis: str) -> bool:
    """Whether parts are joined along the axis, which then has another size than a part."""
    return any(one.joined == axis for one in parsed(rule.layout or "->"))


def _sizes(family: Family, config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {axis: size for axis, key in family.sizes if (size := _size(config, key)) is not None}
    heads = sizes.get("H")
    if ("G", "num_key_value_heads") in family.sizes and heads is not None:
        sizes.setdefault("G", heads)
    return sizes


def _size(config: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"mapping_for: {key} of the config is {brief(value)}; needs an integer from {least}")
    return value


def _later_layers(count: int) -> str:
    """A regular expression for tensors of layers from a number on.

    >>> import re
    >>> pattern = re.compile(_later_layers(12))
    >>> [bool(pattern.fullmatch(f"model.layers.{i}.enorm.weight")) for i in (1, 9, 11, 12, 13, 20, 112)]
    [False, False, False, True, True, True, True]
    """
    digits = str(count)
    longer = rf"[1-9]\d{{{len(digits)},}}"
    same = [
        rf"{digits[:at]}[{int(digit) + 1}-9]\d{{{len(digits) - at - 1}}}"
        for at, digit in enumerate(digits)
        if digit != "9"
    ]
    return rf"model\.layers\.(?:{'|'.join([digits, *same, longer])})\..+"
