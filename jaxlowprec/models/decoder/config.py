"""The configuration of a decoder, read from config.json of a Hugging Face folder and checked: an option that changes
the model's function and that this decoder does not have raises an error."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxlowprec.models.decoder.configs import families
from jaxlowprec.models.decoder.configs.common import CheckedConfig
from jaxlowprec.models.decoder.configs.options import Experts, Latent, Norms
from jaxlowprec.models.decoder.rope import Rope

CONFIG = "config.json"
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
"""Architectures by `model_type`."""

_READERS = {
    "llama": families.llama,
    "mistral": families.mistral,
    "mixtral": families.mixtral,
    "qwen2": families.qwen2,
    "qwen3": families.qwen3,
    "qwen3_moe": families.qwen3_moe,
    "phi3": families.phi3,
    "gemma2": families.gemma2,
    "gemma3_text": families.gemma3,
    "glm": families.glm,
    "glm4": families.glm4,
    "glm4_moe": families.glm4_moe,
    "gpt_oss": families.gpt_oss,
    "deepseek_v2": families.deepseek_v2,
    "deepseek_v3": families.deepseek_v3,
    "kimi_k2": families.deepseek_v3,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. The options' defaults are Llama's.

    Attributes:
        family: Hugging Face's `model_type`.
        vocabulary, width, hidden: tokens, features of the residual stream, hidden features of a dense MLP.
        layers, heads, key_heads, head: numbers of layers, of query heads and of key-value heads; features of a head's
            query and key.
        score_scale: what products of queries and keys are multiplied by.
        epsilon: of the norms.
        rope: the rotary embedding.
        tied: whether the head is the embedding.
        windows: for each layer the number of places that a token attends to, itself included; None: all.
        sparse: for each layer, whether it has experts in place of the MLP.
        longest: the number of places that the model was made for.
        stop: tokens that end a text.
        local_rope: the rotary embedding of layers with a window; None: the same.
        qkv_bias, out_bias, mlp_bias: whether these linears have biases.
        query_norm: whether queries and keys are normalised per head.
        score_cap, logit_cap: numbers c that limit scores and logits x, as c tanh(x / c); None: no limit.
        sinks: whether each head has a learned score that takes a share of the softmax and has no value.
        latent: widths of latent attention, or None.
        activation: of a dense MLP and of shared experts, see `jaxlowprec.nnx.MLP`.
        norms: the names of a layer's norms.
        zero_centered: whether norms multiply by 1 + scale.
        embedding_scale: what embeddings are multiplied by.
        experts: sizes and routing of the experts, or None.
    """

    family: str
    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    score_scale: float
    epsilon: float
    rope: Rope
    tied: bool
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    longest: int
    stop: tuple[int, ...] = ()
    local_rope: Rope | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    query_norm: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    latent: Latent | None = None
    activation: str = "swiglu"
    norms: Norms = Norms()
    zero_centered: bool = False
    embedding_scale: float = 1.0
    experts: Experts | None = None

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> DecoderConfig:
        """The config of a Hugging Face folder.

        Raises:
            ValueError: there is no config.json, it is not a JSON object, or see `of`.
        """
        file = pathlib.Path(folder) / CONFIG
        if not file.is_file():  # reading a pipe would wait for its writer
            raise ValueError(f"{folder}: has no {CONFIG}; needs a Hugging Face model folder")
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
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
        said, family = CheckedConfig(content, where), content.get("model_type")
        if not isinstance(family, str) or family not in _READERS:
            said.refuse("model_type", f"one of {', '.join(FAMILIES)}; other families need layers of their own")
        try:
            return cls(family=family, **_READERS[family](said))
        except (TypeError, ArithmeticError, LookupError, AttributeError):
            said.refuse(said.last, "a value of the kind and size that models of this family have")

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of a layer."""
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of all layers, each once."""
        return tuple(dict.fromkeys(self.rope_of(layer) for layer in range(self.layers)))

    @property
    def turned(self) -> int:
        """The features of a head that rotary embeddings are given; `Rope.partial` is a share of them."""
        return self.head if self.latent is None else self.latent.rotated

    @property
    def widths(self) -> set[int]:
        """The features that products are summed over, but for the router's and the head's."""
        found = {self.width, self.heads * (self.head if self.latent is None else self.latent.value)}
        if self.latent is not None:
            found |= {self.latent.rank} | ({self.latent.query_rank} if self.latent.query_rank else set())
        if self.experts is not None:
            found |= {self.experts.width} | ({self.experts.shared} if self.experts.shared else set())
        return found if all(self.sparse) else found | {self.hidden}

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The numbers of heads and of their features that a cache has for keys, and for values."""
        if self.latent is not None:
            return (1, self.latent.rotated), (1, self.latent.rank)
        return (self.key_heads, self.head), (self.key_heads, self.head)
