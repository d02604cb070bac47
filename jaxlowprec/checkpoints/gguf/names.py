"""Names of tensors in GGUF files and in Hugging Face folders, and the order of rows that llama.cpp expects.

Source: tensor_mapping.py and constants.py of the package gguf, llama-arch.cpp of llama.cpp.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError, brief

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

FLOAT32 = ("norm", "ffn_gate_inp")
"""Ends of the names of modules that llama.cpp reads only as F32; so it does tensors of one axis."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of models in both worlds.

    Attributes:
        name: llama.cpp's `general.architecture`.
        model_type: Hugging Face's `model_type`.
        classes: the first entry of Hugging Face's `architectures`.
        block: names of a layer's modules in GGUF to those in Hugging Face's; "{}" is the number of an expert.
        pairs_of_neighbours: whether llama.cpp rotates neighbouring elements of a head, where transformers rotates the
            two halves of a head: rows of q and k are in another order then.
    """

    name: str
    model_type: str
    classes: str
    block: Mapping[str, str]
    pairs_of_neighbours: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether its layers have experts."""
        return "ffn_gate_inp" in self.block


ARCHITECTURES = (
    Architecture("llama", "llama", "LlamaForCausalLM", _BLOCK | _DENSE, pairs_of_neighbours=True),
    Architecture("llama", "mistral", "MistralForCausalLM", _BLOCK | _DENSE, pairs_of_neighbours=True),
    Architecture("llama", "mixtral", "MixtralForCausalLM", _BLOCK | _MIXTRAL_EXPERTS, pairs_of_neighbours=True),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _BLOCK | _DENSE),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _BLOCK | _DENSE | _HEAD_NORMS),
    Architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _BLOCK | _QWEN_EXPERTS | _HEAD_NORMS),
)
"""Families that are converted."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a folder's tensor in a GGUF file: a tensor, and for an expert an index of its first axis."""

    tensor: str
    part: int | None = None

    @property
    def module(self) -> str:
        """The tensor's name without layer and suffix, such as "attn_q"."""
        return self.tensor.split(".")[-2]


def by_config(where: object, config: Mapping[str, Any]) -> Architecture:
    """The family of a config.json. Raises CheckpointError, listing the known ones, for another."""
    given = config.get("model_type")
    for architecture in ARCHITECTURES:
        if architecture.model_type == given:
            return architecture
    raise CheckpointError(
        f"{where}: model_type is {brief(given)}; to and from GGUF go {', '.join(a.model_type for a in ARCHITECTURES)}. "
        "Other families need llama.cpp's convert_hf_to_gguf.py, on the result of `jaxlowprec dequantize`"
    )


def by_metadata(where: object, name: object, experts: int) -> Architecture:
    """The family of a GGUF file. Raises CheckpointError, listing the known ones, for another."""
    for architecture in ARCHITECTURES:
        if isinstance(name, str) and architecture.name == name and architecture.has_experts == bool(experts):
            return architecture
    known = ", ".join(dict.fromkeys(a.name for a in ARCHITECTURES))
    raise CheckpointError(f"{where}: general.architecture is {brief(name)}; to a folder go {known}")


def places(architecture: Architecture, layers: int, experts: int) -> dict[str, Place]:
    """The place of each module of a folder in a GGUF file, without the suffix ".weight" or ".bias"."""
    found = {hf: Place(f"{module}.") for module, hf in _ENDS.items()}
    for layer in range(layers):
        for module, hf in architecture.block.items():
            tensor, prefix = f"blk.{layer}.{module}.", f"model.layers.{layer}."
            if "{}" in hf:
                found |= {prefix + hf.format(expert): Place(tensor, expert) for expert in range(experts)}
            else:
                found[prefix + hf] = Place(tensor)
    return found


def require_counts(where: str, names: Collection[str], layers: int, experts: int) -> None:
    """Raises CheckpointError if a folder has fewer tensors than its config says layers and experts."""
    if layers * max(experts, 1) > len(names):
        of_experts = f" of {experts} experts" if experts else ""
        raise CheckpointError(f"{where}: says {layers} layers{of_experts}; the folder has {len(names)} tensors")


def text_of(name: str) -> str:
    """A file's name as text in UTF-8, with escapes for bytes that are none."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def is_float32(tensor: str, axes: int) -> bool:
    """Whether llama.cpp reads a tensor only as F32."""
    return axes < 2 or tensor.split(".")[-2].endswith(FLOAT32)


def heads_of(architecture: Architecture, place: Place, heads: int, kv_heads: int) -> int | None:
    """The number of heads if a tensor's rows have another order in GGUF, otherwise None."""
    if not architecture.pairs_of_neighbours:
        return None
    return {"attn_q": heads, "attn_k": kv_heads}.get(place.module)


def to_neighbours(rows: int, heads: int) -> np.ndarray:
    """The row in the folder of each row in GGUF: of a head's two halves, an element of each in turn.

    >>> to_neighbours(8, 2)
    array([0, 2, 1, 3, 4, 6, 5, 7])
    """
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def to_halves(rows: int, heads: int) -> np.ndarray:
    """The inverse of `to_neighbours`.

    >>> to_neighbours(8, 2)[to_halves(8, 2)]
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
