"""Exact mappings: Q4_0 to INT4 in groups of 32 with float16 scales, MXFP4 to MXFP4. Bits only change places.

A block of ggml holds its scale and 16 bytes; byte j has element j in the low nibble and element j + 16 in the high one.
Arrays and checkpoints here have neighbours in a byte: element 2i in the low nibble of byte i. INT4's codes are offset
binary in both (the number is code - 8), E2M1's and E8M0's bits are the same.

What differs is what readers make of equal bytes:
* ggml computes Q4_0's (code - 8) * scale in float32. `Int4` and the engines of compressed-tensors round the product to
  the scale's dtype.
* Q4_0's scale may be negative: llama.cpp gives the largest magnitude of a block the code 0, whatever its sign. Such
  scales are kept, and every product with them is right, too.
* The code 8 of MXFP4 is -0 here and 0 in ggml. The scale 255 is NaN here and 2^128 in ggml: it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import MXFP4, Int4
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.gguf.block_types import TYPES, BlockType, nibbles
from jaxlowprec.checkpoints.schemes import Scheme, by_name
from jaxlowprec.checkpoints.schemes.base import Tensors, as_dtype
from jaxlowprec.checkpoints.schemes.codes import bytes_of_words, pack_bytes, unpack_bytes, words_of_bytes
from jaxlowprec.checkpoints.schemes.int4 import PackedInt4, PackedInt4Asymmetric
from jaxlowprec.checkpoints.schemes.mx import PackedMXFP4

GROUP = 32
_NAN = 255  # E8M0
_FITS = "GGUF holds w4a16 with groups of 32 as Q4_0, and mxfp4 as MXFP4"


def scheme_of_type(block_type: BlockType) -> Scheme | None:
    """The scheme that holds a type's codes and scales; None if no scheme does."""
    if block_type.name == "Q4_0":
        return by_name("w4a16", group_size=GROUP, scale_dtype="float16")
    return by_name("mxfp4") if block_type.name == "MXFP4" else None


def type_of_scheme(scheme: Scheme) -> BlockType:
    """The type that holds a scheme's codes and scales. Raises CheckpointError if none does."""
    if isinstance(scheme, PackedMXFP4):
        return TYPES["MXFP4"]
    if isinstance(scheme, PackedInt4) and not isinstance(scheme, PackedInt4Asymmetric) and scheme.group_size == GROUP:
        return TYPES["Q4_0"]
    size = f" with groups of {scheme.group_size}" if isinstance(scheme, PackedInt4) else ""
    raise CheckpointError(
        f"{scheme.name}{size} has no exact form in GGUF: {_FITS}; convert weights in high precision (of a quantised "
        "folder, what `jaxlowprec dequantize` gives) with --scheme w4a16 or mxfp4"
    )


def blocks_of_tensors(scheme: Scheme, tensors: Tensors) -> np.ndarray:
    """A module's tensors as the blocks of a GGUF tensor, uint8 [N, bytes of a row].

    Raises:
        CheckpointError: the scheme has no exact form in GGUF, or a scale has none.
        ValueError: the tensors are not the scheme's.
    """
    block_type = type_of_scheme(scheme)
    _, k = scheme.shape_of(tensors)
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    data = bytes_of_words(packed, k) if block_type.name == "Q4_0" else packed
    return _blocks(block_type, data, scale)


def tensors_of_blocks(block_type: BlockType, blocks: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `blocks_of_tensors`: tensors of `scheme_of_type`.

    Raises:
        CheckpointError: a scale is not finite.
    """
    data, scale = _parts(block_type, blocks)
    if block_type.name == "MXFP4":
        return {"weight_packed": data, "weight_scale": scale}
    shape = np.asarray([len(data), 2 * data.shape[1]], np.int64)
    return {"weight_packed": words_of_bytes(data), "weight_scale": scale, "weight_shape": shape}


def blocks_of_array(q: QuantizedArray) -> tuple[BlockType, np.ndarray]:
    """A QuantizedArray [N, K] as the type and the blocks of a GGUF tensor.

    Arguments:
        q: `Int4(32, scale_dtype="float16")` (or bfloat16, if every scale is a float16 number as well) or `MXFP4()`,
            with `axis=-1` and no rotation.

    Raises:
        CheckpointError: another format or orientation, or a scale that the type cannot hold.
    """
    scheme: Scheme
    if isinstance(q.format, Int4):
        scheme = by_name("w4a16", group_size=q.format.group_size, scale_dtype=q.format.scale_dtype)
    else:
        scheme = by_name("mxfp4")
    try:
        return type_of_scheme(scheme), blocks_of_tensors(scheme, scheme.store(q))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"gguf: {error}; {_FITS}") from None


def array_of_blocks(block_type: BlockType, blocks: np.ndarray, *, dtype: Any = "float16") -> QuantizedArray:
    """The blocks of a tensor of Q4_0 or MXFP4 as a QuantizedArray [N, K], with the same codes and scales.

    Arguments:
        block_type: the tensor's type.
        blocks: uint8 [N, bytes of a row].
        dtype: what the result dequantises to by default.

    Raises:
        CheckpointError: another type, or a scale that is not finite.
    """
    if scheme_of_type(block_type) is None:
        raise CheckpointError(f"gguf: {block_type.name} has no exact form here; read it as numbers. {_FITS}")
    data, scale = _parts(block_type, blocks)
    fmt = Int4(GROUP, scale_dtype="float16") if block_type.name == "Q4_0" else MXFP4()
    bits = scale if block_type.name == "Q4_0" else scale.view(jnp.float8_e8m0fnu)
    shape = (len(data), 2 * data.shape[1])
    return QuantizedArray(as_array(data), as_array(bits), None, None, fmt, shape, as_dtype(dtype), -1, None)


def rows(tensors: Mapping[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    """A module's tensors with the rows of its weight in another order."""
    return {name: array if name == "weight_shape" else array[order] for name, array in tensors.items()}


def _blocks(block_type: BlockType, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Packed neighbours [N, K/2] and scales [N, K/32] as blocks."""
    n, groups = scale.shape
    codes = unpack_bytes(data, groups * GROUP).reshape(n, groups, 2, GROUP // 2)
    if block_type.name == "Q4_0":
        bits = _as_float16(scale).reshape(n, groups, 1).view(np.uint8)
    else:
        bits = scale.view(np.uint8).reshape(n, groups, 1)
        _require_numbers(bits)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    return np.concatenate([bits, packed], axis=-1).reshape(n, -1)


def _parts(block_type: BlockType, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `_blocks`."""
    if blocks.ndim != 2:
        raise CheckpointError(f"gguf: a tensor of {blocks.ndim} axes; needs a matrix [N, K]")
    by_block = blocks.reshape(len(blocks), -1, block_type.block_bytes)
    scale_bytes = block_type.block_bytes - GROUP // 2
    data = pack_bytes(nibbles(by_block[..., scale_bytes:]).reshape(len(blocks), -1))
    scale = np.ascontiguousarray(by_block[..., :scale_bytes])
    if block_type.name == "Q4_0":
        return data, _finite(scale.view("<f2")[..., 0])
    _require_numbers(scale)
    return data, scale[..., 0]


def _as_float16(scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    changed = half.astype(np.float32) != scale.astype(np.float32)
    if changed.any():
        raise CheckpointError(
            f"gguf: {np.count_nonzero(changed)} scales, such as {float(scale[changed][0]):.6g}, are no numbers of "
            "float16, which Q4_0's scales are; run `jaxlowprec dequantize`, and convert the result to GGUF with "
            "--scheme w4a16, which makes float16 scales"
        )
    return np.ascontiguousarray(_finite(half))


def _finite(scale: np.ndarray) -> np.ndarray:
    if not np.isfinite(scale).all():
        raise CheckpointError("gguf: a scale is NaN or infinity; the file is damaged, or its weight was not finite")
    return scale


def _require_numbers(scale: np.ndarray) -> None:
    if (scale == _NAN).any():
        raise CheckpointError("gguf: a scale of MXFP4 is 255: NaN in the format, 2^128 in llama.cpp; quantise again")
