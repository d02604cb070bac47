"""What a rollout engine says of its routing, as arrays."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np


def decoded(sequence: int, routed: Any, num_layers: int, k: int, dense_layers: Sequence[int]) -> np.ndarray:
    """One sequence's `routed_experts` as int32 [tokens - 1, layers with experts, k]; see `RoutingTape`.

    Raises:
        TypeError: numbers that are no integers.
        ValueError: what is no such array, and a layer of zeros: the engine did not capture it, and 0 is an expert.

    >>> decoded(0, np.asarray([1, 0, 2, 3], "<i4").tobytes(), num_layers=1, k=2, dense_layers=()).tolist()
    [[[1, 0]], [[2, 3]]]
    """
    who = f"routed_experts: sequence {sequence}"
    array = _array(who, routed)
    if (
        array.ndim not in (1, 3)
        or array.size % (num_layers * k)
        or array.ndim == 3
        and array.shape[1:] != (num_layers, k)
    ):
        raise ValueError(
            f"{who} has shape {array.shape}; needs [tokens - 1, {num_layers}, {k}], or as many numbers flat"
        )
    array = array.reshape(-1, num_layers, k)
    if wrong := [layer for layer in dense_layers if not 0 <= layer < num_layers]:
        raise ValueError(f"{who}: dense_layers has {wrong[0]}; needs 0 to {num_layers - 1}")
    with_experts = [layer for layer in range(num_layers) if layer not in dense_layers]
    for layer in with_experts:
        if k > 1 and len(array) and not array[:, layer].any():
            raise ValueError(
                f"{who}: layer {layer} is all zeros: the engine did not capture it (a pipeline stage left out?); "
                "capture it, or name it in dense_layers if it has no experts"
            )
    return array[:, with_experts].astype(np.int32)


def _array(who: str, routed: Any) -> np.ndarray:
    if isinstance(routed, str):
        try:
            routed = base64.b64decode(routed, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{who}: text that is no base64 ({error}); needs int32 numbers in base64") from None
    if isinstance(routed, bytes | bytearray | memoryview):
        if len(routed) % 4:
            raise ValueError(f"{who}: {len(routed)} bytes; needs int32 numbers, a multiple of 4 bytes")
        return np.frombuffer(routed, "<i4")
    array = np.asarray(routed)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{who} is {array.dtype}; needs int32")
    return array
