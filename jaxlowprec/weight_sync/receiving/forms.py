"""Forms in which a receiver holds weights, and the inverse conversions to the tensors that were sent.

    published   as they were sent
    plain       quantised weights decoded: <module>.weight [N, K]
    gptq        4-bit integers as GPTQ's qweight, qzeros, scales, g_idx; version 1 where symmetric, else version 2
    marlin      4-bit integers as Marlin's qweight [K/16, 2N], scales [K/g, N], qzeros [K/g, N/8] where asymmetric, and
                the module's bias, each in the order of its kernel

Weights that are not quantised are the same in every form, except for that bias. Decoded weights whose scales are known
are given their codes back:

    w = RNE_dtype((code - zero) * scale)    the code is the one nearest to w / scale, plus zero

bfloat16 and float16 round w by at most 2^-9 of it, a quarter of the smallest distance between two codes. So the nearest
code is the one that was decoded, unless a scale is zero or a product leaves the range of the dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes import marlin
from jaxlowprec.checkpoints.schemes.base import Scheme, Tensors
from jaxlowprec.checkpoints.schemes.codes import pack_bytes, pack_words, unpack_words
from jaxlowprec.checkpoints.schemes.gptq import GPTQ
from jaxlowprec.checkpoints.schemes.int4 import Int4Groups
from jaxlowprec.checkpoints.schemes.mixed import Mixed
from jaxlowprec.weight_sync.manifest import scheme_of

Arrays = dict[str, Any]

_EXTREME = 2.0**-60, 2.0**60
_SMALL_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Form:
    """The conversions of a module to a form and back.

    Attributes:
        decode: takes (tensors of a module by the last part of their names, scheme, dtype), returns (the live tensors,
            the tensors that are kept beside them).
        encode: takes (live, kept, scheme), returns the tensors that were sent.
    """

    decode: Callable[[Arrays, Scheme, Any], tuple[Arrays, Arrays]]
    encode: Callable[[Arrays, Arrays, Scheme], Arrays]


def _to_plain(tensors: Arrays, scheme: Scheme, dtype: Any) -> tuple[Arrays, Arrays]:
    weight = scheme.decompress(tensors, dtype)
    codes = scheme.required[0]
    beside = {name: tensor.copy() for name, tensor in tensors.items() if name != codes}
    if not _certain(tensors, scheme, weight.dtype):
        try:
            again = requantized(weight, beside, codes, scheme)[codes]
        except ValueError:  # the tensors can be decoded but not loaded
            again = None
        if again is None or again.tobytes() != tensors[codes].tobytes():
            beside[codes] = tensors[codes].copy()
    return {"weight": weight}, beside


def _certain(tensors: Arrays, scheme: Scheme, dtype: np.dtype) -> bool:
    """Whether the codes certainly follow from the decoded weight and its scales."""
    q = scheme.load(tensors, dtype) if isinstance(scheme, Int4Groups) else None
    if q is None or dtype.name == "float16":
        return False
    scale = np.abs(np.asarray(q.scale).astype(np.float32))
    return bool(_EXTREME[0] < scale.min() and scale.max() < _EXTREME[1])


def _from_plain(live: Arrays, kept: Arrays, scheme: Scheme) -> Arrays:
    codes = scheme.required[0]
    if codes in kept:  # the weight does not determine the codes, but it has to agree with them
        decoded = scheme.decompress(kept, live["weight"].dtype)
        if decoded.tobytes() == live["weight"].tobytes():
            return kept
    return {**requantized(live["weight"], {n: t for n, t in kept.items() if n != codes}, codes, scheme), **kept}


def _as_gptq(scheme: Scheme) -> GPTQ:
    if not isinstance(scheme, Int4Groups):
        raise ValueError(f"{scheme.name} holds no 4-bit integers; needs form='plain' or 'published'")
    fmt = scheme.format
    version: Any = 2 if fmt.has_zero_point else 1
    return GPTQ(fmt.length, not fmt.has_zero_point, fmt.scale_dtype, version)


def _to_gptq(tensors: Arrays, scheme: Scheme, dtype: Any) -> tuple[Arrays, Arrays]:
    stored = _as_gptq(scheme).store(scheme.load(tensors))
    return stored, {name: tensor.copy() for name, tensor in tensors.items() if tensor.nbytes <= _SMALL_BYTES}


def _from_gptq(live: Arrays, kept: Arrays, scheme: Scheme) -> Arrays:
    return {**scheme.store(_as_gptq(scheme).load(live)), **kept}


def _to_marlin(tensors: Arrays, scheme: Scheme, dtype: Any) -> tuple[Arrays, Arrays]:
    stored, kept = _to_gptq(tensors, scheme, dtype)
    n, k = scheme.shape_of(tensors)
    group_size = k if stored["scales"].shape[0] == 1 else _as_gptq(scheme).group_size
    if reason := marlin.why_not(n, k, -1 if group_size == k else group_size):
        raise ValueError(f"Marlin's kernel cannot take it: {reason}")
    live = {
        "qweight": marlin.repack(stored["qweight"]),
        "scales": marlin.permute_scale(stored["scales"], group_size, k),
    }
    if not _as_gptq(scheme).symmetric:
        live["qzeros"] = marlin.pack_zero_points(unpack_words(stored["qzeros"], n))
    return live, kept


def _from_marlin(live: Arrays, kept: Arrays, scheme: Scheme) -> Arrays:
    gptq = _as_gptq(scheme)
    qweight = marlin.unpack(live["qweight"])
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    groups = live["scales"].shape[0]
    zeros = np.full((groups, n), 7, np.uint8) if gptq.symmetric else marlin.unpack_zero_points(live["qzeros"])
    stored = {
        "qweight": qweight,
        "scales": marlin.permute_scale(live["scales"], k // groups, k),
        "qzeros": pack_words(zeros),
        "g_idx": (np.arange(k) // gptq.group_size).astype(np.int32),
    }
    return _from_gptq(stored, kept, scheme)


_FORMS = {
    "plain": Form(_to_plain, _from_plain),
    "gptq": Form(_to_gptq, _from_gptq),
    "marlin": Form(_to_marlin, _from_marlin),
}

NAMES = ("published", *_FORMS)
"""The names of all forms."""


def check(described: Mapping[str, Any] | None, form: str) -> None:
    """Raises ValueError for a scheme that is unknown or that the form cannot hold.

    >>> check({"name": "nvfp4"}, "marlin")
    Traceback (most recent call last):
    ValueError: nvfp4 holds no 4-bit integers; needs form='plain' or 'published'
    """
    if form == "published" or described is None:
        return
    schemes = _schemes(scheme_of(described))
    if form != "plain":
        for scheme in schemes:
            _as_gptq(scheme)


@dataclasses.dataclass(frozen=True)
class Module:
    """A quantised module of a live version, with all that is needed to restore what was sent.

    Attributes:
        scheme: the format in which it was sent.
        live: names of the live tensors, by their last parts.
        kept: tensors that are not live, by their last parts.
    """

    scheme: Scheme
    live: Mapping[str, str]
    kept: Mapping[str, Any]


def decoded(
    arrays: Arrays, described: Mapping[str, Any] | None, form: str, dtype: Any
) -> tuple[Arrays, dict[str, Module]]:
    """Converts the tensors of whole modules to a form.

    Arguments:
        arrays: the tensors, by their names.
        described: the manifest's scheme.
        form: one of `NAMES`.
        dtype: the dtype of plain weights.

    Returns:
        The live tensors, by their names, and the quantised modules.

    Raises:
        ValueError: a module lacks tensors, or cannot be decoded to the form.

    >>> from jaxlowprec.checkpoints.schemes import by_name
    >>> from jaxlowprec.weight_sync.manifest import described
    >>> scheme = by_name("w4a16", group_size=16)
    >>> stored = scheme.compress(np.eye(8, 16, dtype=np.float32))
    >>> sent = {f"up.{part}": tensor for part, tensor in stored.items()}
    >>> live, modules = decoded(sent, described(scheme), "plain", "float32")
    >>> live["up.weight"].shape, list(modules)
    ((8, 16), ['up'])
    >>> sorted(encoded(live, modules, "plain")) == sorted(sent)
    True
    """
    if form == "published" or described is None:
        return arrays, {}
    live, modules = dict(arrays), {}
    for module, (scheme, names) in _quantised(arrays, scheme_of(described)).items():
        tensors = {part: np.asarray(arrays[name]) for part, name in names.items()}
        try:
            stored = scheme.as_stored({part: tensor.dtype.name for part, tensor in tensors.items()})
            made, kept = _FORMS[form].decode(tensors, stored, dtype)
            if form == "marlin" and f"{module}.bias" in live:
                live[f"{module}.bias"] = marlin.permute_bias(np.asarray(live[f"{module}.bias"]))
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from error
        for name in names.values():
            del live[name]
        for tensor in made.values():
            tensor.flags.writeable = False
        live |= {f"{module}.{part}": tensor for part, tensor in made.items()}
        modules[module] = Module(stored, {part: f"{module}.{part}" for part in made}, kept)
    return live, modules


def encoded(live: Mapping[str, Any], modules: Mapping[str, Module], form: str) -> Arrays:
    """The inverse: the tensors that were sent, from the live ones. See `decoded`."""
    sent = {name: np.asarray(array) for name, array in live.items()}
    for name, module in modules.items():
        tensors = {part: sent.pop(full) for part, full in module.live.items()}
        again = _FORMS[form].encode(tensors, dict(module.kept), module.scheme)
        sent |= {f"{name}.{part}": tensor for part, tensor in again.items()}
        if form == "marlin" and f"{name}.bias" in sent:
            sent[f"{name}.bias"] = marlin.permute_bias(sent[f"{name}.bias"])
    return sent


def _schemes(scheme: Scheme) -> tuple[Scheme, ...]:
    return scheme.schemes if isinstance(scheme, Mixed) else (scheme,)


def _quantised(arrays: Arrays, scheme: Scheme) -> dict[str, tuple[Scheme, dict[str, str]]]:
    """The quantised modules with their schemes, and their tensors' names by the last parts."""
    return {
        module: (own, names)
        for own in _schemes(scheme)
        for module, names in _with_codes(arrays, own).items()
        if scheme.of_module(module) == own
    }


def _with_codes(arrays: Arrays, scheme: Scheme) -> dict[str, dict[str, str]]:
    """The modules that have the scheme's codes: maps each to its tensors' names, by their last parts."""
    codes, parts = scheme.required[0], (*scheme.required, *scheme.optional)
    own = [name.rpartition(".")[0] for name in arrays if name.rpartition(".")[2] == codes]
    if codes == "weight":  # a float weight has this name, too
        own = [m for m in own if any(f"{m}.{part}" in arrays for part in scheme.required[1:])]
    return {m: {part: f"{m}.{part}" for part in parts if f"{m}.{part}" in arrays} for m in own}


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
