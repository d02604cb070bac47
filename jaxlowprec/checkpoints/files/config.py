"""config.json of quantised checkpoints and of the plain ones that they come from."""

from __future__ import annotations

import copy
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError, brief

_KEYS = ("quantization_config", "compression_config")
_TEXT_MODELS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys under which configs of multimodal models keep the config of their text model."""


def with_quantization(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """A config with the entry that says how weights are quantised.

    The entry is at the top, where vLLM, SGLang and transformers look, and again in each nested text model: engines that
    build the text model only from its own config would otherwise take packed weights for plain ones.
    """
    config = copy.deepcopy(config)
    for place in text_configs(config):
        place["quantization_config"] = copy.deepcopy(quantization)
    return config


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The config without such entries: the inverse of `with_quantization`."""
    config = copy.deepcopy(config)
    for place in text_configs(config):
        for key in _KEYS:
            place.pop(key, None)
    return config


def quantization_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of a config that says how weights are quantised; None if there is none.

    Raises:
        CheckpointError: the entry is not an object.
    """
    for place in text_configs(config):
        for key in _KEYS:
            entry = place.get(key)
            if entry is not None and not isinstance(entry, dict):
                raise CheckpointError(f"config: {key} is {brief(entry)}; needs an object")
            if entry:
                return entry
    return None


def deployment_dtype(config: dict[str, Any]) -> str:
    """The dtype that engines compute in: float16 if the config says so, otherwise bfloat16."""
    said = (place.get(key) for place in text_configs(config) for key in ("dtype", "torch_dtype"))
    first = next((dtype for dtype in said if isinstance(dtype, str)), "bfloat16")
    return "float16" if first.removeprefix("torch.") == "float16" else "bfloat16"


def text_configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config itself, and the configs of text models nested in it."""
    places = [config]
    for key in _TEXT_MODELS:
        if isinstance(config.get(key), dict):
            places += text_configs(config[key])
    return places
