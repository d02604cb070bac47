"""What config.json of a Hugging Face folder says about a decoder, checked: an option that changes the model's function
and that this decoder does not have raises an error."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxlowprec.models.decoder.rope import Rope

CONFIG = "config.json"
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Architectures by `model_type`."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """Sizes of a mixture of experts.

    Attributes:
        number, per_token: the number of experts, and of those that each token goes to.
        width: the hidden features of an expert.
        normalize: whether the weights of a token's experts are scaled to sum to 1.
        load_balance: what the load-balance loss is multiplied by.
    """

    number: int
    per_token: int
    width: int
    normalize: bool
    load_balance: float


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Attributes:
        family: Hugging Face's `model_type`.
        vocabulary, width, hidden: tokens, features of the residual stream, hidden features of a dense MLP.
        layers, heads, key_heads, head: numbers of layers, of query heads and of key-value heads; features of a head.
        epsilon: of the norms.
        rope: the rotary embedding.
        qkv_bias, out_bias, mlp_bias: whether these linears have biases.
        query_norm: whether queries and keys are normalised per head (Qwen3).
        tied: whether the head is the embedding.
        windows: for each layer the number of places that a token attends to, itself included; None: all.
        experts: sizes of the experts, or None.
        sparse: for each layer, whether it has experts in place of the MLP.
        longest: the number of places that the model was made for.
        stop: tokens that end a text.
    """

    family: str
    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    epsilon: float
    rope: Rope
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    query_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    experts: Experts | None
    sparse: tuple[bool, ...]
    longest: int
    stop: tuple[int, ...] = ()

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> DecoderConfig:
        """The config of a Hugging Face folder.

        Raises:
            ValueError: there is no config.json, it is not a JSON object, or see `of`.
        """
        file = pathlib.Path(folder) / CONFIG
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder}: has no {CONFIG}; needs a Hugging Face model folder") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}; needs a JSON object") from None
        return cls.of(content, str(file))

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str = CONFIG) -> DecoderConfig:
        """The config that the content of config.json describes.

        Raises:
            ValueError: the family is unknown, a size is missing or does not fit, or an option is not supported.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"{where}: holds {type(content).__name__}; needs a JSON object")
        said = _Said(content, where)
        family = str(content.get("model_type"))
        if family not in FAMILIES:
            said.refuse("model_type", f"one of {', '.join(FAMILIES)}; other families need layers of their own")
        if (activation := content.get("hidden_act", "silu")) not in ("silu", "swish"):
            said.refuse("hidden_act", f"silu, not {activation}")
        width, heads, layers = (said.size(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        key_heads = said.size("num_key_value_heads", heads)
        head = said.size("head_dim", 128 if family == "qwen3" else width // heads)
        if heads % key_heads:
            said.refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
        if head % 2:
            said.refuse("head_dim", "an even number")
        bias = bool(content.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
        return cls(
            family=family,
            vocabulary=said.size("vocab_size"),
            width=width,
            hidden=said.size("intermediate_size"),
            layers=layers,
            heads=heads,
            key_heads=key_heads,
            head=head,
            epsilon=float(content.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6)),
            rope=_rope(said, family),
            qkv_bias=bias or family == "qwen2",
            out_bias=bias,
            mlp_bias=bool(content.get("mlp_bias", False)) and family == "llama",
            query_norm=family in ("qwen3", "qwen3_moe"),
            tied=bool(content.get("tie_word_embeddings", False)),
            windows=_windows(said, family, layers),
            experts=_experts(said, family),
            sparse=_sparse(content, family, layers),
            longest=said.size("max_position_embeddings", 2048),
            stop=_tokens(content.get("eos_token_id")),
        )


class _Said:
    """The content of a config, and errors about it."""

    def __init__(self, content: Mapping[str, Any], where: str):
        self.content, self.where = content, where

    def refuse(self, key: str, needed: str) -> NoReturn:
        """Raises ValueError about a key."""
        raise ValueError(f"{self.where}: {key} is {self.content.get(key)!r}; this decoder needs {needed}")

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        value = self.content.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            self.refuse(key, "a whole number, 1 or more")
        return value


def _rope(said: _Said, family: str) -> Rope:
    """The rotary embedding, as `rope_parameters` says, or `rope_theta` and `rope_scaling` of older files."""
    content = said.content
    key = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    found = content.get(key) or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        said.refuse(key, "one object for all layers")
    found = dict(found)
    kind = found.get("rope_type", found.get("type", "default"))
    partial = found.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        said.refuse("partial_rotary_factor", "rotary embeddings of whole heads, 1.0")
    theta = found.get("rope_theta", content.get("rope_theta")) or (1e6 if family == "mixtral" else 1e4)
    original = found.get("original_max_position_embeddings") or content.get("max_position_embeddings", 2048)
    found["original_max_position_embeddings"] = content.get("original_max_position_embeddings") or original
    try:
        return Rope.of(kind, float(theta), found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{said.where}: {key}: {error}") from None


def _windows(said: _Said, family: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    content, window = said.content, None
    default = 4096 if family == "mistral" else None
    if family in ("mistral", "mixtral") or content.get("use_sliding_window", False):
        window = content.get("sliding_window", default)
    if family == "llama" or window is None:
        return (None,) * layers
    if type(window) is not int or window < 1:
        said.refuse("sliding_window", "a whole number, 1 or more, or null")
    if family not in ("qwen2", "qwen3"):
        return (window,) * layers
    full = said.size("max_window_layers", 28) if content.get("max_window_layers") != 0 else 0
    kinds = content.get("layer_types") or [("full" if i < full else "sliding") + "_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        said.refuse("layer_types", f"full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(said: _Said, family: str) -> Experts | None:
    content = said.content
    if family == "mixtral":
        number, width, normalize = said.size("num_local_experts", 8), said.size("intermediate_size"), True
        per_token = said.size("num_experts_per_tok", 2)
    elif family == "qwen3_moe":
        key = "num_experts" if "num_experts" in content else "num_local_experts"
        number, width = said.size(key, 128), said.size("moe_intermediate_size", 768)
        normalize, per_token = bool(content.get("norm_topk_prob", False)), said.size("num_experts_per_tok", 8)
    else:
        return None
    if per_token > number:
        said.refuse("num_experts_per_tok", f"{number} or less, the number of experts")
    return Experts(number, per_token, width, normalize, float(content.get("router_aux_loss_coef", 0.001)))


def _sparse(content: Mapping[str, Any], family: str, layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    if family == "mixtral":
        return (True,) * layers
    if family != "qwen3_moe":
        return (False,) * layers
    dense, every = content.get("mlp_only_layers") or (), content.get("decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(layers))


def _tokens(value: Any) -> tuple[int, ...]:
    found = value if isinstance(value, list | tuple) else [value]
    return tuple(token for token in found if type(token) is int)
