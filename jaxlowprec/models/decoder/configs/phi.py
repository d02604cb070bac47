"""Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of, window_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said


def phi3(said: Said) -> dict[str, Any]:
    """Phi-3 and Phi-4: Llama's layers, with rotary embeddings of a part of each head (Phi-4-mini)."""
    require_silu(said)
    found = sizes_of(said, epsilon=1e-5, longest=4096)
    rope = rope_of(said, partial=1.0, original=4096)
    if rope.kind not in ("default", "longrope"):
        said.refuse("rope_parameters" if said.get("rope_parameters") else "rope_scaling", "longrope or none for Phi")
    if rope.kind == "longrope" and any(
        len(factors) != rope.rotated_of(found["head"]) // 2 for factors in (rope.short, rope.long)
    ):
        raise ValueError(
            f"{said.where}: short_factor and long_factor have {len(rope.short)} and {len(rope.long)} numbers; a head "
            f"has {rope.rotated_of(found['head']) // 2} pairs that are rotated, which need one each"
        )
    return found | {"rope": rope, "windows": (window_of(said),) * found["layers"]}
