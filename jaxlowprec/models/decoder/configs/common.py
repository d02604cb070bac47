"""Keys that the configs of all families share, read one by one: rotary embeddings, and Llama's decoder, from which
others differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxlowprec.arguments import finite_number, shown
from jaxlowprec.models.decoder.rope import Rope

LARGEST = 2**31 - 1
MOST_LAYERS = 1 << 14
"""Sizes beyond these are refused before anything is made for each layer; published models have hundreds of layers."""

PARTIAL, ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"
SILU = ("silu", "swish")
KINDS = {"full_attention", "sliding_attention"}


class CheckedConfig:
    """The content of a config, and errors about it.

    Arguments:
        content: of config.json.
        where: the file, for errors.

    Attributes:
        last: the key that was read last.
    """

    def __init__(self, content: Mapping[str, Any], where: str):
        self.content, self.where, self.last = content, where, "model_type"

    def refuse(self, key: str, needed: str) -> NoReturn:
        """Raises ValueError about a key."""
        raise ValueError(f"{self.where}: {key} is {shown(self.content.get(key))}; this decoder needs {needed}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default if there is none or it is null."""
        self.last = key
        value = self.content.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number of `least` to `most`."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"a whole number, {least} or more and at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = finite_number(self.get(key, default))
        if value is None or not value > 0:
            self.refuse(key, "a number above 0")
        return value

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """A number above 0, or None if the file says null; the default if it says nothing."""
        value = self.content.get(key, default)
        return None if value is None else self.number(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self.get(key, default))

    def only(self, key: str, value: Any, why: str) -> None:
        """Refuses a key that has another value than the only one that this decoder computes."""
        if self.get(key, value) != value:
            self.refuse(key, why)


def rope_of(
    said: CheckedConfig, *, theta: float = 1e4, partial: float | None = None, original: int | None = None
) -> Rope:
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


def rope_from(said: CheckedConfig, key: str, found: Mapping[str, Any]) -> Rope:
    """The rotary embedding that an object of the config describes. Raises ValueError that names the key."""
    try:
        return Rope.of(found.get("rope_type", found.get("type", "default")), float(found["rope_theta"]), found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{said.where}: {key}: {error}") from None


def _present(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


def _share(said: CheckedConfig, share: Any) -> float:
    if type(share) not in (int, float) or not 0 < share <= 1:
        said.refuse(PARTIAL, "a number above 0, up to 1")
    return float(share)


def sizes_of(
    said: CheckedConfig, *, head: int | None = None, epsilon: float = 1e-6, longest: int = 2048
) -> dict[str, Any]:
    """The sizes of a decoder, by the names of `DecoderConfig`.

    Arguments:
        head: the family's features of a head, if the file has none. None: the width divided by the heads.
        epsilon: the family's epsilon of norms, if the file has none.
        longest: the number of places that the family was made for, if the file has none.
    """
    width, heads = said.size("hidden_size"), said.size("num_attention_heads")
    layers = said.size("num_hidden_layers", most=MOST_LAYERS)
    key_heads = said.size("num_key_value_heads", heads)
    head = said.size("head_dim", head or width // heads)
    if heads % key_heads:
        said.refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if head % 2:
        said.refuse("head_dim", "an even number")
    return {
        "vocabulary": said.size("vocab_size"),
        "width": width,
        "hidden": said.size("intermediate_size"),
        "layers": layers,
        "heads": heads,
        "key_heads": key_heads,
        "head": head,
        "score_scale": head**-0.5,
        "epsilon": said.number("rms_norm_eps", epsilon),
        "tied": said.flag("tie_word_embeddings"),
        "windows": (None,) * layers,
        "sparse": (False,) * layers,
        "longest": said.size("max_position_embeddings", longest),
        "stop": tokens_of(said.get("eos_token_id")),
    }


def require_silu(said: CheckedConfig) -> None:
    """Refuses activations other than SiLU."""
    if (activation := said.get("hidden_act", "silu")) not in SILU:
        said.refuse("hidden_act", f"silu, not {activation}")


def window_of(said: CheckedConfig, default: int | None = None) -> int | None:
    """The number of places that `sliding_window` says; None: all."""
    window = said.content.get("sliding_window", default)
    if window is not None and (type(window) is not int or window < 1):
        said.refuse("sliding_window", "a whole number, 1 or more, or null")
    return window


def windows_of(said: CheckedConfig, layers: int, window: int | None, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types`, or the family's kinds if the file has none."""
    kinds = said.get("layer_types", kinds)
    if len(kinds) != layers or not set(kinds) <= KINDS:
        said.refuse("layer_types", f"full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def tokens_of(value: Any) -> tuple[int, ...]:
    """One token or several as a tuple."""
    found = value if isinstance(value, list | tuple) else [value]
    return tuple(token for token in found if type(token) is int)
