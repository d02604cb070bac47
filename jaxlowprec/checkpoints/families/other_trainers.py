"""Trees of other trainers: MaxText, tunix, and the gemma package (Flax), as rules to Hugging Face's tensors.

* MaxText, scanned (with its default `param_scan_axis` of 1) and not: Llama 3, Qwen2, Qwen3 and Gemma 3. Its Llama holds
  queries divided by sqrt(head_dim), and the two halves of each head of queries and keys in turn. Its Gemma holds
  embeddings times sqrt(width), and norms as 1 + weight.
* tunix: Llama 3, Qwen2, Qwen3, and Gemma 2 and 3.
* The gemma package: Gemma 2 and 3, whose leaves of norms hold the file's weight, as those of tunix's Gemma do.

tests/checkpoints/families/captured has the trees that these packages make, and docs/reference/checkpoints.md their
versions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.families.parts import GATED, IN_FILE, LAYER, Rules
from jaxlowprec.checkpoints.trees.mapping import EXPERT, Rule, TreeMapping

_LAYER = "decoder.layers.{i}."
_MLP = tuple(zip(("wi_0", "wi_1", "wo"), GATED, strict=True))
_TURNS = "D {0} (r 2) -> ({0} 2 r) D"
_PLAIN = "D {0} d -> ({0} d) D"


def _maxtext_ends() -> Rules:
    return (
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "V D -> V D"),
        Rule("decoder.decoder_norm.scale", "model.norm.weight"),
        Rule("decoder.logits_dense.kernel", "lm_head.weight", "D V -> V D"),
    )


def _maxtext_attention(query: str = _PLAIN) -> Rules:
    kinds = (("query", "q", query, "H"), ("key", "k", query, "G"), ("value", "v", _PLAIN, "G"))
    at, inside = f"{_LAYER}self_attention.", f"{IN_FILE}self_attn."
    return (
        *(
            Rule(f"{at}{ours}.kernel", f"{inside}{theirs}_proj.weight", layout.format(heads))
            for ours, theirs, layout, heads in kinds
        ),
        *(
            Rule(f"{at}{ours}.bias", f"{inside}{theirs}_proj.bias", f"{heads} d -> ({heads} d)")
            for ours, theirs, _, heads in kinds
        ),
        Rule(f"{at}out.kernel", f"{inside}o_proj.weight", "H d D -> D (H d)"),
        Rule(f"{at}query_norm.scale", f"{inside}q_norm.weight", "d -> d"),
        Rule(f"{at}key_norm.scale", f"{inside}k_norm.weight", "d -> d"),
    )


def _maxtext_mlp() -> Rules:
    return tuple(Rule(f"{_LAYER}mlp.{a}.kernel", f"{IN_FILE}mlp.{b}.weight", "D N -> N D") for a, b in _MLP)


def _maxtext_experts() -> Rules:
    inside = f"{IN_FILE}mlp.experts.{EXPERT}"
    return (
        Rule(f"{_LAYER}moe_block.gate.kernel", f"{IN_FILE}mlp.gate.weight", "D E -> E D"),
        *(Rule(f"{_LAYER}moe_block.{a}", f"{inside}.{b}.weight", "expert D N -> N D") for a, b in _MLP),
    )


def _maxtext_norms(pairs: Iterable[tuple[str, str]]) -> Rules:
    return tuple(Rule(f"{_LAYER}{ours}.scale", f"{IN_FILE}{theirs}.weight", "D -> D") for ours, theirs in pairs)


_TWO_NORMS = (
    ("pre_self_attention_layer_norm", "input_layernorm"),
    ("post_self_attention_layer_norm", "post_attention_layernorm"),
)
_FOUR_NORMS = (
    ("pre_self_attention_norm", "input_layernorm"),
    ("post_self_attention_norm", "post_attention_layernorm"),
    ("pre_ffw_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)

_QWEN = (*_maxtext_attention(), *_maxtext_mlp(), *_maxtext_experts(), *_maxtext_norms(_TWO_NORMS))
_LLAMA = (*_maxtext_attention(_TURNS), *_maxtext_mlp(), *_maxtext_norms(_TWO_NORMS))
_GEMMA = (*_maxtext_attention(), *_maxtext_mlp(), *_maxtext_norms(_FOUR_NORMS))


def _scanned(rule: Rule, under: str = "decoder.layers.", number: str = "{i}") -> Rule:
    """A rule for layers that are stacked along axis 1; leaves of vectors along their last."""
    assert isinstance(rule.path, str) and isinstance(rule.name, str) and rule.layout is not None
    first, *rest = rule.layout.split(" ", 1)
    return dataclasses.replace(
        rule,
        path=under + rule.path.removeprefix(_LAYER),
        name=rule.name.replace("{i}", number),
        layout=" ".join([first, "i", *rest]),
    )


def _both(layers: Rules) -> TreeMapping:
    return TreeMapping((*_maxtext_ends(), *layers, *map(_scanned, layers)))


MAXTEXT_QWEN = _both(_QWEN)
"""Qwen2, Qwen3 and Qwen3-MoE."""

MAXTEXT_LLAMA = _both(_LLAMA)
"""Llama 3, whose queries have a factor of 1 / sqrt(head_dim) that `completed` adds."""

_PATTERN = 6

MAXTEXT_GEMMA3 = TreeMapping(
    (
        *_maxtext_ends(),
        *_GEMMA,
        *(
            _scanned(rule, f"decoder.layers.layers_{n}.", f"{{{_PATTERN}*i+{n}}}")
            for n in range(_PATTERN)
            for rule in _GEMMA
        ),
    )
)
"""Gemma 3, which scans six layers at once; `completed` adds the embedding's factor and the offset of norms."""


def completed(mapping: TreeMapping, config: Mapping[str, Any]) -> TreeMapping:
    """The mapping with the factors, offsets and layouts that follow from a config."""
    make = {MAXTEXT_LLAMA: _llama, MAXTEXT_GEMMA3: _gemma3, FLAX_GEMMA: _flax_gemma}.get(mapping)
    return mapping if make is None else TreeMapping(tuple(make(mapping.rules, config)))


def _llama(rules: Rules, config: Mapping[str, Any]) -> Rules:
    """MaxText's Llama: queries are divided by sqrt(head_dim)."""
    width = config.get("head_dim")
    width = width or _needed(config, "hidden_size", "MaxText") // _needed(config, "num_attention_heads", "MaxText")
    return _changed(rules, "query.kernel", factor=float(np.float32(1 / math.sqrt(width))))


def _gemma3(rules: Rules, config: Mapping[str, Any]) -> Rules:
    """MaxText's Gemma 3: embeddings are multiplied by sqrt(width), norms are 1 + weight, the last layers unscanned."""
    factor = float(ml_dtypes.bfloat16(math.sqrt(_needed(config, "hidden_size", "MaxText"))))
    rules = _changed(_changed(rules, "token_embedder.embedding", factor=factor), "scale", offset=1.0)
    done = _needed(config, "num_hidden_layers", "MaxText") // _PATTERN * _PATTERN
    return (*rules, *_remainder(rules, done))


def _flax_gemma(rules: Rules, config: Mapping[str, Any]) -> Rules:
    """The gemma package: gate and up are [2, I, D], but [2, D, I] in Gemma 2 2B, which its width tells."""
    width = _needed(config, "hidden_size", "the gemma package")
    layout = "+ D I -> I D" if width == _GEMMA2_2B else "+ I D -> I D"
    return _changed(rules, "gating_einsum", layout=layout, sizes=(("D", width),))


def _changed(rules: Rules, end: str, **fields: Any) -> Rules:
    return tuple(dataclasses.replace(rule, **fields) if rule.paths[0].endswith(end) else rule for rule in rules)


def _needed(config: Mapping[str, Any], key: str, trainer: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"mapping_for: {key} of the config is {brief(value)}; the tree of {trainer} follows from it"
        )
    return value


def _remainder(rules: Iterable[Rule], done: int) -> Rules:
    """The layers after the last whole pattern, which are not scanned."""
    return tuple(
        dataclasses.replace(
            rule,
            path=f"decoder.layers_remainder.layers.{{i}}.{rule.paths[0].removeprefix(_LAYER)}",
            name=rule.names[0].replace("{i}", f"{{i+{done}}}"),
        )
        for rule in rules
        if rule.paths[0].startswith(_LAYER)
    )


_QUERY, _KEY, _OUT = "D H d -> (H d) D", "D G d -> (G d) D", "H d D -> D (H d)"

TUNIX_MLP: Rules = tuple(Rule(f"{LAYER}mlp.{part}.kernel", f"{IN_FILE}mlp.{part}.weight") for part in GATED)

_TUNIX_PROJECTIONS = tuple(
    Rule(f"{LAYER}attn.{module}.w", f"{IN_FILE}self_attn.{module}.weight", layout)
    for module, layout in (("q_proj", _QUERY), ("k_proj", _KEY), ("v_proj", _KEY), ("o_proj", _OUT))
)
_TUNIX_BIASES = tuple(
    Rule(f"{LAYER}attn.{p}_bias", f"{IN_FILE}self_attn.{p}_proj.bias", "N -> N | H d -> (H d)") for p in "qkv"
)
_TUNIX_NORMS = (
    *(Rule(f"{LAYER}attn.{p}_norm.w", f"{IN_FILE}self_attn.{p}_norm.weight") for p in "qk"),
    *(Rule(f"{LAYER}{norm}.w", f"{IN_FILE}{norm}.weight") for norm in ("input_layernorm", "post_attention_layernorm")),
)
_TUNIX_EXPERTS = (
    Rule(f"{LAYER}mlp.router.kernel", f"{IN_FILE}mlp.gate.weight"),
    *(
        Rule(f"{LAYER}mlp.{part}", f"{IN_FILE}mlp.experts.{EXPERT}.{part}.weight", "expert D N -> N D")
        for part in GATED
    ),
)

TUNIX_DECODER = TreeMapping(
    (
        Rule("embedder.input_embedding", "model.embed_tokens.weight", "V D -> V D"),
        Rule("final_norm.w", "model.norm.weight"),
        Rule("lm_head.w", "lm_head.weight", "D V -> V D"),
        *_TUNIX_PROJECTIONS,
        *_TUNIX_BIASES,
        *_TUNIX_NORMS,
        *TUNIX_MLP,
        *_TUNIX_EXPERTS,
    )
)
"""Llama 3, Qwen2, Qwen3 and Qwen3-MoE."""


_FLAX = "layer.{i}."
_GEMMA2_2B = 2304
_KEYS_VALUES = tuple(f"{IN_FILE}self_attn.{part}_proj.weight" for part in "kv")
_ALL = tuple(f"{IN_FILE}self_attn.{part}_proj.weight" for part in "qkv")


def _gemma_ends() -> Rules:
    return (
        Rule("embedder.input_embedding", "model.embed_tokens.weight", "V D -> V D"),
        Rule("final_norm.scale", "model.norm.weight"),
        Rule("lm_head.kernel", "lm_head.weight", "D V -> V D"),
    )


def _gemma_attention(at: str) -> Rules:
    return (
        Rule(f"{at}attn.q_einsum.w", f"{IN_FILE}self_attn.q_proj.weight", "H D d -> (H d) D"),
        Rule(f"{at}attn.kv_einsum.w", _KEYS_VALUES, "+ G D d -> (G d) D"),
        Rule(f"{at}attn.qkv_einsum.w", _ALL, "+ H D d -> (H d) D"),
        Rule(f"{at}attn.attn_vec_einsum.w", f"{IN_FILE}self_attn.o_proj.weight", "H d D -> D (H d)"),
        Rule(f"{at}attn._query_norm.scale", f"{IN_FILE}self_attn.q_norm.weight"),
        Rule(f"{at}attn._key_norm.scale", f"{IN_FILE}self_attn.k_norm.weight"),
    )


def _gemma_norms(at: str) -> Rules:
    names = (
        ("pre_attention_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_attn_norm", "post_attention_layernorm"),  # tunix's name in Gemma 2
        ("pre_ffw_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    )
    return tuple(Rule(f"{at}{ours}.scale", f"{IN_FILE}{theirs}.weight") for ours, theirs in names)


_GATING = (
    Rule(
        f"{_FLAX}mlp.gating_einsum",
        (f"{IN_FILE}mlp.gate_proj.weight", f"{IN_FILE}mlp.up_proj.weight"),
        "+ I D -> I D",
    ),
    Rule(f"{_FLAX}mlp.linear", f"{IN_FILE}mlp.down_proj.weight", "I D -> D I"),
)

FLAX_GEMMA = TreeMapping((*_gemma_ends(), *_gemma_attention(_FLAX), *_gemma_norms(_FLAX), *_GATING))
"""The gemma package."""

TUNIX_GEMMA = TreeMapping((*_gemma_ends(), *_gemma_attention(LAYER), *_gemma_norms(LAYER), *TUNIX_MLP))
"""Tunix."""
