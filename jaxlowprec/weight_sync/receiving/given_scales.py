"""Codes of weights whose scales are known: restores the bytes that decoded weights came from.

    w = RNE_dtype((code - zero) * scale)    the code is the one nearest to w / scale, plus zero

bfloat16 and float16 round w by at most 2^-9 of it, a quarter of the smallest distance between two codes. So the nearest
code is the one that was decoded, unless a scale is zero or a product leaves the range of the dtype.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Tensors
from jaxlowprec.checkpoints.schemes.codes import pack_bytes


def requantized(weight: np.ndarray, beside: Tensors, codes: str, scheme: Scheme) -> dict[str, np.ndarray]:
    """All tensors of a module, codes included, from its decoded weight.

    Arguments:
        weight: [N, K], decoded.
        beside: the module's tensors without its codes.
        codes: the name of the tensor of codes.
        scheme: the module's scheme.

    Raises:
        ValueError: the scheme does not load such tensors.

    >>> from jaxlowprec.checkpoints.schemes import by_name
    >>> scheme = by_name("w4a16", group_size=16)
    >>> stored = scheme.compress(np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16))
    >>> beside = {name: stored[name] for name in ("weight_scale", "weight_shape")}
    >>> again = requantized(scheme.decompress(stored), beside, "weight_packed", scheme)
    >>> np.array_equal(again["weight_packed"], stored["weight_packed"])
    True
    """
    dtype, shape = scheme.output_specs(weight.shape, weight.dtype.name)[codes]
    q = scheme.load({**beside, codes: np.zeros(shape, _numpy(dtype))}, weight.dtype)
    made = _int4(weight, q) if q.format.element == "int4" else _float(weight, q, scheme)
    return scheme.store(dataclasses.replace(q, data=as_array(made)))


def _numpy(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _int4(weight: np.ndarray, q: QuantizedArray) -> np.ndarray:
    """Codes as bytes, two in each."""
    n, k = weight.shape
    scale = np.asarray(q.scale).astype(np.float32)[..., None]
    zero = SYMMETRIC_ZERO if q.zero_point is None else np.asarray(q.zero_point)[..., None].astype(np.int32)
    groups = weight.astype(np.float32).reshape(n, scale.shape[1], -1)
    steps = np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)
    found = np.clip(np.rint(steps) + zero, 0, 15).astype(np.uint8)
    data = pack_bytes(found.reshape(n, k))
    if k % 2:  # a QuantizedArray fills the last nibble with the code of zero
        last = SYMMETRIC_ZERO if q.zero_point is None else np.asarray(q.zero_point)[:, -1]
        data[:, -1] = data[:, -1] & 15 | np.uint8(last) << 4
    return data


def _float(weight: np.ndarray, q: QuantizedArray, scheme: Scheme) -> np.ndarray:
    """4-bit codes as bytes, two in each, or 8-bit codes."""
    element, packed = q.format.numbers.dtype, q.format.packed
    one = np.ones(1, element).view(np.uint8)[0]
    ones = np.full(q.data.shape, one | one << 4 if packed else one, np.uint8).view(np.asarray(q.data).dtype)
    scale = scheme.decompress(scheme.store(dataclasses.replace(q, data=as_array(ones))), "float32")
    values = weight.astype(np.float32)
    found = np.divide(values, scale, out=np.copysign(np.float32(0), values), where=scale != 0).astype(element)
    return pack_bytes(found.view(np.uint8)) if packed else found
