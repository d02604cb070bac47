"""Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of, window_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said


def phi3(said: Said) -> dict[str, Any]:
    """Phi-3 and Phi-4: Llama's layers, with rotary embeddings of a part of each head (Phi-4-mini)."""
    require_silu(said)
    found = sizes_of(said, epsilon=1e-5)
    rope = rope_of(said, partial=1.0, original=4096)
    return found | {"rope": rope, "windows": (window_of(said),) * found["layers"]}
