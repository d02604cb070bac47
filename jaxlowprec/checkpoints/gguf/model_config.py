"""A model's sizes as config.json and as metadata of GGUF say them.

Source: conversion/base.py and conversion/llama.py of llama.cpp (which keys); constants.py of the package gguf (names).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlowprec.arguments import finite_number
from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.gguf.header import Value, shortest
from jaxlowprec.checkpoints.gguf.names import Architecture, Place

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotations' frequencies, float32 [head_dim / 2]: how GGUF holds the scaling of Llama 3."""

QUANTIZATION_VERSION = 2  # of ggml's blocks

_LLAMA3_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
    "llama3": ("factor", *_LLAMA3_DEFAULTS),
}
"""Kinds of scaled rotations, and the parameters that both sides read in the same way."""

_EVERY_ROPE = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
_EXPERT_SIZES = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
_LARGEST = float(np.finfo(np.float32).max)
_EXPERT_COUNTS = ("num_experts", "num_local_experts")


class Config:
    """The fields of a config.json that GGUF needs, checked.

    Attributes:
        content: the config.json.
        layers, heads, kv_heads, head_dim, experts: the model's sizes.
        rope: the parameters of its rotation, with `rope_theta` and `rope_type`.

    Raises:
        CheckpointError: a field is missing, is no number, or says what llama.cpp does not compute.
    """

    def __init__(self, where: object, config: Mapping[str, Any], architecture: Architecture):
        self.content = dict(config)
        self._where, self._config, self._architecture = where, config, architecture
        self.layers, self.heads = self.size("num_hidden_layers"), self.size("num_attention_heads")
        self.kv_heads = self.size("num_key_value_heads", self.heads)
        self.head_dim = self.size("head_dim", self.size("hidden_size") // self.heads)
        if self.head_dim % 2:
            raise CheckpointError(f"{where}: has heads of {self.head_dim}; rotations need an even number")
        self.experts = self._experts()
        self.rope = self._rope()
        self._refuse()

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        found = self._config.get(key)
        found = default if found is None else found
        if type(found) is not int or not 0 < found < 2**31:
            raise CheckpointError(f"{self._where}: {key} is {brief(found)}; needs a whole number above 0")
        return found

    def number(self, key: str, holder: Mapping[str, Any] | None = None) -> float:
        """A finite number."""
        given = (self._config if holder is None else holder).get(key)
        found = finite_number(given)
        if found is None or abs(found) > _LARGEST:
            raise CheckpointError(f"{self._where}: {key} is {brief(given)}; needs a number of float32")
        return found

    def require_shape(self, what: str, place: Place, shape: Sequence[int]) -> None:
        """Raises CheckpointError unless a weight, one expert's, or a bias has the shape that the sizes say."""
        hidden = self.size("hidden_size")
        inner = self.size("moe_intermediate_size" if "moe_intermediate_size" in self.content else "intermediate_size")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        needed: dict[str, tuple[int | None, ...]] = {
            **dict.fromkeys(("token_embd", "output"), (None, hidden)),
            **dict.fromkeys(("output_norm", "attn_norm", "ffn_norm"), (hidden,)),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (self.head_dim,)),
            **dict.fromkeys(("attn_k", "attn_v"), (kv, hidden)),
            **{"attn_q": (q, hidden), "attn_output": (hidden, q), "ffn_gate_inp": (self.experts, hidden)},
            **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps"), (inner, hidden)),
            **dict.fromkeys(("ffn_down", "ffn_down_exps"), (hidden, inner)),
        }
        wanted = needed[place.module] if place.tensor.endswith("weight") else needed[place.module][:1]
        if (
            len(wanted) != len(shape)
            or 0 in shape
            or any(w not in (None, s) for w, s in zip(wanted, shape, strict=True))
        ):
            sizes = ", ".join("tokens" if w is None else str(w) for w in wanted)
            raise CheckpointError(
                f"{what} is {list(shape)}; the model's sizes say [{sizes}]: {self._where} says {self.heads} heads of "
                f"{self.head_dim} in a width of {hidden}"
            )

    def metadata(self, vocabulary: int) -> dict[str, Value]:
        """The sizes as metadata. `vocabulary`: rows of the embedding."""
        found: dict[str, Value] = {
            key: np.uint32(self.kv_heads if hf == "num_key_value_heads" else self.size(hf))
            for hf, key in self._sizes().items()
        }
        found |= {
            "vocab_size": np.uint32(vocabulary),
            "attention.key_length": np.uint32(self.head_dim),
            "attention.value_length": np.uint32(self.head_dim),
            "attention.layer_norm_rms_epsilon": np.float32(self.number("rms_norm_eps")),
            "rope.dimension_count": np.uint32(self.head_dim),
            "rope.freq_base": np.float32(self.number("rope_theta", self.rope)),
        }
        if self.experts:
            found["expert_count"] = np.uint32(self.experts)
        kind = self.rope["rope_type"]
        if kind in ("linear", "yarn"):
            found["rope.scaling.type"] = kind
            found["rope.scaling.factor"] = np.float32(self.number("factor", self.rope))
        if kind == "yarn":
            key = "original_max_position_embeddings"
            original = self.rope.get(key)
            original = self.size("max_position_embeddings") if original is None else original
            if finite_number(original) is None or not 0 < original < 2**31:
                raise CheckpointError(f"{self._where}: {key} is {brief(original)}; needs a number above 0")
            found["rope.scaling.original_context_length"] = np.uint32(original)
            given = {key: name for key, name in _YARN.items() if self.rope.get(key) is not None}
            found |= {f"rope.scaling.{name}": np.float32(self.number(key, self.rope)) for key, name in given.items()}
        return {f"{self._architecture.name}.{key}": value for key, value in found.items()}

    def rope_freqs(self) -> np.ndarray | None:
        """The tensor `ROPE_FREQS`, or None if the model has no scaling of Llama 3's kind."""
        if self.rope["rope_type"] != "llama3":
            return None
        rope = _LLAMA3_DEFAULTS | {key: self.number(key, self.rope) for key in _ROPE_KEYS["llama3"] if key in self.rope}
        if "factor" not in rope or rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise CheckpointError(f"{self._where}: rope_scaling is {brief(rope)}; needs a factor, and low below high")
        return llama3_divisors(self.head_dim, self.number("rope_theta", self.rope), rope)

    def warnings(self) -> list[str]:
        """Warnings about long texts, for which llama.cpp computes something else."""
        window = self._config.get("sliding_window")
        if window is None or self._config.get("use_sliding_window") is False:
            return []
        return [
            f"the model attends to the last {brief(window)} tokens; llama.cpp's {self._architecture.name} attends to "
            "all, and differs for longer texts"
        ]

    def _sizes(self) -> dict[str, str]:
        more = {key: name for key, name in _EXPERT_SIZES.items() if self._config.get(key) is not None}
        return _SIZES | (more if self.experts else {})

    def _experts(self) -> int:
        if not self._architecture.has_experts:
            return 0
        key = next((key for key in _EXPERT_COUNTS if key in self._config), _EXPERT_COUNTS[0])
        return self.size(key)

    def _rope(self) -> dict[str, Any]:
        """The parameters of the rotation, with `rope_theta` and `rope_type`."""
        found: dict[str, Any] = {"rope_theta": self._config.get("rope_theta", 10000.0)}
        for key in ("rope_scaling", "rope_parameters"):
            given = self._config.get(key) or {}
            if not isinstance(given, Mapping):
                raise CheckpointError(f"{self._where}: {key} is {brief(given)}; needs an object")
            found |= given
        found["rope_type"] = found.get("rope_type", found.get("type", "default"))
        kind = found["rope_type"]
        remedy = "leave rope_scaling out if texts stay within the original context"
        if (
            not isinstance(kind, str)
            or kind not in _ROPE_KEYS
            or (kind == "llama3" and self._architecture.name != "llama")
        ):
            raise CheckpointError(
                f"{self._where}: rope_type is {brief(kind)}; to GGUF go {', '.join(_ROPE_KEYS)} "
                f"(llama3 for Llama only); {remedy}"
            )
        known = (*_EVERY_ROPE, *_ROPE_KEYS[kind])
        if unknown := sorted(key for key, value in found.items() if key not in known and value is not None):
            raise CheckpointError(
                f"{self._where}: rope_scaling has {', '.join(map(brief, unknown))}, which llama.cpp reads otherwise "
                f"or not; {remedy}"
            )
        return found

    def _refuse(self) -> None:
        for key, allowed in (
            ("hidden_act", ("silu", "swish", None)),
            ("partial_rotary_factor", (1, None)),
            ("num_shared_experts", (0, None)),
            ("mlp_only_layers", ([], None)),
            ("decoder_sparse_step", (1, None)),
        ):
            if self._config.get(key) not in allowed:
                raise CheckpointError(
                    f"{self._where}: {key} is {brief(self._config[key])}, which llama.cpp's {self._architecture.name} "
                    f"does not compute; needs {allowed[0]!r}"
                )
        hidden = self.size("hidden_size")
        if self._architecture.name == "qwen2" and self.heads * self.head_dim != hidden:
            raise CheckpointError(
                f"{self._where}: {self.heads} heads of {self.head_dim} in a width of {hidden}; llama.cpp's qwen2 needs "
                "heads that are as wide as the model"
            )
        if self._architecture.name == "qwen3moe" and self._config.get("norm_topk_prob") is not True:
            raise CheckpointError(
                f"{self._where}: norm_topk_prob is {brief(self._config.get('norm_topk_prob'))}; llama.cpp's qwen3moe "
                "always normalises, as norm_topk_prob true does"
            )


def config_of_metadata(
    where: object,
    metadata: Mapping[str, Value],
    architecture: Architecture,
    vocabulary: int,
    rope_freqs: np.ndarray | None,
) -> dict[str, Any]:
    """A config.json from metadata.

    Arguments:
        where: the file, for errors.
        metadata: the file's.
        architecture: the model's family.
        vocabulary: rows of the embedding.
        rope_freqs: the tensor `ROPE_FREQS`, if there is one.

    Raises:
        CheckpointError: a key is missing or no number, or the rotation is scaled in a way that is not known.
    """

    def number(key: str, default: Any = None) -> float:
        given = metadata.get(f"{architecture.name}.{key}", default)
        found = shortest(given)
        if finite_number(found) is None:
            raise CheckpointError(
                f"{where}: {architecture.name}.{key} is {brief(given)}; needs one number for all layers"
            )
        return found

    def size(key: str, default: Any = None) -> int:
        found = number(key, default)
        if type(found) is not int or not 0 < found < 2**31:
            raise CheckpointError(
                f"{where}: {architecture.name}.{key} is {brief(found)}; needs one whole number above 0 for all layers"
            )
        return found

    heads, hidden = size("attention.head_count"), size("embedding_length")
    config: dict[str, Any] = {
        "architectures": [architecture.classes],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "vocab_size": vocabulary,
    }
    config |= {hf: size(key, heads if hf == "num_key_value_heads" else None) for hf, key in _SIZES.items()}
    config["head_dim"] = size("attention.key_length", hidden // heads)
    config["rms_norm_eps"] = number("attention.layer_norm_rms_epsilon")
    config["rope_theta"] = number("rope.freq_base", 10000.0)
    if architecture.has_experts:
        count = size("expert_count")
        config |= {"num_local_experts" if architecture.name == "llama" else "num_experts": count}
        config["num_experts_per_tok"] = size("expert_used_count")
        if architecture.name == "qwen3moe":
            config |= {"moe_intermediate_size": size("expert_feed_forward_length"), "norm_topk_prob": True}
    scaling = metadata.get(f"{architecture.name}.rope.scaling.type", "none")
    if not isinstance(scaling, str) or scaling not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{where}: rope.scaling.type is {brief(scaling)}; known are none, linear, yarn")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": number("rope.scaling.factor")}
    elif scaling == "yarn":
        for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
            if f"{architecture.name}.{key}" in metadata:
                raise CheckpointError(
                    f"{where}: has {architecture.name}.{key}, which transformers reads otherwise or not"
                )
        rope: dict[str, Any] = {"rope_type": "yarn", "factor": number("rope.scaling.factor")}
        rope["original_max_position_embeddings"] = size("rope.scaling.original_context_length")
        rope |= {
            hf: number(f"rope.scaling.{key}")
            for hf, key in _YARN.items()
            if f"{architecture.name}.rope.scaling.{key}" in metadata
        }
        config["rope_scaling"] = rope
    if rope_freqs is not None:
        config["rope_scaling"] = _llama3_of(where, rope_freqs, config["head_dim"], config["rope_theta"])
    return config


def llama3_divisors(head_dim: int, theta: float, rope: Mapping[str, Any]) -> np.ndarray:
    """How Llama 3.1 divides the frequencies of its rotations, float32 [head_dim / 2].

    Long waves are divided by `factor`, short ones are not, and between both the reciprocal is interpolated.
    """
    frequencies = 1 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    waves = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    smooth = (waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves > high, 1, np.where(waves < low, factor, between)).astype(np.float32)


def _llama3_of(where: object, rope_freqs: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """The scaling that gives these divisors; Llama 3.1 to 3.3 differ only in the factor."""
    factor = shortest(np.float32(rope_freqs.max(initial=1)))
    rope = {"rope_type": "llama3", "factor": factor, **_LLAMA3_DEFAULTS}
    expected = llama3_divisors(head_dim, theta, rope)
    if rope_freqs.shape != expected.shape or not np.allclose(rope_freqs, expected, rtol=1e-5, atol=0):
        raise CheckpointError(f"{where}: {ROPE_FREQS} holds other divisors than those of Llama 3, which no config says")
    return rope
