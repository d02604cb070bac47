"""Rules that model families share, for trees whose modules have Hugging Face's names without "model.".

Axes in layouts: D the model's width, N what a matrix gives, H heads of queries, G heads of keys and values, d the width
of a head, V the vocabulary, E experts, I the width of a hidden layer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from jaxlowprec.checkpoints.trees.layout import parsed
from jaxlowprec.checkpoints.trees.mapping import EXPERT, Rule

Rules = tuple[Rule, ...]

GATED = ("gate_proj", "up_proj", "down_proj")

QUERY = "D N -> N D | D H d -> (H d) D"
KEY = "D N -> N D | D G d -> (G d) D"
OUT = "N D -> D N | H d D -> D (H d)"
QUERY_BIAS = "N -> N | H d -> (H d)"
KEY_BIAS = "N -> N | G d -> (G d)"
LAYER = "layers.{i}."
IN_FILE = "model.layers.{i}."


def ends(embedding: str = "model.embed_tokens.weight", head: str = "lm_head.weight") -> Rules:
    """The embedding, the last norm, and the head."""
    return (
        Rule("embed_tokens.embedding", embedding, "V D -> V D"),
        Rule("norm.scale", "model.norm.weight"),
        Rule("lm_head.kernel", head, "D V -> V D"),
    )


def linears(*modules: str, layout: str | None = None) -> Rules:
    """Linear layers of a block, each with a bias if the tree has one."""
    kernels = [Rule(f"{LAYER}{module}.kernel", f"{IN_FILE}{module}.weight", layout) for module in modules]
    return (*kernels, *(Rule(f"{LAYER}{module}.bias", f"{IN_FILE}{module}.bias") for module in modules))


def norms(*modules: str) -> Rules:
    """Norms of a block."""
    return tuple(Rule(f"{LAYER}{module}.scale", f"{IN_FILE}{module}.weight") for module in modules)


def attention() -> Rules:
    """Projections to heads and back, as matrices or with an axis of heads, and norms of each head."""
    at = "self_attn."
    kinds = (("q_proj", QUERY, QUERY_BIAS), ("k_proj", KEY, KEY_BIAS), ("v_proj", KEY, KEY_BIAS), ("o_proj", OUT, None))
    found: list[Rule] = []
    for module, kernel, bias in kinds:
        found.append(Rule(f"{LAYER}{at}{module}.kernel", f"{IN_FILE}{at}{module}.weight", kernel))
        found.append(Rule(f"{LAYER}{at}{module}.bias", f"{IN_FILE}{at}{module}.bias", bias))
    return (*found, *norms(f"{at}q_norm", f"{at}k_norm"), *kv_scales())


def kv_scales() -> Rules:
    """Static scales of a cache's keys and values, which keep their dtype: rounded, codes would be others."""
    names = [f"self_attn.{kind}_scale" for kind in "kv"]
    return tuple(Rule(f"{LAYER}{name}", f"{IN_FILE}{name}", keeps_dtype=True) for name in names)


def gated_mlp(module: str = "mlp") -> Rules:
    """Gate, up and down; a tree may hold gate and up as one matrix [D, 2 I], or as [D, 2, I]."""
    names = tuple(f"{IN_FILE}{module}.{part}.weight" for part in GATED[:2])
    fused = Rule(f"{LAYER}{module}.gate_up_proj.kernel", names, "D +I -> I D | D + I -> I D")
    return (*linears(*(f"{module}.{part}" for part in GATED)), fused)


def fused_gated_mlp() -> Rules:
    """Files that hold gate and up as one matrix [2 I, D]; trees that hold them as one, or as two."""
    paths = tuple(f"{LAYER}mlp.{part}.kernel" for part in GATED[:2])
    joined = Rule(paths, f"{IN_FILE}mlp.gate_up_proj.weight", "D I -> +I D")
    return (*linears("mlp.gate_up_proj", "mlp.down_proj"), joined)


def fused_attention() -> Rules:
    """Files that hold queries, keys and values as one matrix; trees that hold them as one, or as three."""
    paths = tuple(f"{LAYER}self_attn.{part}_proj.kernel" for part in "qkv")
    joined = Rule(paths, f"{IN_FILE}self_attn.qkv_proj.weight", "D N -> +N D | D H d -> (+H d) D")
    return (*linears("self_attn.qkv_proj"), *linears("self_attn.o_proj", layout=OUT)[:1], joined, *kv_scales())


def experts(names: Sequence[str] = GATED, module: str = "mlp", gate: str = "gate") -> Rules:
    """A router and experts with a tensor for each matrix of each expert, for `jaxlowprec.nnx.MoE` and Linen's.

    Arguments:
        names: the file's names of gate, up and down.
        module: the block's name in the file.
        gate: the router's name in the file.
    """
    at, inside = f"{LAYER}mlp.experts", f"{IN_FILE}{module}.experts.{EXPERT}"
    pairs = zip(GATED, names, strict=True)
    return (
        Rule(f"{LAYER}mlp.router.kernel", f"{IN_FILE}{module}.{gate}.weight"),
        *(Rule(f"{at}.{ours}.kernel", f"{inside}.{theirs}.weight") for ours, theirs in pairs),
        Rule(
            f"{at}.gate_up_proj.kernel",
            (f"{inside}.{names[0]}.weight", f"{inside}.{names[1]}.weight"),
            "expert D +I -> I D | expert D + I -> I D",
        ),
    )


def selection_bias() -> Rules:
    """The rule of a router's selection bias, which keeps its dtype: rounded, the router would choose other experts."""
    name = f"{IN_FILE}mlp.gate.e_score_correction_bias"
    return (Rule(f"{LAYER}mlp.selection_bias", name, keeps_dtype=True),)


def with_stacked(rules: Iterable[Rule], under: str = "layers", first: int = 0) -> Rules:
    """The rules, and those for a tree in which the leaves of all layers are stacked, as after `scan`.

    Arguments:
        rules: for trees with an index in the paths, "layers.{i}.".
        under: the stacked layers' path.
        first: the number of the first of them in the file.
    """
    rules = tuple(rules)
    return (*rules, *(_stacked(rule, under, first) for rule in rules if rule.paths[0].startswith(LAYER)))


def _stacked(rule: Rule, under: str, first: int) -> Rule:
    paths = tuple(f"{under}.{path.removeprefix(LAYER)}" for path in rule.paths)
    names = tuple(name.replace("{i}", f"{{i+{first}}}") if first else name for name in rule.names)
    layout = None if rule.layout is None else " | ".join(f"i {one.text}" for one in parsed(rule.layout))
    return dataclasses.replace(rule, path=_one(paths), name=_one(names), layout=layout)


def _one(texts: tuple[str, ...]) -> str | tuple[str, ...]:
    return texts[0] if len(texts) == 1 else texts


def fused_qkv(heads: int, groups: int) -> Rule:
    """A tree that holds queries, keys and values as one matrix [D, N] or [D, H + 2 G, d], for files that have three."""
    names = tuple(f"{IN_FILE}self_attn.{part}_proj.weight" for part in "qkv")
    layout = "D +N -> N D | D +H d -> (H d) D"
    return Rule(f"{LAYER}self_attn.qkv_proj.kernel", names, layout, parts=(heads, groups, groups))


def fused_qkv_bias(heads: int, groups: int) -> Rule:
    """The biases of `fused_qkv`."""
    names = tuple(f"{IN_FILE}self_attn.{part}_proj.bias" for part in "qkv")
    layout = "+N -> N | +H d -> (H d)"
    return Rule(f"{LAYER}self_attn.qkv_proj.bias", names, layout, parts=(heads, groups, groups))


ROTARY = re.escape("model.layers.") + r"\d+" + re.escape(".self_attn.rotary_emb.inv_freq")
"""Tensors that old checkpoints hold and that follow from the config."""
