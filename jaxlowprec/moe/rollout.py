"""The routing that a rollout engine reports, as arrays."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlowprec.arguments import shown, whole_number


def captured(sequences: Sequence[Any], num_layers: int, k: int, dense_layers: Sequence[int]) -> list[np.ndarray]:
    """Each sequence's `routed_experts` as int32 [tokens - 1, layers with experts, k]; see `RoutingTape`.

    Raises:
        TypeError: the numbers are not integers.
        ValueError: the array has another form, or a layer of zeros: the engine did not capture it, and 0 is an expert.

    >>> captured([np.asarray([1, 0, 2, 3], "<i4").tobytes()], num_layers=1, k=2, dense_layers=())[0].tolist()
    [[[1, 0]], [[2, 3]]]
    """
    who = "routed_experts"
    num_layers, k = whole_number(who, "num_layers", num_layers), whole_number(who, "k", k)
    if num_layers < 1 or k < 1:
        raise ValueError(f"{who}: num_layers={num_layers}, k={k}; needs 1 or more of both, as the engine ran")
    if not isinstance(dense_layers, list | tuple | set | frozenset | range) and np.ndim(dense_layers) != 1:
        raise TypeError(f"{who}: dense_layers={shown(dense_layers)}; needs the numbers of layers")
    dense_layers = [whole_number(who, "dense_layers", layer) for layer in dense_layers]
    if not isinstance(sequences, list | tuple) and not (isinstance(sequences, np.ndarray) and sequences.ndim):
        raise TypeError(f"{who}: {shown(sequences)}; needs a list with what was captured for each sequence")
    if wrong := [layer for layer in dense_layers if not 0 <= layer < num_layers]:
        raise ValueError(f"routed_experts: dense_layers has {wrong[0]}; needs 0 to {num_layers - 1}")
    with_experts = [layer for layer in range(num_layers) if layer not in dense_layers]
    decoded = []
    for i, sequence in enumerate(sequences):
        who = f"routed_experts: sequence {i}"
        array = _array(who, sequence)
        fits = array.shape[1:] == (num_layers, k) if array.ndim == 3 else array.ndim == 1
        if not fits or array.size % (num_layers * k):
            needed = f"[tokens - 1, {num_layers}, {k}]"
            raise ValueError(f"{who} has shape {array.shape}; needs {needed}, or as many numbers flat")
        array = _as_int32(who, array.reshape(-1, num_layers, k)[:, with_experts])
        if k > 1:  # a choice does not have two zeros; with k = 1 a zero may be a choice
            _check_captured(who, array, with_experts)
        decoded.append(array)
    if k == 1 and decoded:
        _check_captured("routed_experts", np.concatenate(decoded), with_experts)
    return decoded


def _as_int32(who: str, experts: np.ndarray) -> np.ndarray:
    for number in (experts.min(), experts.max()) if experts.size else ():
        if not -(2**31) <= number < 2**31:
            raise ValueError(f"{who} has {number}; needs ids of experts, int32")
    return experts.astype(np.int32)


def _check_captured(who: str, experts: np.ndarray, layers: list[int]) -> None:
    for place, layer in enumerate(layers):
        if len(experts) and not experts[:, place].any():
            raise ValueError(
                f"{who}: layer {layer} is all zeros: the engine did not capture it (a pipeline stage left out?); "
                "capture it, or name it in dense_layers if it has no experts"
            )


def _array(who: str, routed: Any) -> np.ndarray:
    if isinstance(routed, str):
        try:
            routed = base64.b64decode(routed, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{who}: text that is not base64 ({error}); needs int32 numbers in base64") from None
    if isinstance(routed, bytes | bytearray | memoryview):
        if len(routed) % 4:
            raise ValueError(f"{who}: {len(routed)} bytes; needs int32 numbers, a multiple of 4 bytes")
        return np.frombuffer(routed, "<i4")
    try:
        array = np.asarray(routed)
    except (TypeError, ValueError):
        raise TypeError(f"{who} is {shown(routed)}; needs int32 numbers") from None
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{who} is {array.dtype}; needs int32")
    return array
