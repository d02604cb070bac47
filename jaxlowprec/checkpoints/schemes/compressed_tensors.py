"""`quantization_config` of compressed-tensors checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "dynamic": False,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "scale_dtype": None,
    "observer": "minmax",
    "observer_kwargs": {},
}


def config_of(
    format: str, weights: Mapping[str, Any], ignore: Sequence[str], activations: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The entry for one group with all linear layers except the ignored ones.

    Arguments:
        format: the compressor's name.
        weights: how weights are quantised, where that differs from the defaults.
        ignore: module names, or "re:" and an expression that is matched from the name's start.
        activations: how inputs are quantised; None: not at all.
    """
    group = {
        "targets": ["Linear"],
        "weights": {**_DEFAULTS, **weights},
        "input_activations": None if activations is None else {**_DEFAULTS, "observer": None, **activations},
        "output_activations": None,
        "format": format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }
