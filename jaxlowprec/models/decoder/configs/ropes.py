"""The rotary embedding that a config describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlowprec.models.decoder.configs.said import Said
from jaxlowprec.models.decoder.rope import Rope

PARTIAL, ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"


def rope_of(said: Said, *, theta: float = 1e4, partial: float | None = None, original: int | None = None) -> Rope:
    """The rotary embedding of all layers, by `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Arguments:
        theta: the family's base, if the file has none.
        partial: the family's part of each head that is rotated, if the file has none. None: whole heads are, always.
        original: the family's context before scaling, if the file has none beside `rope_parameters`.
    """
    key = "rope_parameters" if said.content.get("rope_parameters") else "rope_scaling"
    found = said.get(key, {})
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        said.refuse(key, "one object for all layers")
    share = found.get(PARTIAL, said.get(PARTIAL, partial))
    if partial is None and share not in (None, 1):
        said.refuse(PARTIAL, "rotary embeddings of whole heads, 1.0")
    longest = said.size("max_position_embeddings", 2048)
    context = said.get(ORIGINAL, original) or found.get(ORIGINAL) or longest
    found = {"rope_theta": said.get("rope_theta", theta), "longest": longest} | _present(found) | {ORIGINAL: context}
    made = rope_from(said, key, found)
    return made if share is None else dataclasses.replace(made, partial=_share(said, share))


def rope_from(said: Said, key: str, found: Mapping[str, Any]) -> Rope:
    """The rotary embedding that an object of the config describes. Raises ValueError that names the key."""
    try:
        return Rope.of(found.get("rope_type", found.get("type", "default")), float(found["rope_theta"]), found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{said.where}: {key}: {error}") from None


def _present(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


def _share(said: Said, share: Any) -> float:
    if type(share) not in (int, float) or not 0 < share <= 1:
        said.refuse(PARTIAL, "a number above 0, up to 1")
    return float(share)
