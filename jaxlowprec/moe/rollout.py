"""The routing that a rollout engine reports, as arrays, and arrays in the form in which engines report."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxlowprec.arguments import one_of, shown, whole_number
from jaxlowprec.moe.tape_dtype import AFRESH

Form = Literal["array", "base64", "npy"]

_DTYPES = ("int32", "int16", "uint16", "uint8")
_NPY = b"\x93NUMPY"


def captured(
    sequences: Sequence[Any], num_layers: int, k: int, dense_layers: Sequence[int], bytes_dtype: str
) -> list[np.ndarray]:
    """Each sequence's `routed_experts` as int32 [tokens - 1, layers with experts, k]; see `RoutingTape`.

    Raises:
        TypeError: the numbers are not integers.
        ValueError: the array has another form, or a layer of zeros: the engine did not capture it, and 0 is an expert.

    >>> captured([np.asarray([1, 0, 2, 3], "<i4").tobytes()], 1, k=2, dense_layers=(), bytes_dtype="int32")[0].tolist()
    [[[1, 0]], [[2, 3]]]
    """
    who = "routed_experts"
    num_layers, k = whole_number(who, "num_layers", num_layers), whole_number(who, "k", k)
    if num_layers < 1 or k < 1:
        raise ValueError(f"{who}: num_layers={num_layers}, k={k}; needs 1 or more of both, as the engine ran")
    one_of(who, "bytes_dtype", bytes_dtype, *_DTYPES)
    if not isinstance(sequences, list | tuple) and not (isinstance(sequences, np.ndarray) and sequences.ndim):
        raise TypeError(f"{who}: {shown(sequences)}; needs a list with what was captured for each sequence")
    with_experts = _layers_with_experts(who, num_layers, dense_layers)
    decoded = []
    for i, sequence in enumerate(sequences):
        who = f"routed_experts: sequence {i}"
        array = _array(who, sequence, bytes_dtype)
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


def encoded(
    experts: np.ndarray,
    num_layers: int | None,
    dense_layers: Sequence[int],
    lengths: Sequence[int] | None,
    form: Form,
    dtype: str,
) -> list[Any]:
    """Encodes int32 [layers with experts, sequences, length, k] as `captured` reads it; see `RoutingTape`."""
    who = "to_routed_experts"
    one_of(who, "form", form, "array", "base64", "npy")
    one_of(who, "dtype", dtype, *_DTYPES)
    if experts.ndim != 4:
        raise ValueError(f"{who}: the tape has shape {experts.shape}; needs [layers, sequences, length, k]")
    layers, sequences, length, k = experts.shape
    if num_layers is None:
        num_layers = layers + len(set(_numbers(who, dense_layers)))
    with_experts = _layers_with_experts(who, whole_number(who, "num_layers", num_layers, 1), dense_layers)
    if len(with_experts) != layers:
        raise ValueError(
            f"{who}: the tape has {layers} layers and the engine {len(with_experts)} with experts, of num_layers="
            f"{num_layers}; needs the same: name the others in dense_layers"
        )
    if lengths is None:
        afresh = (experts == AFRESH).all((0, 3))
        last = np.where(afresh, 0, np.arange(1, length + 1)).max(axis=-1, initial=0)
        lengths = [int(rows) + 1 for rows in last]
    lengths = [whole_number(who, "lengths", tokens, 1) for tokens in lengths]
    if len(lengths) != sequences or any(tokens > length + 1 for tokens in lengths):
        raise ValueError(f"{who}: lengths={shown(lengths)}; needs {sequences} of at most {length + 1} tokens")
    results = []
    for i, tokens in enumerate(lengths):
        rows = experts[:, i, : tokens - 1]
        wrong = ((rows < 0) | (rows > np.iinfo(dtype).max)).any(-1)
        if wrong.any():
            layer, token = (int(n) for n in np.argwhere(wrong)[0])
            raise ValueError(
                f"{who}: layer {layer}, sequence {i}, token {token} has experts {rows[layer, token].tolist()}; needs "
                f"ids from 0 on that fit {dtype}: engines have no number for a token that chooses afresh"
            )
        array = np.zeros((tokens - 1, num_layers, k), dtype)
        array[:, with_experts] = rows.swapaxes(0, 1)
        results.append(_in_form(array, form))
    return results


def _in_form(array: np.ndarray, form: Form) -> np.ndarray | str:
    if form == "array":
        return array
    little = array.astype(array.dtype.newbyteorder("<"))
    if form == "base64":
        return base64.b64encode(little.tobytes()).decode()
    file = io.BytesIO()
    np.save(file, little, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _numbers(who: str, dense_layers: Any) -> list[int]:
    if not isinstance(dense_layers, list | tuple | set | frozenset | range) and np.ndim(dense_layers) != 1:
        raise TypeError(f"{who}: dense_layers={shown(dense_layers)}; needs the numbers of layers")
    return [whole_number(who, "dense_layers", layer) for layer in dense_layers]


def _layers_with_experts(who: str, num_layers: int, dense_layers: Any) -> list[int]:
    dense = _numbers(who, dense_layers)
    if wrong := [layer for layer in dense if not 0 <= layer < num_layers]:
        raise ValueError(f"{who}: dense_layers has {wrong[0]}; needs 0 to {num_layers - 1}")
    return [layer for layer in range(num_layers) if layer not in dense]


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


def _array(who: str, routed: Any, bytes_dtype: str) -> np.ndarray:
    if isinstance(routed, str):
        try:
            routed = base64.b64decode(routed, validate=True)
        except binascii.Error as error:
            raise ValueError(
                f"{who}: text that is not base64 ({error}); needs {bytes_dtype} numbers in base64"
            ) from None
    if isinstance(routed, bytes | bytearray | memoryview):
        routed = bytes(routed)
        # int32 numbers that begin like a file would be ids above 10^9; smaller numbers may begin like one.
        if bytes_dtype == "int32" and routed.startswith(_NPY):
            return _of_file(who, routed)
        dtype = np.dtype(bytes_dtype).newbyteorder("<")
        if len(routed) % dtype.itemsize:
            raise ValueError(
                f"{who}: {len(routed)} bytes; needs {bytes_dtype} numbers, a multiple of {dtype.itemsize} bytes"
            )
        return np.frombuffer(routed, dtype)
    try:
        array = np.asarray(routed)
    except (TypeError, ValueError):
        raise TypeError(f"{who} is {shown(routed)}; needs int32 numbers") from None
    return _integers(who, array)


def _of_file(who: str, content: bytes) -> np.ndarray:
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{who}: an .npy file that cannot be read ({error}); needs all of its bytes") from None
    return _integers(who, array)


def _integers(who: str, array: np.ndarray) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{who} is {array.dtype}; needs int32")
    return array
