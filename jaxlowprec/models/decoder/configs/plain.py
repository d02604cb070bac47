"""What the configs of all families have in common: the decoder of Llama, from which others differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlowprec.models.decoder.configs.said import MOST_LAYERS, Said

SILU = ("silu", "swish")
KINDS = {"full_attention", "sliding_attention"}


def sizes_of(said: Said, *, head: int | None = None, epsilon: float = 1e-6, longest: int = 2048) -> dict[str, Any]:
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


def require_silu(said: Said) -> None:
    """Refuses activations other than SiLU."""
    if (activation := said.get("hidden_act", "silu")) not in SILU:
        said.refuse("hidden_act", f"silu, not {activation}")


def window_of(said: Said, default: int | None = None) -> int | None:
    """The number of places that `sliding_window` says; None: all."""
    window = said.content.get("sliding_window", default)
    if window is not None and (type(window) is not int or window < 1):
        said.refuse("sliding_window", "a whole number, 1 or more, or null")
    return window


def windows_of(said: Said, layers: int, window: int | None, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types`, or the family's kinds if the file has none."""
    kinds = said.get("layer_types", kinds)
    if len(kinds) != layers or not set(kinds) <= KINDS:
        said.refuse("layer_types", f"full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def tokens_of(value: Any) -> tuple[int, ...]:
    """One token or several as a tuple."""
    found = value if isinstance(value, list | tuple) else [value]
    return tuple(token for token in found if type(token) is int)
