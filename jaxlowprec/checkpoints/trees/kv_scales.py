"""Static scales of caches of keys and values in checkpoints: which tensors they are, and what config.json says of them.

    model.layers.{i}.self_attn.k_scale, v_scale             float32 [1], or [key_heads]: compressed-tensors
    model.layers.{i}.self_attn.k_proj.k_scale, v_proj.v_scale    ModelOpt: read, not written; engines read both

Source: compressed-tensors 0.20; vLLM 0.32 (`maybe_remap_kv_scale_name`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.ops.kv_cache import KVCache

IN_PROJECTIONS = re.compile(r"\.([kv])_proj\.\1_scale$")
"""The ends of ModelOpt's names."""
_NAME = re.compile(r"\.[kv]_scale$")


def cache_scales(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the static scales of caches among a checkpoint's tensors.

    >>> cache_scales({"model.layers.0.self_attn.k_scale": (1,), "model.norm.weight": (64,)})
    {'model.layers.0.self_attn.k_scale': (1,)}
    """
    return {name: shape for name, shape in shapes.items() if _NAME.search(name)}


def with_kv_cache(
    who: str, entry: dict[str, Any] | None, scheme: Scheme | None, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any] | None:
    """The entry of config.json that says how weights are quantised, and that caches have these static scales.

    Arguments:
        entry: what the scheme says; None: weights are not quantised.
        scheme: the scheme of the weights.
        shapes: of the checkpoint's tensors.

    Raises:
        ValueError: a configuration of that scheme cannot say it, or some layers have scales for heads and others not.

    >>> with_kv_cache("save", None, None, {"layers.0.self_attn.k_scale": (1,)})["kv_cache_scheme"]["strategy"]
    'tensor'
    """
    if not (scales := cache_scales(shapes)):
        return entry
    whole = {shape == (1,) for shape in scales.values()}
    if len(whole) > 1:
        raise ValueError(
            f"{who}: some layers have one static scale for all heads, others one for each; run kv.calibrate again"
        )
    strategy = "tensor" if whole.pop() else "attn_head"
    if entry is None:
        entry = {"quant_method": "compressed-tensors", "format": "dense", "ignore": [], "config_groups": {}}
    if entry["quant_method"] == "compressed-tensors":
        said = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
        return {**entry, "kv_cache_scheme": said}
    if entry["quant_method"] == "modelopt" and strategy == "tensor":
        return {**entry, "kv_cache_quant_algo": "FP8"}
    named = "weights in high precision" if scheme is None else f"the scheme {scheme.name}"
    raise ValueError(
        f"{who}: the tree has static scales of a cache, one for each {'head' if strategy == 'attn_head' else 'layer'}, "
        f"and the configuration of {named} cannot say so; take a scheme of compressed-tensors, or scales that need no "
        "file: KVCache()"
    )


def require_cache_scales(who: str, kept: KVCache, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError if a cache has static scales, and a layer among these tensors has none."""
    layers = {name.rpartition(".self_attn.")[0] for name in shapes if ".self_attn." in name}
    for kind in kept.static:
        missing = [at for at in sorted(layers) if f"{at}.self_attn.{kind[0]}_scale" not in shapes]
        if missing or not layers:
            where = f"{missing[0]}.self_attn.{kind[0]}_scale" if missing else f"any {kind[0]}_scale"
            raise ValueError(
                f"{who}: kv_cache={kept}, and the tree lacks {where}; run jaxlowprec.kv.calibrate(decoder, tokens) "
                "with the weights of this version"
            )


def says_only_the_cache(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of config.json is about caches alone: weights are in high precision."""
    return entry.get("config_groups") == {} and entry.get("kv_cache_scheme") is not None
